"""Measure one layer of a contender: times by phase, bytes sent to other ranks, and peak memory.

On a GPU each phase ends with a device synchronization, so the measurement does not show overlap between phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Measurement, TaskSpec

from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_tools.bench.contenders import Contender
from moe_dispatch_tools.bench.workload import Tokens


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Wall time of one forward and backward by phase, and the processor time of all threads."""

    dispatch: float
    combine: float
    backward: float
    total: float
    processor: float


def middle(runs: Iterable[Seconds]) -> Seconds:
    """Return the run whose total is the median; for an even number, the mean of the two runs in the middle."""
    in_order = sorted(runs, key=lambda run: run.total)
    chosen = in_order[(len(in_order) - 1) // 2 : len(in_order) // 2 + 1]
    return Seconds(**{field.name: mean(getattr(run, field.name) for run in chosen) for field in fields(Seconds)})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Several runs of one contender. The times of a run are those of the slowest rank in that run.

    Attributes:
        cold: First call of a new contender. The process has run the same code before, on a small shape.
        runs: Calls after the first call.
    """

    cold: Seconds
    runs: tuple[Seconds, ...]

    @property
    def warm(self) -> Seconds:
        """The run whose total is the median, so that the phases add up to the total."""
        return middle(self.runs)

    @property
    def totals(self) -> Measurement:
        """Statistics of the total time of the runs, in seconds."""
        return Measurement(1, [run.total for run in self.runs], TaskSpec("layer", ""))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the total time, in seconds. Their distance is ``totals.iqr``."""
        low, high = torch.tensor(self.totals.times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double())
        return float(low), float(high)


def time_in_turn(
    contenders: Mapping[str, Contender],
    tokens: Tokens,
    iterations: int,
    group: dist.ProcessGroup,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Run the contenders in turn, once cold and then ``iterations`` times. Collective.

    Contenders take turns, so that a change in the machine's load affects all of them.

    Returns:
        Timing by contender, the same on all ranks.
    """
    mine: dict[str, list[Seconds]] = {name: [] for name in contenders}
    for _ in range(1 + iterations):
        for name, contender in contenders.items():
            dist.barrier(group)
            mine[name].append(time_layer(contender, tokens))
        after_round()
    return {name: Timing(cold=runs[0], runs=tuple(runs[1:])) for name, runs in _slowest(mine, group).items()}


def _slowest(mine: dict[str, list[Seconds]], group: dist.ProcessGroup) -> dict[str, list[Seconds]]:
    everyone: list[dict[str, list[Seconds]]] = gather(mine, group)
    return {
        name: [max(runs, key=lambda run: run.total) for runs in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in mine
    }


def time_layer(contender: Contender, tokens: Tokens) -> Seconds:
    """Time one forward and backward with experts that cost nothing."""
    x_TD, weights_TK = contender.leaves(tokens)
    device, mark = x_TD.device, 0.0
    synchronize(device)

    def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        nonlocal mark
        synchronize(device)
        mark = time.perf_counter()
        return rows_RD

    processor, start = time.process_time(), time.perf_counter()
    y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
    synchronize(device)
    forward = time.perf_counter()
    torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
    synchronize(device)
    end = time.perf_counter()
    return Seconds(
        dispatch=mark - start,
        combine=forward - mark,
        backward=end - forward,
        total=end - start,
        processor=time.process_time() - processor,
    )


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather ``value`` from every rank, in the order of ranks. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PHASES = ("dispatch", "combine", "backward")


def sent_by_phase(contender: Contender, tokens: Tokens) -> dict[str, int]:
    """Count the bytes that this rank sends in each phase of one forward and backward. Collective."""
    ends: list[int] = []

    def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        ends.append(collectives.nbytes)
        return rows_RD

    x_TD, weights_TK = contender.leaves(tokens)
    with count_collectives() as collectives:
        y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
        ends.append(collectives.nbytes)
        torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
        ends.append(collectives.nbytes)
    return {phase: end - start for phase, start, end in zip(PHASES, [0, *ends], ends, strict=False)}


def floor_bytes(tokens: Tokens, group: dist.ProcessGroup) -> int:
    """Count the bytes that this rank must send in dispatch.

    It must send each token once to each other rank that owns one of the token's experts. A row holds its numbers, and
    6 bytes per slot: a float32 weight and an int16 expert id.
    """
    ranks_TK = tokens.ids_TK // (len(tokens.tokens_per_expert_E) // group.size())
    members_TP = torch.zeros(len(ranks_TK), group.size(), dtype=torch.bool, device=ranks_TK.device).scatter_(
        1, ranks_TK, True
    )
    members_TP[:, group.rank()] = False
    row_bytes = tokens.x_TD.shape[1] * tokens.x_TD.itemsize
    return int(members_TP.sum()) * (row_bytes + 6 * ranks_TK.shape[1])


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Measure the peak of the bytes that ``call`` allocates on a device."""
    return _peak_on_cpu(call, lives=3) if device.type == "cpu" else _peak_on_gpu(call, device)


def _peak_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], object], lives: int) -> int:
    """Measure the peak of the bytes that ``call`` allocates. ``call`` must release all of them.

    The profiler sees only the calling thread, which on a CPU also runs the backward. Sometimes a thread of gloo is the
    last to hold a tensor. The profiler then misses its release, and all later sums are too high. Therefore ``call``
    runs ``lives`` times. The result comes from the run that left the fewest bytes, and these bytes are subtracted. The
    result is exact if the run left no bytes, and else too low.
    """
    left, peak = min(_left_and_peak(_memory_changes(call)) for _ in range(lives))
    return peak - left


def _memory_changes(call: Callable[[], object]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded = profiler.profiler
    assert recorded is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _left_and_peak(changes: Iterable[int]) -> tuple[int, int]:
    """Return the last value and the largest value of the running sum."""
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return level, peak
