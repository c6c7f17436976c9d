"""What a call costs beside its collectives, on so few tokens that moving them costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import final

import torch.distributed as dist

from benchmarks.contenders import Contender, identity_experts
from benchmarks.interception import Recorder, replay
from benchmarks.workload import Tokens


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Milliseconds of dispatch and combine, forward with autograd recording, less those of its collectives run bare.

    Attributes:
        median_ms: difference of the medians of the wall times.
        fastest_ms: difference of the shortest wall times.
        processor_ms: difference of the medians of the calling thread's processor time, which waiting for a rank that
            shares its core does not lengthen.
    """

    median_ms: float
    fastest_ms: float
    processor_ms: float


def measure_overhead(contender: Contender, tokens: Tokens, runs: int, group: dist.ProcessGroup) -> Overhead:
    """Time the layer and its bare collectives in turn. Collective."""
    x_TD, weights_TK = contender.leaves(tokens)

    def layer() -> None:
        contender.layer(x_TD, weights_TK, tokens, identity_experts)

    with Recorder() as recorder:
        layer()

    def bare() -> None:
        replay(recorder.exchanges, group)

    for _ in range(runs // 10):
        layer()
    times = [(_time(layer, group), _time(bare, group)) for _ in range(runs)]
    (wall, thread), (bare_wall, bare_thread) = (zip(*column, strict=True) for column in zip(*times, strict=True))
    return Overhead(
        median_ms=1e3 * (median(wall) - median(bare_wall)),
        fastest_ms=1e3 * (min(wall) - min(bare_wall)),
        processor_ms=1e3 * (median(thread) - median(bare_thread)),
    )


def _time(call: Callable[[], None], group: dist.ProcessGroup) -> tuple[float, float]:
    dist.barrier(group)
    wall, thread = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - wall, time.thread_time() - thread
