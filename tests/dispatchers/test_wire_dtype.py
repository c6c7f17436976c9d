"""``wire_dtype`` against a reference that rounds at the same places: dispatch, each rank's sums, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing
from tests.dispatchers.layer import cut_layer, expert_weights, random_routing, random_rows, small_config

EXPERTS, SLOTS, HIDDEN, TOKENS = 8, 3, 256, 24
CUTS = {1: [24], 2: [17, 7], 4: [9, 0, 11, 4]}


Parts = dict[str, Tensor]


def _through_bfloat16(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16).to(rows.dtype)


def _through_float8(rows: Tensor) -> Tensor:
    """One float32 scale per 128 columns: their largest magnitude over 448."""
    blocks = rows.float().view(len(rows), -1, 128)
    scales = blocks.abs().amax(2, keepdim=True) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view_as(rows).to(rows.dtype)


def _through_mxfp8(rows: Tensor) -> Tensor:
    """One power of two per 32 columns: the next above their largest magnitude over 448."""
    blocks = rows.float().view(len(rows), -1, 32)
    scales = (blocks.abs().amax(2, keepdim=True).double() / 448).log2().ceil().exp2().float()
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view_as(rows).to(rows.dtype)


def _identity(rows: Tensor) -> Tensor:
    return rows


OUT = {None: _identity, "bfloat16": _through_bfloat16, "float8_e4m3fn": _through_float8, "mxfp8": _through_mxfp8}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Routing, Tensor, Tensor]:
    x_TD, grad_TD = random_rows(TOKENS, HIDDEN, dtype=dtype), random_rows(TOKENS, HIDDEN, seed=5, dtype=dtype)
    way = random_routing(TOKENS, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::5, 1] = -1
    return x_TD, way, grad_TD, expert_weights(EXPERTS, HIDDEN, dtype)


def _reference(wire: str | None, dtype: torch.dtype, size: int) -> Parts:
    """What every rank sends home is rounded once for each pair of ranks; sums in between are float64 here."""
    x_TD, way, grad_TD, weights_EDD = _inputs(dtype)
    back = _identity if wire is None else _through_bfloat16
    sent_TD, grad_TD = OUT[wire](x_TD), back(grad_TD)
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
    return {
        "y": back(sums_PTD.to(dtype)).double().sum(0),
        "x": back(grads_PTD.to(dtype)).double().sum(0),
        "weights": grad_weights_TK,
        "experts": grad_EDD,
    }


def _layer(backend: Any, wire: str | None, dtype: torch.dtype, size: int) -> Parts:
    sizes = {"num_experts": EXPERTS, "top_k": SLOTS, "hidden_size": HIDDEN}
    return cut_layer(small_config(backend, wire_dtype=wire, **sizes), CUTS[size], *_inputs(dtype))


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
        ("alltoall", 2, torch.float32, None),
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
    _assert_rounded_alike(_layer(backend, wire, dtype, size), _reference(wire, dtype, size), dtype)


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
        _assert_rounded_alike(_layer("alltoall", wire, dtype, 2), _reference(other, dtype, 2), dtype)


@pytest.mark.parametrize("wire", ["bfloat16", "float8_e4m3fn", "mxfp8"])
def test_one_rank_has_the_numbers_of_the_wire_whichever_backend(wire: str) -> None:
    local, one = (_layer(backend, wire, torch.float32, 1) for backend in ("local", "alltoall"))
    assert all(torch.equal(local[name], one[name]) for name in local)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "mxfp8"])
def test_exact_reduction_with_a_narrow_wire_has_the_same_bits_on_any_number_of_ranks(wire: str) -> None:
    def exact(name: str) -> Any:
        return {"name": name, "reduction": "exact"}

    expected = _layer(exact("local"), wire, torch.bfloat16, 1)
    for size in (1, 2, 4):
        got = _layer(exact("alltoall"), wire, torch.bfloat16, size)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
