"""Expected results of a case, and the comparison of a backend's results with them.

Expected results are computed densely in float64, without permutation, exchange, padding or grouped products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch.dispatched import Dispatched
from moe_dispatch_testing.scenario import Batch, Experts, Scenario


class ConformanceError(AssertionError):
    """A backend returned a wrong result. The text names the field or tensor, the expected value and the wrong one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """Results of one rank: y (T, D), gradients of x (T, D) and weights (T, K), and of experts (E, W, W) and (E, D)."""

    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor
    grad_matrix_EWW: Tensor
    grad_bias_ED: Tensor


def reference(batch: Batch, experts: Experts, wire: str | None = None, grad_wire: str | None = None) -> Expected:
    """Apply every expert to every row, weighted by the slots that name the expert.

    Args:
        batch: Tokens of one rank.
        experts: Experts of the whole group.
        wire: Dtype to which rows are rounded on their way to the experts. The gradient ignores the rounding.
        grad_wire: Dtype to which the gradient of the result is rounded on this way.
    """
    x_TD = batch.x_TD.clone().requires_grad_()
    weights_TK = torch.where(batch.ids_TK < 0, 0, batch.weights_TK).requires_grad_()
    leaves = experts.leaves()
    seen_TD = x_TD + (round_to_wire(batch.x_TD, wire) - batch.x_TD)
    y_TD = torch.zeros_like(seen_TD)
    for expert in range(len(experts.bias_ED)):
        share_T = torch.where(batch.ids_TK == expert, weights_TK, 0).sum(1, keepdim=True)
        y_TD = y_TD + share_T * leaves.apply(expert, seen_TD)
    inputs = (x_TD, weights_TK, leaves.matrix_EWW, leaves.bias_ED)
    grads = torch.autograd.grad(y_TD, inputs, round_to_wire(batch.upstream_TD, grad_wire))
    return Expected(
        y_TD=y_TD.detach(),
        grad_x_TD=grads[0],
        grad_weights_TK=torch.where(batch.ids_TK < 0, 0, grads[1]),
        grad_matrix_EWW=grads[2],
        grad_bias_ED=grads[3],
    )


def round_to_wire(x_TD: Tensor, wire: str | None) -> Tensor:
    """Round rows as if they travelled in ``wire``.

    Quantised columns share a scale, which is their largest magnitude / 448: with "float8_e4m3fn" 128 columns, and with
    "mxfp8" 32 columns, whose scale is rounded up to a power of two.
    """
    if wire is None:
        return x_TD
    if wire == "bfloat16":
        return x_TD.bfloat16().double()
    blocks = x_TD.float().view(len(x_TD), -1, 32 if wire == "mxfp8" else 128)
    scale = blocks.abs().amax(2, keepdim=True) / 448
    if wire == "mxfp8":
        mantissa, exponent = scale.frexp()
        scale = torch.where(scale > 0, torch.where(mantissa == 0.5, 0.5, 1).ldexp(exponent), 0)
    scale = torch.where(scale > 0, scale, 1)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).double().view_as(x_TD)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedDispatch:
    """The rows that a rank must receive.

    Attributes:
        rows_RD: Rows in float64, 0 in padding.
        weights_R: Weights in float64, 0 in padding.
        real: Number of rows of each expert, without padding.
        counts: Number of rows of each expert, with padding.
        padded: bool (R,), True for padding rows.
    """

    rows_RD: Tensor
    weights_R: Tensor
    real: list[int]
    counts: list[int]
    padded: Tensor


@lru_cache(maxsize=256)
def expected_dispatch(
    batches: tuple[Batch, ...], scenario: Scenario, rank: int, ranks_per_node: int
) -> ExpectedDispatch:
    """Collect for each expert of a rank the rows that go to it, by source rank and token. Pad them with zeros."""
    real, rows, weights, padded = [], [], [], []
    for expert in slots_of_rank(scenario, rank, len(batches)):
        chosen = [
            served_rows(scenario, batches, source, (expert, rank), ranks_per_node) for source in range(len(batches))
        ]
        count = sum(int(mask.sum()) for mask in chosen)
        pad = -count % scenario.pad_multiple
        real.append(count)
        rows += [round_to_wire(b.x_TD, scenario.wire_dtype)[mask] for b, mask in zip(batches, chosen, strict=True)]
        weights += [_merged_weights(b, expert)[mask] for b, mask in zip(batches, chosen, strict=True)]
        rows.append(rows[-1].new_zeros(pad, scenario.hidden))
        weights.append(weights[-1].new_zeros(pad))
        padded.append(torch.arange(count + pad) >= count)
    return ExpectedDispatch(
        rows_RD=torch.cat(rows),
        weights_R=torch.cat(weights),
        real=real,
        counts=list(map(len, padded)),
        padded=torch.cat(padded),
    )


def _merged_weights(batch: Batch, expert: int) -> Tensor:
    """Return (T,): the weight of an expert for each row, summed over the slots that name it."""
    return torch.where(batch.ids_TK == expert, batch.weights_TK, 0).sum(1)


def slots_of_rank(scenario: Scenario, rank: int, ep_size: int) -> Sequence[int]:
    """Return the expert in each expert slot of a rank, or -1 for an empty slot."""
    placement, local = scenario.placement(ep_size), scenario.num_experts // ep_size
    return range(rank * local, (rank + 1) * local) if placement is None else placement.slots[rank]


def served_rows(
    scenario: Scenario, batches: Sequence[Batch], source: int, served: tuple[int, int], ranks_per_node: int
) -> Tensor:
    """Return bool (T,): whether a row of rank ``source`` goes to the copy of an expert on a rank.

    A rank sends rows to its own copy if it has one. Otherwise it sends them in turns to the copies on its node, or to
    all copies if its node has none.

    Args:
        scenario: Scenario of the case.
        batches: Tokens of all ranks.
        source: The rank that sends.
        served: An expert, and a rank that has a slot for it.
        ranks_per_node: Number of consecutive ranks that share a node.
    """
    (expert, rank), names = served, batches[source].ids_TK
    if expert < 0:
        return torch.zeros(len(names), dtype=torch.bool)
    chosen_T = _goes_to(batches[source], expert)
    ranks = [other for other in range(len(batches)) if expert in slots_of_rank(scenario, other, len(batches))]
    near = [other for other in ranks if other // ranks_per_node == source // ranks_per_node]
    ranks = [source] if source in ranks else near or ranks
    if rank not in ranks:
        return torch.zeros_like(chosen_T)
    turn_T = chosen_T.cumsum(0) - 1
    return chosen_T & ((turn_T + source) % len(ranks) == ranks.index(rank))


def _goes_to(batch: Batch, expert: int) -> Tensor:
    """Return bool (T,): whether a row names an expert."""
    return (batch.ids_TK == expert).any(1)


def check_dispatched(
    sent: Dispatched, batches: tuple[Batch, ...], scenario: Scenario, rank: int, ranks_per_node: int
) -> None:
    """Compare every field of ``sent`` with the expected value.

    Args:
        sent: Result of dispatch on this rank.
        batches: Tokens of all ranks.
        scenario: Scenario of the case.
        rank: This rank.
        ranks_per_node: Number of consecutive ranks that share a node. It matters if experts have copies.

    Raises:
        ConformanceError: A field is wrong.
    """
    expected = expected_dispatch(batches, scenario, rank, ranks_per_node)
    padded = expected.padded
    _check_counts(sent, expected, scenario)
    rows_RD, weights_R = sent.rows, sent.weights
    _check_quantised(sent, padded, scenario)
    if scenario.graph_safe:  # rows after the last expert's rows may hold anything
        rows_RD, weights_R = rows_RD[: len(padded)], weights_R[: len(padded)]
        expect_equal("tokens_per_expert_list", sent.tokens_per_expert_list, None)
    expect_close("rows", rows_RD, expected.rows_RD, _row_tolerance(scenario))
    expect_close("weights", weights_R, expected.weights_R, 1e-6)
    expect_zero("padding of rows", rows_RD.detach().cpu()[padded])
    expect_zero("padding of weights", weights_R.detach().cpu()[padded])


def _check_quantised(sent: Dispatched, padded: Tensor, scenario: Scenario) -> None:
    """Check that the values and scales stand for the rows, and that those of padding are 0 and 1."""
    if scenario.deliver == "rows":
        expect_equal("quantised rows", sent.quantised, None)
        return
    assert sent.quantised is not None
    expect_equal("recipe", sent.quantised.recipe, scenario.wire_dtype)
    values, scales = sent.quantised.values.cpu()[: len(padded)], sent.quantised.scales.cpu()[: len(padded)]
    wide = (values.float().view(*scales.shape, -1) * scales.float().unsqueeze(-1)).view(values.shape)
    expect_equal(
        "rows of values and scales",
        torch.equal(wide.to(sent.rows.dtype), sent.rows.detach().cpu()[: len(padded)]),
        True,
    )
    expect_zero("values of padding", values.float()[padded])
    expect_equal("scales of padding", bool((scales.float()[padded] == 1).all()), True)


def _check_counts(sent: Dispatched, expected: ExpectedDispatch, scenario: Scenario) -> None:
    expect_equal("real_tokens_per_expert", sent.real_tokens_per_expert.tolist(), expected.real)
    expect_equal("tokens_per_expert", sent.tokens_per_expert.tolist(), expected.counts)
    if (on_host := sent.tokens_per_expert_list) is not None:
        expect_equal("tokens_per_expert_list", list(on_host), expected.counts)
    expect_equal("offs", sent.offs.tolist(), list(accumulate(expected.counts)))
    expect_equal("dtype of rows", sent.rows.dtype, scenario.torch_dtype)
    expect_equal("dtype of weights", sent.weights.dtype, torch.promote_types(scenario.torch_dtype, torch.float32))
    expect_equal("dtype of counts", {sent.tokens_per_expert.dtype, sent.real_tokens_per_expert.dtype}, {torch.int64})
    expect_equal("pad_multiple", sent.pad_multiple, scenario.pad_multiple)


def _row_tolerance(scenario: Scenario) -> float:
    # Rows are copied exactly. A float8 row is multiplied by its scale in float32 and rounded, which is exact for mxfp8.
    return 0.0 if scenario.wire_dtype != "float8_e4m3fn" else max(1e-6, torch.finfo(scenario.torch_dtype).eps)


def expect_equal(what: str, got: object, expected: object) -> None:
    """Raise ConformanceError unless the two are equal."""
    if got != expected:
        raise ConformanceError(f"{what}: expected {expected}, got {got}")


def expect_zero(what: str, got: Tensor) -> None:
    """Raise ConformanceError unless every entry is exactly 0. NaN is refused."""
    wrong = got != 0
    if bool(wrong.any()):
        raise ConformanceError(f"{what}: must be exactly zero, got {got[wrong][0].item()} ({int(wrong.sum())} entries)")


def expect_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ConformanceError if a difference exceeds ``tolerance`` times the largest expected value."""
    expect_equal(f"shape of {what}", tuple(got.shape), tuple(expected.shape))
    if got.numel() == 0:
        return
    difference = (got.detach().cpu().double() - expected.double()).abs()
    allowed = tolerance * float(expected.abs().max())
    if not bool((difference <= allowed).all()):  # written with "not" so that NaN is refused
        worst = int(difference.nan_to_num(nan=float("inf")).argmax())
        raise ConformanceError(
            f"{what}: entry {tuple(i.item() for i in torch.unravel_index(torch.tensor(worst), got.shape))} must be "
            f"{expected.flatten()[worst].item():.17g} within {allowed:.3g}, got {got.flatten()[worst].item():.17g}"
        )
