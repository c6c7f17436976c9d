"""What must hold of a ``Dispatched``, told from the tokens of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.reference import goes_to, merged_weights, round_to_wire
from moe_dispatch.testing.scenario import Batch, Scenario
from moe_dispatch.types import Dispatched


class ConformanceError(AssertionError):
    """A backend gave something other than the contract says; the text tells what."""


def check_arrival(sent: Dispatched, batches: tuple[Batch, ...], scenario: Scenario, rank: int) -> None:
    """Hold every field of ``sent`` against the contract.

    Raises:
        ConformanceError: naming the field, the entry, and both values.
    """
    expected = expected_arrival(batches, scenario, rank)
    padded = expected.padded
    _check_counts(sent, expected, scenario)
    rows_RD, weights_R = sent.rows, sent.weights
    if scenario.graph_safe:  # behind the last group is slack, which may hold anything
        rows_RD, weights_R = rows_RD[: len(padded)], weights_R[: len(padded)]
        expect_equal("tokens_per_expert_list", sent.tokens_per_expert_list, None)
    expect_close("rows", rows_RD, expected.rows_RD, _row_tolerance(scenario))
    expect_close("weights", weights_R, expected.weights_R, 1e-6)
    expect_zero("padding of rows", rows_RD.detach().cpu()[padded])
    expect_zero("padding of weights", weights_R.detach().cpu()[padded])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrival:
    """What one rank's experts must see: float64 rows and weights, 0 on padding, counts, and which rows are padding."""

    rows_RD: Tensor
    weights_R: Tensor
    real: list[int]
    counts: list[int]
    padded: Tensor


@lru_cache(maxsize=256)
def expected_arrival(batches: tuple[Batch, ...], scenario: Scenario, rank: int) -> Arrival:
    """Expert after expert, the rows that name it by source rank and token, then zeros up to the multiple."""
    local = scenario.num_experts // len(batches)
    real, rows, weights, padded = [], [], [], []
    for expert in range(rank * local, (rank + 1) * local):
        chosen = [goes_to(batch, expert) for batch in batches]
        count = sum(int(mask.sum()) for mask in chosen)
        pad = -count % scenario.pad_multiple
        real.append(count)
        rows += [round_to_wire(b.x_TD, scenario.wire_dtype)[mask] for b, mask in zip(batches, chosen, strict=True)]
        weights += [merged_weights(b, expert)[mask] for b, mask in zip(batches, chosen, strict=True)]
        rows.append(rows[-1].new_zeros(pad, scenario.hidden))
        weights.append(weights[-1].new_zeros(pad))
        padded.append(torch.arange(count + pad) >= count)
    return Arrival(
        rows_RD=torch.cat(rows),
        weights_R=torch.cat(weights),
        real=real,
        counts=list(map(len, padded)),
        padded=torch.cat(padded),
    )


def _check_counts(sent: Dispatched, expected: Arrival, scenario: Scenario) -> None:
    expect_equal("real_tokens_per_expert", sent.real_tokens_per_expert.tolist(), expected.real)
    expect_equal("tokens_per_expert", sent.tokens_per_expert.tolist(), expected.counts)
    if sent.tokens_per_expert_list is not None:
        expect_equal("tokens_per_expert_list", list(sent.tokens_per_expert_list), expected.counts)
    expect_equal("offs", sent.offs.tolist(), list(accumulate(expected.counts)))
    expect_equal("dtype of rows", sent.rows.dtype, scenario.torch_dtype)
    expect_equal("dtype of weights", sent.weights.dtype, torch.promote_types(scenario.torch_dtype, torch.float32))
    expect_equal("dtype of counts", {sent.tokens_per_expert.dtype, sent.real_tokens_per_expert.dtype}, {torch.int64})
    expect_equal("pad_multiple", sent.pad_multiple, scenario.pad_multiple)


def _row_tolerance(scenario: Scenario) -> float:
    # Rows are copied, so they arrive exactly; a float8 row is multiplied by its scale, in float32, and rounded.
    return 0.0 if scenario.wire_dtype != "float8_e4m3fn" else max(1e-6, torch.finfo(scenario.torch_dtype).eps)


def expect_equal(what: str, got: object, expected: object) -> None:
    """Raise ConformanceError unless the two are equal."""
    if got != expected:
        raise ConformanceError(f"{what}: expected {expected}, got {got}")


def expect_zero(what: str, got: Tensor) -> None:
    """Raise ConformanceError unless every entry is exactly 0; NaN is not."""
    wrong = got != 0
    if bool(wrong.any()):
        raise ConformanceError(f"{what}: must be exactly zero, got {got[wrong][0].item()} ({int(wrong.sum())} entries)")


def expect_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ConformanceError unless the largest difference is within ``tolerance`` of the largest expected value."""
    expect_equal(f"shape of {what}", tuple(got.shape), tuple(expected.shape))
    if got.numel() == 0:
        return
    difference = (got.detach().cpu().double() - expected.double()).abs()
    allowed = tolerance * float(expected.abs().max())
    if not bool((difference <= allowed).all()):  # not: so that NaN is refused
        worst = int(difference.nan_to_num(nan=float("inf")).argmax())
        raise ConformanceError(
            f"{what}: entry {tuple(i.item() for i in torch.unravel_index(torch.tensor(worst), got.shape))} must be "
            f"{expected.flatten()[worst].item():.17g} within {allowed:.3g}, got {got.flatten()[worst].item():.17g}"
        )
