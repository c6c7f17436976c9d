"""Ranks that make different calls: where sizes agree, only a comparison of their calls tells that numbers are wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatcher, Routing, build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers.trail import Trail
from moe_dispatch.errors import InputError
from moe_dispatch.recompute import keep_routes
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25
from tests.dispatchers.layer import (
    SAFE,
    Group,
    by_operators,
    caught,
    identity_round,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

OF_PACKETS: list[Any] = ["alltoall", "allgather"]
VENDORS: list[Any] = [V1, V2, V25, HYBRID, RAGGED]
ORDER = "ranks must make the same calls in the same order"
Call = Callable[[Dispatcher, bool], Any]


def built(group: Group, backend: Any, **fields: Any) -> Dispatcher:
    if backend in VENDORS:
        fields = {"hidden_size": 256, "wire": "bfloat16", **fields}
    return build_dispatcher(small_config(backend, **fields), group)


def send(
    dispatcher: Dispatcher, *, dtype: torch.dtype = torch.float32, plan: bool = False, **carry: Tensor
) -> tuple[Any, Tensor]:
    x = random_rows(4, dispatcher.config.hidden_size, dtype=dtype).requires_grad_()
    settled = dispatcher.plan(like=x) if plan else None
    return dispatcher.dispatch(x, random_routing(4), settled, carry=carry or None), x


TOKENS = torch.arange(4)
CARRIED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one rank carries": ({"token": TOKENS}, {}, "carry: token (int64)"),
    "more names": ({"token": TOKENS}, {"token": TOKENS, "adapter": TOKENS}, "carry: adapter (int64), token (int64)"),
    "another dtype": ({"token": TOKENS}, {"token": TOKENS.int()}, "carry: token (int32)"),
}
OF_ANY_BACKEND: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another name": ({"token": TOKENS}, {"other": TOKENS}, "carry: other (int64)"),
    "dtype of x": ({"dtype": torch.bfloat16}, {"dtype": torch.float16}, "the dtype of x: float16"),
}
DIFFERENT = [
    pytest.param(backend, *difference, id=f"{backend}, {name}")
    for backends, differences in ((OF_PACKETS, CARRIED | OF_ANY_BACKEND), (VENDORS, OF_ANY_BACKEND))
    for backend, (name, difference) in itertools.product(backends, differences.items())
]


@pytest.mark.parametrize(("backend", "mine", "its", "told"), DIFFERENT)
def test_check_names_facts_that_differ(backend: Any, mine: dict[str, Any], its: dict[str, Any], told: str) -> None:
    """All of them were garbage on all ranks, and nothing said so."""

    def body(group: Group) -> Exception:
        dispatcher = built(group, backend, **SAFE)
        send(dispatcher, **mine)
        dispatcher.check()
        sent, _ = send(dispatcher, **(its if group.rank() == 2 else mine))
        dispatcher.combine(sent.rows, sent).sum().backward()
        with pytest.raises(InputError) as found:
            dispatcher.check()
        send(dispatcher, **mine)
        dispatcher.check()
        return found.value

    results = on_ranks(body, 4)
    raises_everywhere(results, InputError, ORDER, told, "on rank 2", "on ranks 0, 1, 3", "Results since then are wrong")
    assert len(set(map(str, results))) == 1


@pytest.mark.parametrize(("mine", "its", "told"), CARRIED.values(), ids=CARRIED)
def test_allgather_with_a_plan_compares_marks_with_its_counts(
    mine: dict[str, Any], its: dict[str, Any], told: str
) -> None:
    def body(group: Group) -> Exception:
        dispatcher = built(group, "allgather")
        with pytest.raises(InputError) as found:
            send(dispatcher, plan=True, **(its if group.rank() == 1 else mine))
        sent, _ = send(dispatcher, plan=True, **mine)
        assert sent.carried is not None
        return found.value

    raises_everywhere(on_ranks(body, 4), InputError, "Ranks disagree on carry", told.removeprefix("carry: "))


def test_retry_on_overflow_names_them_too() -> None:
    def body(group: Group) -> Any:
        dispatcher = built(group, "alltoall", **SAFE)
        step = partial(send, dispatcher, dtype=torch.bfloat16 if group.rank() else torch.float16)
        return dispatcher.retry_on_overflow(step)

    raises_everywhere(outcomes(body, 2), InputError, "Dispatcher.retry_on_overflow", ORDER, "the dtype of x: float16")


def test_one_rank_keeps_its_routes() -> None:
    """Its recomputation would send fewer bytes than its peers await."""

    def body(group: Group) -> Any:
        dispatcher = built(group, "alltoall", **SAFE)
        x = random_rows(4).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            sent = dispatcher.dispatch(x, random_routing(4))
            return dispatcher.combine(sent.rows, sent)

        kept: dict[str, Any] = {"context_fn": keep_routes} if group.rank() == 0 else {}
        checkpoint(layer, x, use_reentrant=False, **kept)
        return caught(dispatcher.check)

    raises_everywhere(on_ranks(body, 2), InputError, "and a recomputation takes the same route) on rank 0")


def _backwards(dispatcher: Dispatcher, swapped: bool) -> None:
    calls = [send(dispatcher) for _ in range(2)]
    results = [dispatcher.combine(sent.rows, sent) for sent, _ in calls]
    for result in reversed(results) if swapped else results:
        result.sum().backward()


def _combines(dispatcher: Dispatcher, swapped: bool) -> None:
    calls = [send(dispatcher)[0] for _ in range(2)]
    for sent in reversed(calls) if swapped else calls:
        dispatcher.combine(sent.rows, sent)


def _dispatches_again(dispatcher: Dispatcher, swapped: bool) -> None:
    calls = [send(dispatcher)[0] for _ in range(2)]
    x = random_rows(4, dispatcher.config.hidden_size)
    for sent in reversed(calls) if swapped else calls:
        dispatcher.dispatch(x, again=sent)


def _combines_of_again(dispatcher: Dispatcher, swapped: bool) -> None:
    sent, x = send(dispatcher)
    calls = [dispatcher.dispatch(x.detach() * factor, again=sent) for factor in (2, 3)]
    for again in reversed(calls) if swapped else calls:
        dispatcher.combine(again.rows, again)


def _backwards_of_dispatches(dispatcher: Dispatcher, swapped: bool) -> None:
    rows = [send(dispatcher)[0].rows.sum() for _ in range(2)]
    for each in reversed(rows) if swapped else rows:
        each.backward()


ORDERS: dict[str, tuple[Call, str]] = {
    "backwards": (_backwards, "combine.backward of call"),
    "combines": (_combines, "combine of call"),
    "again": (_dispatches_again, "dispatch again"),
    "combines of again": (_combines_of_again, "combine of call"),
    "backwards of dispatch": (_backwards_of_dispatches, "dispatch.backward of call"),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("backend", [*OF_PACKETS, *VENDORS], ids=str)
def test_check_names_another_order(backend: Any, name: str) -> None:
    """The gradients of two micro-batches were mixed silently."""
    call, told = ORDERS[name]

    def body(group: Group) -> Exception:
        dispatcher = built(group, backend, **SAFE)
        call(dispatcher, False)
        dispatcher.check()
        call(dispatcher, group.rank() == 1)
        with pytest.raises(InputError) as found:
            dispatcher.check()
        call(dispatcher, True)  # all ranks
        dispatcher.check()
        return found.value

    raises_everywhere(on_ranks(body, 4), InputError, ORDER, told, "on ranks 0, 2, 3", "on rank 1")


EAGER: list[Any] = [
    *("alltoall", "allgather", V2, V25, HYBRID, RAGGED),
    {"name": "alltoall", "reduction": "exact"},
    {"name": "alltoall_by_node", "ranks_per_node": 1},
]


@pytest.mark.parametrize("name", ["backwards", "combines"])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("backend", EAGER, ids=str)
def test_the_next_eager_call_names_another_order(backend: Any, planned: bool, name: str) -> None:
    call, told = ORDERS[name]

    def body(group: Group) -> Exception:
        dispatcher = built(group, backend)
        for _ in range(2):
            call(dispatcher, False)
        call(dispatcher, group.rank() == 1)
        with pytest.raises(InputError) as found:
            send(dispatcher, plan=planned)
        call(dispatcher, False)
        send(dispatcher, plan=planned)
        return found.value

    verb = "plan" if planned and backend not in (EAGER[0], *EAGER[-2:]) else "dispatch"
    raises_everywhere(on_ranks(body, 2), InputError, f"Dispatcher.{verb}: {ORDER}", told, "on rank 0", "on rank 1")


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", V1], ids=str)
def test_debug_names_another_order_before_rows_travel(backend: Any, fields: dict[str, Any], name: str) -> None:
    """Of other sizes, they end the process on gloo."""
    call, told = ORDERS[name]

    def body(group: Group) -> Any:
        dispatcher = built(group, backend, debug=True, **fields)
        call(dispatcher, False)
        return caught(call, dispatcher, group.rank() == 1)

    raises_everywhere(on_ranks(body, 2), InputError, "Ranks disagree on the call", told)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_one_rank_may_run_operators(backend: str, fields: dict[str, Any]) -> None:
    """They do not know which call belongs to which. What they know is compared."""

    def layer(dispatcher: Dispatcher, x: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, random_routing(4))
        return dispatcher.combine(sent.rows, sent)

    def body(group: Group) -> Any:
        dispatcher = built(group, backend, **fields)
        dtypes = (torch.float32, torch.bfloat16 if group.rank() else torch.float16)
        for dtype in dtypes[: 1 + bool(fields)]:
            x = random_rows(4, dtype=dtype).requires_grad_()
            run = partial(layer, dispatcher)
            for _ in range(2):
                (by_operators(run, x) if group.rank() == 0 else run(x)).sum().backward()
            if fields and dtype == torch.float32:
                dispatcher.check()
        return caught(dispatcher.check) if fields else identity_round(dispatcher)

    results = on_ranks(body, 4)
    if fields:
        raises_everywhere(results, InputError, ORDER, "the dtype of x: float16")


@pytest.mark.parametrize("backend", [*OF_PACKETS, *VENDORS], ids=str)
def test_planted_calls_that_leave_no_mark_go_unnoticed(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So these tests fail without the marks, and nothing else sees the difference."""
    monkeypatch.setattr(Trail, "follow", lambda *_, **__: 0)

    def body(group: Group) -> None:
        dispatcher = built(group, backend, **SAFE)
        sent, _ = send(dispatcher, dtype=torch.float16 if group.rank() else torch.bfloat16)
        dispatcher.combine(sent.rows, sent).sum().backward()
        _backwards(dispatcher, group.rank() == 1)
        dispatcher.check()

    on_ranks(body, 2)


CALLS = st.lists(st.tuples(st.sampled_from(["dispatch", "combine"]), st.integers(0, 3)), max_size=12)


@settings(deadline=None)
@given(CALLS, CALLS)
def test_trails_are_equal_only_for_equal_calls(mine: list[tuple[str, int]], its: list[tuple[str, int]]) -> None:
    def number(calls: list[tuple[str, int]]) -> int:
        trail = Trail(cast(Communicator, SimpleNamespace(size=2)), None)
        for what, dispatcher in calls:
            trail.follow(what, torch.device("cpu"), dispatcher=dispatcher)
        return trail.value

    assert (number(mine) == number(its)) == (mine == its)
    assert number(mine[::-1]) == number(mine) or mine != mine[::-1]


def test_routings_of_other_sizes_and_orders_are_no_difference() -> None:
    """Only what must be equal is compared: not rows, ids, weights, or which tensors require grad."""

    def body(group: Group) -> None:
        dispatcher = built(group, "alltoall", graph_safe=True, max_tokens_per_rank=8)
        for step in range(3):
            rows = (group.rank() + step) % 4
            x = random_rows(rows, seed=group.rank()).requires_grad_(group.rank() > 0)
            sent = dispatcher.dispatch(x, Routing(*_parts(rows, group.rank())))
            dispatcher.combine(sent.rows.detach() if group.rank() == 1 else sent.rows, sent).sum().backward()
            dispatcher.check()

    on_ranks(body, 4)


def _parts(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    routing = random_routing(rows, seed)
    return routing.topk_ids, routing.topk_weights.requires_grad_(seed == 2)
