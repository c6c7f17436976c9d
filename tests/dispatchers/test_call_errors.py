"""What a wrong call gets: the same clear error on every rank that made it, before anything is exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, Plan, Routing, Rows, build_dispatcher
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.errors import InputError, LayoutError, PeerError, StateError
from moe_dispatch_testing import count_collectives
from tests.dispatchers.layer import (
    BACKENDS,
    HIDDEN,
    SAFE,
    Group,
    by_operators,
    identity_round,
    outcomes,
    outcomes_on,
    raises_everywhere,
    small_config,
)
from tests.dispatchers.layer import random_routing as routing
from tests.dispatchers.layer import random_rows as rows

X, WAY = rows(6), routing(6)
IDS, WEIGHTS = WAY.topk_ids, WAY.topk_weights

Call = Callable[[Dispatcher], Any]


def _sent(dispatcher: Dispatcher) -> tuple[Tensor, Dispatched]:
    sent = dispatcher.dispatch(X, WAY)
    return sent.rows, sent


# A wrong call, and parts of what is said.
DISPATCH: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: d.dispatch(X, routing(5)), "x has 6 tokens but routing has 5", "id -1 for those to skip"),
    (
        lambda d: d.dispatch(X.view(2, 3, -1), Routing(IDS.view(2, 3, -1), WEIGHTS.view(2, 3, -1))),
        "topk_ids must be (T, top_k=2), one row for each row of x, got (2, 3, 2)",
        "layout.flatten(topk_ids)",
    ),
    (lambda d: d.dispatch(X, routing(6, top_k=3)), "must be (T, top_k=2)", "(6, 3)"),
    (lambda d: d.dispatch(X, Routing(IDS, WEIGHTS[:, :1])), "must be (T, top_k=2)", "(6, 1)"),
    (lambda d: d.dispatch(X, Routing(IDS.int(), WEIGHTS)), "must be torch.int64, got torch.int32", "topk_ids.long()"),
    (
        lambda d: d.dispatch(X, Routing(WEIGHTS, IDS)),
        "ids and weights of the Routing are swapped",
        "torch.topk returns the weights first",
    ),
    (lambda d: d.dispatch(X, Routing(IDS, WEIGHTS.long())), "topk_weights must be a floating dtype, got torch.int64"),
    (lambda d: d.dispatch(X.long(), WAY), "x must be torch.bfloat16, torch.float16, torch.float32, torch.float64, got"),
    (lambda d: d.dispatch(X.to(torch.float8_e4m3fn), WAY), "got torch.float8_e4m3fn. Convert x"),
    (lambda d: d.dispatch(rows(6, HIDDEN + 1), WAY), f"x has hidden size {HIDDEN + 1}, the config has {HIDDEN}"),
    (
        lambda d: d.dispatch(X, Routing(IDS.to("meta"), WEIGHTS)),
        "x, topk_ids and topk_weights must share a device",
        "cpu, meta, cpu",
    ),
    (lambda d: d.dispatch(X), "pass Routing(topk_ids, topk_weights), not NoneType", "Dispatcher.dispatch"),
    (
        lambda d: d.dispatch(X, WAY, torch.tensor([0, 6])),
        "plan must be a Plan, a Layout or None, got Tensor",
        "Dispatcher.dispatch",
    ),
    (
        lambda d: d.dispatch(X, IDS, WEIGHTS),
        "plan must be",
        "got Tensor. Pass weights with their ids, as Routing(ids, we",
    ),
    (lambda d: d.dispatch(X, WAY, X[:, 0] > 0), "plan must be", "got Tensor. Pass a mask as Masked(mask)"),
    (
        lambda d: d.dispatch(X, WAY, [3, 3]),
        "plan must be",
        "got list. Pass lengths as BSHD(lengths), and offsets as THD(",
    ),
    (lambda d: d.dispatch(X, WAY, BSHD), "plan must be", "got the class BSHD. Make a layout of it: BSHD(...)"),
    (
        lambda d: d.dispatch(X, Routing(IDS, None)),  # type: ignore[arg-type]
        "topk_weights must be a Tensor, got NoneType",
    ),
    (lambda d: d.dispatch(rows(5), again=d.dispatch(X, WAY)), "again=sent was made with floating (6, 16) on cpu"),
    (lambda d: d.dispatch(X.long(), again=d.dispatch(X, WAY)), "floating (6, 16)", "got torch.int64 (6, 16)"),
    (lambda d: d.dispatch(X, WAY, again=d.dispatch(X, WAY)), "again=sent already has routing and plan"),
]
PLAN: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: d.dispatch(X, WAY, THD([1, 6])), "THD: cu_seqlens must start at 0, got [1, 6]"),
    (lambda d: d.dispatch(X, WAY, THD([0, 4, 3, 6])), "THD: cu_seqlens must not decrease, got [0, 4, 3, 6]"),
    (lambda d: d.dispatch(X, WAY, THD([0, 7])), "must end at the number of rows, got 7 and 6 rows", "shard(...)"),
    (lambda d: d.plan(THD([0, 7]), like=X), "THD: cu_seqlens must end at the number of rows, got 7 and 6 rows"),
    (lambda d: d.dispatch(X, WAY, THD([0, 4, 8]).shard(0, 2)), "at the number of rows, got 8 and 12 rows"),
    (lambda d: d.dispatch(X.view(2, 3, -1), WAY, BSHD([3, 4])), "BSHD: lengths must lie in 0..3 (S), got 4"),
    (lambda d: d.dispatch(X.view(2, 3, -1), WAY, d.plan(BSHD([3, 4]))), "lengths must lie in 0..3 (S), got 4"),
    (
        lambda d: d.dispatch(rows(5), routing(5), d.plan(Rows(), like=X)),
        "the plan is for 6 tokens, got x with 5",
        "Make a plan per micro-batch",
    ),
]
COMBINE: list[tuple[Call, *tuple[str, ...]]] = [
    (
        lambda d: d.combine(torch.zeros(1, HIDDEN), d.dispatch(X, WAY)),
        "Dispatcher.combine: rows must be floating",
        "got torch.float32 (1, 16) on cpu",
        "one output row per row",
    ),
    (lambda d: d.combine((s := d.dispatch(X, WAY)).rows.long(), s), "combine: rows must be floating", "torch.int64"),
    (
        lambda d: d.combine(X, d.dispatch(X, WAY, async_op=True)),
        "Dispatcher.combine: sent must be a Dispatched, got InFlight",
        "After async_op=True, wait()",
    ),
    (
        lambda d: run_in_chunks(d, lambda sent: None, X, WAY),  # type: ignore[arg-type, return-value]
        "combine: rows must be a Tensor, got NoneType",
        "what the experts returned",
    ),
    (lambda d: d.combine(*_sent(d)[::-1]), "combine: sent must be a Dispatched, got Tensor", "what dispatch returned"),
    (
        lambda d: run_in_chunks(d, X, WAY, lambda sent: sent.rows),  # type: ignore[arg-type]
        "run_in_chunks: pass run_in_chunks(dispatcher, run_experts, x, routing), got Tensor for run_experts",
    ),
    (lambda d: d.plan(THD), "Dispatcher.plan: layout must be a Layout or None, got the class THD. Make a layout"),
    (lambda d: d.plan(X), "Dispatcher.plan: layout must be a Layout or None, got Tensor", "as like=x"),
    (lambda d: d.plan(), "Dispatcher.plan: pass the layout of the batch, or like=x"),
]
TRANSFORMS: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: torch.func.grad(lambda x: d.dispatch(x, WAY).rows.sum())(X), "Dispatcher.dispatch: the transforms of"),
    (lambda d: torch.func.vmap(lambda x: d.dispatch(x, WAY).rows)(X[None]), "got a call inside one"),
    (
        lambda d: torch.func.grad(lambda x, sent: d.combine(x, sent).sum())(*_sent(d)),
        "Dispatcher.combine: the transforms of torch.func are not supported",
    ),
]
NAN = float("nan")
# Under debug=True.
VALUES: list[tuple[Call, *tuple[str, ...]]] = [
    (
        lambda d: d.dispatch(X, Routing(IDS + 8 - IDS.max(), WEIGHTS)),
        "must lie in -1..7, got ",
        "..8. Check the router",
    ),
    (lambda d: d.dispatch(X, Routing(IDS.clamp(max=-2), WEIGHTS)), "topk_ids must lie in -1..7, got -2.."),
    (  # the padding has another invalid id, which is no error
        lambda d: d.dispatch(
            X, Routing(torch.full_like(IDS, 8).index_fill(0, torch.tensor([1]), 99), WEIGHTS), Rows(1)
        ),
        "must lie in -1..7, got 8..8. ",
    ),
    (
        lambda d: d.dispatch(X, Routing(IDS, WEIGHTS.index_fill(0, torch.tensor([1]), NAN))),
        "topk_weights must be finite, got 2 that are not",
        "Check the router",
    ),
]
CALLS: list[tuple[bool, type[Exception], Call, *tuple[str, ...]]] = [
    *((False, InputError, *row) for row in DISPATCH + COMBINE),
    *((False, LayoutError, *row) for row in PLAN),
    *((False, StateError, *row) for row in TRANSFORMS),
    *((True, InputError, *row) for row in VALUES),
    (True, LayoutError, *PLAN[3]),
]


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[3])
def test_wrong_call_is_refused_and_a_right_one_still_works(case: Any, backend: str, size: int) -> None:
    debug, kind, call, *texts = case

    def body(group: Group) -> Exception | None:
        dispatcher = build_dispatcher(small_config(backend, debug=debug), group)
        try:
            call(dispatcher)
        except Exception as error:
            identity_round(dispatcher)
            return error
        return None

    raises_everywhere(outcomes_on(body, size), kind, *texts)


def test_nan_weight_of_a_skipped_slot_is_no_error() -> None:
    dispatcher, first = build_dispatcher(small_config("local", debug=True)), torch.tensor([0])
    sent = dispatcher.dispatch(X, Routing(IDS.index_fill(1, first, -1), WEIGHTS.index_fill(1, first, NAN)))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), X * WEIGHTS[:, 1:])


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_tensors_on_another_device_than_configured(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        build_dispatcher(small_config(backend, device="cuda"), group).dispatch(X, WAY)

    raises_everywhere(outcomes_on(body, size), InputError, "x must be on cuda, got cpu", "change config.device")


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_more_tokens_than_the_maximum_are_refused_before_anything_travels(
    backend: str, size: int, planned: bool
) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        for count in (0, 1, 4):
            sent = dispatcher.dispatch(rows(count), routing(count))
            assert torch.equal(sent.offs, sent.tokens_per_expert.cumsum(0))
            assert dispatcher.combine(sent.rows, sent).shape[0] == count
        plan = dispatcher.plan(Rows()) if planned else None
        with count_collectives() as seen, pytest.raises(InputError) as caught:
            dispatcher.dispatch(rows(5), routing(5), plan)
        assert seen.calls == []
        identity_round(dispatcher)
        raise caught.value

    texts = ("at most max_tokens_per_rank (4) rows per rank, got 5", "at most max_tokens_per_rank")
    raises_everywhere(outcomes_on(body, size), InputError, *texts)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("verb", ["dispatch", "combine"])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_double_backward_is_refused(backend: str, size: int, verb: str, cut: bool) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        x = rows(6).requires_grad_()
        sent = dispatcher.dispatch(x, WAY, Rows(4) if cut else None)
        # Of combine alone: a leaf in the place of what the experts return.
        y = sent.rows if verb == "dispatch" else dispatcher.combine(sent.rows.detach().requires_grad_(), sent)
        torch.autograd.grad(y.square().sum(), x, create_graph=True, allow_unused=True)

    texts = (f"Dispatcher.{verb}: double backward is not supported", "Use create_graph=False")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("shape", [(3, HIDDEN), (7, HIDDEN), (6, HIDDEN * 2)], ids=["fewer", "more", "wider"])
def test_rows_sent_again_must_be_as_many(operators: bool, shape: tuple[int, int]) -> None:
    """Operators cropped or padded them without a word, and took a layout of 100 real rows for x with 6."""
    dispatcher, x = build_dispatcher(small_config("local")), rows(6).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return dispatcher.dispatch(torch.zeros(shape), again=dispatcher.dispatch(x, WAY)).rows

    def cut(x: Tensor) -> Tensor:
        return dispatcher.dispatch(x, WAY, Rows(100)).rows

    with pytest.raises((InputError, LayoutError), match="again=sent was made with floating"):
        by_operators(layer, x) if operators else layer(x)
    with pytest.raises(LayoutError, match="100"):
        by_operators(cut, x) if operators else cut(x)


@pytest.mark.parametrize("pad_multiple", [1, 4])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_state_and_plan_of_another_dispatcher(backend: str, size: int, pad_multiple: int) -> None:
    """Of a dispatcher of the same config, which shares its channel, or of another one."""

    def body(group: Group) -> list[Any]:
        mine = build_dispatcher(small_config(backend), group)
        other = build_dispatcher(small_config(backend, pad_multiple=pad_multiple), group)
        sent, plan = other.dispatch(X, WAY), other.plan(Rows(), like=X)
        calls: list[Callable[[], object]] = [
            lambda: mine.combine(sent.rows, sent),
            lambda: mine.dispatch(X, again=sent),
            lambda: mine.dispatch(X, WAY, plan),
        ]
        told: list[Any] = []
        for call in calls:
            try:
                told.append(call())
            except StateError as error:
                told.append(error)
            identity_round(mine)
        return told

    for combine, again, plan in outcomes_on(body, size):
        texts = ("sent must come from this dispatcher", "not from another one")
        raises_everywhere([combine], StateError, "Dispatcher.combine: ", *texts)
        raises_everywhere([again], StateError, "Dispatcher.dispatch: ", *texts)
        if pad_multiple == 1:
            assert isinstance(plan, Dispatched)
        else:
            texts = ("the plan is of another config or group", "Make it with this dispatcher")
            raises_everywhere([plan], StateError, *texts)


CLOSED: dict[str, Callable[[Dispatcher, Dispatched], Any]] = {
    "plan": lambda d, sent: d.plan(Rows(), like=X),
    "dispatch": lambda d, sent: d.dispatch(X, WAY),
    "combine": lambda d, sent: d.combine(sent.rows, sent),
    "metrics": lambda d, sent: d.metrics(),
    "self_test": lambda d, sent: d.self_test(),
    "backend_name": lambda d, sent: d.backend_name,
}


@pytest.mark.parametrize("call", CLOSED)
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_closed_dispatcher(backend: str, size: int, call: str) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        sent = dispatcher.dispatch(X, WAY)
        dispatcher.close()
        dispatcher.close()
        CLOSED[call](dispatcher, sent)

    texts = ("Dispatcher: the dispatcher must be open", f"a closed one of backend {backend!r}", "build_dispatcher")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


def test_forward_without_experts() -> None:
    class Forgetful(Dispatcher):
        pass

    with pytest.raises(StateError, match=r"Forgetful.forward: define run_experts\(sent\)"):
        Forgetful(small_config("local"), None)(X, WAY)


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_waiting_twice_neither_repeats_the_dispatch_nor_lends_its_buffers_twice(backend: str) -> None:
    """Rows of over a megabyte, so that buffers are kept for the next calls; these must not share one."""
    hidden, count = 512, 800
    dispatcher = build_dispatcher(small_config(backend, hidden_size=hidden))
    x, way = rows(count, hidden), routing(count)
    flight = dispatcher.dispatch(x, way, async_op=True)
    first = flight.wait()
    with contextlib.suppress(StateError):  # refusing is as good as giving the same again
        assert flight.wait() is first
    assert isinstance(first, Dispatched)
    calls = [dispatcher.dispatch(x * (i + 1), way, async_op=True) for i in range(3)]
    for i, call in enumerate(calls):
        sent = call.wait()
        expected = x * (i + 1) * way.topk_weights.sum(1, keepdim=True)
        torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)


NAME = "stage 2, layers.7.mlp"
NAMED: dict[str, Call] = {
    "plan": lambda d: d.plan(THD([0, 5]), like=X),
    "dispatch": lambda d: d.dispatch(X, routing(4)),
    "again": lambda d: d.dispatch(rows(5), again=d.dispatch(X, WAY)),
    "combine": lambda d: d.combine((sent := d.dispatch(X, WAY)).rows[:-1], sent),
}


@pytest.mark.parametrize("verb", NAMED)
def test_errors_of_every_verb_say_the_name(verb: str) -> None:
    with pytest.raises(InputError) as caught:
        NAMED[verb](build_dispatcher(small_config("local"), name=NAME))
    assert caught.value.__notes__ == [f"In the dispatcher {NAME!r}."]
    with pytest.raises(InputError) as caught:
        NAMED[verb](build_dispatcher(small_config("local")))
    assert not hasattr(caught.value, "__notes__")


class Packed(Dispatcher):
    def layout_of(self, x: Tensor) -> BSHD:
        raise AssertionError("asked for a layout")


@pytest.mark.parametrize("verb", ["plan", "dispatch"])
def test_a_call_without_a_layout_is_refused_where_none_is_inferred(verb: str) -> None:
    dispatcher, x = Packed(small_config("local", infer_layout=False), name=NAME), X.view(1, 6, HIDDEN)
    with pytest.raises(
        LayoutError, match=rf"Dispatcher\.{verb}: a plan or a layout must be given.*broadcast_layout"
    ) as caught:
        dispatcher.plan(like=x) if verb == "plan" else dispatcher.dispatch(x, WAY)
    assert NAME in caught.value.__notes__[0]
    with pytest.raises(LayoutError, match="infer_layout=False"):
        dispatcher.plan()


def test_a_layout_or_a_plan_is_taken_where_none_is_inferred() -> None:
    dispatcher, layout = build_dispatcher(small_config("local", infer_layout=False)), THD([0, 2], [0, 6])
    plans: list[Plan | THD] = [layout, dispatcher.plan(layout)]
    for plan in plans:
        assert int(dispatcher.dispatch(X, WAY, plan).real_tokens_per_expert.sum()) == 4
    dispatcher.self_test()


def test_peers_hear_of_the_rank_that_got_no_layout() -> None:
    """On alltoall the exchange of counts carries the refusal."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(infer_layout=False), group, name=f"rank {group.rank()}")
        dispatcher.dispatch(X, WAY, None if group.rank() else Rows())

    told = outcomes(body, 2)
    text = "Dispatcher.dispatch: a plan or a layout must be given"
    raises_everywhere(told[:1], PeerError, f"rank 1 refused: {text}")
    raises_everywhere(told[1:], LayoutError, text)
    assert told[1].__notes__ == ["In the dispatcher 'rank 1'."]
