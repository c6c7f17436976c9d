"""What a call with bad input gets: the same clear error on every rank that made it, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, THD, Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError, LayoutError, StateError
from tests.dispatchers.layer import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Group,
    identity_round,
    outcomes_on,
    raises_everywhere,
    small_config,
)
from tests.dispatchers.layer import random_routing as routing
from tests.dispatchers.layer import random_rows as rows

BACKENDS = [("local", 1), ("alltoall", 2), ("allgather", 2)]

Call = Callable[[Dispatcher], Any]


def _x(count: int = 6) -> Tensor:
    return rows(count)


def _with_ids(change: Callable[[Tensor], Tensor]) -> Routing:
    return replace(routing(6), topk_ids=change(routing(6).topk_ids))


def _with_weights(change: Callable[[Tensor], Tensor]) -> Routing:
    return replace(routing(6), topk_weights=change(routing(6).topk_weights))


CALLS: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "token counts": (
        lambda d: d.dispatch(_x(6), routing(5)),
        InputError,
        ("Dispatcher.dispatch: x has 6 tokens but routing has 5", "id -1 for those to skip"),
    ),
    "K": (
        lambda d: d.dispatch(_x(), routing(6, top_k=3)),
        InputError,
        (f"must be (T, top_k={TOP_K})", "(6, 3)"),
    ),
    "weights of another shape": (
        lambda d: d.dispatch(_x(), Routing(routing(6).topk_ids, routing(6, top_k=1).topk_weights)),
        InputError,
        (f"must be (T, top_k={TOP_K})", "(6, 1)"),
    ),
    "dtype of ids": (
        lambda d: d.dispatch(_x(), _with_ids(Tensor.int)),
        InputError,
        ("topk_ids must be torch.int64, got torch.int32", "topk_ids.long()"),
    ),
    "weights before ids": (
        lambda d: d.dispatch(_x(), Routing(routing(6).topk_weights, routing(6).topk_ids)),
        InputError,
        (
            "topk_ids must be torch.int64 and topk_weights floating, got torch.float32 and torch.int64",
            "Were the arguments swapped? torch.topk returns weights first; pass Routing(topk_ids, topk_weights)",
        ),
    ),
    "dtype of weights": (
        lambda d: d.dispatch(_x(), _with_weights(Tensor.long)),
        InputError,
        ("topk_weights must be a floating dtype, got torch.int64",),
    ),
    "dtype of x": (
        lambda d: d.dispatch(_x().long(), routing(6)),
        InputError,
        ("x must be torch.bfloat16, torch.float16, torch.float32, torch.float64, got torch.int64. Convert x",),
    ),
    "x in float8": (
        lambda d: d.dispatch(_x().to(torch.float8_e4m3fn), routing(6)),
        InputError,
        ("got torch.float8_e4m3fn. Convert x",),
    ),
    "hidden size": (
        lambda d: d.dispatch(rows(6, HIDDEN + 1), routing(6)),
        InputError,
        (f"x has hidden size {HIDDEN + 1}, hidden_size is {HIDDEN}",),
    ),
    "device of the routing": (
        lambda d: d.dispatch(_x(), _with_ids(lambda ids: ids.to("meta"))),
        InputError,
        ("x, topk_ids and topk_weights must share a device", "cpu, meta, cpu"),
    ),
    "no routing": (
        lambda d: d.dispatch(_x()),
        InputError,
        ("routing must be a Routing, got NoneType", "again=sent"),
    ),
    "no plan": (
        lambda d: d.dispatch(_x(), routing(6), torch.tensor([0, 6])),  # type: ignore[call-overload]
        InputError,
        ("plan must be a Plan, a Layout or None, got Tensor", "dispatcher.plan(layout)"),
    ),
    "cu_seqlens not from 0": (
        lambda d: d.dispatch(_x(), routing(6), THD([1, 6])),
        LayoutError,
        ("THD: cu_seqlens must start at 0, got [1, 6]",),
    ),
    "cu_seqlens decreasing": (
        lambda d: d.dispatch(_x(), routing(6), THD([0, 4, 3, 6])),
        LayoutError,
        ("THD: cu_seqlens must not decrease, got [0, 4, 3, 6]",),
    ),
    "cu_seqlens ending elsewhere": (
        lambda d: d.dispatch(_x(), routing(6), THD([0, 4, 7])),
        LayoutError,
        ("THD: cu_seqlens must end at the number of rows, got 7 and 6 rows", "shard(...)"),
    ),
    "cu_seqlens of a shard ending elsewhere": (
        lambda d: d.dispatch(_x(), routing(6), THD([0, 4, 8]).shard(0, 2)),
        LayoutError,
        ("THD: cu_seqlens must end at the number of rows, got 8 and 12 rows",),
    ),
    "lengths above S": (
        lambda d: d.dispatch(_x().view(2, 3, -1), routing(6), BSHD([3, 4])),
        LayoutError,
        ("BSHD: lengths must lie in 0..3 (S), got 4",),
    ),
    "rows for combine": (
        lambda d: d.combine(torch.zeros(1, HIDDEN), d.dispatch(_x(), routing(6))),
        InputError,
        ("Dispatcher.combine: rows must be floating", "got torch.float32 (1, 16) on cpu", "one output row per row"),
    ),
    "integer rows for combine": (
        lambda d: d.combine((sent := d.dispatch(_x(), routing(6))).rows.long(), sent),
        InputError,
        ("Dispatcher.combine: rows must be floating", "got torch.int64"),
    ),
    "again with other tokens": (
        lambda d: d.dispatch(_x(5), again=d.dispatch(_x(), routing(6))),
        InputError,
        ("again=sent was made with floating (6, 16) on cpu", "got torch.float32 (5, 16)"),
    ),
    "again with integers": (
        lambda d: d.dispatch(_x().long(), again=d.dispatch(_x(), routing(6))),
        InputError,
        ("again=sent was made with floating (6, 16)", "got torch.int64 (6, 16)"),
    ),
    "again with routing": (
        lambda d: d.dispatch(_x(), routing(6), again=d.dispatch(_x(), routing(6))),
        InputError,
        ("again=sent already has routing and plan",),
    ),
    "plan for other tokens": (
        lambda d: d.dispatch(_x(5), routing(5), d.plan(Rows(), like=_x(6))),
        LayoutError,
        ("the plan is for 6 tokens, got x with 5", "Make a plan per micro-batch"),
    ),
    "combine before wait": (
        lambda d: d.combine(_x(), d.dispatch(_x(), routing(6), async_op=True)),  # type: ignore[arg-type]
        InputError,
        ("Dispatcher.combine: sent must be a Dispatched, got InFlight", "after wait() where async_op=True"),
    ),
    "plan of nothing": (
        lambda d: d.plan(),
        InputError,
        ("Dispatcher.plan: a layout or like=x is needed, got neither",),
    ),
}


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_is_refused_and_a_right_one_still_works(name: str, backend: str, size: int) -> None:
    call, kind, texts = CALLS[name]

    def body(group: Group) -> Exception | None:
        dispatcher = build_dispatcher(small_config(backend), group)
        try:
            call(dispatcher)
        except Exception as error:
            identity_round(dispatcher)
            return error
        return None

    raises_everywhere(outcomes_on(body, size), kind, *texts)


VALUES: dict[str, tuple[Call, tuple[str, ...]]] = {
    "id too large": (
        lambda d: d.dispatch(_x(), _with_ids(lambda ids: ids + 1 + (NUM_EXPERTS - 1 - ids.max()))),
        (f"topk_ids must lie in -1..{NUM_EXPERTS - 1}, got ", f"..{NUM_EXPERTS}. Check the router"),
    ),
    "id below -1": (
        lambda d: d.dispatch(_x(), _with_ids(lambda ids: ids.index_fill(0, torch.tensor([2]), -2))),
        (f"topk_ids must lie in -1..{NUM_EXPERTS - 1}, got -2..",),
    ),
    "NaN weight": (
        lambda d: d.dispatch(_x(), _with_weights(lambda w: w.index_fill(0, torch.tensor([1]), float("nan")))),
        (f"topk_weights must be finite, got {TOP_K} that are not", "router's logits"),
    ),
}


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_are_refused_under_debug(name: str, backend: str, size: int) -> None:
    call, texts = VALUES[name]

    def body(group: Group) -> Exception | None:
        dispatcher = build_dispatcher(small_config(backend, debug=True), group)
        try:
            call(dispatcher)
        except Exception as error:
            identity_round(dispatcher)
            return error
        return None

    raises_everywhere(outcomes_on(body, size), InputError, *texts)


def test_nan_weight_of_a_skipped_slot_is_no_error() -> None:
    dispatcher = build_dispatcher(small_config("local", debug=True))
    right = routing(6)
    ids = right.topk_ids.index_fill(1, torch.tensor([0]), -1)
    weights = right.topk_weights.index_fill(1, torch.tensor([0]), float("nan"))
    sent = dispatcher.dispatch(_x(), Routing(ids, weights))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), _x() * weights[:, 1:])


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_tensors_on_another_device_than_configured(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        build_dispatcher(small_config(backend, device="cuda"), group).dispatch(_x(), routing(6))

    raises_everywhere(outcomes_on(body, size), InputError, "x must be on cuda, got cpu", "change config.device")


@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_lengths_above_s_are_refused_though_the_plan_did_not_know_s(backend: str) -> None:
    dispatcher = build_dispatcher(small_config(backend))
    plan = dispatcher.plan(BSHD([3, 4]))
    with pytest.raises(LayoutError, match=r"lengths must lie in 0\.\.3 \(S\), got 4"):
        dispatcher.dispatch(_x().view(2, 3, -1), routing(6), plan)


@pytest.mark.parametrize("debug", [False, True])
def test_a_plan_that_ends_elsewhere_is_refused_when_it_is_made(debug: bool) -> None:
    dispatcher = build_dispatcher(small_config("local", debug=debug))
    with pytest.raises(LayoutError, match="must end at the number of rows, got 7 and 6 rows"):
        dispatcher.plan(THD([0, 7]), like=_x())


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_double_backward_is_refused(backend: str, size: int, verb: str) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        x = _x().requires_grad_()
        sent = dispatcher.dispatch(x, routing(6))
        # Of combine alone: a leaf in the place of what the experts return.
        y = sent.rows if verb == "dispatch" else dispatcher.combine(sent.rows.detach().requires_grad_(), sent)
        torch.autograd.grad(y.square().sum(), x, create_graph=True, allow_unused=True)

    texts = (f"Dispatcher.{verb}: double backward is not supported", "create_graph=True")
    raises_everywhere(outcomes_on(body, size), StateError, *texts)


@pytest.mark.parametrize("skip", [True, False])
def test_double_backward_is_refused_where_rows_are_cut(skip: bool) -> None:
    dispatcher = build_dispatcher(small_config("local"))
    x = _x().requires_grad_()
    sent = dispatcher.dispatch(x, routing(6), Rows(4 if skip else None))
    with pytest.raises(StateError, match="double backward is not supported"):
        torch.autograd.grad(dispatcher.combine(sent.rows, sent).square().sum(), x, create_graph=True)
