"""What a wrong call gets: the same clear error on every rank that made it, before anything is exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, Plan, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.errors import InputError, LayoutError, StateError
from moe_dispatch_testing import count_collectives
from tests.dispatchers.layer import (
    BACKENDS,
    HIDDEN,
    SAFE,
    Group,
    by_operators,
    caught,
    identity_round,
    on_ranks,
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
    (lambda d: d.dispatch(X, Routing(IDS.view(2, 3, 2), WEIGHTS.view(2, 3, 2))), "got (2, 3, 2)", "layout.flatten("),
    (lambda d: d.dispatch(X, routing(6, top_k=3)), "must be (T, top_k=2)", "(6, 3)"),
    (lambda d: d.dispatch(X, Routing(IDS, WEIGHTS[:, :1])), "must be (T, top_k=2)", "(6, 1)"),
    (lambda d: d.dispatch(X, Routing(IDS.int(), WEIGHTS)), "must be torch.int64, got torch.int32", "topk_ids.long()"),
    (lambda d: d.dispatch(X, Routing(WEIGHTS, IDS)), "swapped", "torch.topk returns the weights first"),
    (lambda d: d.dispatch(X, Routing(IDS, WEIGHTS.long())), "topk_weights must be a floating dtype, got torch.int64"),
    (lambda d: d.dispatch(X.long(), WAY), "x must be torch.bfloat16, torch.float16, torch.float32, torch.float64, got"),
    (lambda d: d.dispatch(X.to(torch.float8_e4m3fn), WAY), "got torch.float8_e4m3fn. Convert x"),
    (lambda d: d.dispatch(rows(6, HIDDEN + 1), WAY), f"x has hidden size {HIDDEN + 1}, the config has {HIDDEN}"),
    (lambda d: d.dispatch(X, Routing(IDS.to("meta"), WEIGHTS)), "must share a device", "cpu, meta, cpu"),
    (lambda d: d.dispatch(X), "Dispatcher.dispatch", "pass Routing(topk_ids, topk_weights), not NoneType"),
    (lambda d: d.dispatch(X, WAY, torch.tensor([0, 6])), "plan must be a Plan, a Layout or None, got Tensor"),
    (lambda d: d.dispatch(X, IDS, WEIGHTS), "plan must be", "got Tensor. Pass weights with their ids, as Routing(ids"),
    (lambda d: d.dispatch(X, WAY, X[:, 0] > 0), "plan must be", "got Tensor. Pass a mask as Masked(mask)"),
    (lambda d: d.dispatch(X, WAY, [3, 3]), "got list. Pass lengths as BSHD(lengths), and offsets as THD("),
    (lambda d: d.dispatch(X, WAY, BSHD), "plan must be", "got the class BSHD. Make a layout of it: BSHD(...)"),
    (lambda d: d.dispatch(X, Routing(IDS, None)), "topk_weights must be a Tensor, got NoneType"),  # type: ignore[arg-type]
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
    (lambda d: d.dispatch(rows(5), routing(5), d.plan(Rows(), like=X)), "6 tokens, got x with 5", "per micro-batch"),
]
# These two have an argument of another type, or experts that return nothing.
SWAPPED: Any = (X, WAY, lambda sent: sent.rows)
NOTHING: Any = (lambda sent: None, X, WAY)
COMBINE: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: d.combine(X[:1], d.dispatch(X, WAY)), "combine: rows must be", "(1, 16) on cpu", "one output row per"),
    (lambda d: d.combine((s := d.dispatch(X, WAY)).rows.long(), s), "combine: rows must be floating", "torch.int64"),
    (lambda d: d.combine(X, d.dispatch(X, WAY, async_op=True)), "must be a Dispatched, got InFlight", "wait()"),
    (lambda d: d.combine(*_sent(d)[::-1]), "combine: sent must be a Dispatched, got Tensor", "what dispatch returned"),
    (lambda d: run_in_chunks(d, *NOTHING), "combine: rows must be a Tensor, got NoneType", "what the experts returned"),
    (lambda d: run_in_chunks(d, *SWAPPED), "run_in_chunks(dispatcher, run_experts, x, routing)", "Tensor for run_exp"),
    (lambda d: d.plan(THD), "Dispatcher.plan: layout must be a Layout or None, got the class THD. Make a layout"),
    (lambda d: d.plan(X), "Dispatcher.plan: layout must be a Layout or None, got Tensor", "as like=x"),
    (lambda d: d.plan(), "Dispatcher.plan: pass the layout of the batch, or like=x"),
]
TRANSFORMS: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: torch.func.grad(lambda x: d.dispatch(x, WAY).rows.sum())(X), "Dispatcher.dispatch: the transforms of"),
    (lambda d: torch.func.vmap(lambda x: d.dispatch(x, WAY).rows)(X[None]), "got a call inside one"),
    (lambda d: torch.func.grad(lambda x, sent: d.combine(x, sent).sum())(*_sent(d)), "combine: the transforms of"),
]
NAN, SECOND = float("nan"), torch.tensor([1])
# The padding has an invalid id too, 99, which is no error.
PADDED = Routing(torch.full_like(IDS, 8).index_fill(0, SECOND, 99), WEIGHTS)
# Under debug=True.
VALUES: list[tuple[Call, *tuple[str, ...]]] = [
    (lambda d: d.dispatch(X, Routing(IDS + 8 - IDS.max(), WEIGHTS)), "in -1..7, got ", "..8. Check the router"),
    (lambda d: d.dispatch(X, Routing(IDS.clamp(max=-2), WEIGHTS)), "topk_ids must lie in -1..7, got -2.."),
    (lambda d: d.dispatch(X, PADDED, Rows(1)), "must lie in -1..7, got 8..8. "),
    (lambda d: d.dispatch(X, Routing(IDS, WEIGHTS.index_fill(0, SECOND, NAN))), "must be finite, got 2 that are not"),
]
CALLS: list[tuple[bool, type[Exception], Call, *tuple[str, ...]]] = [
    *((False, InputError, *row) for row in DISPATCH + COMBINE),
    *((False, LayoutError, *row) for row in PLAN),
    *((False, StateError, *row) for row in TRANSFORMS),
    *((True, InputError, *row) for row in VALUES),
    (True, LayoutError, *PLAN[3]),
]


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_wrong_calls_are_refused_and_a_right_one_still_works(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        with_debug = {debug: build_dispatcher(small_config(backend, debug=debug), group) for debug in (False, True)}
        for debug, kind, call, *texts in CALLS:
            raises_everywhere([caught(call, with_debug[debug])], kind, *texts)
            identity_round(with_debug[debug])

    on_ranks(body, size)


def test_nan_weight_of_a_skipped_slot_is_no_error() -> None:
    dispatcher, first = build_dispatcher(small_config("local", debug=True)), torch.tensor([0])
    sent = dispatcher.dispatch(X, Routing(IDS.index_fill(1, first, -1), WEIGHTS.index_fill(1, first, NAN)))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), X * WEIGHTS[:, 1:])


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_more_tokens_than_the_maximum_are_refused_before_anything_travels(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        for count in (0, 1, 4):
            sent = dispatcher.dispatch(rows(count), routing(count))
            assert torch.equal(sent.offs, sent.tokens_per_expert.cumsum(0))
            assert dispatcher.combine(sent.rows, sent).shape[0] == count
        for plan in (None, dispatcher.plan(Rows())):
            with (
                count_collectives() as seen,
                pytest.raises(InputError, match=r"at most max_tokens_per_rank \(4\) rows per rank, got 5"),
            ):
                dispatcher.dispatch(rows(5), routing(5), plan)
            assert seen.calls == []
            identity_round(dispatcher)

    on_ranks(body, size)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_double_backward_is_refused(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        dispatcher, x = build_dispatcher(small_config(backend), group), rows(6).requires_grad_()
        for verb, layout in (("dispatch", None), ("dispatch", Rows(4)), ("combine", None), ("combine", Rows(4))):
            sent = dispatcher.dispatch(x, WAY, layout)
            # Of combine alone: a leaf in the place of what the experts return.
            y = sent.rows if verb == "dispatch" else dispatcher.combine(sent.rows.detach().requires_grad_(), sent)
            with pytest.raises(StateError, match=f"{verb}: double backward is not supported.*Use create_graph=False"):
                torch.autograd.grad(y.square().sum(), x, create_graph=True, allow_unused=True)

    on_ranks(body, size)


@pytest.mark.parametrize("operators", [False, True])
def test_rows_sent_again_must_be_as_many(operators: bool) -> None:
    """Operators cropped or padded them without a word, and took a layout of 100 real rows for x with 6."""
    dispatcher, x = build_dispatcher(small_config("local")), rows(6).requires_grad_()

    def run(layer: Callable[[Tensor], Tensor]) -> None:
        by_operators(layer, x) if operators else layer(x)

    for shape in [(3, HIDDEN), (7, HIDDEN), (6, HIDDEN * 2)]:
        with pytest.raises((InputError, LayoutError), match="again=sent was made with floating"):
            run(lambda x: dispatcher.dispatch(torch.zeros(shape), again=dispatcher.dispatch(x, WAY)).rows)  # noqa: B023
    with pytest.raises(LayoutError, match="100"):
        run(lambda x: dispatcher.dispatch(x, WAY, Rows(100)).rows)


@pytest.mark.parametrize("pad_multiple", [1, 4])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_state_and_plan_of_another_dispatcher(backend: str, size: int, pad_multiple: int) -> None:
    """Of a dispatcher of the same config, which shares its channel, or of another one."""

    def body(group: Group) -> None:
        mine = build_dispatcher(small_config(backend), group)
        other = build_dispatcher(small_config(backend, pad_multiple=pad_multiple), group)
        sent, plan = other.dispatch(X, WAY), other.plan(Rows(), like=X)
        told = "sent must come from this dispatcher.*not from another one"
        with pytest.raises(StateError, match=rf"Dispatcher\.combine: {told}"):
            mine.combine(sent.rows, sent)
        identity_round(mine)
        with pytest.raises(StateError, match=rf"Dispatcher\.dispatch: {told}"):
            mine.dispatch(X, again=sent)
        identity_round(mine)
        if pad_multiple == 1:
            mine.dispatch(X, WAY, plan)
        else:
            with pytest.raises(StateError, match=r"the plan is of another config or group\. Make it with"):
                mine.dispatch(X, WAY, plan)
        identity_round(mine)

    on_ranks(body, size)


CLOSED: tuple[Callable[[Dispatcher, Dispatched], Any], ...] = (
    lambda d, sent: d.plan(Rows(), like=X),
    lambda d, sent: d.dispatch(X, WAY),
    lambda d, sent: d.combine(sent.rows, sent),
    lambda d, sent: d.metrics(),
    lambda d, sent: d.self_test(),
    lambda d, sent: d.backend_name,
)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_closed_dispatcher(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        sent = dispatcher.dispatch(X, WAY)
        dispatcher.close()
        dispatcher.close()
        for call in CLOSED:
            with pytest.raises(StateError, match=f"must be open.*closed one of backend {backend!r}.*build_dispatcher"):
                call(dispatcher, sent)

    on_ranks(body, size)


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
NAMED: tuple[Call, ...] = (
    lambda d: d.plan(THD([0, 5]), like=X),
    lambda d: d.dispatch(X, routing(4)),
    lambda d: d.dispatch(rows(5), again=d.dispatch(X, WAY)),
    lambda d: d.combine((sent := d.dispatch(X, WAY)).rows[:-1], sent),
    lambda d: d.place(ExpertPlacement.contiguous(9, 1)),
)


def test_errors_of_every_verb_say_the_name() -> None:
    named, other = build_dispatcher(small_config("local"), name=NAME), build_dispatcher(small_config("local"))
    for call in NAMED:
        assert caught(call, named).__notes__ == [f"In the dispatcher {NAME!r}."]
        assert not hasattr(caught(call, other), "__notes__")


class Packed(Dispatcher):
    def layout_of(self, x: Tensor) -> BSHD:
        raise AssertionError("asked for a layout")


def test_a_call_without_a_layout_is_refused_where_none_is_inferred() -> None:
    dispatcher, x = Packed(small_config("local", infer_layout=False), name=NAME), X.view(1, 6, HIDDEN)
    for verb, call in (("plan", lambda: dispatcher.plan(like=x)), ("dispatch", lambda: dispatcher.dispatch(x, WAY))):
        told = rf"{verb}: a plan or a layout must be given.*broadcast_layout"
        with pytest.raises(LayoutError, match=told) as raised:
            call()
        assert NAME in raised.value.__notes__[0]
    with pytest.raises(LayoutError, match="infer_layout=False"):
        dispatcher.plan()
    layout = THD([0, 2], [0, 6])
    given: tuple[Plan | THD, ...] = (layout, dispatcher.plan(layout))
    for plan in given:
        assert int(dispatcher.dispatch(X, WAY, plan).real_tokens_per_expert.sum()) == 4
    dispatcher.self_test()
