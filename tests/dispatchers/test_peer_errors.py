"""A call that is wrong on one rank: it raises there, its peers are told, and the group is good for the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, THD, Dispatcher, Rows, build_dispatcher
from moe_dispatch.errors import InputError, LayoutError, PeerError, StateError
from moe_dispatch.layouts import Layout
from tests.dispatchers.layer import HIDDEN, Group, identity_round, outcomes, raises_everywhere, small_config
from tests.dispatchers.layer import random_routing as routing
from tests.dispatchers.layer import random_rows as rows

WRONG = 3

# Where ranks exchange something anyway, or always (debug): the fields, and whether a plan may be given beforehand.
EXCHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "counts": ({"backend": "alltoall"}, True),
    "counts, two levels": ({"backend": {"name": "alltoall", "levels": 2, "ranks_per_node": 2}}, True),
    "agreement": ({"backend": "allgather"}, False),
    "check": ({"backend": "allgather", "row_counts": "check"}, False),
    "debug, counts": ({"backend": "alltoall", "debug": True}, True),
    "debug, agreement": ({"backend": "allgather", "debug": True}, True),
    "debug, assume": ({"backend": "allgather", "row_counts": "assume", "debug": True}, True),
    "debug, static": ({"backend": "allgather", "row_counts": "static", "max_tokens_per_rank": 8, "debug": True}, True),
}


class Fickle(Dispatcher):
    """Its layout is wrong when asked to be."""

    broken: bool

    def layout_of(self, x: Tensor) -> Layout:
        if self.broken:
            raise RuntimeError("no layout today")
        return BSHD() if x.dim() == 3 else Rows()


Call = Callable[[Fickle, Any], Any]
FAULTS: dict[str, tuple[Call, type[Exception], str]] = {
    "tensors": (
        lambda d, plan: d.dispatch(rows(4), routing(5), plan),
        InputError,
        "Dispatcher.dispatch: x has 4 tokens but routing has 5.",
    ),
    "hidden size": (
        lambda d, plan: d.dispatch(rows(4, HIDDEN * 2), routing(4), plan),
        InputError,
        f"Dispatcher.dispatch: x has hidden size {HIDDEN * 2}, hidden_size is {HIDDEN}.",
    ),
    "no tensor": (
        lambda d, plan: d.dispatch(cast(Any, None), routing(4), plan),
        InputError,
        "Dispatcher.dispatch: x must be a Tensor, got NoneType.",
    ),
    "layout": (
        lambda d, plan: d.dispatch(rows(4), routing(4), THD([0, 2, 1, 4])),
        LayoutError,
        "THD: cu_seqlens must not decrease, got [0, 2, 1, 4].",
    ),
    "anything else": (
        lambda d, plan: d.dispatch(rows(4), routing(4)),
        RuntimeError,
        "no layout today",
    ),
}


# The last two are faults of calls that bring no plan.
WITH_PLAN = ("tensors", "hidden size", "no tensor")
CASES = [
    (name, fault, planned)
    for name, (_, may_plan) in EXCHANGES.items()
    for fault in FAULTS
    for planned in ([False, True] if may_plan and fault in WITH_PLAN else [False])
]


@pytest.mark.parametrize(("name", "fault", "planned"), CASES)
def test_peers_of_a_refusing_rank_are_told(name: str, fault: str, planned: bool) -> None:
    call, kind, reason = FAULTS[fault]

    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = Fickle(small_config(**EXCHANGES[name][0]), group)
        dispatcher.broken = False
        plan = dispatcher.plan(Rows(), like=rows(4)) if planned else None
        dispatcher.broken = group.rank() == WRONG and fault == "anything else"
        with pytest.raises(Exception) as caught:  # noqa: PT011 - told apart below
            call(dispatcher, plan) if group.rank() == WRONG else dispatcher.dispatch(rows(4), routing(4), plan)
        dispatcher.broken = False
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], kind, reason)
    told = f"RuntimeError: {reason}" if kind is RuntimeError else str(results[WRONG])
    told = f"rank {WRONG} refused: {told} [MD08]"
    assert [str(result) for result in results[:WRONG]] == [told] * WRONG
    raises_everywhere(results[:WRONG], PeerError)


@pytest.mark.parametrize("name", ["debug, counts", "debug, assume", "debug, static"])
def test_a_wrong_plan_is_told_under_debug(name: str) -> None:
    """Also where a plan has nothing to agree on."""

    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config(**EXCHANGES[name][0]), group)
        with pytest.raises((LayoutError, PeerError)) as caught:
            dispatcher.plan(THD([0, 2, 1, 4] if group.rank() == WRONG else [0, 2, 4]), like=rows(4))
        dispatcher.plan(THD([0, 2, 4]), like=rows(4))
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], LayoutError)
    raises_everywhere(results[:WRONG], PeerError, f"rank {WRONG} refused: {results[WRONG]}")


def test_too_many_rows_under_assume_raise_before_anything_is_exchanged() -> None:
    config = small_config("allgather", row_counts="assume", constraints={"max_rows": 8})
    results = outcomes(lambda group: build_dispatcher(config, group).plan(like=rows(9)), 2)
    raises_everywhere(results, InputError, "Dispatcher.plan: at most 8 rows per rank fit, got 9")


def test_two_refusing_ranks_are_both_named_where_counts_are_exchanged() -> None:
    def body(group: Group) -> None:
        assert group is not None
        wrong = {1: (5, None), 2: (4, THD([0, 3]))}.get(group.rank(), (4, None))
        build_dispatcher(small_config(), group).dispatch(rows(4), routing(wrong[0]), wrong[1])

    results = outcomes(body, 4)
    told = f"rank 1 refused: {results[1]}; rank 2 refused: {results[2]}"
    raises_everywhere([results[0], results[3]], PeerError, told)
    assert isinstance(results[1], InputError)
    assert isinstance(results[2], LayoutError)


def test_values_wrong_on_one_rank_under_debug() -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config(debug=True), group)
        right = routing(4)
        if group.rank() == WRONG:
            right.topk_weights[0, 0] = float("inf")
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.dispatch(rows(4), right)
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], InputError, "topk_weights must be finite, got 1 that are not")
    raises_everywhere(results[:WRONG], PeerError, f"rank 3 refused: {results[WRONG]}")


@pytest.mark.parametrize("debug", [False, True])
def test_plan_of_another_dispatcher_on_one_rank(debug: bool) -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        mine = build_dispatcher(small_config(debug=debug), group)
        other = build_dispatcher(small_config(debug=debug, pad_multiple=4), group)
        maker = other if group.rank() == WRONG else mine
        plan = maker.plan(Rows(), like=rows(4))
        with pytest.raises((StateError, PeerError)) as caught:
            mine.dispatch(rows(4), routing(4), plan)
        identity_round(mine)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], StateError, "the plan must be made by")
    raises_everywhere(results[:WRONG], PeerError, f"rank 3 refused: {results[WRONG]}")


@pytest.mark.parametrize("policy", ["agree", "check"])
def test_plan_that_is_wrong_on_one_rank(policy: str) -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config("allgather", row_counts=policy), group)
        layouts = {0: None, 1: THD([1, 4])}
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.plan(layouts.get(group.rank(), THD([0, 4])))
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[:1], InputError, "a layout or like=x is needed")
    raises_everywhere(results[1:2], LayoutError, "must start at 0")
    told = f"rank 0 refused: {results[0]}; rank 1 refused: {results[1]}"
    raises_everywhere(results[2:], PeerError, told)


@pytest.mark.parametrize(("backend", "extra"), [("alltoall", {}), ("alltoall", {"debug": True})])
def test_more_rows_than_max_tokens_per_rank_on_one_rank(backend: str, extra: dict[str, Any]) -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        config = small_config(backend, row_counts="static", max_tokens_per_rank=4, **extra)
        dispatcher = build_dispatcher(config, group)
        count = 5 if group.rank() == WRONG else 4
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.dispatch(rows(count), routing(count))
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], InputError, "at most max_tokens_per_rank (4) rows per rank, got 5")
    raises_everywhere(results[:WRONG], PeerError, f"rank 3 refused: {results[WRONG]}")


@pytest.mark.parametrize("extra", [{}, {"debug": True}])
def test_more_rows_than_the_backend_takes_on_one_rank(extra: dict[str, Any]) -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config(constraints={"max_rows": 4}, **extra), group)
        count = 5 if group.rank() == WRONG else 4
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.dispatch(rows(count), routing(count))
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG:], InputError, "at most 4 rows per rank fit, got 5")
    raises_everywhere(results[:WRONG], PeerError, f"rank 3 refused: {results[WRONG]}")


def test_check_names_both_numbers_and_ranks_everywhere() -> None:
    counts = [4, 4, 7, 3]

    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config("allgather", row_counts="check"), group)
        with pytest.raises(InputError) as caught:
            dispatcher.plan(Rows(), like=torch.empty(counts[group.rank()], HIDDEN))
        identity_round(dispatcher)
        return caught.value

    texts = ('row_counts="check" needs equal rows on all ranks', "got 7 on rank 2 and 3 on rank 3", "Pad them alike")
    raises_everywhere(outcomes(body, 4), InputError, *texts)


@pytest.mark.parametrize("policy", ["agree", "assume"])
def test_a_plan_of_unknown_rows_where_they_are_needed(policy: str) -> None:
    dispatcher = build_dispatcher(small_config("allgather", row_counts=policy))
    with pytest.raises(InputError, match=r"backend 'allgather' needs row counts, and BSHD does not know.*like=x"):
        dispatcher.plan(BSHD())


def test_more_rows_than_max_tokens_per_rank_in_a_plan() -> None:
    dispatcher = build_dispatcher(small_config("allgather", row_counts="static", max_tokens_per_rank=4))
    with pytest.raises(InputError, match=r"at most max_tokens_per_rank \(4\) rows per rank, got 5"):
        dispatcher.plan(Rows(), like=rows(5))
