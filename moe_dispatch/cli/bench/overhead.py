"""What a call costs beside its collectives, on so few tokens that moving them costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist

from moe_dispatch.cli.bench.contenders import Contender, identity_experts
from moe_dispatch.cli.bench.interception import Recorder, replay
from moe_dispatch.cli.bench.timing import synchronize
from moe_dispatch.cli.bench.workload import Tokens


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Milliseconds of dispatch and combine, forward with autograd recording, less those of its collectives run bare.

    Attributes:
        median_ms: difference of the medians of the wall times.
        fastest_ms: difference of the shortest wall times.
        processor_ms: difference of the medians of the calling thread's processor time, which waiting for a rank that
            shares its core does not lengthen.
        in_place_ms: median of the wall times, each less its own collectives timed where they stand; None for a
            contender whose collectives are not calls of the process group's methods.
        fastest_in_place_ms: the shortest of these times.
    """

    median_ms: float
    fastest_ms: float
    processor_ms: float
    in_place_ms: float | None
    fastest_in_place_ms: float | None


def measure_overhead(contender: Contender, tokens: Tokens, runs: int, group: dist.ProcessGroup) -> Overhead:
    """Time the layer and its bare collectives in turn, then the layer with a clock on its collectives. Collective.

    Run bare, one right after the other, collectives find their code in the cache and take less than in the layer, so
    the differences contain part of them. Timed in place they do not; that is the cost of a call as such.
    """
    x_TD, weights_TK = contender.leaves(tokens)
    device = x_TD.device

    def layer() -> None:
        contender.layer(x_TD, weights_TK, tokens, identity_experts)

    with Recorder() as recorder:
        layer()

    def bare() -> None:
        replay(recorder.exchanges, group, device)

    for _ in range(runs // 10):
        layer()
    times = [(_time(layer, group, device), _time(bare, group, device)) for _ in range(runs)]
    (wall, thread), (bare_wall, bare_thread) = (zip(*column, strict=True) for column in zip(*times, strict=True))
    beside = [_time_beside(layer, group, device, len(recorder.exchanges)) for _ in range(runs)]
    known = [1e3 * seconds for seconds in beside if seconds is not None]
    return Overhead(
        median_ms=1e3 * (median(wall) - median(bare_wall)),
        fastest_ms=1e3 * (min(wall) - min(bare_wall)),
        processor_ms=1e3 * (median(thread) - median(bare_thread)),
        in_place_ms=median(known) if known else None,
        fastest_in_place_ms=min(known) if known else None,
    )


def _time_beside(
    call: Callable[[], None], group: dist.ProcessGroup, device: torch.device, exchanges: int
) -> float | None:
    """Seconds of a call less those of its all-to-alls, each awaited at once; None where not all could be timed."""
    spent: list[float] = []
    issue = dist.ProcessGroup.alltoall_base

    def timed(*args: Any) -> dist.Work:
        synchronize(device)
        start = time.perf_counter()
        work = issue(*args)
        work.wait()
        synchronize(device)
        spent.append(time.perf_counter() - start)
        return work

    with patch.object(dist.ProcessGroup, "alltoall_base", timed):
        wall, _ = _time(call, group, device)
    return wall - sum(spent) if len(spent) == exchanges else None


def _time(call: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    dist.barrier(group)
    synchronize(device)
    wall, thread = time.perf_counter(), time.thread_time()
    call()
    synchronize(device)
    return time.perf_counter() - wall, time.thread_time() - thread
