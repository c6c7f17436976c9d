"""``reduction="exact"``: the same bits for every ep_size, forward and backward; ``"fast"`` does not have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing
from tests.dispatchers.layer import cut_layer, expert_weights, random_routing, random_rows, small_config

EXPERTS, SLOTS, HIDDEN, TOKENS = 8, 4, 32, 40
# Tokens by rank: different on each, none on one.
CUTS = {1: [40], 2: [33, 7], 4: [9, 0, 27, 4], 8: [3, 9, 0, 7, 11, 1, 5, 4]}
EXACT = {"name": "alltoall", "reduction": "exact"}
LOCAL = {"name": "local", "reduction": "exact"}
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def _layer(backend: dict[str, Any], dtype: torch.dtype, size: int, weights: str = "combine") -> dict[str, Tensor]:
    x_TD, grad_TD = random_rows(TOKENS, HIDDEN, dtype=dtype), random_rows(TOKENS, HIDDEN, seed=5, dtype=dtype)
    config = small_config(backend, num_experts=EXPERTS, top_k=SLOTS, hidden_size=HIDDEN, weights=weights)
    return cut_layer(config, CUTS[size], x_TD, _routing(), grad_TD, expert_weights(EXPERTS, HIDDEN, dtype))


def _routing() -> Routing:
    way = random_routing(TOKENS, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::5, 1] = -1
    way.topk_ids[7, 0] = way.topk_ids[7, 3]  # twice the same expert
    way.topk_ids[11] = -1
    return way


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(F64, "combine"), (F32, "experts"), (BF16, "combine"), (BF16, "experts"), (F16, "combine")],
)
def test_exact_has_the_same_bits_on_any_number_of_ranks(dtype: torch.dtype, weights: str) -> None:
    expected = _layer(LOCAL, dtype, 1, weights)
    assert set(expected) == {"y", "x", "weights", "experts"}
    for size in (1, 2, 4):
        got = _layer(EXACT, dtype, size, weights)
        differing = [name for name in expected if not torch.equal(got[name], expected[name])]
        assert not differing, f"ep {size}"


@pytest.mark.parametrize(
    ("dtype", "size", "ranks_per_node"), [(F64, 4, 2), (F32, 8, 2), (BF16, 4, 2), (BF16, 8, 4), (F16, 4, 2)]
)
def test_exact_has_the_same_bits_on_two_levels(dtype: torch.dtype, size: int, ranks_per_node: int) -> None:
    expected = _layer(LOCAL, dtype, 1)
    got = _layer({**EXACT, "levels": 2, "ranks_per_node": ranks_per_node}, dtype, size)
    assert not [name for name in expected if not torch.equal(got[name], expected[name])]


def test_fast_has_other_bits_in_bfloat16_so_exact_is_no_empty_promise() -> None:
    one, four = (_layer({"name": "alltoall"}, BF16, size) for size in (1, 4))
    assert not torch.equal(one["y"], four["y"])
    assert not torch.equal(one["x"], four["x"])
    torch.testing.assert_close(one["y"], four["y"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", [{"name": "alltoall"}, EXACT, {"name": "allgather"}], ids=str)
def test_run_to_run(backend: dict[str, Any]) -> None:
    first, second = (_layer(backend, BF16, 4) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
