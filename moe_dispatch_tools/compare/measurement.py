"""Run every variant of ``compare`` on one rank: check its results and measure its costs.

All variants get the same tokens. Dimensions are those of ``moe_dispatch.types``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from statistics import mean, median
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_dispatch.backends.volume import Volume
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_testing.host_syncs import count_host_syncs
from moe_dispatch_testing.rank_context import Call
from moe_dispatch_tools.compare.contenders import Contender, Ours, TimedExperts, run_layer
from moe_dispatch_tools.compare.peers import PEERS
from moe_dispatch_tools.compare.results import PHASES, QUANTITIES, CaseResult, Load, VariantResult
from moe_dispatch_tools.compare.workload import Material, Step, Workload, make_material
from moe_dispatch_tools.loads import dtype_names
from moe_dispatch_tools.names import NamedBackend, noting
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send

_EXCHANGES = 5  # which are timed, to learn how long a byte takes
_FLOP_PER_WEIGHT = 6  # of a row, in forward and backward


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One backend in one mode, or a peer.

    Attributes:
        label: Text from the command line.
        mode: "eager" or "graph-safe".
        backend: Backend of this package; None for a name in ``PEERS``.
    """

    label: str
    mode: str
    backend: NamedBackend | None = None

    def config(self, base: DispatcherConfig, max_tokens: int) -> DispatcherConfig:
        """Make the config of a backend. In graph-safe mode, its buffers fit the worst routing, or have its capacity.

        Raises:
            ConfigError, BackendUnavailableError: The backend has no such options, or cannot be loaded.
        """
        assert self.backend is not None
        graph_safe, given = self.mode == "graph-safe", {"capacity_factor": "worst", **self.backend.fields}
        return base.replace(
            backend=self.backend.spec(),
            graph_safe=graph_safe,
            row_counts=None if graph_safe else base.row_counts,
            max_tokens_per_rank=max_tokens,
            on_overflow=None if given["capacity_factor"] == "worst" else "drop",
            **given,
        )

    def open(self, base: DispatcherConfig, max_tokens: int, place: Place) -> Contender:
        """Open a new contender. Collective.

        Raises:
            MoEDispatchError: The backend cannot be used on this group or for this config.
        """
        if self.backend is None:
            return PEERS[self.label](base, place.group)
        config = self.config(base, max_tokens)
        group = None if place.size == 1 and config.backend_name == "local" else place.group
        return Ours(build_dispatcher(config, group, control_group=place.control if group else None))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of one comparison.

    Attributes:
        config: Config without options of a backend.
        variants: Backends with their modes, and peers.
        workloads: Cases.
        explicit: Whether the user named the backends. A named backend that cannot run is a failure.
        rounds: Smallest number of timed rounds. Variants take turns, so that a change in the machine's load affects all
            of them.
        tolerance: Largest allowed difference from the reference; None for the tolerance of the dtype.
        expert_width: Width of the experts whose time is measured too; None for twice the hidden size if any variant has
            spare expert slots, else experts are not timed.
    """

    config: DispatcherConfig
    variants: tuple[Variant, ...]
    workloads: tuple[Workload, ...]
    explicit: bool = True
    rounds: int = 10
    tolerance: float | None = None
    expert_width: int | None = None

    @property
    def width(self) -> int | None:
        """Width of the timed experts; None if experts are not timed."""
        placed = any(
            one.backend.fields.get("spare_experts_per_rank", self.config.spare_experts_per_rank)
            for one in self.variants
            if one.backend is not None
        )
        return self.expert_width or (2 * self.config.hidden_size if placed else None)

    @property
    def parts(self) -> int:
        """Number of messages "1" of one start."""
        return sum(workload.steps + max(self.rounds, workload.steps) for workload in self.workloads)


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Runner:
    """A variant on this rank, and what this rank found so far. The lists have an entry for each round or step.

    Attributes:
        rounds: Seconds of the phases in ``PHASES``, and processor seconds.
        busy: Busy seconds of a step around experts that cost nothing, and of a step with experts.
        rows: Rows that the experts of this rank got.
    """

    variant: Variant
    opened: Contender | None = None
    result: VariantResult
    nbytes: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    copied_bytes: float = 0.0

    @property
    def name(self) -> str:
        """Name in errors."""
        return f"{self.variant.label}, {self.variant.mode}"

    @property
    def contender(self) -> Contender:
        """The open contender."""
        assert self.opened is not None
        return self.opened

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher; None for a peer."""
        return self.opened.dispatcher if isinstance(self.opened, Ours) else None

    def note(self, **found: Any) -> None:
        """Change the result."""
        self.result = replace(self.result, **found)


def measure(task: Task, place: Place, send: Send) -> None:
    """Run a task. Collective. Call ``send`` with 1 after every part, and with the ``CaseResult`` of each case."""
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the result names the emulated backends
    for workload in task.workloads:
        send(_measure_case(task, workload, place, send))


def _measure_case(task: Task, workload: Workload, place: Place, send: Send) -> CaseResult:
    material = make_material(workload, task.config, rank=place.rank, ranks=place.size)
    steps, dtype = material.steps, material.scenario.torch_dtype
    runners = [_open(variant, task, place, material) for variant in task.variants]
    for step in steps:
        _hold_against_reference(step, runners, place)
        send(1)
    running = [runner for runner in runners if runner.result.refused is None]
    for runner in running:
        if isinstance(runner.contender, Ours) and task.width is not None:
            runner.contender.experts = TimedExperts(runner.contender.dispatcher, task.width, dtype, place.device)
        with noting(runner.name):
            _count(runner, steps, place, partial(runner.variant.open, task.config, material.room, place))
    for index in range(max(task.rounds, len(steps))):
        call = steps[index % len(steps)].call(place.device)
        for runner in running:
            with noting(runner.name):
                times, free = _time(runner.contender, call, place)
                runner.rounds.append(times)
                if isinstance(runner.contender, Ours) and runner.contender.experts is not None:
                    runner.busy.append((free, _time(runner.contender, call, place, full=True)[1]))
        send(1)
    of_result = attrgetter("from_reference", "from_first", "host_syncs", "peak_bytes")
    mine = [[*of_result(one.result), one.nbytes, one.rounds, one.busy, one.rows] for one in runners]
    everyone = Communicator(place.control or place.group).gather_json(mine, label="compare")
    found = {id(runner): of_ranks for runner, of_ranks in zip(runners, zip(*everyone, strict=True), strict=True)}
    for runner in running:
        _join_ranks(runner, found[id(runner)], dtype, place.size)
    speed, tokens_per_expert = None, 0.0
    if task.width is not None and (timed := [runner for runner in running if runner.busy]):
        speed = _measure_loads(timed, [found[id(one)] for one in timed], task, dtype, place)
        tokens_per_expert = mean(map(sum, zip(*(rank[7] for rank in found[id(timed[0])]), strict=True)))
        tokens_per_expert /= task.config.num_experts
    for runner in running:
        runner.contender.close()
    return CaseResult(
        workload=workload,
        tolerance=task.tolerance or material.scenario.tolerance,
        transport="nccl" if place.device.type == "cuda" else "gloo",
        tokens=material.tokens,
        variants=tuple(runner.result for runner in runners),
        tokens_per_expert=tokens_per_expert,
        flop_per_byte=speed,
    )


def _open(variant: Variant, task: Task, place: Place, material: Material) -> Runner:
    emulated = variant.backend is not None and variant.backend.emulated
    runner = Runner(variant=variant, result=VariantResult(backend=variant.label, mode=variant.mode, emulated=emulated))
    try:
        if emulated and place.device.type != "cpu":
            raise ConfigError(
                f"compare: an emulation needs CPU tensors, got {variant.label!r} on ranks with GPUs. Leave it out, or "
                "hide the GPUs: CUDA_VISIBLE_DEVICES=."
            )
        if variant.backend is None and not (material.plain and material.scenario.dtype in ("bfloat16", "float32")):
            raise ConfigError(
                f"compare: {variant.label} needs float32 or bfloat16, and tokens that each name top_k different "
                "experts, without padding rows. Leave it out, or use another --dtype, --routing or --trace."
            )
        with noting(runner.name):
            runner.opened = variant.open(task.config, material.room, place)
    except MoEDispatchError as refusal:
        runner.note(refused=str(refusal))
    return runner


def _hold_against_reference(step: Step, runners: Sequence[Runner], place: Place) -> None:
    """Run one batch through every contender, and keep the largest differences so far."""
    expected = _summed(step.expected(), place)
    first: dict[str, Tensor] | None = None
    for runner in runners:
        if runner.result.refused is not None:
            continue
        try:
            with noting(runner.name):
                found = _summed(_results(runner.contender, step, place), place)
        except MoEDispatchError as refusal:  # all ranks raise it
            runner.note(refused=str(refusal))
            runner.contender.close()
            continue
        first, result, dispatcher = first or found, runner.result, runner.dispatcher
        runner.note(
            from_reference=_largest(result.from_reference, found, expected),
            from_first=_largest(result.from_first, found, first),
        )
        if dispatcher is not None and dispatcher.config.on_overflow == "drop" and dispatcher.config.graph_safe:
            runner.note(dropped=result.dropped or dispatcher.check().overflowed)


def _results(contender: Contender, step: Step, place: Place) -> dict[str, Tensor]:
    """Compute output and gradients of one layer with the experts of the conformance kit, by name, on the CPU."""
    call = step.call(place.device)
    contender.prepare(call)
    y = contender.checked(step, call, place.rank)
    y.backward(call.upstream)
    leaves = (call.x, call.weights_TK, call.experts.matrix_EWW, call.experts.bias_ED)
    x, weights, *experts = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    summed = torch.cat([part.flatten() for part in experts])
    found = {"y": y.detach().flatten(0, -2), "x": x.flatten(0, -2), "weights": weights, "experts": summed}
    return {name: part.cpu() for name, part in found.items()}


def _summed(results: dict[str, Tensor], place: Place) -> dict[str, Tensor]:
    """Sum the gradients of the experts over ranks. Each rank has a part: its own experts, or its own tokens."""
    return {**results, "experts": place.sum(results["experts"].double().to(place.device)).cpu()}


def _largest(so_far: dict[str, float], found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: max(so_far.get(name, 0.0), relative_difference(found[name], expected[name])) for name in QUANTITIES}


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected value unless this is 0; infinite for a NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
    return float(difference) / (float(expected.double().abs().max()) or 1.0)


def _count(runner: Runner, steps: Sequence[Step], place: Place, reopen: Callable[[], Contender]) -> None:
    """Count rows, bytes and padding of all steps, and host syncs and memory of the first step. This also warms up."""
    contender, dispatcher, sums = runner.contender, runner.dispatcher, torch.zeros(len(PHASES), dtype=torch.float64)
    before = dispatcher.metrics(gather=True) if dispatcher else None
    for step in steps:
        call, marks = step.call(place.device), list[int]()
        contender.prepare(call)
        with count_collectives() as collectives:
            run_layer(contender, call, lambda: marks.append(collectives.nbytes))  # noqa: B023 - called at once
        sums += torch.tensor(marks, dtype=torch.float64).diff()
        if isinstance(contender, Ours):
            runner.rows.append(int(contender.received_L.sum()))
    runner.nbytes = (sums / len(steps)).tolist()
    if dispatcher is not None and before is not None:
        after = dispatcher.metrics(gather=True)
        copied = [metrics.bytes_sent.get("weights", 0) for metrics in (before, after)]
        runner.copied_bytes = (copied[1] - copied[0]) / len(steps)
        causes = {cause: (rows - before.rows_padded[cause]) / len(steps) for cause, rows in after.rows_padded.items()}
        runner.note(rows_padded=causes)
    call = steps[0].call(place.device)
    contender.prepare(call)
    if place.rank == 0:
        with count_host_syncs() as reads:
            run_layer(contender, call, lambda: None)
        runner.note(host_syncs=len(reads))
    else:
        run_layer(contender, call, lambda: None)
    if not runner.result.emulated:

        def live() -> None:
            fresh = reopen()
            for _ in range(2):  # the second run can reuse buffers
                fresh.prepare(call)
                run_layer(fresh, call, lambda: None)
            fresh.close()

        runner.note(peak_bytes=peak_bytes(live, place.device))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Measure the peak of the bytes that ``call`` allocates on a device. ``call`` must release all of them.

    On a CPU the profiler sees only the calling thread. If a thread of gloo is the last to hold a tensor, the profiler
    misses its release, and all later sums are too high. Therefore ``call`` runs three times, and the run that left the
    fewest bytes counts.
    """
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    found = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        assert profiler.profiler is not None
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [0, *(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))]
        levels = torch.tensor(changes, dtype=torch.int64).cumsum(0)
        found.append((int(levels[-1]), int(levels.max())))
    left, peak = min(found)
    return peak - left


def clock(place: Place) -> float:
    """Return seconds during which this rank was busy: processor time on CPUs, which ranks share, else elapsed time."""
    return time.process_time() if place.device.type == "cpu" else time.perf_counter()


def _time(contender: Contender, call: Call, place: Place, *, full: bool = False) -> tuple[list[float], float]:
    """Time one call on this rank. All ranks start together.

    Returns:
        Seconds of the phases in ``PHASES`` and processor seconds, and busy seconds.
    """
    marks: list[float] = []

    def mark() -> None:
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        marks.append(time.perf_counter())

    contender.prepare(call)
    place.sum(torch.zeros(1, device=place.device))
    processor, busy = time.process_time(), clock(place)
    run_layer(contender, call, mark, full=full)
    phases = [end - start for start, end in pairwise(marks)]
    return [*phases, time.process_time() - processor], clock(place) - busy


def _join_ranks(runner: Runner, of_ranks: Sequence[Any], dtype: torch.dtype, ranks: int) -> None:
    """Join what the ranks found: the sum of the bytes, the slowest rank of each round, the largest of the rest."""
    reference, first, syncs, peaks, nbytes, rounds, *_ = zip(*of_ranks, strict=True)
    backend, emulated, dispatcher = runner.variant.backend, runner.result.emulated, runner.dispatcher
    slowest = (max(of_round, key=lambda one: sum(one[:-1])) for of_round in zip(*rounds, strict=True))
    counted = backend is None or "emulate" not in backend.load().model_fields
    runner.note(
        from_reference={name: max(of_rank[name] for of_rank in reference) for name in QUANTITIES},
        from_first={name: max(of_rank[name] for of_rank in first) for name in QUANTITIES},
        host_syncs=None if emulated else syncs[0],
        peak_bytes=None if emulated else max(peaks),
        bytes_sent=dict(zip(PHASES, map(sum, zip(*nbytes, strict=True)), strict=True)) if counted else None,
        starts=() if emulated else (tuple(tuple(1e3 * seconds for seconds in one) for one in slowest),),
        row_dtypes=str(dtype).removeprefix("torch.")
        if dispatcher is None
        else _row_dtypes(dispatcher.config, dtype, ranks),
    )


def _row_dtypes(config: DispatcherConfig, dtype: torch.dtype, ranks: int) -> str:
    """Return the names of the dtypes of the rows on the wire. They do not depend on the number of rows."""
    names = [part.name for part in fields(Volume) if part.name != "legs"]
    counts: dict[str, Any] = dict.fromkeys(names, torch.zeros(ranks, dtype=torch.float64))
    leg = Volume(**counts)
    options = config.backend_options
    wire = (
        None if options is None else options.wire_bytes(shape_of(config, ranks), replace(leg, legs=(leg, leg)), dtype)
    )
    return dtype_names(() if wire is None else wire.row_dtypes)


def _measure_loads(
    runners: Sequence[Runner], found: Sequence[Any], task: Task, dtype: torch.dtype, place: Place
) -> float | None:
    """Note the loads of the ranks, and return the FLOP of the experts in the time of one byte. Collective.

    Balanced variants are compared with the first one that is not. Without such a variant there is no break-even.
    """
    weights = 3 * task.config.hidden_size * (task.width or 0)
    speed, plain, base = None, None, None
    for runner, of_ranks in zip(runners, found, strict=True):
        busy, rows = ([rank[index] for rank in of_ranks] for index in (6, 7))
        rows_CP = list(zip(*rows, strict=True))
        load = Load(
            imbalance=mean(max(rows_P) / max(mean(rows_P), 1) for rows_P in rows_CP),
            peak_rows=max(map(max, rows_CP)),
            copied_bytes=runner.copied_bytes,
        )
        if not runner.result.emulated:
            slowest = [[max(pair[side] for pair in one) for one in zip(*busy, strict=True)] for side in (0, 1)]
            times = (median(slowest[0]), median(slowest[1]))
            base, even = base or times[1], None
            assert runner.dispatcher is not None
            if runner.dispatcher.config.balance is None:
                if plain is None:
                    plain = times
                    peak = mean(map(max, rows_CP))
                    speed = flop_per_byte(
                        times, peak, weights, _seconds_per_byte(runner.dispatcher, dtype, weights, place)
                    )
            elif plain is not None:
                even = break_even(plain, times, mean(map(sum, rows_CP)) / task.config.num_experts)
            load = replace(load, busiest_ms=1e3 * times[1], busiest_ratio=times[1] / base, break_even=even)
        runner.note(load=load)
    return speed


def flop_per_byte(plain: tuple[float, float], peak_rows: float, weights: int, byte_seconds: float) -> float | None:
    """Return the FLOP of the experts in the time of one byte between ranks; None if the experts took no time.

    Args:
        plain: Seconds of a step without balancing: around experts that cost nothing, and with experts.
        peak_rows: Rows of the busiest rank.
        weights: Number of weights of an expert.
        byte_seconds: Seconds of a byte.
    """
    free, full = plain
    return _FLOP_PER_WEIGHT * weights * peak_rows / (full - free) * byte_seconds if full > free else None


def break_even(plain: tuple[float, float], balanced: tuple[float, float], tokens_per_expert: float) -> float | None:
    """Return the tokens per expert from which balancing saves time; None if it saves none with any number.

    The time of experts is taken as proportional to the tokens. Everything else that balancing adds is taken as fixed:
    the exchange of counts, the planner, and the weights with their gradients.

    Args:
        plain: Seconds of a step without balancing: around experts that cost nothing, and with experts.
        balanced: The same with balancing, of the same steps.
        tokens_per_expert: Rows at experts divided by the number of experts, in these steps.
    """
    saved = (plain[1] - plain[0]) - (balanced[1] - balanced[0])
    return tokens_per_expert * max(balanced[0] - plain[0], 0.0) / saved if saved > 0 else None


def _seconds_per_byte(dispatcher: Dispatcher, dtype: torch.dtype, numbers: int, place: Place) -> float:
    """Measure how long a byte takes to the other ranks, on the slowest rank. Each rank sends each ``numbers``."""
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
    mine = median(found[1:]) / max(sent[1:].nbytes, 1)
    everyone: list[float] = Communicator(place.control or place.group).gather_json(mine, label="compare")
    return max(everyone)
