"""Megatron's overlap of a forward and a backward: with its real nodes and plans, steps have the bits of plain ones."""

from __future__ import annotations

import functools
import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch.replay import RoutingTable
from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import BALANCED, EXPERTS, TOP_K, Case, Parallel, groups
from tests.integration.megatron_core.model import BATCH, LENGTH, VOCABULARY, gpt_model
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.schedule import (
    Batch,
    Seen,
    overlapped_steps,
    packed_model,
    plain_steps,
    simulated_streams,
)
from tests.integration.megatron_core.test_balanced_layers import WeightGradStore
from tests.integration.megatron_core.test_packed import PADDED, REAL, params
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = [
    *needs("megatron"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron's import
]

RANKS, LAYERS, MICRO_BATCHES = 2, 2, 3
OVERLAP = {"overlap_moe_expert_parallel_comm": True}  # set afterwards: Megatron asks for bfloat16
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, "config": {"hidden_size": 256}}
HYBRIDEP = {"name": "hybridep", "emulate": True}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
SHARED = {"moe_shared_expert_intermediate_size": 16}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model of two ranks and how they are divided, the options of ``convert``, and what micro-batches are like."""

    case: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    delayed: bool = False
    packed: bool = False
    replayed: bool = False
    masked: bool = False


JOBS = {
    "plain": Job(),
    "etp 2, exact reduction": Job(
        parallel={"ep": 1, "etp": 2}, options={"backend": {"name": "alltoall", "reduction": "exact"}}
    ),
    "allgather, shared experts": Job(case={"config": SHARED}, options={"backend": "allgather"}),
    "deepep": Job(case=BFLOAT16, options={"backend": {"name": "deepep", "emulate": True}}),
    "delay_wgrad_compute": Job(delayed=True, packed=True),
    "balanced": Job(options=BALANCED),
    "balanced, delay_wgrad_compute": Job(delayed=True, packed=True, options=BALANCED),
    "packed, hybridep": Job(case=BFLOAT16, options={"backend": HYBRIDEP}, packed=True),
    "packed, replayed": Job(packed=True, replayed=True),
    "padding mask, expert bias": Job(case={"config": BIAS}, masked=True),
    "tp 2, packed": Job(parallel={"tp": 2}, packed=True),
}
# The job, what is replaced of our integration, and what is noticed.
PLANTS: dict[str, tuple[Job, str, Any, str]] = {
    "weights keep their graph": (
        Job(),
        "dispatcher.dataclasses",
        SimpleNamespace(replace=lambda sent, **changes: sent),
        "moe_combine backward: dispatch.backward",
    ),
    "no stand-ins": (Job(), "dispatcher.stand_in", lambda tensor: tensor, "off by nan"),
    "streams are not recorded": (
        Job(),
        "dispatcher.use_on_current_stream",
        lambda *tensors: None,
        "memory of moe_dispatch forward is reused before compute is done",
    ),
    "hooks of layers": (JOBS["packed, hybridep"], "layers.overlaps", lambda config: False, "rows of gaps were sent"),
    "masks stay with the model": (
        Job(masked=True),
        "layers._follow_masks",
        lambda owner: None,
        "rows of gaps were sent",
    ),
}


def planted(plant: str) -> AbstractContextManager[Any]:
    if not plant:
        return nullcontext()
    _, target, value, _ = PLANTS[plant]
    return patch(f"moe_dispatch.integrations.megatron.{target}", value)


@final
class DelayedLinear(nn.Module):
    """A linear layer of an expert that computes the gradient of its weight in ``backward_dw``, as TE's does."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        self.wgrad_store = WeightGradStore(True)

    def forward(self, x: Tensor, **unused: Any) -> tuple[Tensor, None]:
        if not self.wgrad_store.enabled:
            return x @ self.weight.T, None
        output, pending = x @ self.weight.detach().T, self.wgrad_store.computations
        if output.requires_grad:
            output.register_hook(lambda grad: pending.append(lambda: grad.T @ x.detach()))
        return output, None

    @torch.no_grad()
    def backward_dw(self) -> None:
        self.weight.main_grad += self.wgrad_store.computations.popleft()()  # type: ignore[attr-defined]


def delay_wgrad(model: Any) -> None:
    model.config.delay_wgrad_compute = True
    for layer in model.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            expert.linear_fc1, expert.linear_fc2 = (
                DelayedLinear(linear.weight) for linear in (expert.linear_fc1, expert.linear_fc2)
            )


def batch(rank: int, micro: int, job: Job) -> Batch:
    """Ranks of one tensor-parallel group have the same rows."""
    rank, packed = rank // job.parallel.get("tp", 1), job.packed
    generator = torch.Generator().manual_seed(10 * micro + rank)
    shape = (1, sum(PADDED)) if packed else (BATCH, LENGTH)
    tokens = torch.randint(0, VOCABULARY, (2, *shape), generator=generator)
    return {
        "input_ids": tokens[0],
        "position_ids": (torch.arange(shape[1]) % LENGTH).expand(shape),
        "attention_mask": None if packed else torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None],
        "labels": tokens[1],
        "packed_seq_params": params(lengths(rank, micro), PADDED) if packed else None,
    } | ({"padding_mask": torch.arange(LENGTH) >= torch.tensor([[LENGTH - micro], [3 + rank]])} if job.masked else {})


def lengths(rank: int, micro: int) -> tuple[int, ...]:
    """Of the sequences of a micro-batch; the first rank has no rows in the second one."""
    return (0,) * len(REAL) if (rank, micro) == (0, 1) else tuple(max(0, length - micro) for length in REAL)


def real_rows(job: Job) -> int:
    batches = [batch(rank, micro, job) for rank in range(RANKS) for micro in range(MICRO_BATCHES)]
    if job.masked:
        return sum(int((~inputs["padding_mask"]).sum()) for inputs in batches)
    return sum(int(inputs["packed_seq_params"].cu_seqlens_q[-1]) for inputs in batches) // job.parallel.get("tp", 1)


def table() -> RoutingTable:
    """Ids for all sequences of all ranks, under their rank, micro-batch and number."""
    generator = torch.Generator().manual_seed(5)
    entries = {
        (rank, micro, number): torch.rand(length, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
        for rank in range(RANKS)
        for micro in range(MICRO_BATCHES)
        for number, length in enumerate(lengths(rank, micro))
    }
    return RoutingTable([(str(name), ids.contiguous()) for name, ids in entries.items()], num_experts=EXPERTS)


def case_of(job: Job, **unchecked: Any) -> Case:
    config = {"num_layers": LAYERS, **job.case.get("config", {})}
    if job.packed:  # a loss of balancing is not a number on a rank without rows
        config |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    parallel = Parallel(**{"ep": RANKS, **job.parallel})
    return Case(**{**job.case, "config": config, "parallel": parallel, "unchecked": unchecked})


def converted(job: Job, *, plant: str = "", **unchecked: Any) -> Any:
    from megatron.core import parallel_state

    from moe_dispatch.integrations.megatron import convert

    case = case_of(job, **unchecked)
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = groups(case.parallel).tp  # 0.16 looks here
    model = packed_model(case) if job.packed else gpt_model(case)
    model.to(case.dtype)  # norms without transformer-engine are float32
    with planted(plant):
        convert(model, **job.options)
    return model


class Outcome(NamedTuple):
    """How overlapped steps differ from plain ones.

    Attributes:
        error: Of losses and gradients.
        equal: Whether these have equal bits, and the losses of an evaluation.
        slots: That all ranks sent.
        agreements: On sizes.
        seen: The nodes, collectives and streams.
    """

    error: float
    equal: bool
    slots: int
    agreements: int
    seen: Seen


def compared(rank: int, job: Job, plant: str = "") -> Outcome:
    """Overlapped steps beside plain ones."""
    from moe_dispatch.integrations.megatron import RoutingReplay

    plain, overlapped = converted(job), converted(job, plant=plant, **OVERLAP)
    overlapped.load_state_dict(plain.state_dict())
    if job.delayed:
        delay_wgrad(overlapped)
    if job.delayed and job.options == BALANCED:  # whose gradients of copies are added before delayed ones
        delay_wgrad(plain)
    dispatcher = overlapped.decoder.layers[0].mlp.token_dispatcher.dispatcher
    seen, got, slots, sizes = Seen(), [], list[int](), list[int]()
    for model, steps in {plain: plain_steps, overlapped: overlapped_steps}.items():
        batches = [batch(rank, micro, job) for micro in range(MICRO_BATCHES)]
        if job.replayed:
            replay = RoutingReplay(model, table())
            for micro, inputs in enumerate(batches):
                names = [str((rank, micro, number)) for number in range(len(REAL))]
                replay.micro_batch(inputs["packed_seq_params"], names)
        if model is plain:
            got.append(steps(model, batches))
        else:
            with planted(plant), simulated_streams() as seen:
                got.append(steps(model, batches))
        assert not any(layer.mlp.token_dispatcher.plans for layer in model.decoder.layers)
        metrics = dispatcher.metrics(gather=True)  # of both models
        slots.append(int(metrics.real_tokens_per_expert.sum()))
        sizes.append(metrics.collectives.get("sizes", 0) // RANKS)
    # Megatron evaluates without its schedule.
    with torch.no_grad(), planted(plant), simulated_streams(watch_memory=False):
        evaluated = [model(**batches[0]) for model in (plain, overlapped)]
    for layer in (*plain.decoder.layers, *overlapped.decoder.layers):
        layer.mlp.token_dispatcher.close()
    equal = all(torch.equal(got[1][name], tensor) for name, tensor in got[0].items()) and torch.equal(*evaluated)
    return Outcome(difference(got[1], got[0]), equal, slots[1] - slots[0], sizes[1] - sizes[0], seen)


def kept(rank: int, job: Job) -> list[int]:
    """The number of tensors and graph nodes that live after 3 micro-batches, and after 9 more."""
    model, numbers = converted(job, plant="", **OVERLAP), []
    delay_wgrad(model)
    for micro_batches in (3, 9):
        with simulated_streams(watch_memory=False):
            overlapped_steps(model, [batch(rank, micro % 3, job) for micro in range(micro_batches)])
        gc.collect()
        types = [type(each) for each in gc.get_objects()]
        numbers.append(sum(issubclass(cls, Tensor) or "Backward" in cls.__name__ for cls in types))
    return numbers


@functools.cache
def results() -> dict[str, list[Any]]:
    checks: dict[str, Check] = {"kept": functools.partial(kept, job=Job(packed=True))}
    for name, job in JOBS.items():
        checks[name] = functools.partial(compared, job=job)
    for name, (job, *_) in PLANTS.items():
        checks[name] = functools.partial(compared, job=job, plant=name)
    return run_megatron(checks, RANKS)


def found(name: str) -> list[Outcome]:
    return require(results()[name])


def problems(name: str) -> list[str]:
    """What is wrong with a job: other numbers, exchanges in other nodes or in another order on some rank, gaps."""
    job, outcomes, wrong = PLANTS[name][0] if name in PLANTS else JOBS[name], found(name), list[str]()
    for outcome in outcomes:
        if not outcome.error < 1e-5:
            wrong.append(f"off by {outcome.error}")
        wrong += outcome.seen.races
        wrong += [call for call in outcome.seen.collectives if not in_its_node(call)]
    if len({tuple(outcome.seen.collectives) for outcome in outcomes}) > 1:
        wrong.append("the orders of collectives differ")
    if (job.packed or job.masked) and outcomes[0].slots != TOP_K * LAYERS * real_rows(job):
        wrong.append("rows of gaps were sent")
    if job.options.get("backend") == HYBRIDEP and outcomes[0].agreements != MICRO_BATCHES:
        wrong.append("layers share no plan")
    return wrong


def in_its_node(call: str) -> bool:
    """Whether rows travel in the node of their verb, and sizes in that of dispatch."""
    node, _, label = call.partition(": ")
    verb, _, phase = node.removeprefix("moe_").partition(" ")
    if label.startswith("emulated"):  # a library dispatches in the backward of combine
        return verb in ("dispatch", "combine")
    if label.startswith(("dispatch", "combine")):
        return label.startswith(verb) and label.endswith("backward") == (phase == "backward")
    return verb == "dispatch" or (("weights" in label or label == "parameters") and verb == "mlp")


@pytest.mark.parametrize("name", JOBS)
def test_overlapped_steps_equal_plain_ones(name: str) -> None:
    """And the inputs of the four nodes of each layer are freed."""
    assert problems(name) == []
    for outcome in found(name):
        assert outcome.equal
        assert outcome.seen.freed == 4 * LAYERS * MICRO_BATCHES


@pytest.mark.parametrize("name", [name for name in JOBS if "deepep" not in name and "hybridep" not in name])
def test_only_dispatch_makes_the_host_wait(name: str) -> None:
    for outcome in found(name):
        waits = [ran.node for ran in outcome.seen.nodes if ran.host_reads]
        if "balanced" in name:  # in the first call of a layer, ranks compare its parameters
            waits = [node for node in waits if node != "mlp forward"]
        assert set(waits) == {"moe_dispatch forward"}
        assert len(waits) == LAYERS * MICRO_BATCHES


def test_exchanges_run_beside_compute_as_the_picture_shows() -> None:
    seen = found("plain")[0].seen.nodes
    second, third = [index for index, ran in enumerate(seen) if ran.node == "pre_process forward"][1:3]
    nodes = [ran for ran in seen[second:third] if "process" not in ran.node]  # of layers, between two forwards
    compute = [ran for ran in nodes if ran.stream == "compute"]
    exchanges = [ran for ran in nodes if ran.stream == "exchange"]
    hidden = sum(
        max(0.0, min(ran.end, other.end) - max(ran.begin, other.begin)) for ran in exchanges for other in compute
    )
    assert hidden == sum(ran.end - ran.begin for ran in exchanges)
    assert [ran.begin for ran in compute[1:]] == [ran.end for ran in compute[:-1]], "compute has a gap"


def test_micro_batches_leave_nothing_behind() -> None:
    for before, after in require(results()["kept"]):
        assert before == after


def test_weights_of_copies_travel_in_the_node_of_experts() -> None:
    calls = found("balanced")[0].seen.collectives
    assert {"mlp forward: weights", "mlp backward: weights.backward"} <= set(calls)


def test_a_stand_in_needs_memory_for_one_number() -> None:
    from moe_dispatch.integrations.megatron.overlap import put_in_place, stand_in

    rows = torch.randn(6, 4, requires_grad=True)
    standing, real = stand_in(rows), rows.detach() + 1
    assert standing.shape == rows.shape
    assert standing.untyped_storage().nbytes() == rows.element_size()
    placed = put_in_place(standing, real)
    assert placed.data_ptr() == real.data_ptr()
    upstream = torch.randn(6, 4)
    placed.backward(upstream)
    assert rows.grad is not None
    assert torch.equal(rows.grad, upstream)


def test_a_mask_is_added_to_what_else_a_router_is_given() -> None:
    from moe_dispatch.integrations.megatron.layers import _SeenPadding

    layer, hidden = SimpleNamespace(), torch.zeros(4, 1, 2)
    seen, given = _SeenPadding(layer), torch.tensor([[True], [False], [False], [False]])
    for args, kwargs in (((hidden, given, "more"), {"ids": 1}), ((hidden,), {"padding_mask": given, "ids": 1})):
        layer.moe_dispatch_mask = torch.tensor([[False, False, False, True]])
        seen.see(None, (hidden,), {})
        got_args, got_kwargs = seen.mark(None, args, kwargs)
        mask = got_args[1] if len(args) > 1 else got_kwargs["padding_mask"]
        assert mask.flatten().tolist() == [True, False, False, True]
        assert (got_args[2:], got_kwargs["ids"]) == (args[2:], 1)
        assert seen.mark(None, args, kwargs) == (args, kwargs)


@pytest.mark.parametrize("plant", PLANTS)
def test_faults_are_noticed(plant: str) -> None:
    assert PLANTS[plant][3] in problems(plant)
