"""One case of the benchmark: a shape, a dtype and a routing, on which every contender is checked and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from moe_dispatch.cli.bench.agreement import check_agreement
from moe_dispatch.cli.bench.contenders import Contender, identity_experts, run_layer
from moe_dispatch.cli.bench.interception import PHASES, bytes_by_phase, floor_bytes, record_layer
from moe_dispatch.cli.bench.memory import peak_bytes
from moe_dispatch.cli.bench.overhead import Overhead, measure_overhead
from moe_dispatch.cli.bench.peers import contender_names, open_contender
from moe_dispatch.cli.bench.timing import Timing, time_in_turn
from moe_dispatch.cli.bench.workload import Shape, Skew, Tokens, draw_tokens


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is measured."""

    shape: Shape
    dtype: torch.dtype
    skew: Skew

    def tokens(self, rank: int) -> Tokens:
        """One rank's input."""
        return draw_tokens(self.shape, self.skew, self.dtype, rank)

    def open(self, group: dist.ProcessGroup) -> dict[str, Contender]:
        """Every contender that is installed, ours first. Collective."""
        return {name: open_contender(name, self.shape, group) for name in contender_names()}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one contender did in one case.

    Attributes:
        timing: forward and backward, cold and warm.
        bytes_sent: to other ranks, a rank's mean, in "dispatch", "combine" and "backward".
        peak_bytes: most memory held at once, of the rank that held most.
        error: largest difference to the dense result, relative to the magnitude of its terms.
    """

    timing: Timing
    bytes_sent: dict[str, float]
    peak_bytes: int
    error: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """All contenders in one case, ours first; ``floor_bytes`` is a rank's mean of the fewest bytes one way."""

    floor_bytes: float
    contenders: dict[str, Measured]


def run_case(case: Case, iterations: int, group: dist.ProcessGroup) -> CaseResult:
    """Check and measure all contenders; the same result on all ranks. Collective.

    Raises:
        DisagreementError: a contender's output or gradient is wrong, or a peer's differs from ours.
    """
    tokens, contenders = case.tokens(group.rank()), case.open(group)
    timings = time_in_turn(contenders, tokens, iterations, group)
    errors = check_agreement(contenders, tokens, group)
    sent = {name: bytes_by_phase(record_layer(contender, tokens)) for name, contender in contenders.items()}
    for contender in contenders.values():
        contender.close()
    peaks = {name: measure_peak(name, case.shape, tokens, group) for name in contenders}
    ranks = gather((floor_bytes(tokens, group), errors, sent, peaks), group)
    floors, all_errors, all_sent, all_peaks = zip(*ranks, strict=True)
    measured = {
        name: Measured(
            timing=timings[name],
            bytes_sent={phase: sum(rank[name][phase] for rank in all_sent) / len(ranks) for phase in PHASES},
            peak_bytes=max(rank[name] for rank in all_peaks),
            error=max(rank[name] for rank in all_errors),
        )
        for name in contenders
    }
    return CaseResult(floor_bytes=sum(floors) / len(ranks), contenders=measured)


def time_case(case: Case, iterations: int, group: dist.ProcessGroup) -> dict[str, Timing]:
    """Only the times. Collective."""
    contenders = case.open(group)
    timings = time_in_turn(contenders, case.tokens(group.rank()), iterations, group)
    for contender in contenders.values():
        contender.close()
    return timings


def overhead_case(case: Case, runs: int, group: dist.ProcessGroup) -> dict[str, Overhead]:
    """The cost of a call beside its collectives; of the rank where it is largest. Collective."""
    tokens, contenders = case.tokens(group.rank()), case.open(group)
    mine = {name: measure_overhead(contender, tokens, runs, group) for name, contender in contenders.items()}
    ranks = gather(mine, group)
    return {name: max((rank[name] for rank in ranks), key=lambda overhead: overhead.median_ms) for name in mine}


def measure_peak(name: str, shape: Shape, tokens: Tokens, group: dist.ProcessGroup) -> int:
    """Most bytes held in the life of a contender that runs twice, so that it may reuse buffers. Collective."""

    def live() -> None:
        contender = open_contender(name, shape, group)
        for _ in range(2):
            run_layer(contender, tokens, identity_experts)
        contender.close()

    return peak_bytes(live, lives=3)


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank, by rank."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values
