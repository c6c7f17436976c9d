"""Run every variant of ``compare`` on one rank: check its results and measure its costs.

All variants get the same tokens. Dimensions are those of ``moe_dispatch.types``.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch.permutation import count_experts
from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_testing.host_syncs import count_host_syncs
from moe_dispatch_testing.rank_context import LayerCall
from moe_dispatch_tools.compare.contenders import Contender, Ours, make_experts, run_layer
from moe_dispatch_tools.compare.peers import PEERS
from moe_dispatch_tools.compare.workload import Material, Step, Workload, make_material
from moe_dispatch_tools.names import NamedBackend, noting, with_changes
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send

QUANTITIES = ("y", "x", "weights", "experts")
PHASES = ("dispatch", "experts", "combine", "backward")
Outcome = dict[str, Any]


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

    @property
    def name(self) -> str:
        """Name in errors."""
        return f"{self.label}, {self.mode}"

    def config(self, base: DispatcherConfig, max_tokens: int) -> DispatcherConfig:
        """Make the config of a backend. In graph-safe mode, its buffers fit the worst routing, or have its capacity.

        Raises:
            ConfigError, BackendUnavailableError: The backend has no such options, or cannot be loaded.
        """
        assert self.backend is not None
        changes: dict[str, Any] = {
            "backend": self.backend.spec(),
            "graph_safe": self.mode == "graph-safe",
            "row_counts": None if self.mode == "graph-safe" else base.row_counts,
            "max_tokens_per_rank": max_tokens,
            **self.backend.fields,
        }
        changes.pop("place", None)
        if changes.get("graph_safe.capacity_factor", "worst") != "worst":
            changes["graph_safe.on_overflow"] = "drop"
        return with_changes(base, changes)


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
        expert_width: Width of the experts; None for twice the hidden size if any variant has spare expert slots, else
            for experts that cost nothing.
    """

    config: DispatcherConfig
    variants: tuple[Variant, ...]
    workloads: tuple[Workload, ...]
    explicit: bool = True
    rounds: int = 10
    expert_width: int | None = None

    @property
    def width(self) -> int | None:
        """Width of the experts; None for experts that cost nothing."""
        of_variants = [{} if one.backend is None else one.backend.fields for one in self.variants]
        placed = any(fields.get("balance", self.config.balance) is not None for fields in of_variants)
        return self.expert_width or (2 * self.config.hidden_size if placed else None)

    @property
    def parts(self) -> int:
        """Number of messages "1" of ``measure``."""
        return sum(workload.steps + max(self.rounds, workload.steps) for workload in self.workloads)


def measure(task: Task, place: Place, send: Send) -> None:
    """Run a task. Collective. Call ``send`` with 1 after every part, and with the result of each case as JSON.

    A case has its workload, and an outcome for each variant. A cost is that of one step.

    - refused: Why the variant could not run. Then its other values are None.
    - emulated: Whether its library is an emulation. Its bytes, syncs, memory and times would say nothing.
    - dropped: Whether rows were dropped because a buffer was too small. Then the differences say nothing.
    - agrees: Whether the variant ran, and differs from the reference by at most the tolerance.
    - from_reference: Largest difference from the dense float64 reference, by name in ``QUANTITIES``, divided by the
      largest value; None if it is not finite. from_first: The same difference from the first variant that ran.
    - bytes_sent: Bytes of the collectives of torch.distributed by phase, sum of all ranks, mean of all steps. None if
      another library sends the rows.
    - rows_padded: Padding rows by cause, sum of all ranks, mean of all steps.
    - uneven: Number of dispatches in all steps that left out copies of experts because of ``balance.min_rows``.
    - peak_rows: Most rows that a rank's experts got in any step. imbalance: Rows of the busiest rank divided by the
      mean of all ranks, mean of all steps.
    - host_syncs: Host syncs of rank 0 in the first step, including the plan.
    - saved_bytes: Bytes that autograd saves in the forward of the first step, without the matrices of experts, on the
      rank that saves most.
    - peak_bytes: Peak of the memory that the first step allocates, on the rank with the highest peak.
    - rounds: Milliseconds of the phases of the slowest rank in each round, and the processor time of the busiest rank.
    - milliseconds: Medians of the rounds, of the phases, their "total" and the "processor".
    - ratio: Quartiles of the ratio of the totals to the first variant that ran, over rounds.
    - overhead_ms: Median of how many milliseconds dispatch and combine take longer than the floor's.
    """
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the result names the emulated backends
    for workload in task.workloads:
        send(_measure_case(task, workload, place, send))


def _measure_case(task: Task, workload: Workload, place: Place, send: Send) -> dict[str, Any]:
    material = make_material(workload, task.config, rank=place.rank, ranks=place.size)
    steps, tolerance = material.steps, material.scenario.tolerance
    experts = make_experts(task.config, task.width or 0, place, material.scenario.torch_dtype)
    outcomes = [_empty(variant) for variant in task.variants]
    opened: dict[int, Contender] = {}
    for index, variant in enumerate(task.variants):
        with noting(variant.name):
            try:
                opened[index] = _open(variant, task, place, material, experts)
            except MoEDispatchError as refusal:
                outcomes[index]["refused"] = str(refusal)
    for step in steps:
        hold_against_reference(step, opened, outcomes, task.variants, place)
        send(1)
    for index, contender in opened.items():
        variant = task.variants[index]
        with noting(variant.name):
            # Contenders with one config share a pool of CPU memory. Room for one more token gives this one its own.
            reopen = partial(_open, variant, task, place, replace(material, room=material.room + 1), experts)
            outcomes[index] |= _count(contender, steps, place, reopen, emulated=outcomes[index]["emulated"])
    for number in range(max(task.rounds, len(steps))):
        call = steps[number % len(steps)].call(place.device)
        for index, contender in opened.items():
            if not outcomes[index]["emulated"]:
                with noting(task.variants[index].name):
                    outcomes[index]["rounds"].append(_time(contender, call, place))
        send(1)
    everyone = Communicator(place.control or place.group).gather_json(outcomes, label="compare")
    for contender in opened.values():
        contender.close()
    ran = [_joined([of_rank[index] for of_rank in everyone], tolerance) for index in opened]
    floor = next((one for one in ran if one["backend"] == "floor"), None)
    for one in ran:
        if one["rounds"] and ran[0]["rounds"]:
            own, first = (torch.tensor(_totals(each), dtype=torch.float64) for each in (one, ran[0]))
            one["ratio"] = (own / first).quantile(own.new_tensor((0.25, 0.5, 0.75))).tolist()
        if one["rounds"] and floor:
            pairs = zip(one["rounds"], floor["rounds"], strict=True)
            one["overhead_ms"] = median(mine[0] + mine[2] - least[0] - least[2] for mine, least in pairs)
    missing = {one["backend"] for one in outcomes} - {one["backend"] for one in ran}
    return {
        "case": str(workload),
        "agree": bool(ran) and all(one["agrees"] for one in ran) and not (task.explicit and missing),
        "tolerance": tolerance,
        "transport": "nccl" if place.device.type == "cuda" else "gloo",
        "tokens": list(material.tokens),
        "steps": workload.steps,
        "dtype": workload.dtype,
        "routing": workload.routing if workload.trace is None else None,
        "trace": workload.trace and {"file": str(workload.trace), "dispatches": workload.recorded},
        "outcomes": [ran.pop(0) if index in opened else one for index, one in enumerate(outcomes)],
    }


def _empty(variant: Variant) -> Outcome:
    names = ("refused", "dropped", "agrees", "rows_padded", "uneven", "peak_rows", "imbalance", "host_syncs")
    return {
        "backend": variant.label,
        "mode": variant.mode,
        "emulated": variant.backend is not None and variant.backend.emulated,
        **dict.fromkeys((*names, "saved_bytes", "peak_bytes", "bytes_sent", "ratio", "overhead_ms")),
        "from_reference": dict.fromkeys(QUANTITIES, 0.0),
        "from_first": dict.fromkeys(QUANTITIES, 0.0),
        "rounds": [],
        "milliseconds": dict.fromkeys((*PHASES, "total", "processor")),
    }


def _open(variant: Variant, task: Task, place: Place, material: Material, experts: tuple[Tensor, ...]) -> Contender:
    """Open a new contender, and place its experts by the planner in its field "place", for the first batch. Collective.

    Raises:
        MoEDispatchError: It cannot run on this group, or for this task.
    """
    if variant.backend is None:
        if not (material.plain and material.scenario.dtype in ("bfloat16", "float32")):
            raise ConfigError(
                f"compare: {variant.label} needs float32 or bfloat16, tokens that each name top_k different experts, "
                "and no padding rows. Leave it out, or use another --dtype, --routing or --trace."
            )
        peer = PEERS[variant.label](task.config, place.group)
        peer.experts = experts
        return peer
    if variant.backend.emulated and place.device.type != "cpu":
        raise ConfigError(
            f"compare: an emulation needs CPU tensors, got {variant.label!r} on ranks with GPUs. Leave it out, or "
            "hide the GPUs: CUDA_VISIBLE_DEVICES=."
        )
    config = variant.config(task.config, material.room)
    group = None if place.size == 1 and config.backend_name == "local" else place.group
    ours = Ours(build_dispatcher(config, group, control_group=place.control if group else None), experts)
    if planner := variant.backend.fields.get("place"):
        ids_TK = material.steps[0].call(place.device).ids_TK
        ours.place(planner, place.sum(count_experts(ids_TK, config.num_experts)).cpu())
    return ours


def hold_against_reference(
    step: Step, opened: dict[int, Contender], outcomes: list[Outcome], variants: Sequence[Variant], place: Place
) -> None:
    """Run one batch through every contender, and note the largest differences so far in its outcome.

    Args:
        step: Batch.
        opened: Contenders by index of their variant. One that raises an error of this library is closed and left out.
        outcomes: Outcome of each variant on this rank.
        variants: Variants.
        place: Place of this rank.
    """
    expected, first = _summed(step.expected(), place), None
    for index, contender in [*opened.items()]:
        outcome = outcomes[index]
        try:
            with noting(variants[index].name):
                found = _summed(_results(contender, step, place), place)
        except MoEDispatchError as refusal:  # all ranks raise it
            outcome["refused"] = str(refusal)
            opened.pop(index).close()
            continue
        first = first or found
        for kind, other in (("from_reference", expected), ("from_first", first)):
            for name, largest in outcome[kind].items():
                outcome[kind][name] = max(largest, relative_difference(found[name], other[name]))
        dispatcher = contender.dispatcher
        options = None if dispatcher is None else dispatcher.config.graph_safe_options
        if dispatcher is not None and options is not None and options.on_overflow == "drop":
            outcome["dropped"] = outcome["dropped"] or dispatcher.check().overflowed


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


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected value unless this is 0; infinite for a NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
    return float(difference) / (float(expected.double().abs().max()) or 1.0)


def _count(
    contender: Contender, steps: Sequence[Step], place: Place, reopen: Callable[[], Contender], *, emulated: bool
) -> Outcome:
    """Count rows, bytes and padding of all steps, and host syncs and memory of the first step. This also warms up."""
    dispatcher = contender.dispatcher
    before = dispatcher.metrics(gather=True) if dispatcher else None
    sums, received = torch.zeros(len(PHASES), dtype=torch.float64), []
    for step in steps:
        call, marks = step.call(place.device), list[int]()
        contender.prepare(call)
        with count_collectives() as collectives:
            run_layer(contender, call, lambda: marks.append(collectives.nbytes))  # noqa: B023 - called at once
        sums += torch.tensor(marks, dtype=torch.float64).diff()
        received.append(int(contender.counts_L.sum()))
    found: Outcome = {"received": received}
    if dispatcher is None or "emulate" not in type(dispatcher._channel.options).model_fields:
        found["bytes_sent"] = dict(zip(PHASES, (sums / len(steps)).tolist(), strict=True))
    if dispatcher is not None and before is not None:
        after = dispatcher.metrics(gather=True)
        found["rows_padded"] = {
            cause: (rows - before.rows_padded[cause]) / len(steps) for cause, rows in after.rows_padded.items()
        }
        found["uneven"] = (after.dispatches_left_uneven - before.dispatches_left_uneven) // place.size
    call = steps[0].call(place.device)
    contender.prepare(call)
    counting: AbstractContextManager[list[Any]] = count_host_syncs() if place.rank == 0 else nullcontext([])
    with counting as reads:
        run_layer(contender, call, lambda: None)
    found["host_syncs"] = None if emulated else len(reads)

    def live() -> None:
        fresh = reopen()
        for _ in range(2):  # the second run can reuse buffers
            fresh.prepare(call)
            run_layer(fresh, call, lambda: None)
        fresh.close()

    if emulated:
        return found
    return found | {"saved_bytes": saved_bytes(contender, call), "peak_bytes": peak_bytes(live, place.device)}


def saved_bytes(contender: Contender, call: LayerCall) -> int:
    """Count the bytes that autograd saves in a forward, without the matrices of experts. Collective.

    Parts of one storage count once: what the tensors saved from it span. The tables of integers that a dispatcher
    keeps beside autograd do not count.
    """
    spans = dict[int, int]()
    own = {matrix.untyped_storage().data_ptr() for matrix in contender.experts}

    def pack(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):  # such as the result of an asynchronous collective
            for name in tensor.__tensor_flatten__()[0]:
                pack(getattr(tensor, name))
            return tensor
        place = tensor.untyped_storage().data_ptr()
        if place not in own and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = int(tensor.storage_offset() + last + 1) * tensor.element_size()
            spans[place] = max(end, spans.get(place, 0))
        return tensor

    contender.prepare(call)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = contender.timed(call, lambda: None)
    torch.autograd.grad(y, contender.leaves(call), call.upstream)
    return sum(spans.values())


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
    gc.collect()  # the profiler complains of memory that was allocated before it
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


def _time(contender: Contender, call: LayerCall, place: Place) -> list[float]:
    """Return milliseconds of the phases on this rank, and processor milliseconds. All ranks start together."""
    marks: list[float] = []

    def mark() -> None:
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        marks.append(time.perf_counter())

    contender.prepare(call)
    place.sum(torch.zeros(1, device=place.device))
    processor = time.process_time()
    run_layer(contender, call, mark)
    return [1e3 * (end - start) for start, end in (*pairwise(marks), (processor, time.process_time()))]


def _joined(of_ranks: Sequence[Outcome], tolerance: float) -> Outcome:
    """Join the outcomes of a variant on all ranks."""
    found: Outcome = dict(of_ranks[0])
    received = [[*rows] for rows in zip(*(one["received"] for one in of_ranks), strict=True)]
    del found["received"]
    if any(map(any, received)):
        found["peak_rows"] = max(map(max, received))
        found["imbalance"] = mean(max(rows) / max(mean(rows), 1) for rows in received)
    largest = {
        kind: {name: max(one[kind][name] for one in of_ranks) for name in QUANTITIES}
        for kind in ("from_reference", "from_first")
    }
    found["agrees"] = bool(found["dropped"]) or max(largest["from_reference"].values()) <= tolerance
    for kind, values in largest.items():
        found[kind] = {name: value if math.isfinite(value) else None for name, value in values.items()}
    if found["bytes_sent"]:
        found["bytes_sent"] = {phase: sum(one["bytes_sent"][phase] for one in of_ranks) for phase in PHASES}
    for name in ("saved_bytes", "peak_bytes"):
        if found[name] is not None:
            found[name] = max(one[name] for one in of_ranks)
    if found["rounds"]:
        rounds = [*zip(*(one["rounds"] for one in of_ranks), strict=True)]
        slowest = [max((one[:-1] for one in ranks), key=sum) for ranks in rounds]
        found["rounds"] = [[*one, max(rank[-1] for rank in ranks)] for one, ranks in zip(slowest, rounds, strict=True)]
        *phases, processor = map(median, zip(*found["rounds"], strict=True))
        numbers = (*phases, median(_totals(found)), processor)
        found["milliseconds"] = dict(zip(found["milliseconds"], numbers, strict=True))
    return found


def _totals(outcome: Outcome) -> list[float]:
    return [sum(one[:-1]) for one in outcome["rounds"]]
