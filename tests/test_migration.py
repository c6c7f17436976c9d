"""Calls of DeepEP and those that replace them give the same on two ranks, on the emulation.

``tests/integration/test_migration_frameworks.py`` compares those of megatron-core and torchtitan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch_testing.emulation import imported_as_deep_ep
from tests.migration import Layer, deep_ep, instead_of_deep_ep, largest_error
from tests.ranks import run_ranks

RANKS = 2


def _expected(rank: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, ids and weights of a rank, and what all experts on one rank make of them."""
    x, ids, weights = Layer.inputs(rank, tokens, hidden=256, dtype=dtype)
    return x, ids, weights, Layer(0, 1, hidden=256, dtype=dtype).dense(x, ids, weights)


def test_both_sides_of_deep_ep_on_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    # The release does not run while torch fills memory. The side of this library switches it off itself.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def body(group: Any) -> list[float]:
        x, ids, weights, expected = _expected(group.rank(), 6 - group.rank(), torch.bfloat16)
        layer = Layer(group.rank(), RANKS, hidden=256, dtype=torch.bfloat16)
        sides = [side(layer, group) for side in (deep_ep, instead_of_deep_ep)]
        return [largest_error(moe(x, ids, weights), expected) for moe in sides]

    with imported_as_deep_ep("v1.2.1"):
        before, after = (max(errors) for errors in zip(*run_ranks(body, RANKS), strict=True))
    assert 0 < before < 0.02
    assert 0 < after < 0.02
