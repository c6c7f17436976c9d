"""The load of ranks with and without balancing, for ``compare``: predicted from the routing, and measured.

Dimensions: C steps, P ranks, L experts of a rank, D the hidden size, W the width of an expert.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher, SlotWeights
from moe_dispatch.permutation import count_values, merge_slots
from moe_dispatch.types import Dispatched
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.placements import UNPLACED, Choice, ExpertCost, placement_plans

_EXCHANGES = 5  # which are timed, to learn how long a byte takes
_FLOP_PER_WEIGHT = 6  # of a row, in forward and backward


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of the ranks under one placement.

    Attributes:
        imbalance: Rows of the busiest rank divided by the mean of all ranks, mean of all steps.
        peak_rows: Most rows of a rank in any step.
        copied_bytes: Bytes of expert weights that travel in a forward, sum of all ranks, mean of all steps. As many
            bytes of gradients travel in the backward.
        break_even: Tokens per expert from which balancing saves time on the busiest rank. None for a variant without
            balancing, or if balancing saves no time with any number of tokens.
    """

    imbalance: float
    peak_rows: float
    copied_bytes: float
    break_even: float | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of the busiest rank in a step, median of all rounds: processor time on CPUs, elapsed time on GPUs.

    Attributes:
        free: Step around experts that cost nothing. Weights of experts travel.
        full: The same step with experts.
    """

    free: float
    full: float

    @property
    def experts(self) -> float:
        """Seconds of the experts."""
        return self.full - self.free


@final
class TimedExperts:
    """Experts for timing: gated, with an up matrix (D, 2W) and a down matrix (W, D), in the dtype of the rows."""

    def __init__(self, dispatcher: Dispatcher, width: int, dtype: torch.dtype, device: torch.device) -> None:
        config, size = dispatcher.config, dispatcher._channel.shape.ep_size
        local, hidden = config.num_experts // size, config.hidden_size
        shapes = ((local, hidden, 2 * width), (local, width, hidden))
        self.own = tuple(
            torch.randn(shape).div_(shape[1] ** 0.5).to(device, dtype).requires_grad_() for shape in shapes
        )
        self._slot_weights = SlotWeights(dispatcher)

    def fetch(self, sent: Dispatched) -> tuple[Dispatched, tuple[Tensor, ...]]:
        """Bring the weights to the slots of this rank. Collective."""
        return self._slot_weights.fetch(sent, *self.own)

    @staticmethod
    def apply(sent: Dispatched, weights: tuple[Tensor, ...]) -> Tensor:
        """Compute the experts of the slots of this rank, (R, D)."""
        up, gate = sent.grouped_mm(sent.rows, weights[0]).chunk(2, 1)
        return sent.grouped_mm(up * torch.sigmoid(gate), weights[1])


def weights_of_expert(config: DispatcherConfig, width: int) -> int:
    """Return the number of weights of one of the timed experts."""
    return 3 * config.hidden_size * width


def clock(place: Place) -> float:
    """Return seconds during which this rank was busy: processor time on CPUs, which ranks share, else elapsed time."""
    return time.process_time() if place.device.type == "cpu" else time.perf_counter()


def count_experts(ids_TK: Tensor, num_experts: int) -> list[int]:
    """Return the rows for each expert. An expert that a row names twice counts once."""
    ids_TK, _ = merge_slots(ids_TK, torch.zeros(ids_TK.shape), asks=True)
    counts: list[int] = count_values(ids_TK.flatten() + 1, num_experts + 1)[1:].tolist()
    return counts


def seconds_per_byte(dispatcher: Dispatcher, dtype: torch.dtype, numbers: int, place: Place) -> float:
    """Measure how long a byte takes from this rank to others. Each rank sends ``numbers`` to each rank. Collective."""
    link, size, found = dispatcher._channel.communicator, place.size, []
    sent = torch.zeros(size, numbers, dtype=dtype, device=place.device)
    for _ in range(1 + _EXCHANGES):
        place.sum(torch.zeros(1, device=place.device))
        started = clock(place)
        work = link.all_to_all(torch.empty_like(sent), sent, [1] * size, [1] * size, label="compare")
        if work is not None:
            work.wait()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        found.append(clock(place) - started)
    return median(found[1:]) / max(sent[1:].nbytes, 1)


def flop_per_byte(plain: Times, peak_rows: float, weights: int, byte_seconds: float) -> float | None:
    """Return the FLOP of the experts in the time of one byte between ranks; None if the experts took no time.

    Args:
        plain: Times without balancing.
        peak_rows: Rows of the busiest rank.
        weights: Number of weights of an expert.
        byte_seconds: Seconds of a byte.
    """
    if plain.experts <= 0:
        return None
    return _FLOP_PER_WEIGHT * weights * peak_rows / plain.experts * byte_seconds


def break_even(plain: Times, balanced: Times, tokens_per_expert: float) -> float | None:
    """Return the tokens per expert from which balancing saves time; None if it saves none with any number.

    The time of experts is taken as proportional to the tokens. Everything else that balancing adds is taken as fixed:
    the exchange of counts, the planner, and the weights with their gradients.

    Args:
        plain: Times without balancing.
        balanced: Times with balancing, of the same steps.
        tokens_per_expert: Rows at experts divided by the number of experts, in these steps.
    """
    saved, added = plain.experts - balanced.experts, max(balanced.free - plain.free, 0.0)
    return tokens_per_expert * added / saved if saved > 0 else None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Survey:
    """What all variants of a comparison share.

    Attributes:
        experts_CPE: Rows of each rank for each expert.
        weights: Number of weights of a timed expert.
        itemsize: Bytes of a weight.
        byte_seconds: Seconds of a byte from rank to rank.
    """

    experts_CPE: Tensor
    weights: int
    itemsize: int
    byte_seconds: float

    @property
    def tokens_per_expert(self) -> float:
        """Rows at experts divided by the number of experts, mean of all steps."""
        return float(self.experts_CPE.sum(1).double().mean())


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observed:
    """What was measured of one variant on all ranks.

    Attributes:
        dispatcher: Dispatcher of the variant on this rank.
        rows_CP: Rows that the experts of each rank got.
        copied_bytes: As in ``Load``.
        times: Times of the busiest rank; None for an emulation.
    """

    dispatcher: Dispatcher
    rows_CP: Sequence[Sequence[int]]
    copied_bytes: float
    times: Times | None


def loads_of(survey: Survey, variants: Sequence[Observed]) -> tuple[list[tuple[Load, Load]], float | None]:
    """Return the predicted and the measured load of each variant, and the measured FLOP per byte.

    Balanced variants are compared with the first one that is not. Without such a variant there is no break-even.
    """
    plain, speed = None, None
    for one in variants:
        if plain is None and one.times is not None and one.dispatcher.config.balance is None:
            plain, rows = one.times, mean(map(max, one.rows_CP))
            speed = flop_per_byte(plain, rows, survey.weights, survey.byte_seconds)
    cost = ExpertCost(itemsize=survey.itemsize, nbytes=survey.weights * survey.itemsize, flop_per_byte=speed)
    found = []
    for one in variants:
        even = None
        if plain is not None and one.times is not None and one.dispatcher.config.balance is not None:
            even = break_even(plain, one.times, survey.tokens_per_expert)
        measured = Load(
            imbalance=mean(max(rows_P) / max(mean(rows_P), 1) for rows_P in one.rows_CP),
            peak_rows=max(map(max, one.rows_CP)),
            copied_bytes=one.copied_bytes,
            break_even=even,
        )
        found.append((_predicted(one.dispatcher, survey.experts_CPE, cost), measured))
    return found, speed


def _predicted(dispatcher: Dispatcher, experts_CPE: Tensor, cost: ExpertCost) -> Load:
    config, channel = dispatcher.config, dispatcher._channel
    shape: MoEShape = dataclasses.replace(
        channel.shape, num_experts=config.num_experts, ranks_per_node=channel.ranks_per_node
    )
    choice = Choice(config.balance or UNPLACED, config.spare_experts_per_rank)
    (plan,) = placement_plans(experts_CPE, shape, [choice], cost)
    assert plan.copied_bytes is not None
    return Load(
        imbalance=plan.imbalance,
        peak_rows=plan.peak_rows,
        copied_bytes=plan.copied_bytes,
        break_even=plan.break_even,
    )
