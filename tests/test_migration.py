"""docs/migration.md is true: our side of each section runs on two ranks, and deep_ep's side on its emulation.

``tests/integration/test_migration_pages.py`` runs the sides that need megatron-core and torchtitan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch_testing import run_ranks
from moe_dispatch_testing.emulation import imported_as_deep_ep
from tests.migration_pages import EXPERTS, TOP_K, Layer, largest_error, run_block

RANKS = 2
TOKENS = (5, 0)


def _titled(group: Any, title: str, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    layer = Layer(group.rank(), RANKS, hidden=256, dtype=dtype)
    return run_block(title, {**layer.names(), "ep_group": group, "ep_mesh": group})


def _expected(rank: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, ids and weights of a rank, and what all experts on one rank make of them."""
    x, ids, weights = Layer.inputs(rank, tokens, hidden=256, dtype=dtype)
    return x, ids, weights, Layer(0, 1, hidden=256, dtype=dtype).dense(x, ids, weights)


def test_our_side_of_megatron() -> None:
    def body(group: Any) -> float:
        x, ids, weights, expected = _expected(group.rank(), TOKENS[group.rank()])
        routing_map = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
        probs = torch.zeros(len(x), EXPERTS).scatter_(1, ids, weights)
        y = _titled(group, "After: Megatron")["moe"](x.view(-1, 1, 256), routing_map, probs)
        return largest_error(y.view(-1, 256), expected)

    assert max(run_ranks(body, RANKS)) < 1e-5


def test_our_side_of_torchtitan() -> None:
    def body(group: Any) -> float:
        x, ids, weights, expected = _expected(group.rank(), TOKENS[group.rank()])
        return largest_error(_titled(group, "After: torchtitan")["moe"](x, weights, ids), expected)

    assert max(run_ranks(body, RANKS)) < 1e-5


def test_both_sides_of_deep_ep_on_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    # The release does not run while torch fills memory. The side of this library switches it off itself.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def body(group: Any) -> list[float]:
        x, ids, weights, expected = _expected(group.rank(), 6 - group.rank(), torch.bfloat16)
        sides = [_titled(group, f"{side}: deep_ep", dtype=torch.bfloat16) for side in ("Before", "After")]
        return [largest_error(side["moe"](x, ids, weights), expected) for side in sides]

    with imported_as_deep_ep("v1.2.1"):
        before, after = (max(errors) for errors in zip(*run_ranks(body, RANKS), strict=True))
    assert 0 < before < 0.02
    assert 0 < after < 0.02


def test_the_layer_of_these_tests_uses_every_slot() -> None:
    x, ids, weights, expected = _expected(0, 5)
    assert ids.shape == (5, TOP_K)
    for slot in range(TOP_K):
        without = weights.clone()
        without[:, slot] = 0
        assert largest_error(Layer(0, 1, hidden=256, dtype=torch.float32).dense(x, ids, without), expected) > 0.1
