"""A call that is wrong or unlike on one rank: it raises, its peers are told, and the group is good for the next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.backends.marks import MARKED_DISPATCHERS, WANTS_WEIGHTS, marks_agree
from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.dispatchers.agreement import mark_of
from moe_dispatch.dispatchers.checks import ROW_DTYPES
from moe_dispatch.errors import ConfigError, InputError, LayoutError, PeerError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import Permutation
from tests.dispatchers.layer import (
    HIDDEN,
    SAFE,
    Group,
    by_operators,
    identity_round,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)
from tests.dispatchers.layer import random_routing as routing
from tests.dispatchers.layer import random_rows as rows

WRONG = 3  # of 4


class Fickle(Dispatcher):
    """It has no layout for rows of 5 tokens."""

    def layout_of(self, x: Tensor) -> Layout:
        if len(x) == 5:
            raise RuntimeError("no layout today")
        return Rows()


# Where ranks exchange something anyway, or always (debug): the fields, and whether a plan may be given beforehand.
EXCHANGES: list[tuple[dict[str, Any], bool]] = [
    ({"backend": "alltoall"}, True),
    ({"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}}, True),
    ({"backend": "allgather"}, False),
    ({"backend": "allgather", "row_counts": "check"}, False),
    ({"backend": "alltoall", "debug": True}, True),
    ({"backend": "allgather", "debug": True}, True),
    ({"backend": "allgather", "row_counts": "assume", "debug": True}, True),
    ({"backend": "allgather", "row_counts": "static", "max_tokens_per_rank": 8, "debug": True}, True),
]
# A dispatcher, 1 on the rank whose call is wrong, and a plan or None.
Call = Callable[[Fickle, int, Any], Any]


COUNTS: Any = (
    lambda d, wrong, plan: d.dispatch(rows(4), routing(4 + wrong), plan),
    InputError,
    "Dispatcher.dispatch: x has 4 tokens but routing has 5.",
)
THD_TEXT = "THD: cu_seqlens must not decrease, got [0, 2, 1, 4]."
LAYOUT: Any = (
    lambda d, wrong, plan: d.dispatch(rows(4), routing(4), THD([0, 2, 1, 4]) if wrong else plan),
    LayoutError,
    THD_TEXT,
)
PLAN: Any = (
    lambda d, wrong, plan: d.plan(THD([0, 2, 1, 4] if wrong else [0, 2, 4]), like=rows(4)),
    LayoutError,
    THD_TEXT,
)
NO_LAYOUT: Any = (
    lambda d, wrong, plan: d.dispatch(rows(4 + wrong), routing(4 + wrong), plan),
    RuntimeError,
    "no layout today",
)
INFINITE: Any = (
    lambda d, wrong, plan: d.dispatch(
        rows(4), Routing(routing(4).topk_ids, torch.tensor([[1.0, float("inf") if wrong else 1]] * 4))
    ),
    InputError,
    "topk_weights must be finite, got 4 that are not",
)


def too_many(text: str, *, planned: bool = False) -> Any:
    def call(d: Fickle, wrong: int, plan: Any) -> Any:
        return d.dispatch(rows(4 + wrong), routing(4 + wrong), d.plan(Rows()) if planned else Rows())

    return call, InputError, text


MAXIMUM = "at most max_tokens_per_rank (4) rows per rank, got 5"
FIT = "at most 4 rows per rank fit, got 5"
STATIC: dict[str, Any] = {"row_counts": "static", "max_tokens_per_rank": 4}
Case = tuple[dict[str, Any], bool, Call, type[Exception], str]
CASES: list[Case] = [
    *((fields, may_plan, *COUNTS) for fields, may_plan in EXCHANGES),
    ({"backend": "alltoall"}, False, *COUNTS),
    ({"backend": "allgather", "debug": True}, False, *COUNTS),
    *((EXCHANGES[at][0], False, *LAYOUT) for at in (0, 1, 2, 5)),
    *((EXCHANGES[at][0], False, *NO_LAYOUT) for at in (0, 3, 4, 6)),
    *((EXCHANGES[at][0], False, *PLAN) for at in (4, 6, 7)),  # nothing is agreed on in a plan
    ({"debug": True}, False, *INFINITE),
    *(({**STATIC, "debug": debug}, False, *too_many(MAXIMUM)) for debug in (False, True)),
    *(({"constraints": {"max_rows": 4}, "debug": debug}, False, *too_many(FIT)) for debug in (False, True)),
    ({**SAFE, "backend": "alltoall", "debug": True}, False, *too_many(MAXIMUM)),
    ({**SAFE, "backend": "allgather", "debug": True}, False, *too_many(MAXIMUM, planned=True)),
]


@pytest.mark.parametrize(("fields", "planned", "call", "kind", "reason"), CASES)
def test_peers_of_a_refusing_rank_are_told(
    fields: dict[str, Any], planned: bool, call: Call, kind: type[Exception], reason: str
) -> None:
    def body(group: Group) -> Exception:
        dispatcher = Fickle(small_config(**fields), group)
        plan = dispatcher.plan(Rows(), like=rows(4)) if planned else None
        with pytest.raises(Exception) as caught:  # noqa: PT011 - told apart below
            call(dispatcher, int(group.rank() == WRONG), plan)
        identity_round(dispatcher)
        return caught.value

    results = on_ranks(body, 4)
    raises_everywhere(results[WRONG:], kind, reason)
    told = f"RuntimeError: {reason}" if kind is RuntimeError else str(results[WRONG])
    assert [str(result) for result in results[:WRONG]] == [f"rank {WRONG} refused: {told} [MD08]"] * WRONG
    raises_everywhere(results[:WRONG], PeerError)


def test_two_refusing_ranks_are_both_named_where_counts_are_exchanged() -> None:
    def body(group: Group) -> None:
        wrong = {1: (5, None), 2: (4, THD([0, 3]))}.get(group.rank(), (4, None))
        build_dispatcher(small_config(), group).dispatch(rows(4), routing(wrong[0]), wrong[1])

    results = outcomes(body, 4)
    told = f"rank 1 refused: {results[1]}; rank 2 refused: {results[2]}"
    raises_everywhere([results[0], results[3]], PeerError, told)
    assert isinstance(results[1], InputError)
    assert isinstance(results[2], LayoutError)


def test_check_names_both_numbers_and_ranks_everywhere() -> None:
    def body(group: Group) -> Exception:
        dispatcher = build_dispatcher(small_config("allgather", row_counts="check"), group)
        with pytest.raises(InputError) as caught:
            dispatcher.plan(Rows(), like=torch.empty([4, 4, 7, 3][group.rank()], HIDDEN))
        identity_round(dispatcher)
        return caught.value

    texts = 'row_counts="check" needs equal rows', "got 7 on rank 2 and 3 on rank 3", 'use row_counts="agree"'
    raises_everywhere(on_ranks(body, 4), InputError, *texts)


UNKNOWN = r"backend 'allgather' needs row counts, which BSHD does not know.*like=x"
PLANS: list[tuple[dict[str, Any], Callable[[Dispatcher], Any], str]] = [
    ({"row_counts": "agree"}, lambda d: d.plan(BSHD()), UNKNOWN),
    ({"row_counts": "assume"}, lambda d: d.plan(BSHD()), UNKNOWN),
    (STATIC, lambda d: d.plan(Rows(), like=rows(5)), r"at most max_tokens_per_rank \(4\) rows per rank, got 5"),
    ({"row_counts": "assume", "constraints": {"max_rows": 8}}, lambda d: d.plan(like=rows(9)), "at most 8 rows"),
]


@pytest.mark.parametrize(("fields", "call", "text"), PLANS)
def test_plans_that_raise_before_anything_is_exchanged(
    fields: dict[str, Any], call: Callable[[Dispatcher], Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        call(build_dispatcher(small_config("allgather", **fields)))


@pytest.mark.parametrize("backend", ["allgather", "alltoall"])
def test_peers_wait_no_longer_than_the_group_without_debug(backend: str) -> None:
    """Nothing is exchanged but rows of fixed size, so nobody can tell them: that would be a host sync."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        count = 5 if group.rank() else 4
        with pytest.raises(InputError if group.rank() else RuntimeError):
            dispatcher.dispatch(rows(count), routing(count))

    assert outcomes(body, 2, seconds=0.3) == [None] * 2


@pytest.mark.parametrize(("backend", "step"), [("alltoall", "merge_slots"), ("allgather", "valid_ids")])
def test_memory_that_runs_out_while_ids_are_cleaned_is_told(
    backend: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out on rank 1 only, whose rows name no expert but 0."""
    plain = getattr(Permutation, step)

    def fails(ids_TK: Tensor, *args: Any, **options: Any) -> Any:
        if int(ids_TK.max()) == 0:
            raise RuntimeError("out of memory")
        return plain(ids_TK, *args, **options)

    monkeypatch.setattr(Permutation, step, staticmethod(fails))

    def body(group: Group) -> None:
        x = rows(4)
        ids = torch.tensor([[0, -1]] * 4) if group.rank() else torch.tensor([[0, 1]] * 4)
        build_dispatcher(small_config(backend, top_k=2), group).dispatch(x, Routing(ids, torch.rand(4, 2)))

    first, second = outcomes(body, 2)
    assert isinstance(first, PeerError)
    assert "rank 1 refused: RuntimeError: out of memory" in str(first)
    assert isinstance(second, RuntimeError)


FACTS: dict[str, Any] = {"dtypes": ["bfloat16"], "rows": 64, "options": {"name": "alltoall", "factor": 1}}


def _entered(size: int, *by_rank: dict[str, Any]) -> list[Any]:
    """What ``raise_alike`` returned or raised on each rank, given ``by_rank``; the last entry is for all ranks left."""

    def body(group: Group) -> list[int]:
        given = {"problem": None, **by_rank[min(group.rank(), len(by_rank) - 1)]}
        return raise_alike(Communicator(group), given.pop("problem"), label="test", **given)

    return outcomes(body, size)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({**FACTS, "rows": 32}, "Ranks disagree on rows: rank 0 has 64, rank 2 has 32. Give every rank the same"),
        ({}, "Ranks disagree on dtypes: rank 0 has ['bfloat16'], rank 2 has nothing."),
        ({**FACTS, "newer": None}, "Ranks disagree on newer: rank 0 has nothing, rank 2 has None."),
    ],
)
def test_facts_that_differ_are_named_with_both_values_on_every_rank(other: dict[str, Any], told: str) -> None:
    results = _entered(3, {"facts": FACTS}, {"facts": FACTS}, {"facts": other})
    raises_everywhere(results, ConfigError, told)
    assert len({str(result) for result in results}) == 1


def test_a_problem_comes_before_facts_that_differ() -> None:
    problem = InputError("x is wrong.")
    results = _entered(2, {"facts": FACTS}, {"facts": {}, "problem": problem})
    raises_everywhere(results[:1], PeerError, "rank 1 refused: x is wrong.")
    assert results[1] is problem


@pytest.mark.parametrize("facts", [None, FACTS], ids=["no facts", "facts"])
def test_a_peer_that_left(facts: dict[str, Any] | None) -> None:
    problem = InputError("x is wrong.")

    def body(group: Group) -> None:
        if group.rank() < 2:
            raise_alike(Communicator(group), problem if group.rank() == 0 else None, facts=facts, label="test")

    mine, peer, absent = outcomes(body, 3, seconds=0.3)
    assert mine is problem
    assert mine.__notes__[0].startswith("The other ranks were not told: ")
    assert mine.__context__ is None
    assert isinstance(peer, RuntimeError)
    assert not isinstance(peer, PeerError), "it heard of nothing, so it must not say that a rank refused"
    assert absent is None


HYBRID = {"name": "hybridep", "emulate": "hybridep-744"}
# The fields, and whether the call has a plan, for each exchange that tells of the call.
TOLD_BY: dict[str, tuple[dict[str, Any], bool]] = {
    "counts": ({"backend": "alltoall"}, False),
    "counts, plan": ({"backend": "alltoall"}, True),
    "counts, by node": ({"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}}, False),
    "agreement": ({"backend": "allgather"}, False),
    "check": ({"backend": "allgather", "row_counts": "check"}, False),
    "agreement on the largest": ({"backend": HYBRID, "hidden_size": 32, "wire": "bfloat16"}, False),
    "debug": ({"backend": "alltoall", "debug": True}, False),
    "debug, plan": ({"backend": "allgather", "debug": True}, True),
    "debug, graph-safe": ({"backend": "alltoall", "debug": True, "graph_safe": True, "max_tokens_per_rank": 4}, False),
}


def call(dispatcher: Dispatcher, planned: bool, dtype: torch.dtype = torch.float32) -> Any:
    x = random_rows(4, dispatcher.config.hidden_size, dtype=dtype)
    return dispatcher.dispatch(x, random_routing(4), dispatcher.plan(like=x) if planned else None)


@pytest.mark.parametrize("name", TOLD_BY)
def test_dtypes_and_grad_modes_that_differ(name: str) -> None:
    """gloo ended a process that received more than it had room for, and peers of a rank without gradients hung."""
    fields, planned = TOLD_BY[name]

    def body(group: Group) -> list[Exception]:
        dispatcher = build_dispatcher(small_config(**fields), group)
        errors: list[Exception] = []
        for unlike in (partial(call, dtype=torch.float64), torch.no_grad()(call)):
            with pytest.raises(InputError) as caught:
                (unlike if group.rank() else call)(dispatcher, planned)
            errors.append(caught.value)
            call(dispatcher, planned)
        return errors

    of_dtypes, of_modes = zip(*on_ranks(body, 2), strict=True)
    text = "Ranks disagree on the dtype of x: rank 0 has 'float32', rank 1 has 'float64'. Make the same call on every"
    raises_everywhere([*of_dtypes], InputError, text)
    text = "Ranks disagree on grad mode: rank 0 has 'enabled', rank 1 has 'disabled'."
    raises_everywhere([*of_modes], InputError, text)


@pytest.mark.parametrize(
    ("debug", "verb", "told"),
    [
        # Without a plan a rank agrees on sizes, which its peer has done before.
        (True, "dispatch", "rank 0 has 'dispatch without a plan', rank 1 has 'dispatch with a plan'."),
        (True, "plan", "rank 0 has 'dispatch without a plan', rank 1 has 'plan'."),
        (False, "plan", "rank 0 has 'dispatch without a plan', rank 1 has 'plan'."),
    ],
)
def test_a_dispatch_without_a_plan_meets_another_call(debug: bool, verb: str, told: str) -> None:
    def body(group: Group) -> Exception:
        dispatcher, x = build_dispatcher(small_config("allgather", debug=debug), group), random_rows(4)
        plan = dispatcher.plan(Rows(), like=x)
        if group.rank() == 1 and verb == "plan":
            unlike: Any = partial(dispatcher.plan, like=x)
        else:
            unlike = partial(dispatcher.dispatch, x, random_routing(4), plan if group.rank() else None)
        with pytest.raises(InputError) as caught:
            unlike()
        identity_round(dispatcher)
        return caught.value

    raises_everywhere(on_ranks(body, 2), InputError, f"Ranks disagree on the call: {told}")


def test_numbers_of_the_exchange_of_counts_tell_all_calls_apart() -> None:
    marks = {mark_of((dtype, recorded), False) for dtype in ROW_DTYPES for recorded in (False, True)}
    assert len(marks) == 2 * len(ROW_DTYPES)
    assert min(marks) >= 0
    assert max(marks) + MARKED_DISPATCHERS + WANTS_WEIGHTS < 2**22
    mark = min(marks)
    assert marks_agree([mark, mark])
    assert marks_agree([mark, mark + WANTS_WEIGHTS]), "whose weights require grad may differ"
    assert not any(
        marks_agree([mark, other, *more]) for other in marks - {mark} for more in ([], [mark + WANTS_WEIGHTS])
    )


@pytest.mark.parametrize("name", [name for name in TOLD_BY if name != "check"])
def test_one_rank_swaps_two_layers(name: str) -> None:
    """The rows have equal sizes, so nothing else tells that they reach the experts of another layer."""
    fields, planned = TOLD_BY[name]

    def body(group: Group) -> Exception:
        layers = [build_dispatcher(small_config(**fields), group, name=name) for name in ("layers.0", "layers.1")]
        layers = copy.deepcopy(layers)  # a copy stands for its original
        with pytest.raises(InputError) as caught:
            call(layers[group.rank() == 2], planned)
        for layer in layers:
            call(layer, planned)
        return caught.value

    text = "Ranks disagree on the dispatcher: rank 0 has \"'layers.0', number 0\", rank 2 has \"'layers.1', number 1\"."
    raises_everywhere(on_ranks(body, 4), InputError, text)


@pytest.mark.parametrize("name", ["counts", "agreement", "debug"])
def test_names_may_differ_and_operators_do_not_know_them(name: str) -> None:
    """One rank may fall back to eager mode where the others run compiled code."""
    fields, _ = TOLD_BY[name]

    def body(group: Group) -> None:
        rank = group.rank()
        build_dispatcher(small_config(**fields), group)
        layer = build_dispatcher(small_config(**fields), group, name=f"layers.{rank}")
        for eager in (True, rank == 1):
            sent = call(layer, False) if eager else dispatch_by_operators(layer)
            assert len(layer.combine(sent.rows, sent)) == 4

    assert on_ranks(body, 2) == [None, None]


def dispatch_by_operators(dispatcher: Dispatcher, dtype: torch.dtype = torch.float32) -> Dispatched:
    x = random_rows(4, dtype=dtype).requires_grad_()
    return by_operators(lambda x: dispatcher.dispatch(x, random_routing(4)), x)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_dtypes_that_differ_in_operators(backend: str) -> None:
    def body(group: Group) -> Dispatched:
        dispatcher = build_dispatcher(small_config(backend), group)
        return dispatch_by_operators(dispatcher, torch.float64 if group.rank() else torch.float32)

    raises_everywhere(outcomes(body, 2), InputError, "Ranks disagree on the dtype of x")


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("way", ["operators", "async_op", "requires_grad", "layout"])
def test_calls_that_may_differ(backend: str, way: str) -> None:
    """They exchange the same bytes in the same order."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend), group)
        x, routing = random_rows(4), random_routing(4)
        if group.rank() == 0:
            sent = dispatcher.dispatch(x.requires_grad_(), routing)
        elif way == "operators":
            sent = dispatch_by_operators(dispatcher)
        elif way == "async_op":
            sent = dispatcher.dispatch(x.requires_grad_(), routing, async_op=True).wait()
        else:
            sent = dispatcher.dispatch(x, routing, Rows(3) if way == "layout" else None)
        dispatcher.combine(sent.rows, sent).sum().backward()
        identity_round(dispatcher)

    on_ranks(body, 2)
