"""Ranks that make unlike calls: refused by name on every rank, where ranks exchange something before rows travel."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatched, Dispatcher, Rows, build_dispatcher
from moe_dispatch.backends.base import MARKED_DISPATCHERS, WANTS_WEIGHTS, marks_agree
from moe_dispatch.dispatchers.agreement import mark_of
from moe_dispatch.dispatchers.checks import ROW_DTYPES
from moe_dispatch.errors import InputError
from tests.dispatchers.layer import (
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

HYBRID = {"name": "hybridep", "emulate": "hybridep-744"}
# The fields, and whether the call has a plan, for each exchange that tells of the call.
EXCHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "counts": ({"backend": "alltoall"}, False),
    "counts, plan": ({"backend": "alltoall"}, True),
    "counts, two levels": ({"backend": {"name": "alltoall", "levels": 2, "ranks_per_node": 2}}, False),
    "agreement": ({"backend": "allgather"}, False),
    "check": ({"backend": "allgather", "row_counts": "check"}, False),
    "agreement on the largest": ({"backend": HYBRID, "hidden_size": 32, "wire_dtype": "bfloat16"}, False),
    "debug": ({"backend": "alltoall", "debug": True}, False),
    "debug, plan": ({"backend": "allgather", "debug": True}, True),
    "debug, graph-safe": ({"backend": "alltoall", "debug": True, "graph_safe": True, "max_tokens_per_rank": 4}, False),
}


def call(dispatcher: Dispatcher, planned: bool, dtype: torch.dtype = torch.float32) -> Any:
    x = random_rows(4, dispatcher.config.hidden_size, dtype=dtype)
    return dispatcher.dispatch(x, random_routing(4), dispatcher.plan(like=x) if planned else None)


@pytest.mark.parametrize("name", EXCHANGES)
def test_dtypes_and_grad_modes_that_differ(name: str) -> None:
    """gloo ended a process that received more than it had room for, and peers of a rank without gradients hung."""
    fields, planned = EXCHANGES[name]

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
    marks = {mark_of(dtype, recorded, None, False) for dtype in ROW_DTYPES for recorded in (False, True)}
    assert len(marks) == 2 * len(ROW_DTYPES)
    assert min(marks) >= 0
    assert max(marks) + MARKED_DISPATCHERS + WANTS_WEIGHTS < 2**22
    mark = min(marks)
    assert marks_agree([mark, mark])
    assert marks_agree([mark, mark + WANTS_WEIGHTS]), "whose weights require grad may differ"
    assert not any(
        marks_agree([mark, other, *more]) for other in marks - {mark} for more in ([], [mark + WANTS_WEIGHTS])
    )


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name != "check"])
def test_one_rank_swaps_two_layers(name: str) -> None:
    """The rows have equal sizes, so nothing else tells that they reach the experts of another layer."""
    fields, planned = EXCHANGES[name]

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
    fields, _ = EXCHANGES[name]

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
