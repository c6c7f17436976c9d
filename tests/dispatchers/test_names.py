"""A dispatcher's name in its errors, and calls that must bring a layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_dispatch import BSHD, THD, Dispatcher, DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.dispatchers.opening import Group
from moe_dispatch.errors import InputError, LayoutError, PeerError
from moe_dispatch_testing.ranks import run_ranks

CONFIG = DispatcherConfig(backend="local", num_experts=4, top_k=2, hidden_size=8)
NAME = "stage 2, layers.7.mlp"


def routing(rows: int) -> Routing:
    return Routing(torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, 2))


@pytest.mark.parametrize("verb", ["plan", "dispatch", "again", "combine"])
def test_errors_of_every_verb_say_the_name(verb: str) -> None:
    dispatcher = build_dispatcher(CONFIG, name=NAME)
    sent = dispatcher.dispatch(torch.zeros(3, 8), routing(3))
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: dispatcher.plan(THD([0, 5]), like=torch.zeros(3, 8)),
        "dispatch": lambda: dispatcher.dispatch(torch.zeros(3, 8), routing(4)),
        "again": lambda: dispatcher.dispatch(torch.zeros(5, 8), again=sent),
        "combine": lambda: dispatcher.combine(sent.rows[:-1], sent),
    }
    with pytest.raises(InputError) as caught:
        calls[verb]()
    assert caught.value.__notes__ == [f"In the dispatcher {NAME!r}."]


def test_without_a_name_nothing_is_added() -> None:
    with pytest.raises(InputError) as caught:
        build_dispatcher(CONFIG).dispatch(torch.zeros(3, 8), routing(4))
    assert not hasattr(caught.value, "__notes__")


class Packed(Dispatcher):
    def layout_of(self, x: torch.Tensor) -> BSHD:
        raise AssertionError("asked for a layout")


@pytest.mark.parametrize("verb", ["plan", "dispatch"])
def test_a_call_without_a_layout_is_refused_where_none_is_inferred(verb: str) -> None:
    dispatcher = Packed(CONFIG.replace(infer_layout=False), name=NAME)
    x = torch.zeros(1, 3, 8)
    with pytest.raises(LayoutError, match=rf"Dispatcher\.{verb}: a plan or a layout must be given.*got None") as caught:
        dispatcher.plan(like=x) if verb == "plan" else dispatcher.dispatch(x, routing(3))
    assert NAME in caught.value.__notes__[0]
    with pytest.raises(LayoutError, match="infer_layout=False"):
        dispatcher.plan()


def test_a_layout_or_a_plan_is_taken_where_none_is_inferred() -> None:
    dispatcher = build_dispatcher(CONFIG.replace(infer_layout=False))
    x = torch.zeros(3, 8)
    layout = THD([0, 2], [0, 3])
    for plan in (layout, dispatcher.plan(layout)):
        assert int(dispatcher.dispatch(x, routing(3), plan).real_tokens_per_expert.sum()) == 2
    dispatcher.self_test()


def test_peers_hear_of_the_rank_that_got_no_layout() -> None:
    """On alltoall the exchange of counts carries the refusal."""

    def body(group: Group) -> str:
        assert group is not None
        rank = group.rank()  # type: ignore[union-attr]
        config = CONFIG.replace(backend="alltoall", infer_layout=False)
        dispatcher = build_dispatcher(config, group, name=f"rank {rank}")
        with pytest.raises((LayoutError, PeerError)) as caught:
            dispatcher.dispatch(torch.zeros(3, 8), routing(3), None if rank == 1 else Rows())
        return f"{type(caught.value).__name__}: {caught.value} {caught.value.__notes__}"

    told = run_ranks(body, 2)
    assert "PeerError: rank 1 refused: Dispatcher.dispatch: a plan or a layout must be given" in told[0]
    assert "LayoutError" in told[1]
    assert "'rank 1'" in told[1]
