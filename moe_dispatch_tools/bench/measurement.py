"""Measure the contenders in every case, on one rank, and check their results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch_tools.bench.agreement import check_agreement
from moe_dispatch_tools.bench.contenders import Contender, identity_experts, run_layer
from moe_dispatch_tools.bench.costs import PHASES, Timing, floor_bytes, gather, peak_bytes, sent_by_phase, time_in_turn
from moe_dispatch_tools.bench.overhead import Overhead, measure_overhead
from moe_dispatch_tools.bench.request import NamedContender, Task
from moe_dispatch_tools.bench.results import CaseResult, Measured, OverheadResult
from moe_dispatch_tools.bench.workload import Case, Tokens
from moe_dispatch_tools.names import noting
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send

OVERHEAD_RUNS = 40  # calls per iteration in suite overhead, because these calls are short
_WARMING_TOKENS = 16


def measure(task: Task, place: Place, send: Send) -> None:
    """Run every case of a task. Collective.

    Args:
        task: Cases and contenders.
        place: Device and groups of this rank.
        send: Called with 1 after each part of a case, and with the ``CaseResult`` or ``OverheadResult`` of each case
            when the case ends. Results are the same on all ranks.

    Raises:
        DisagreementError: The output or a gradient of a contender is wrong, or differs from the first contender.
        MoEDispatchError: A backend of this package cannot be used on this group or for a shape.
    """
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # as on any number of ranks; a second thread makes a busy machine many times slower
    _warm(task, place)
    run = {"overhead": _overheads, "growth": _times_only}.get(task.suite, _everything)
    for case in task.cases:
        send(run(case, task, place, lambda: send(1)))


def _warm(task: Task, place: Place) -> None:
    """Run a few tokens, to connect ranks and load code. Then "cold" is the first call of a contender only."""
    shapes = {replace(case.shape, tokens=_WARMING_TOKENS): case for case in task.cases}
    for shape, case in shapes.items():
        _times_only(replace(case, shape=shape), replace(task, iterations=1), place, lambda: None)


@contextmanager
def _opened(case: Case, named: Sequence[NamedContender], place: Place) -> Iterator[dict[str, Contender]]:
    """Open all contenders, and close them at the end of the block. Collective."""
    contenders = {}
    for one in named:
        with noting(one.label):
            contenders[one.label] = one.open(case.shape, place)
    yield contenders
    for contender in contenders.values():
        contender.close()


def _times_only(case: Case, task: Task, place: Place, done: Callable[[], None]) -> CaseResult:
    with _opened(case, task.contenders, place) as contenders:
        timings = time_in_turn(contenders, case.tokens(place), task.iterations, _group(place), done)
    return CaseResult(case=case, contenders={name: Measured(timing=timing) for name, timing in timings.items()})


def _everything(case: Case, task: Task, place: Place, done: Callable[[], None]) -> CaseResult:
    tokens, group = case.tokens(place), _group(place)
    with _opened(case, task.contenders, place) as contenders:
        timings = time_in_turn(contenders, tokens, task.iterations, group, done)
        dropped = {name for name, contender in contenders.items() if contender.dropped()}
        whole = {name: contender for name, contender in contenders.items() if name not in dropped}
        errors = check_agreement(whole, tokens, group) if whole else {}
        done()
        sent = {
            one.label: sent_by_phase(contenders[one.label], tokens) for one in task.contenders if one.bytes_are_seen
        }
        done()
    peaks = {one.label: _peak(one, case, tokens, place) for one in task.contenders}
    done()
    ranks = gather((floor_bytes(tokens, group), errors, sent, peaks), group)
    return CaseResult(
        case=case,
        contenders=_joined(timings, dropped, [rank[1:] for rank in ranks]),
        floor_bytes=sum(floor for floor, *_ in ranks) / len(ranks),
    )


def _joined(timings: Mapping[str, Timing], dropped: set[str], ranks: Sequence[Any]) -> dict[str, Measured]:
    """Join the results of all ranks: the mean of the bytes, the largest of all other numbers."""
    errors, sent, peaks = zip(*ranks, strict=True)
    return {
        name: Measured(
            timing=timing,
            bytes_sent={phase: sum(rank[name][phase] for rank in sent) / len(sent) for phase in PHASES}
            if name in sent[0]
            else None,
            peak_bytes=max(rank[name] for rank in peaks),
            error=None if name in dropped else max(rank[name] for rank in errors),
            dropped=name in dropped,
        )
        for name, timing in timings.items()
    }


def _overheads(case: Case, task: Task, place: Place, done: Callable[[], None]) -> OverheadResult:
    """Measure the overhead of every contender. The result is that of the rank with the largest overhead."""
    tokens, group = case.tokens(place), _group(place)
    with _opened(case, task.contenders, place) as contenders:
        runs = OVERHEAD_RUNS * task.iterations
        mine = {}
        for name, contender in contenders.items():
            with noting(name):
                mine[name] = measure_overhead(contender, tokens, runs, group)
    done()
    ranks: list[dict[str, Overhead]] = gather(mine, group)
    return OverheadResult(
        case=case,
        contenders={name: max((rank[name] for rank in ranks), key=lambda cost: cost.median_ms) for name in mine},
    )


def _peak(named: NamedContender, case: Case, tokens: Tokens, place: Place) -> int:
    """Measure the peak of the memory of a contender. It runs twice, so that it can reuse buffers. Collective."""

    def live() -> None:
        contender = named.open(case.shape, place)
        for _ in range(2):
            run_layer(contender, tokens, identity_experts)
        contender.close()

    return peak_bytes(live, place.device)


def _group(place: Place) -> dist.ProcessGroup:
    assert place.group is not None
    return place.group
