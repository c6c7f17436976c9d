"""SlotWeights: gradients of the dense layer, what travels, checkpointing, calls in flight, and ranks without work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.balance.movement import movement_of
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.dispatchers.slot_weights import _summed
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.types import InFlight
from moe_dispatch_testing import Scenario
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, Group, on_ranks, random_routing, random_rows, small_config

RANKS = 4
INNER = 6
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
    dispatcher = build_dispatcher(small_config(spare_experts_per_rank=spare, **fields), group)
    dispatcher.place(placement)
    return dispatcher


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.float64, {"graph_safe": True, "max_tokens_per_rank": 24, "pad_multiple": 4}),
    ],
    ids=["float32", "float64", "graph_safe"],
)
def test_gradients_are_those_of_the_dense_layer(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    def body(group: Group) -> list[Tensor]:
        stacked = own_part(group, dtype)
        dispatcher = placed(group, **fields)
        weights = SlotWeights(dispatcher)
        for call in range(3):
            placement = Scenario(name="", spare=1, seed=call).placement(RANKS)
            assert placement is not None
            dispatcher.place(placement)
            x, routing, upstream = inputs(group.rank(), call, dtype)
            sent, (up, down) = weights.fetch(dispatcher.dispatch(x, routing), *stacked)
            dispatcher.combine(experts(sent, up, down), sent).backward(upstream)
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


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_recomputation_fetches_no_weights(reentrant: bool, recomputed: bool, apart: bool) -> None:
    """All weights in one call, or ``apart``: a call for each."""

    def body(group: Group) -> tuple[list[Tensor], int, int]:
        stacked, dispatcher = own_part(group, torch.float64), placed(group)
        weights = SlotWeights(dispatcher, recomputed=recomputed)

        def layer(x: Tensor, routing: Routing) -> Tensor:
            sent = dispatcher.dispatch(x, routing)
            if apart:
                sent, (up,) = weights.fetch(sent, stacked[0])
                sent, (down,) = weights.fetch(sent, stacked[1])
            else:
                sent, (up, down) = weights.fetch(sent, *stacked)
            return dispatcher.combine(experts(sent, up, down), sent)

        outputs, upstreams = [], []
        for call in range(2):
            x, routing, upstream = inputs(group.rank(), call, torch.float64)
            outputs.append(checkpoint(layer, x.requires_grad_(), routing, use_reentrant=reentrant))
            upstreams.append(upstream)
        torch.autograd.backward(outputs, upstreams)
        collectives = dispatcher.metrics().collectives
        return gradients(stacked), collectives["weights"], collectives["weights.backward"]

    found = on_ranks(body, RANKS)
    assert [counts for _, *counts in found] == [[(1 + apart) * (2 if recomputed else 4), (1 + apart) * 2]] * RANKS
    expect_dense([one for one, *_ in found], torch.float64, 2)


def test_parameters_of_equal_shapes_may_be_fetched_apart() -> None:
    """As gate and up of gated experts are: the recomputation once took the weights of one for the other."""

    def body(group: Group) -> list[list[Tensor]]:
        found = []
        for checkpointed in (False, True):
            dispatcher = placed(group)
            first, last = (weight.detach() for weight in own_part(group, torch.float64))
            gate, up, down = map(nn.Parameter, (first, first.flip(0, 2), last))
            weights = SlotWeights(dispatcher, recomputed=checkpointed)

            def layer(x: Tensor, routing: Routing) -> Tensor:
                sent = dispatcher.dispatch(x, routing)  # noqa: B023 - called in this turn
                slots = []
                for weight in (gate, up, down):  # noqa: B023
                    sent, (of_slots,) = weights.fetch(sent, weight)  # noqa: B023
                    slots.append(of_slots)
                hidden = torch.tanh(sent.grouped_mm(sent.rows, slots[0])) * sent.grouped_mm(sent.rows, slots[1])
                return dispatcher.combine(sent.grouped_mm(hidden, slots[2]), sent)  # noqa: B023

            x, routing, upstream = inputs(group.rank(), 0, torch.float64)
            x.requires_grad_()
            y = checkpoint(layer, x, routing, use_reentrant=False) if checkpointed else layer(x, routing)
            y.backward(upstream)
            assert dispatcher.metrics().collectives["weights"] == 3
            found.append(gradients([gate, up, down]))
            dispatcher.close()
        return found

    for plain, recomputed in on_ranks(body, RANKS):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_kept_weights_go_with_the_parameters() -> None:
    """After an optimizer step the weights of the last step are fetched again, and no longer kept."""

    def body(group: Group) -> None:
        (up, _), dispatcher = own_part(group, torch.float64), placed(group)
        weights = SlotWeights(dispatcher, recomputed=True)
        for step in range(3):
            sent = dispatcher.dispatch(*inputs(0, 0, torch.float64)[:2])
            _, (slots,) = weights.fetch(sent, up)
            assert len(weights._kept) == 1
            copies = {expert: slots[i] for i, expert in enumerate(COPIES.slots[dispatcher._channel.communicator.rank])}
            if 0 in copies:
                torch.testing.assert_close(copies[0], all_weights(torch.float64)[0][0] + step)
            with torch.no_grad():
                up.add_(1)

    on_ranks(body, RANKS)


def test_two_micro_batches_in_flight() -> None:
    def body(group: Group) -> list[Tensor]:
        stacked, dispatcher = own_part(group, torch.float64), placed(group)
        weights = SlotWeights(dispatcher)
        calls = [inputs(group.rank(), call, torch.float64) for call in range(2)]
        flying = [dispatcher.dispatch(x, routing, async_op=True) for x, routing, _ in calls]
        assert all(isinstance(one, InFlight) and one.placement == COPIES for one in flying)
        landed = [weights.fetch(one, *stacked) for one in flying]
        outputs = [dispatcher.combine(experts(sent, *slots), sent) for sent, slots in reversed(landed)]
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
        sent, slots = SlotWeights(dispatcher).fetch(dispatcher.dispatch(x, routing), *stacked)
        empty = skips_empty and not len(sent.rows)
        outputs = torch.zeros(0, HIDDEN, dtype=torch.float64) if empty else experts(sent, *slots)
        dispatcher.combine(outputs, sent).backward(upstream)
        return [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in stacked]

    expect_dense(on_ranks(body, RANKS), torch.float64, 1, rows=rows)


def test_gradients_are_summed_by_rank_and_rounded_once() -> None:
    """In bfloat16, 256 + 1 + 1 is 256 if each sum is rounded."""
    placement = ExpertPlacement(3, ((0, -1), (1, 0), (2, 0)))
    movement = movement_of(placement, 0, torch.device("cpu"))
    grad, home = torch.tensor([[256.0], [9.0]]).bfloat16(), torch.tensor([[1.0], [1.0]]).bfloat16()
    assert _summed(movement, grad, home).tolist() == [[258.0]]
    assert movement.rows_out == (0, 1, 1)


def test_without_gradients() -> None:
    def body(group: Group) -> None:
        stacked, dispatcher = own_part(group, torch.float32), placed(group)
        weights = SlotWeights(dispatcher, recomputed=True)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                sent, (up, _) = weights.fetch(dispatcher.dispatch(random_rows(2), random_routing(2)), *stacked)
                assert not up.requires_grad
                assert not sent.weights.requires_grad

    on_ranks(body, RANKS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda up, down: [], r"SlotWeights\.fetch: stacked must be tensors \(2, \.\.\.\), .*, got none"),
        (lambda up, down: [up, torch.ones(3, 2)], r"must be tensors \(2, \.\.\.\), .*, got \(2, 16, 6\), \(3, 2\)"),
        (lambda up, down: [up, down.double()], r"one dtype and device, got torch\.float32 on cpu, torch\.float64 on"),
        (lambda up, down: [torch.ones(2, 3, dtype=torch.int64)], r"must be floating, .*, got torch\.int64 on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments: Callable[..., list[Tensor]], told: str) -> None:
    def body(group: Group) -> None:
        dispatcher = placed(group)
        sent = dispatcher.dispatch(random_rows(2), random_routing(2))
        with pytest.raises(InputError, match=told):
            SlotWeights(dispatcher).fetch(sent, *arguments(*own_part(group, torch.float32)))

    on_ranks(body, RANKS)


def test_the_dispatch_of_another_dispatcher_is_refused() -> None:
    def body(group: Group) -> None:
        dispatcher, other = placed(group), placed(group)
        sent = dispatcher.dispatch(random_rows(2), random_routing(2))
        with pytest.raises(StateError, match=r"from the dispatcher of these weights, got the result of another one"):
            SlotWeights(other).fetch(sent, *own_part(group, torch.float32))

    on_ranks(body, RANKS)


def test_a_compiled_call_is_refused() -> None:
    dispatcher = build_dispatcher(small_config("local"))
    weights = SlotWeights(dispatcher)
    up = torch.ones(NUM_EXPERTS, HIDDEN, HIDDEN)

    def call(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return weights.fetch(dispatcher.dispatch(x, Routing(ids, shares)), up)[1][0]

    routing = random_routing(2)
    with pytest.raises(Exception, match=r"weights must be fetched outside of compiled\s+regions"):
        torch.compile(call, fullgraph=True, backend="eager")(random_rows(2), routing.topk_ids, routing.topk_weights)
