"""What happens before a backend gets rows: maps become ids, experts named twice are merged, invalid ids are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError, LostPeerError, PeerError
from moe_dispatch.permutation import merge_slots
from moe_dispatch_testing import refuse_host_syncs
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import (
    Group,
    by_operators,
    caught,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_rows,
    small_config,
)

EXPERTS, SLOTS = 5, 3


@st.composite
def maps(draw: Any) -> Tensor:
    """Bool (T, E) with at most SLOTS True per row."""
    chosen = draw(st.lists(st.sets(st.integers(0, EXPERTS - 1), max_size=SLOTS), max_size=6))
    routing_map = torch.zeros(len(chosen), EXPERTS, dtype=torch.bool)
    for row, experts in enumerate(chosen):
        routing_map[row, list(experts)] = True
    return routing_map


@settings(max_examples=60, deadline=None, derandomize=True)
@given(maps())
def test_ids_ascend_and_missing_slots_go_nowhere(routing_map: Tensor) -> None:
    probs = torch.arange(1.0, routing_map.numel() + 1).view(-1, EXPERTS)
    routing = Routing.from_map(routing_map, probs, top_k=SLOTS)
    assert routing.topk_ids.dtype == torch.int64
    assert routing.topk_ids.shape == routing.topk_weights.shape == (len(routing_map), SLOTS)
    for row, chosen in enumerate(routing_map):
        experts = chosen.nonzero().flatten().tolist()
        assert routing.topk_ids[row].tolist() == experts + [-1] * (SLOTS - len(experts))
        weights = [float(probs[row, expert]) for expert in experts]
        assert routing.topk_weights[row].tolist() == weights + [0.0] * (SLOTS - len(experts))


def test_gradient_reaches_what_the_map_selects_and_nothing_else() -> None:
    routing_map = torch.tensor([[True, False, True, False, False], [False] * 5])
    probs = torch.rand(2, EXPERTS, requires_grad=True)
    Routing.from_map(routing_map, probs, top_k=SLOTS).topk_weights.sum().backward()
    assert probs.grad is not None
    assert torch.equal(probs.grad, routing_map.float())


def test_probs_outside_the_map_may_be_nan() -> None:
    routing_map = torch.tensor([[True, False, False, False, False]])
    probs = torch.where(routing_map, 0.5, float("nan"))
    assert Routing.from_map(routing_map, probs, top_k=SLOTS).topk_weights.tolist() == [[0.5, 0.0, 0.0]]


def test_a_map_gives_the_layer_of_its_ids() -> None:
    dispatcher = build_dispatcher(small_config("local", num_experts=EXPERTS, top_k=SLOTS))
    routing_map = torch.rand(6, EXPERTS).argsort(1) < 2
    probs = torch.rand(6, EXPERTS)
    sent = dispatcher.dispatch(random_rows(6), Routing.from_map(routing_map, probs, top_k=SLOTS))
    expected = random_rows(6) * (probs * routing_map).sum(1, keepdim=True)
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)


WRONG: dict[str, tuple[Tensor, Tensor, int, str]] = {
    "shapes": (torch.ones(2, 5) > 0, torch.ones(2, 4), 2, r"bool \(T, E\) and probs the same shape, got .*\(2, 4\)"),
    "no bools": (torch.ones(2, 5), torch.ones(2, 5), 2, r"routing_map must be bool \(T, E\).*got torch.float32"),
    "3-D": (torch.ones(2, 5, 1) > 0, torch.ones(2, 5, 1), 2, r"must be bool \(T, E\)"),
    "top_k 0": (torch.ones(2, 5) > 2, torch.ones(2, 5), 0, r"top_k must lie in 1\.\.5, got 0"),
    "top_k 6": (torch.ones(2, 5) > 2, torch.ones(2, 5), 6, r"top_k must lie in 1\.\.5, got 6"),
    "too many": (torch.ones(2, 5) > 0, torch.ones(2, 5), 3, r"a row selects 5 experts, top_k is 3. Pass top_k=5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_maps(name: str) -> None:
    routing_map, probs, top_k, text = WRONG[name]
    with pytest.raises(InputError, match=f"Routing.from_map: .*{text}"):
        Routing.from_map(routing_map, probs, top_k=top_k)


MERGED_SLOTS = 4
ROWS = st.lists(st.lists(st.integers(-1, 3), min_size=MERGED_SLOTS, max_size=MERGED_SLOTS), max_size=5)


def _tensors(ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, MERGED_SLOTS)
    weights_TK = torch.arange(1.0, ids_TK.numel() + 1).view(-1, MERGED_SLOTS)
    return ids_TK, torch.where(ids_TK < 0, float("nan"), weights_TK)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ROWS)
def test_an_expert_named_twice_gets_one_slot_and_the_sum_of_its_weights(ids: list[list[int]]) -> None:
    ids_TK, weights_TK = _tensors(ids)
    merged_ids, merged_weights = (merged.tolist() for merged in merge_slots(ids_TK, weights_TK, asks=True))
    for row, slots in enumerate(ids):
        for k, expert in enumerate(slots):
            if expert < 0:
                assert merged_ids[row][k] == -1
            elif expert in slots[:k]:
                assert [merged_ids[row][k], merged_weights[row][k]] == [-1, 0]
            else:
                total = sum(float(weights_TK[row, other]) for other in range(MERGED_SLOTS) if slots[other] == expert)
                assert [merged_ids[row][k], merged_weights[row][k]] == [expert, total]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS)
def test_each_merged_slot_gets_the_gradient_of_its_expert(ids: list[list[int]]) -> None:
    ids_TK, weights_TK = _tensors(ids)
    merged_ids, merged_weights = merge_slots(ids_TK, weights_TK.requires_grad_(), asks=True)
    # A gradient that names the expert, so that it shows where it arrives.
    (grad,) = torch.autograd.grad(merged_weights, weights_TK, torch.where(merged_ids < 0, 0.0, merged_ids + 10.0))
    for row, slots in enumerate(ids):
        for k, expert in enumerate(slots):
            if expert >= 0:
                assert grad[row, k] == expert + 10


def test_ids_without_duplicates_are_left_alone() -> None:
    ids_TK, weights_TK = _tensors([[3, 1, -1, -1], [0, 1, 2, 3]])
    merged_ids, merged_weights = merge_slots(ids_TK, weights_TK, asks=True)
    assert merged_ids is ids_TK
    assert merged_weights is weights_TK


NUM_EXPERTS, TOKENS, HIDDEN = 8, 5, 256
V2 = {"name": "deepep", "emulate": "v2-2.1.0"}
BACKENDS: dict[str, tuple[Any, int]] = {
    "local": ("local", 1),
    "alltoall": ("alltoall", 2),
    "alltoall, one expert a rank": ("alltoall", NUM_EXPERTS),
    "alltoall exact": ({"name": "alltoall", "reduction": "exact"}, 2),
    "alltoall_by_node": ({"name": "alltoall_by_node", "ranks_per_node": 2}, 4),
    "allgather": ("allgather", 2),
    "deepep v1": ({"name": "deepep", "emulate": "v1.2.1"}, 2),
    "deepep v2": (V2, 2),
    "deepep v2 expanded": ({**V2, "expand": True, "deterministic": False}, 2),
    "hybridep": ({"name": "hybridep", "emulate": "hybridep-744"}, 2),
}
# They hear of it before rows travel: by the counts, or by the agreement on sizes of a call without a plan.
TELL_PEERS = ("alltoall", "allgather", "deepep v2", "hybridep")
GRAPH_SAFE = [name for name in BACKENDS if "exact" not in name and "by_node" not in name]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}
# 65537 is 1 in 16 bits, and 2**32 + 1 is 1 in 32.
INVALID = [NUM_EXPERTS, -2, 65537, 2**32 + 1, -(2**63)]


def config(name: str, **fields: Any) -> DispatcherConfig:
    sizes: dict[str, Any] = {"num_experts": NUM_EXPERTS, "top_k": 2, "hidden_size": HIDDEN}
    wire = {"wire": "bfloat16"} if "ep" in name else {}
    return DispatcherConfig(backend=BACKENDS[name][0], **{**sizes, **wire, **fields})


def rows() -> Tensor:
    return torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN).remainder(64).float()


def routing(invalid: int | None = None) -> Routing:
    """Ids 0 to E-1 in turn, but for one slot, which is -1 or an id that is invalid."""
    ids = torch.arange(2 * TOKENS).view(TOKENS, 2) % NUM_EXPERTS
    ids[3, 0] = -1 if invalid is None else invalid
    return Routing(ids, torch.ones(TOKENS, 2))


def layer(dispatcher: Dispatcher, way: Routing, plan: Any = None) -> Tensor:
    sent = dispatcher.dispatch(rows(), way, plan)
    return dispatcher.combine(sent.rows, sent)


def is_last(group: Group) -> bool:
    return group is None or group.rank() == group.size() - 1


@pytest.mark.parametrize("name", BACKENDS)
def test_it_raises_in_its_dispatch(name: str) -> None:
    size = BACKENDS[name][1]
    calls = [*((invalid, False) for invalid in INVALID), (NUM_EXPERTS, True)]

    def body(group: Group) -> list[Any]:
        dispatcher, found = build_dispatcher(config(name), group), list[Any]()
        with torch.no_grad():
            right = layer(dispatcher, routing())
            for invalid, async_op in calls:
                way = routing(invalid if is_last(group) else None)
                found.append(caught(lambda: dispatcher.dispatch(rows(), way, async_op=async_op).wait()))  # noqa: B023
                # The group is in step: every rank has left the dispatch.
                assert torch.equal(layer(dispatcher, routing()), right)
        return found

    ids = routing().topk_ids
    for (invalid, _), (*peers, wrong) in zip(calls, zip(*on_ranks(body, size), strict=True), strict=True):
        low, high = min(invalid, 0), max(invalid, NUM_EXPERTS - 1)
        text = f"Dispatcher.dispatch: topk_ids must lie in -1..{NUM_EXPERTS - 1}, got {low}..{high}. Check the router."
        raises_everywhere([wrong], InputError, text)
        if name.startswith(TELL_PEERS):
            raises_everywhere(peers, PeerError, f"rank {size - 1} refused: {text}")
            continue
        # Nothing is exchanged before rows travel, so peers get the dispatch of a slot that goes nowhere.
        for rank, sent in enumerate(peers):
            of_rank = torch.bincount(ids[ids >= 0], minlength=NUM_EXPERTS).chunk(size)[rank]
            assert torch.equal(sent.real_tokens_per_expert, size * of_rank)


@pytest.mark.parametrize("name", ["allgather", "deepep v1", "deepep v2", "hybridep"])
def test_with_a_plan_its_rank_says_that_the_others_wait(name: str) -> None:
    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(config(name), group)
        plan = dispatcher.plan(like=rows())
        with torch.no_grad():
            return caught(dispatcher.dispatch, rows(), routing(NUM_EXPERTS if is_last(group) else None), plan)

    peer, wrong = on_ranks(body, 2)
    assert isinstance(peer, Dispatched)
    assert isinstance(wrong, InputError)
    assert "The other ranks were not told, because nothing is exchanged before rows travel" in wrong.__notes__[0]
    assert "They wait until the watchdog, or a timeout" in wrong.__notes__[0]


def test_the_watchdog_ends_the_wait_of_the_others() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config("allgather", watchdog=0.3), group)
        plan = dispatcher.plan(like=rows())
        layer(dispatcher, routing(NUM_EXPERTS if is_last(group) else None), plan)

    *peers, wrong = outcomes(body, 2)
    assert isinstance(wrong, InputError)
    raises_everywhere(peers, LostPeerError, "rank 1")


@pytest.mark.parametrize("name", GRAPH_SAFE)
def test_graph_safe_it_goes_nowhere_and_check_reports_it_once(name: str) -> None:
    size = BACKENDS[name][1]
    text = f"check: topk_ids must lie in -1..7, got up to 1 invalid ids in one dispatch of rank {size - 1}."

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(name, **SAFE), group)
        with torch.no_grad():
            right = layer(dispatcher, routing())
            assert dispatcher.check().invalid_ids == 0
            for invalid in INVALID:
                assert torch.equal(layer(dispatcher, routing(invalid if is_last(group) else None)), right)
                assert dispatcher.required_capacity().invalid_ids == 1
                raises_everywhere([caught(dispatcher.check)], InputError, text, "nowhere")
                assert dispatcher.check().invalid_ids == 0

    on_ranks(body, size)


def test_invalid_ids_are_counted_where_a_row_names_one_twice() -> None:
    dispatcher = build_dispatcher(config("local", **SAFE))
    way = routing()
    way.topk_ids[1], way.topk_ids[2] = -2, NUM_EXPERTS
    with refuse_host_syncs():
        layer(dispatcher, way)
    # One of two equal ids above E-1 is merged into the other.
    with pytest.raises(InputError, match="got up to 3 invalid ids"):
        dispatcher.check()


@pytest.mark.parametrize("name", ["local", "alltoall", "allgather"])
@pytest.mark.parametrize("graph_safe", [False, True])
def test_ids_of_rows_without_a_token_may_be_anything(name: str, graph_safe: bool) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(name, **(SAFE if graph_safe else {})), group)
        way = routing()
        way.topk_ids[2:] = 10**6
        for real in (2, torch.tensor([2])):
            y = layer(dispatcher, way, Rows(real))
            assert torch.equal(y[:2], 2 * rows()[:2])
            assert not y[2:].any()
        if graph_safe:
            dispatcher.check()

    on_ranks(body, BACKENDS[name][1])


@pytest.mark.parametrize("name", ["local", "alltoall", "allgather"])
@pytest.mark.parametrize("graph_safe", [False, True])
def test_operators_report_it_too(name: str, graph_safe: bool) -> None:
    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(config(name, **(SAFE if graph_safe else {})), group)
        way = routing(-2 if is_last(group) else None)
        sent = caught(by_operators, lambda x: dispatcher.dispatch(x, way), rows())
        return caught(dispatcher.check) if graph_safe else sent

    results = on_ranks(body, BACKENDS[name][1])
    reported = results if graph_safe else results[-1:]
    raises_everywhere(reported, InputError, "topk_ids must lie in -1..7, got ")
    if name != "local" and not graph_safe:
        raises_everywhere(results[:1], PeerError, "rank 1 refused: Dispatcher.dispatch: topk_ids must lie in -1..7")


def test_retry_on_overflow_reports_it() -> None:
    """On every rank, and on the ranks of another expert-parallel group that run the step too."""
    graph_safe = config("local", **{**SAFE, "graph_safe": {"capacity_factor": 1.0, "on_overflow": "raise"}})

    def body(group: Group) -> None:
        # Each rank is an expert-parallel group of its own. Without a group, the threads would share counters.
        dispatcher = build_dispatcher(graph_safe, thread_group(HashStore(), 0, 1))
        step = partial(layer, dispatcher, routing(99 if is_last(group) else None))
        dispatcher.retry_on_overflow(step, group=group)

    peer, wrong = on_ranks(partial(caught, body), 2)
    text = "Dispatcher.retry_on_overflow: topk_ids must lie in -1..7, got up to 1 invalid ids"
    raises_everywhere([wrong], InputError, text)
    raises_everywhere([peer], PeerError, f"rank 1 refused: {text}")
    dispatcher = build_dispatcher(graph_safe)
    with pytest.raises(InputError, match=text):
        dispatcher.retry_on_overflow(partial(layer, dispatcher, routing(99)))
