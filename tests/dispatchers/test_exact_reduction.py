"""Rounding: ``reduction="exact"`` has the same bits for every ep_size, and ``wire`` rounds where it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing
from moe_dispatch_testing.reference import round_to_wire
from tests.dispatchers.layer import cut_layer, expert_weights, random_routing, random_rows, small_config

EXPERTS, SLOTS, HIDDEN, TOKENS = 8, 4, 128, 40
# Tokens by rank: different on each, none on one.
CUTS = {1: [40], 2: [33, 7], 4: [9, 0, 27, 4], 8: [3, 9, 0, 7, 11, 1, 5, 4]}
EXACT = {"name": "alltoall", "reduction": "exact"}
LOCAL = {"name": "local", "reduction": "exact"}
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Routing, Tensor, Tensor]:
    x_TD, grad_TD = random_rows(TOKENS, HIDDEN, dtype=dtype), random_rows(TOKENS, HIDDEN, seed=5, dtype=dtype)
    way = random_routing(TOKENS, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::5, 1] = -1
    way.topk_ids[7, 0] = way.topk_ids[7, 3]  # twice the same expert
    way.topk_ids[11] = -1
    return x_TD, way, grad_TD, expert_weights(EXPERTS, HIDDEN, dtype)


def _layer(backend: dict[str, Any], dtype: torch.dtype, size: int, **fields: Any) -> dict[str, Tensor]:
    config = small_config(backend, num_experts=EXPERTS, top_k=SLOTS, hidden_size=HIDDEN, **fields)
    return cut_layer(config, CUTS[size], *_inputs(dtype))


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (F64, {}),
        (F32, {"weights": "experts"}),
        (BF16, {}),
        (BF16, {"weights": "experts"}),
        (F16, {}),
        (BF16, {"wire": "float8_e4m3fn"}),
        (BF16, {"wire": "mxfp8"}),
    ],
)
def test_exact_has_the_same_bits_on_any_number_of_ranks(dtype: torch.dtype, fields: dict[str, str]) -> None:
    expected = _layer(LOCAL, dtype, 1, **fields)
    assert set(expected) == {"y", "x", "weights", "experts"}
    for size in (1, 2, 4):
        got = _layer(EXACT, dtype, size, **fields)
        differing = [name for name in expected if not torch.equal(got[name], expected[name])]
        assert not differing, f"ep {size}"


@pytest.mark.parametrize(
    ("dtype", "size", "ranks_per_node"), [(F64, 4, 2), (F32, 8, 2), (BF16, 4, 2), (BF16, 8, 4), (F16, 4, 2)]
)
def test_exact_has_the_same_bits_by_node(dtype: torch.dtype, size: int, ranks_per_node: int) -> None:
    expected = _layer(LOCAL, dtype, 1)
    got = _layer({**EXACT, "name": "alltoall_by_node", "ranks_per_node": ranks_per_node}, dtype, size)
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


Parts = dict[str, Tensor]


def _reference(wire: Any, dtype: torch.dtype, size: int) -> Parts:
    """What every rank sends home is rounded once for each pair of ranks; sums in between are float64 here."""
    x_TD, way, grad_TD, weights_EDD = _inputs(dtype)

    def home(rows: Tensor) -> Tensor:
        return round_to_wire(rows.to(dtype).double(), None if wire is None else "bfloat16")

    sent_TD, grad_TD = round_to_wire(x_TD.double(), wire).to(dtype), home(grad_TD).to(dtype)
    sums_PTD, grads_PTD = torch.zeros(2, size, TOKENS, HIDDEN, dtype=torch.float64)
    grad_weights_TK = torch.zeros(TOKENS, SLOTS, dtype=torch.float64)
    grad_EDD = torch.zeros_like(weights_EDD, dtype=torch.float64)
    for expert in range(EXPERTS):
        token_N, slot_N = (way.topk_ids == expert).nonzero(as_tuple=True)
        scale_N = way.topk_weights[token_N, slot_N].unsqueeze(1)
        rows, weights = sent_TD[token_N].requires_grad_(), weights_EDD[expert].clone().requires_grad_()
        outputs = torch.tanh(rows @ weights)
        # Weighted gradients reach the experts in the model's dtype, after float32.
        grads = (grad_TD[token_N].to(torch.promote_types(dtype, torch.float32)) * scale_N).to(dtype)
        grad_rows, grad_EDD[expert] = (g.double() for g in torch.autograd.grad(outputs, (rows, weights), grads))
        rank = expert // (EXPERTS // size)
        sums_PTD[rank].index_add_(0, token_N, outputs.detach().double() * scale_N)
        grads_PTD[rank].index_add_(0, token_N, grad_rows)
        grad_weights_TK[token_N, slot_N] = (grad_TD[token_N].double() * outputs.double()).sum(1).detach()
    return {"y": home(sums_PTD).sum(0), "x": home(grads_PTD).sum(0), "weights": grad_weights_TK, "experts": grad_EDD}


def _assert_rounded_alike(got: Parts, expected: Parts, dtype: torch.dtype) -> None:
    """Almost every number equal; where float32 sums fall on the other side of a rounding, a step of bfloat16 or two."""
    for name, wanted in expected.items():
        error = (got[name].double() - wanted).abs() / wanted.abs().mean()
        assert error.max() < (0.08 if dtype == torch.bfloat16 else 0.04), name
        if dtype == torch.bfloat16:  # experts round by themselves, so only the mean tells
            assert error.mean() < 0.004, name
        else:
            assert (error > 1e-5).double().mean() < 0.02, name


@pytest.mark.parametrize(
    ("backend", "size", "dtype", "wire"),
    [
        ("local", 1, torch.float32, None),
        ("local", 1, torch.float32, "mxfp8"),
        ("alltoall", 1, torch.float32, "float8_e4m3fn"),
        ("alltoall", 2, torch.float32, "float8_e4m3fn"),
        ("alltoall", 4, torch.float32, "bfloat16"),
        ("alltoall", 4, torch.float32, "mxfp8"),
        ("alltoall", 4, torch.bfloat16, None),
        ("alltoall", 4, torch.bfloat16, "float8_e4m3fn"),
    ],
)
def test_equals_a_reference_that_rounds_at_the_same_places(
    backend: str, size: int, dtype: torch.dtype, wire: str | None
) -> None:
    _assert_rounded_alike(_layer({"name": backend}, dtype, size, wire=wire), _reference(wire, dtype, size), dtype)


APART: list[tuple[torch.dtype, str | None, str | None]] = [
    (torch.float32, "bfloat16", None),
    (torch.float32, "float8_e4m3fn", "bfloat16"),
    (torch.float32, None, "bfloat16"),
    (torch.bfloat16, "float8_e4m3fn", "bfloat16"),
    (torch.float32, "mxfp8", "float8_e4m3fn"),
]


@pytest.mark.parametrize(("dtype", "wire", "other"), APART)
def test_the_comparison_tells_wires_apart(dtype: torch.dtype, wire: str | None, other: str | None) -> None:
    with pytest.raises(AssertionError):
        _assert_rounded_alike(_layer({"name": "alltoall"}, dtype, 2, wire=wire), _reference(other, dtype, 2), dtype)
