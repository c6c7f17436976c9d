"""Times of one layer: dispatch, combine, backward; contenders in turn, so that drift of the machine hits all alike.

On a GPU every phase ends when the device is done with it: what phases could overlap is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.cli.bench.contenders import Contender
from moe_dispatch.cli.bench.workload import Tokens


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Wall time of one forward and backward by phase, and the processor time of the whole, all threads together."""

    dispatch: float
    combine: float
    backward: float
    total: float
    processor: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Several runs of one contender; every run is that of the rank that took longest.

    Attributes:
        cold: the first call of a contender just opened, in a process that has run it before at a small size.
        runs: the calls after it.
    """

    cold: Seconds
    runs: tuple[Seconds, ...]

    @property
    def warm(self) -> Seconds:
        """Medians of the runs, each phase for itself."""
        return Seconds(
            **{field.name: median(getattr(run, field.name) for run in self.runs) for field in fields(Seconds)}
        )

    @property
    def spread(self) -> tuple[float, float]:
        """Shortest and longest total."""
        totals = [run.total for run in self.runs]
        return min(totals), max(totals)


def time_in_turn(
    contenders: Mapping[str, Contender],
    tokens: Tokens,
    iterations: int,
    group: dist.ProcessGroup,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Run all contenders once, then again, ``iterations`` times after the first. Collective; alike on all ranks."""
    mine: dict[str, list[Seconds]] = {name: [] for name in contenders}
    for _ in range(1 + iterations):
        for name, contender in contenders.items():
            dist.barrier(group)
            mine[name].append(time_layer(contender, tokens))
        after_round()
    return {name: Timing(cold=runs[0], runs=tuple(runs[1:])) for name, runs in _slowest(mine, group).items()}


def _slowest(mine: dict[str, list[Seconds]], group: dist.ProcessGroup) -> dict[str, list[Seconds]]:
    everyone: list[dict[str, list[Seconds]]] = [{}] * group.size()
    dist.all_gather_object(everyone, mine, group)
    return {
        name: [max(runs, key=lambda run: run.total) for runs in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in mine
    }


def time_layer(contender: Contender, tokens: Tokens) -> Seconds:
    """One forward and backward with experts that cost nothing."""
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


def synchronize(device: torch.device) -> None:
    """Until a GPU is done; a CPU is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
