"""SlotWeights: gradients of the dense layer, what travels, checkpointing, calls in flight, and ranks without work."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.capabilities.balance.exact import ExactPlacement
from moe_dispatch.capabilities.balance.movement import movement_of, static_movement
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatched import InFlight
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.errors import InputError, PeerError, StateError
from moe_dispatch.integrations.slot_experts import run_layer
from moe_dispatch_testing import Scenario
from tests.deep_ep_backends.vendors import HYBRID, V2
from tests.dispatchers.layer import (
    HIDDEN,
    NUM_EXPERTS,
    Group,
    on_ranks,
    outcomes,
    random_routing,
    random_rows,
    small_config,
)

RANKS = 4
INNER = 8
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-13}
COPIES = ExpertPlacement(NUM_EXPERTS, ((0, 5, 7), (2, 3, -1), (4, 0, 1), (6, 7, 0)))


def all_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator, dtype=torch.float64) / 4
    down = torch.randn(NUM_EXPERTS, INNER, HIDDEN, generator=generator, dtype=torch.float64) / 3
    return up.to(dtype), down.to(dtype)


def inputs(rank: int, call: int, dtype: torch.dtype, rows: int = 24) -> tuple[Tensor, Routing, Tensor]:
    """x, routing and the gradient of the result of one call."""
    seed = 10 * call + rank
    routing = random_routing(rows, seed=seed)
    x = random_rows(rows, seed=seed, dtype=dtype)
    return x, Routing(routing.topk_ids, routing.topk_weights.to(dtype)), random_rows(rows, seed=seed + 500, dtype=dtype)


def dense_gradients(dtype: torch.dtype, calls: int, rows: Callable[[int], int] = lambda rank: 24) -> list[Tensor]:
    """Gradients of all experts after calls of all ranks, without a dispatcher, in float64."""
    up, down = (weight.double().requires_grad_() for weight in all_weights(dtype))
    for rank in range(RANKS):
        for call in range(calls):
            x, routing, upstream = inputs(rank, call, dtype, rows(rank))
            shares_TE = torch.zeros(len(x), NUM_EXPERTS, dtype=torch.float64)
            shares_TE.scatter_(1, routing.topk_ids, routing.topk_weights.double())
            y_ETD = torch.tanh(x.double() @ up) @ down
            y = torch.einsum("te,etd->td", shares_TE, y_ETD)
            y.backward(upstream.double())
    assert up.grad is not None
    assert down.grad is not None
    return [up.grad, down.grad]


def own_part(group: Group, dtype: torch.dtype) -> list[Tensor]:
    assert group is not None
    return [weight.chunk(RANKS)[group.rank()].clone().requires_grad_() for weight in all_weights(dtype)]


def experts(sent: Dispatched, up: Tensor, down: Tensor) -> Tensor:
    return sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, up)), down)


def expect_dense(by_rank: list[list[Tensor]], dtype: torch.dtype, calls: int, **changes: Any) -> None:
    for which, wanted in enumerate(dense_gradients(dtype, calls, **changes)):
        got = torch.cat([gradients[which] for gradients in by_rank]).double()
        difference = float((got - wanted).abs().max() / wanted.abs().max())
        assert difference <= TOLERANCES[dtype], difference


def gradients(stacked: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in stacked if weight.grad is not None]


def placed(group: Group, placement: ExpertPlacement = COPIES, **fields: Any) -> Dispatcher:
    spare = placement.slots_per_rank - NUM_EXPERTS // placement.num_ranks
    balance = {"name": "manual", "spare_experts_per_rank": spare}
    dispatcher = build_dispatcher(small_config(balance=balance, **fields), group)
    dispatcher.place(placement)
    return dispatcher


EXACT: dict[str, Any] = {"balance": {"name": "exact", "spare_experts_per_rank": 2}}
STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 24}
EAGER: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0, "spare_experts_per_rank": 2}}
FEW_SLOTS: dict[str, Any] = {"balance": {"name": "exact", "spare_experts_per_rank": 1}}
BOTH = pytest.mark.parametrize("fields", [EAGER, {**EXACT, **STATIC}], ids=["eager", "static"])


@pytest.mark.parametrize(
    ("dtype", "keeps", "fields"),
    [
        (torch.float32, False, {}),
        (torch.float64, True, {}),
        (torch.float64, False, {**STATIC, "pad_multiple": 4}),
        (torch.float64, True, {**EAGER}),
        (torch.float64, False, {"balance": {**EAGER["balance"], "spare_experts_per_rank": 1}, "pad_multiple": 4}),
        (torch.float64, True, {**EXACT, **STATIC}),
        (torch.float64, False, {**FEW_SLOTS, **STATIC, "pad_multiple": 4}),
    ],
    ids=["float32", "float64", "graph_safe", "exact", "exact_few_slots", "exact_static", "exact_static_few_slots"],
)
def test_gradients_are_those_of_the_dense_layer(dtype: torch.dtype, keeps: bool, fields: dict[str, Any]) -> None:
    def body(group: Group) -> list[Tensor]:
        stacked = own_part(group, dtype)
        dispatcher = build_dispatcher(small_config(**{"balance": "manual", **fields}), group)
        weights = SlotWeights(dispatcher)
        for call in range(3):
            if "balance" not in fields:
                placement = Scenario(name="", spare=1, seed=call).placement(RANKS)
                assert placement is not None
                dispatcher.place(placement)
            x, routing, upstream = inputs(group.rank(), call, dtype)
            if keeps:
                sent, (up, down) = weights.fetch(dispatcher.dispatch(x, routing), *stacked)
                outputs = experts(sent, up, down)
            else:
                sent, outputs = weights.run(dispatcher.dispatch(x, routing, async_op=True), experts, *stacked)
            dispatcher.combine(outputs, sent).backward(upstream)
        assert dispatcher.metrics().collectives["weights"] == (3 if keeps else 6)
        return gradients(stacked)

    expect_dense(on_ranks(body, RANKS), dtype, 3)


def test_weights_are_in_their_slots_and_only_those_of_other_homes_travel() -> None:
    def body(group: Group) -> list[int]:
        dispatcher, (whole_up, whole_down) = placed(group), all_weights(torch.float32)
        up, down = own_part(group, torch.float32)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        sent = dispatcher.dispatch(random_rows(1), Routing(ids, torch.ones(1, 2)))
        _, slots = SlotWeights(dispatcher).fetch(sent, up, down)
        for got, whole in zip(slots, (whole_up, whole_down), strict=True):
            for slot, expert in enumerate(COPIES.slots[group.rank()]):
                wanted = torch.zeros_like(whole[0]) if expert < 0 else whole[expert]
                assert torch.equal(got[slot], wanted)
        sum(slot.sum() for slot in slots).backward()  # type: ignore[union-attr]
        metrics = dispatcher.metrics()
        assert metrics.collectives["weights"] == metrics.collectives["weights.backward"] == 1
        return [metrics.bytes_sent.get(label, 0) for label in ("weights", "weights.backward")]

    expert = 2 * HIDDEN * INNER * 4
    # Rank 0 sends expert 0 to ranks 2 and 3, and expert 1 to rank 2. Rank 2 sends expert 5 to rank 0.
    sent, back = zip(*on_ranks(body, RANKS), strict=True)
    assert sent == (3 * expert, 0, expert, expert)
    assert back == (2 * expert, 0, 2 * expert, expert)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [("alltoall", EAGER), ("allgather", {**EXACT, **STATIC}), (V2, {**EXACT, **STATIC}), (HYBRID, EAGER)],
    ids=["alltoall", "allgather", "deepep", "hybridep"],
)
def test_bytes_of_weights_follow_the_plan(backend: Any, fields: dict[str, Any]) -> None:
    """Eager, two fetches send each copy from its home, and a gradient comes home. Static, S weights go to each rank."""
    hidden, static = 256, "graph_safe" in fields

    def body(group: Group) -> tuple[list[list[int]], list[int]]:
        dispatcher = build_dispatcher(small_config(backend, hidden_size=hidden, **fields), group)
        up = torch.ones(2, hidden, 3, requires_grad=True)
        x, routing = random_rows(24, hidden, dtype=torch.bfloat16), random_routing(24, seed=group.rank())
        sent = dispatcher.dispatch(x, Routing(routing.topk_ids.clamp(max=2), routing.topk_weights))
        assert isinstance(sent.placement, ExactPlacement)
        copies = sent.placement.copies_PS.tolist()
        sent, rows = SlotWeights(dispatcher).run(
            sent, lambda part, up: part.rows * part.grouped_mm(part.rows.float(), up).sum(1, keepdim=True), up
        )
        dispatcher.combine(rows.to(x.dtype), sent).sum().backward()
        nbytes = dispatcher.metrics().bytes_sent
        dispatcher.close()
        return copies, [nbytes.get(label, 0) for label in ("weights", "weights.backward")]

    expert = hidden * 3 * 4
    for rank, (copies, nbytes) in enumerate(on_ranks(body, RANKS)):
        sent = sum(copy // 2 == rank for of_rank in copies for copy in of_rank)
        held = sum(copy < NUM_EXPERTS for copy in copies[rank])
        every = (RANKS - 1) * 2
        assert nbytes == ([2 * every * expert, every * expert] if static else [2 * sent * expert, held * expert])


def test_nothing_travels_where_every_rank_holds_its_own() -> None:
    def body(group: Group) -> None:
        own = ExpertPlacement.contiguous(NUM_EXPERTS, RANKS, spare=1)
        stacked = own_part(group, torch.float32)
        for dispatcher in (placed(group, own), build_dispatcher(small_config(), group)):
            sent = dispatcher.dispatch(random_rows(2), random_routing(2))
            _, (up, _) = SlotWeights(dispatcher).fetch(sent, *stacked)
            assert torch.equal(up[:2], stacked[0])
            up.sum().backward()
            assert not {"weights", "weights.backward"} & dispatcher.metrics().collectives.keys()
            assert (up is stacked[0]) == (dispatcher.placement is None)

    on_ranks(body, RANKS)


@BOTH
def test_copies_take_no_more_memory_than_they_must(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of the exchange are free when experts run, and weights of slots once they have run. ``fetch`` keeps them.

    Nothing public shows the buffers.
    """
    exchange, used = Communicator.all_to_all, threading.local()

    def noted(link: Communicator, received: Tensor, sent: Tensor, *args: Any, label: str) -> Any:
        if label == "weights":  # in eager mode weights arrive in the buffer of the experts
            used.tensors = [weakref.ref(one) for one in ([received, sent] if "graph_safe" in fields else [sent])]
        return exchange(link, received, sent, *args, label=label)

    monkeypatch.setattr(Communicator, "all_to_all", noted)

    def body(group: Group) -> int:
        stacked, dispatcher = own_part(group, torch.float32), build_dispatcher(small_config(**fields), group)
        weights, own = SlotWeights(dispatcher), {weight.untyped_storage().data_ptr() for weight in stacked}
        fetched: list[torch.UntypedStorage] = []

        def watched(sent: Dispatched, up: Tensor, down: Tensor) -> Tensor:
            for _ in range(500):  # the thread of gloo may hold buffers for a moment after the wait
                if any(one() is not None for one in used.tensors):
                    time.sleep(0.01)
            assert all(one() is None for one in used.tensors)
            fetched.extend(memory for one in (up, down) if (memory := one.untyped_storage()).data_ptr() not in own)
            assert all(memory.nbytes() for memory in fetched[-1:])
            return experts(sent, up, down)

        for call in range(3):
            x, routing, upstream = inputs(group.rank(), call, torch.float32)
            sent, outputs = weights.run(dispatcher.dispatch(x, routing), watched, *stacked)
            assert not any(memory.nbytes() for memory in fetched)
            dispatcher.combine(outputs, sent).backward(upstream)
            fetched.clear()
        _, kept = weights.fetch(dispatcher.dispatch(x, routing), *stacked)
        assert all(weight.untyped_storage().nbytes() for weight in kept)
        return dispatcher.metrics().collectives["weights"]

    assert all(fetches > 1 for fetches in on_ranks(body, RANKS))


@pytest.mark.parametrize(
    ("fields", "hooked"), [(EAGER, {0, 1, 2, 3}), (EAGER, {1}), ({**EXACT, **STATIC}, {1})], ids=str
)
def test_ranks_differ_in_hooks_that_keep_weights(fields: dict[str, Any], hooked: set[int]) -> None:
    """Saved tensors are copied, as to the CPU, on some ranks. All ranks fetch again, also one without copies."""

    def body(group: Group) -> tuple[list[Tensor], int]:
        assert group is not None
        stacked, dispatcher = own_part(group, torch.float64), build_dispatcher(small_config(**fields), group)
        x, routing, upstream = inputs(group.rank(), 0, torch.float64)
        x.requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor)
            if group.rank() in hooked
            else nullcontext()
        ):
            sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), experts, *stacked)
            y = dispatcher.combine(outputs, sent)
        y.backward(upstream)
        assert x.grad is not None
        assert x.grad.isfinite().all()
        return gradients(stacked), dispatcher.metrics().collectives["weights"]

    found = on_ranks(body, RANKS)
    assert len({fetches for _, fetches in found}) == 1
    expect_dense([grads for grads, _ in found], torch.float64, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Tensor.detach, "parameter 0 of SlotWeights.*frozen"),  # the rank would take no part in the backward
        (lambda weight: weight.detach().bfloat16(), "parameter 0 of SlotWeights.*bfloat16"),
        (lambda weight: weight[1:], "SlotWeights: stacked must be tensors"),
    ],
    ids=["frozen", "bfloat16", "sliced"],
)
@pytest.mark.parametrize(
    ("fields", "how"),
    [
        (EAGER, "in a call"),
        (EAGER, "at build"),
        ({**EXACT, **STATIC}, "at build"),
        ({**EXACT, **STATIC}, "in a layer"),
        ({**EXACT, **STATIC, "chunks": 2}, "in a layer"),
    ],
    ids=str,
)
def test_parameters_that_differ_between_ranks_are_refused_on_all(
    fields: dict[str, Any], how: str, change: Callable[[Tensor], Tensor], told: str
) -> None:
    """In graph-safe mode, where a call does not wait, when SlotWeights are built, or in the first call of a layer."""

    def body(group: Group) -> None:
        dispatcher, stacked = build_dispatcher(small_config(**fields), group), own_part(group, torch.float32)
        if group.rank() == 1:
            stacked = [change(weight) for weight in stacked]
        if how == "at build":
            SlotWeights(dispatcher, *stacked)
        x, routing, _ = inputs(group.rank(), 0, torch.float32)
        if how == "in a layer":
            run_layer(dispatcher, experts, stacked, x, routing, None)
        SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), experts, *stacked)

    results = outcomes(body, RANKS)
    refused = results.pop(1)
    assert isinstance(refused, InputError)
    assert re.search(told, str(refused))
    for result in results:
        assert isinstance(result, (InputError, PeerError))
        assert re.search(told, str(result))


@pytest.mark.parametrize("fields", [EAGER, {**EXACT, **STATIC}], ids=str)
def test_layers_of_integrations_compare_their_parameters_once(fields: dict[str, Any]) -> None:
    def body(group: Group) -> int:
        dispatcher, stacked = build_dispatcher(small_config(**fields), group), own_part(group, torch.float64)
        for call in range(3):
            x, routing, upstream = inputs(group.rank(), call, torch.float64)
            run_layer(dispatcher, experts, stacked, x, routing, None).backward(upstream)
        assert len(gradients(stacked)) == 2
        return dispatcher.metrics().collectives["parameters"]

    assert on_ranks(body, RANKS) == [1] * RANKS


@pytest.mark.parametrize("fields", [EAGER, {}], ids=["exact", "no placement"])
def test_parameters_are_ready_in_the_same_order_with_and_without_copies(fields: dict[str, Any]) -> None:
    """ZeRO 2 reduces what is ready first, and its ranks may belong to several expert-parallel groups."""

    def body(group: Group) -> list[tuple[list[int], int]]:
        found, dispatcher = [], build_dispatcher(small_config(**fields), group)
        for copies in (False, True):
            stacked, order = own_part(group, torch.float64), list[int]()
            for number, weight in enumerate(stacked):
                weight.register_post_accumulate_grad_hook(lambda _, number=number, order=order: order.append(number))
            x, routing, upstream = inputs(group.rank(), 0, torch.float64)
            ids_TK = routing.topk_ids if copies else torch.arange(2 * len(x)).view(-1, 2) % NUM_EXPERTS
            sent = dispatcher.dispatch(x.requires_grad_(), Routing(ids_TK, routing.topk_weights))
            sent, outputs = SlotWeights(dispatcher).run(sent, experts, *stacked)
            dispatcher.combine(outputs, sent).backward(upstream)
            found.append((order, dispatcher.metrics().collectives.get("weights", 0)))
        return found

    for (without, none), (with_copies, fetches) in on_ranks(body, RANKS):
        assert not none
        assert bool(fetches) == bool(fields)
        assert with_copies == without == [0, 1]


def test_two_micro_batches_in_flight() -> None:
    def body(group: Group) -> list[Tensor]:
        stacked, dispatcher = own_part(group, torch.float64), placed(group)
        weights = SlotWeights(dispatcher)
        calls = [inputs(group.rank(), call, torch.float64) for call in range(2)]
        flying = [dispatcher.dispatch(x, routing, async_op=True) for x, routing, _ in calls]
        assert all(isinstance(one, InFlight) and one.placement == COPIES for one in flying)
        landed = [weights.run(one, experts, *stacked) for one in flying]
        outputs = [dispatcher.combine(rows, sent) for sent, rows in reversed(landed)]
        torch.autograd.backward(outputs, [upstream for *_, upstream in reversed(calls)])
        return gradients(stacked)

    expect_dense(on_ranks(body, RANKS), torch.float64, 2)


@pytest.mark.parametrize("skips_empty", [False, True])
def test_ranks_without_rows_take_part(skips_empty: bool) -> None:
    """Rank 3 sends nothing, and an expert that got no row may have no autograd history."""

    def rows(rank: int) -> int:
        return 0 if rank == 3 else 1

    def body(group: Group) -> list[Tensor]:
        stacked, dispatcher = own_part(group, torch.float64), placed(group)
        x, routing, upstream = inputs(group.rank(), 0, torch.float64, rows(group.rank()))

        def run(part: Dispatched, up: Tensor, down: Tensor) -> Tensor:
            if skips_empty and not len(part.rows):
                return torch.zeros(0, HIDDEN, dtype=torch.float64)
            return experts(part, up, down)

        sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), run, *stacked)
        dispatcher.combine(outputs, sent).backward(upstream)
        return [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in stacked]

    expect_dense(on_ranks(body, RANKS), torch.float64, 1, rows=rows)


def test_gradients_are_summed_by_rank_and_rounded_once() -> None:
    """In bfloat16, 256 + 1 + 1 is 256 if each sum is rounded."""
    placement = ExpertPlacement(3, ((0, -1), (1, 0), (2, 0)))
    movement = movement_of(placement, 0, torch.device("cpu"))
    own, home = movement.own_grads([torch.tensor([[256.0], [9.0]]).bfloat16()]), torch.ones(2, 1).bfloat16()
    assert [total.tolist() for total in movement.collect(own, home)] == [[[258.0]]]
    assert movement.rows_out == (0, 1, 1)
    exact = static_movement(ExactPlacement(copies_PS=torch.tensor([[3], [0], [0]]), num_experts=3), 0)
    assert [total.tolist() for total in exact.collect(own, torch.ones(3, 1).bfloat16())] == [[[258.0]]]


@pytest.mark.parametrize(("how", "fields"), [("run", {**EXACT, **STATIC}), ("fetch", EAGER)], ids=["run", "fetch"])
def test_one_number_for_each_expert(how: str, fields: dict[str, Any]) -> None:
    """Tensors (M,) and (M, 0) beside others give the outputs and gradients of a layer without copies."""

    def scaled(part: Dispatched, up: Tensor, scale_L: Tensor, none_L0: Tensor) -> Tensor:
        assert none_L0.shape == (len(scale_L), 0)
        return part.grouped_mm(part.rows, scale_L[:, None, None] * torch.eye(HIDDEN) + up.sum(2, keepdim=True))

    def layer(group: Group, given: dict[str, Any]) -> list[Tensor]:
        dispatcher = build_dispatcher(small_config(**given), group)
        x, routing, upstream = inputs(group.rank(), 0, torch.float32)
        own = [own_part(group, torch.float32)[0], torch.tensor([2.0, 3.0]).add(group.rank()).requires_grad_()]
        sent, more = dispatcher.dispatch(x, routing), torch.ones(2, 0)
        if how == "run":
            sent, outputs = SlotWeights(dispatcher).run(sent, scaled, *own, more)
        else:
            sent, slots = SlotWeights(dispatcher).fetch(sent, *own, more)
            outputs = scaled(sent, *slots)
        y = dispatcher.combine(outputs, sent)
        y.backward(upstream)
        return [y.detach(), *gradients(own)]

    for got, wanted in on_ranks(lambda group: (layer(group, fields), layer(group, {})), RANKS):
        torch.testing.assert_close(got, wanted)


MISFITS: list[tuple[Callable[..., list[Any]], str]] = [
    (lambda up, down: [], r"SlotWeights: stacked must be tensors \(2, \.\.\.\), .*, got none"),
    (lambda up, down: [up, torch.ones(3, 2)], r"must be tensors \(2, \.\.\.\), .*, got \(2, 16, 8\), \(3, 2\)"),
    (lambda up, down: [up, down.double()], r"one dtype and device, got torch\.float32 on cpu, torch\.float64 on"),
    (lambda up, down: [torch.ones(2, 3, dtype=torch.int64)], r"must be floating, .*, got torch\.int64 on cpu"),
    (lambda up, down: [[up, down]], r"must be tensors, got list\. Pass each tensor as an argument of its own"),
]


def test_tensors_and_results_that_do_not_fit_are_refused() -> None:
    def body(group: Group) -> None:
        dispatcher, other, stacked = placed(group), placed(group), own_part(group, torch.float32)
        sent = dispatcher.dispatch(random_rows(2), random_routing(2))
        for change, told in MISFITS:
            with pytest.raises(InputError, match=told):
                SlotWeights(dispatcher).fetch(sent, *change(*stacked))
        with pytest.raises(StateError, match=r"from the dispatcher of these weights, got the result of another one"):
            SlotWeights(other).fetch(sent, *stacked)
        with pytest.raises(InputError, match=r"sent must be the result of a dispatch, got Tensor"):
            SlotWeights(dispatcher).run(random_rows(2), experts, *stacked)  # type: ignore[arg-type]

    on_ranks(body, RANKS)


def test_experts_that_know_nothing_of_slots_are_told_of_slot_weights() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(balance={"name": "exact", "min_rows": 0}), group)
        sent = dispatcher.dispatch(random_rows(4), Routing(torch.tensor([[0, 1]] * 4), torch.ones(4, 2)))
        assert isinstance(sent, Dispatched)
        own = own_part(group, torch.float32)[0]
        with pytest.raises(InputError, match=r"got torch.float32 .* run experts with SlotWeights"):
            sent.grouped_mm(sent.rows, own)
        with pytest.raises(InputError, match=r"got 2 functions for 4 experts.* run experts with SlotWeights"):
            sent.per_expert([torch.nn.Identity()] * 2)
        dispatcher.combine(sent.rows, sent)

    on_ranks(body, RANKS)


def test_a_compiled_call_is_refused() -> None:
    dispatcher, up = build_dispatcher(small_config("local")), torch.ones(NUM_EXPERTS, HIDDEN, HIDDEN)
    weights = SlotWeights(dispatcher)

    def call(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return weights.fetch(dispatcher.dispatch(x, Routing(ids, shares)), up)[1][0]

    routing = random_routing(2)
    with pytest.raises(Exception, match=r"weights must be fetched outside of compiled\s+regions"):
        torch.compile(call, fullgraph=True, backend="eager")(random_rows(2), routing.topk_ids, routing.topk_weights)
