"""Run every variant of ``compare`` on one rank: check its results and measure its costs.

All variants get the same tokens. Dimensions are those of ``moe_dispatch.types``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.volume import Volume
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers import Dispatcher, SlotWeights, build_dispatcher
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.types import Dispatched
from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_testing.host_syncs import count_host_syncs
from moe_dispatch_testing.rank_context import Call, RankContext
from moe_dispatch_testing.scenario import Experts
from moe_dispatch_tools.compare.comparison import QUANTITIES, Comparison, Outcome, Task, Variant
from moe_dispatch_tools.compare.load import (
    Observed,
    Survey,
    TimedExperts,
    Times,
    clock,
    count_experts,
    loads_of,
    seconds_per_byte,
    weights_of_expert,
)
from moe_dispatch_tools.compare.workload import Step, make_material
from moe_dispatch_tools.loads import dtype_names
from moe_dispatch_tools.names import noting
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send

# Smallest number of timed rounds. Variants take turns, so that a change in the machine's load affects all of them.
ROUNDS = 5


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Candidate:
    """A variant on this rank, and its measurements so far.

    Attributes:
        experts: Experts whose time is measured; None if no variant of the task has spare expert slots.
        rows: Rows that the experts of this rank got, by step.
        copied_bytes: Bytes of the weights of experts, sum of all ranks, mean of all steps.
        busy: Busy seconds of this rank around experts that cost nothing, and with experts, by round.
    """

    variant: Variant
    dispatcher: Dispatcher | None = None
    refused: str | None = None
    from_reference: dict[str, float] = field(default_factory=dict)
    from_first: dict[str, float] = field(default_factory=dict)
    bytes_sent: float = 0
    rows_padded: dict[str, float] = field(default_factory=dict)
    host_syncs: int = 0
    seconds: list[float] = field(default_factory=list)
    experts: TimedExperts | None = None
    rows: list[int] = field(default_factory=list)
    copied_bytes: float = 0
    busy: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name in errors."""
        return f"{self.variant.backend.label}, {self.variant.mode}"


def measure(task: Task, place: Place, send: Send) -> Comparison:
    """Run a task. Collective. Call ``send((done, of))`` after every part."""
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the result names the emulated backends
    material = make_material(task.workload, task.config, rank=place.rank, ranks=place.size)
    steps = material.steps
    candidates = [_open(variant, task, place, material.most_rows) for variant in task.variants]
    rounds = max(ROUNDS, len(steps))
    for done, step in enumerate(steps, start=1):
        _hold_against_reference(step, candidates, place)
        send((done, len(steps) + rounds))
    runners, dtype = [candidate for candidate in candidates if candidate.refused is None], material.scenario.torch_dtype
    for candidate in runners:
        if task.places_experts:
            candidate.experts = TimedExperts(_dispatcher(candidate), task.width, dtype, place.device)
        with noting(candidate.name):
            _count(candidate, steps, place)
    for done in range(1, rounds + 1):
        call = steps[done % len(steps)].call(place.device)
        for candidate in runners:
            with noting(candidate.name):
                elapsed, free = _time(candidate, call, place)
                candidate.seconds.append(elapsed)
                if candidate.experts is not None:
                    candidate.busy.append((free, _time(candidate, call, place, experts=candidate.experts)[1]))
        send((len(steps) + done, len(steps) + rounds))
    outcomes, speed, tokens_per_expert = tuple(_gathered(candidates, dtype, place)), None, 0.0
    if task.places_experts and runners:
        survey = _survey(task, steps, runners[0], place)
        outcomes, speed = _with_loads(outcomes, candidates, survey, place)
        tokens_per_expert = survey.tokens_per_expert
    for candidate in runners:
        _dispatcher(candidate).close()
    return Comparison(
        task=task,
        tolerance=task.tolerance or material.scenario.tolerance,
        transport="nccl" if place.device.type == "cuda" else "gloo",
        tokens=material.tokens,
        most_rows=max(material.most_rows, 1),
        outcomes=outcomes,
        tokens_per_expert=tokens_per_expert,
        flop_per_byte=speed,
    )


def _open(variant: Variant, task: Task, place: Place, max_tokens: int) -> Candidate:
    candidate = Candidate(variant=variant)
    if variant.backend.emulated and place.device.type != "cpu":
        candidate.refused = (
            f"compare: an emulation needs CPU tensors, got {variant.backend.label!r} on ranks with GPUs. Leave it out, "
            "or hide the GPUs: CUDA_VISIBLE_DEVICES=."
        )
        return candidate
    try:
        with noting(candidate.name):
            config = variant.config(task.config, max(max_tokens, 1))
            group = None if place.size == 1 and config.backend_name == "local" else place.group
            candidate.dispatcher = build_dispatcher(config, group, control_group=place.control if group else None)
    except MoEDispatchError as refusal:
        candidate.refused = str(refusal)
    return candidate


def _dispatcher(candidate: Candidate) -> Dispatcher:
    assert candidate.dispatcher is not None
    return candidate.dispatcher


def _hold_against_reference(step: Step, candidates: Sequence[Candidate], place: Place) -> None:
    """Run one batch through every candidate, and keep the largest differences so far."""
    expected = _summed(step.expected(), place)
    first: dict[str, Tensor] | None = None
    for candidate in candidates:
        if candidate.refused is not None:
            continue
        try:
            with noting(candidate.name):
                found = _summed(_results(_dispatcher(candidate), step, place), place)
        except MoEDispatchError as refusal:  # all ranks raise it
            candidate.refused = str(refusal)
            _dispatcher(candidate).close()
            continue
        first = first or found
        for name in QUANTITIES:
            _keep_largest(candidate.from_reference, name, relative_difference(found[name], expected[name]))
            _keep_largest(candidate.from_first, name, relative_difference(found[name], first[name]))


def _results(dispatcher: Dispatcher, step: Step, place: Place) -> dict[str, Tensor]:
    """Compute output and gradients of one layer with the experts of the conformance kit, by name, on the CPU."""
    call = step.call(place.device)
    context = RankContext(scenario=step.scenario, dispatcher=dispatcher, rank=place.rank, calls=(call,))
    sent = dispatcher.dispatch(call.x, call.routing, context.plan(call))
    experts, numbers = call.experts, None
    if sent.placement is not None:
        local = dispatcher.config.num_experts // place.size
        own = slice(place.rank * local, (place.rank + 1) * local)
        stacked = (experts.matrix_EWW[own], experts.bias_ED[own])
        sent, (matrix_SWW, bias_SD) = SlotWeights(dispatcher).fetch(sent, *stacked)
        experts, numbers = Experts(matrix_EWW=matrix_SWW, bias_ED=bias_SD), range(len(bias_SD))
    y = dispatcher.combine(context.run_experts(sent, experts, numbers), sent)
    y.backward(call.upstream)
    of_experts = [_gradient(call.experts.matrix_EWW), _gradient(call.experts.bias_ED)]
    return {
        "y": y.detach().cpu().view(-1, y.shape[-1]),
        "x": _gradient(call.x).view(-1, y.shape[-1]),
        "weights": _gradient(call.weights_TK),
        "experts": torch.cat([part.flatten() for part in of_experts]),
    }


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf, device="cpu") if leaf.grad is None else leaf.grad.cpu()


def _summed(results: dict[str, Tensor], place: Place) -> dict[str, Tensor]:
    """Sum the gradients of the experts over ranks. Each rank has a part: its own experts, or its own tokens."""
    return {**results, "experts": place.sum(results["experts"].double().to(place.device)).cpu()}


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected value unless this is 0; infinite for a NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
    return float(difference) / (float(expected.double().abs().max()) or 1.0)


def _keep_largest(largest: dict[str, float], name: str, value: float) -> None:
    largest[name] = max(largest.get(name, 0.0), value)


def _layer(candidate: Candidate, call: Call, *, experts: TimedExperts | None = None) -> Dispatched:
    """Run plan, forward and backward around experts that cost nothing, or ``experts``. Return the dispatched rows."""
    dispatcher = _dispatcher(candidate)
    leaves: tuple[Tensor, ...] = (call.x, call.weights_TK)
    weights: tuple[Tensor, ...] = ()
    sent = dispatcher.dispatch(call.x, call.routing, dispatcher.plan(call.layout, like=call.x))
    if candidate.experts is not None:
        leaves = (*leaves, *candidate.experts.own)
        sent, weights = candidate.experts.fetch(sent)
    rows = sent.rows if experts is None else experts.apply(sent, weights)
    if dispatcher.config.weights == "experts":
        rows = (rows * sent.weights.unsqueeze(1)).to(rows.dtype)
    # Experts that cost nothing use no weights.
    torch.autograd.grad(dispatcher.combine(rows, sent), leaves, call.upstream, allow_unused=True)
    return sent


def _count(candidate: Candidate, steps: Sequence[Step], place: Place) -> None:
    """Count rows, bytes and padding of all steps, and the host syncs of the first step. This also warms up."""
    dispatcher, nbytes = _dispatcher(candidate), 0
    before = dispatcher.metrics(gather=True)
    for step in steps:
        call = step.call(place.device)
        with count_collectives() as collectives:
            sent = _layer(candidate, call)
        nbytes += collectives.nbytes
        candidate.rows.append(int(sent.real_tokens_per_expert.sum()))
    after = dispatcher.metrics(gather=True)
    copied = [metrics.bytes_sent.get("weights", 0) for metrics in (before, after)]
    candidate.bytes_sent = nbytes / len(steps)
    candidate.copied_bytes = (copied[1] - copied[0]) / len(steps)
    candidate.rows_padded = {
        cause: (rows - before.rows_padded[cause]) / len(steps) for cause, rows in after.rows_padded.items()
    }
    call = steps[0].call(place.device)
    if place.rank == 0:
        with count_host_syncs() as reads:
            _layer(candidate, call)
        candidate.host_syncs = len(reads)
    else:
        _layer(candidate, call)


def _time(
    candidate: Candidate, call: Call, place: Place, *, experts: TimedExperts | None = None
) -> tuple[float, float]:
    """Time one call on this rank: elapsed and busy seconds. All ranks start together."""
    place.sum(torch.zeros(1, device=place.device))
    _wait(place)
    started, busy = time.perf_counter(), clock(place)
    _layer(candidate, call, experts=experts)
    _wait(place)
    return time.perf_counter() - started, clock(place) - busy


def _wait(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def _gathered(candidates: Sequence[Candidate], dtype: torch.dtype, place: Place) -> list[Outcome]:
    """Gather the outcomes of all ranks. The result is the same on each rank. Collective."""
    mine = [
        [candidate.from_reference, candidate.from_first, candidate.bytes_sent, candidate.host_syncs, candidate.seconds]
        for candidate in candidates
    ]
    everyone = Communicator(place.control or place.group).gather_json(mine, label="compare")
    outcomes, base = [], None
    for candidate, of_ranks in zip(candidates, zip(*everyone, strict=True), strict=True):
        if candidate.refused is not None:
            outcomes.append(_outcome(candidate, refused=candidate.refused))
            continue
        reference, first, sent, syncs, seconds = zip(*of_ranks, strict=True)
        milliseconds = 1e3 * median(max(run) for run in zip(*seconds, strict=True))
        base = base or milliseconds
        options = candidate.variant.backend.load()
        emulated = candidate.variant.backend.emulated
        outcomes.append(
            _outcome(
                candidate,
                emulated=emulated,
                from_reference=_largest(reference),
                from_first=_largest(first),
                bytes_sent=None if "emulate" in options.model_fields else sum(sent),
                row_dtypes=_row_dtypes(candidate, dtype, place.size),
                rows_padded=candidate.rows_padded,
                host_syncs=None if emulated else syncs[0],
                milliseconds=milliseconds,
                time_ratio=milliseconds / base,
            )
        )
    return outcomes


def _survey(task: Task, steps: Sequence[Step], runner: Candidate, place: Place) -> Survey:
    """Gather the rows for each expert, and measure how fast weights travel. Collective."""
    dtype, config = steps[0].scenario.torch_dtype, task.config
    weights = weights_of_expert(config, task.width)
    speed = seconds_per_byte(_dispatcher(runner), dtype, weights, place)
    counts = [count_experts(step.batch().ids_TK, config.num_experts) for step in steps]
    everyone = Communicator(place.control or place.group).gather_json([counts, speed], label="compare")
    experts_PCE = torch.tensor([of_rank for of_rank, _ in everyone], dtype=torch.int64)
    return Survey(
        experts_CPE=experts_PCE.transpose(0, 1),
        weights=weights,
        itemsize=dtype.itemsize,
        byte_seconds=max(slowest for _, slowest in everyone),
    )


def _with_loads(
    outcomes: Sequence[Outcome], candidates: Sequence[Candidate], survey: Survey, place: Place
) -> tuple[tuple[Outcome, ...], float | None]:
    """Add the loads of the ranks to the outcomes, and return the FLOP per byte of this machine. Collective."""
    mine = [[candidate.rows, candidate.busy] for candidate in candidates]
    everyone = Communicator(place.control or place.group).gather_json(mine, label="compare")
    observed = {}
    for index, candidate in enumerate(candidates):
        if candidate.refused is None:
            rows_PC, busy = zip(*(of_rank[index] for of_rank in everyone), strict=True)
            sides = [[max(run[side] for run in runs) for runs in zip(*busy, strict=True)] for side in (0, 1)]
            observed[index] = Observed(
                dispatcher=_dispatcher(candidate),
                rows_CP=list(zip(*rows_PC, strict=True)),
                copied_bytes=candidate.copied_bytes,
                times=None
                if candidate.variant.backend.emulated
                else Times(free=median(sides[0]), full=median(sides[1])),
            )
    loads, speed = loads_of(survey, list(observed.values()))
    found, base = list(outcomes), None
    for (index, one), (predicted, measured) in zip(observed.items(), loads, strict=True):
        found[index] = replace(found[index], predicted=predicted, measured=measured)
        if one.times is not None:
            base = base or one.times.full
            found[index] = replace(found[index], busiest_ms=1e3 * one.times.full, busiest_ratio=one.times.full / base)
    return tuple(found), speed


def _row_dtypes(candidate: Candidate, dtype: torch.dtype, ranks: int) -> str:
    """Return the names of the dtypes of the rows on the wire. They do not depend on the number of rows."""
    backend = candidate.variant.backend
    options = backend.load().model_validate(backend.options)
    names = [part.name for part in fields(Volume) if part.name != "legs"]
    counts: dict[str, Any] = dict.fromkeys(names, torch.zeros(ranks, dtype=torch.float64))
    leg = Volume(**counts)
    nothing = replace(leg, legs=(leg, leg))
    wire = options.wire_bytes(shape_of(_dispatcher(candidate).config, ranks), nothing, dtype)
    return dtype_names(() if wire is None else wire.row_dtypes)


def _outcome(candidate: Candidate, **found: Any) -> Outcome:
    return Outcome(backend=candidate.variant.backend.label, mode=candidate.variant.mode, **found)


def _largest(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(of_rank[name] for of_rank in of_ranks) for name in QUANTITIES}
