"""docs/migration.md is true: both sides of deep_ep run on two ranks, on the emulation.

``tests/integration/test_migration_pages.py`` runs both sides of megatron-core and torchtitan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch_testing.emulation import imported_as_deep_ep
from tests.migration_pages import Layer, largest_error, run_block
from tests.ranks import run_ranks

RANKS = 2


def _titled(group: Any, title: str, dtype: torch.dtype) -> dict[str, Any]:
    layer = Layer(group.rank(), RANKS, hidden=256, dtype=dtype)
    return run_block(title, {**layer.names(), "ep_group": group})


def _expected(rank: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, ids and weights of a rank, and what all experts on one rank make of them."""
    x, ids, weights = Layer.inputs(rank, tokens, hidden=256, dtype=dtype)
    return x, ids, weights, Layer(0, 1, hidden=256, dtype=dtype).dense(x, ids, weights)


def test_both_sides_of_deep_ep_on_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    # The release does not run while torch fills memory. The side of this library switches it off itself.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def body(group: Any) -> list[float]:
        x, ids, weights, expected = _expected(group.rank(), 6 - group.rank(), torch.bfloat16)
        sides = [_titled(group, f"{side}: deep_ep", torch.bfloat16) for side in ("Before", "After")]
        return [largest_error(side["moe"](x, ids, weights), expected) for side in sides]

    with imported_as_deep_ep("v1.2.1"):
        before, after = (max(errors) for errors in zip(*run_ranks(body, RANKS), strict=True))
    assert 0 < before < 0.02
    assert 0 < after < 0.02
