"""``balance`` of the config: a placement for every dispatch, results, costs, and planners that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_dispatch import BSHD, Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement, expected_rows, least_loaded
from moe_dispatch.errors import ConfigError, InputError, PeerError, StateError
from moe_dispatch_testing import Scenario, count_collectives
from tests.balance.test_place import scaled_layer
from tests.dispatchers.layer import Group, on_ranks, random_rows, small_config

RANKS = 4
BALANCED: dict[str, Any] = {"balance": {"name": "least_loaded", "spare_experts_per_rank": 1}}


def zipf_routing(rows: int, seed: int, num_experts: int = 8, top_k: int = 2) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    odds = torch.arange(1, num_experts + 1).double().pow(-1.5).expand(rows, -1)
    ids = torch.multinomial(odds, top_k, generator=generator)
    return Routing(ids, torch.rand(rows, top_k, generator=generator))


EXACT: dict[str, Any] = {"balance": {"name": "exact", "spare_experts_per_rank": 2}}
PLACED: dict[str, Any] = {"balance": {"name": "manual", "spare_experts_per_rank": 3}}
PLANS: dict[str, dict[str, Any]] = {
    "least_loaded": {"balance": {"name": "least_loaded", "spare_experts_per_rank": 2}},
    "exact": {"balance": {"name": "exact", "min_rows": 0, "spare_experts_per_rank": 2}},
    "static": {**EXACT, "graph_safe": True, "max_tokens_per_rank": 48},
    "static_padded": {**EXACT, "graph_safe": True, "max_tokens_per_rank": 48, "pad_multiple": 4},
}


DEEPEP, HYBRIDEP = {"name": "deepep", "emulate": "v1.2.1"}, {"name": "hybridep", "emulate": "hybridep-744"}


@pytest.mark.parametrize(
    ("backend", "plan"),
    [
        *(("alltoall", plan) for plan in PLANS),
        ("allgather", "exact"),
        ("allgather", "static_padded"),
        (DEEPEP, "least_loaded"),
        (HYBRIDEP, "exact"),
    ],
    ids=str,
)
def test_results_are_those_without_balance(backend: Any, plan: str) -> None:
    """``test_any_routing.py`` has graph-safe plans on all backends."""
    vendor = isinstance(backend, dict)
    dtype, tolerance = (torch.bfloat16, 2e-2) if vendor else (torch.float32, 2e-6)
    fields: dict[str, Any] = {"hidden_size": 256} if vendor else {}

    def body(group: Group) -> float:
        rank = group.rank()
        results = []
        for more in ({}, PLANS[plan]):
            dispatcher = build_dispatcher(small_config(backend, **fields, **more), group)
            x = random_rows(40 + rank, dispatcher.config.hidden_size, seed=rank, dtype=dtype).requires_grad_()
            y, sent = scaled_layer(dispatcher, rank, x, zipf_routing(40 + rank, rank))
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
        for one, other in zip(*results, strict=True):
            assert one is not None
            torch.testing.assert_close(other, one, rtol=0, atol=tolerance * float(one.abs().max()))
        if plan.startswith("static"):  # the bound of every routing: Tmax * K, and with padding 2 experts * 3 + 4 more
            assert len(sent.rows) <= (96 if plan == "static" else 96 + 8)
            dispatcher.check()
        return float(sent.tokens_per_expert.sum())

    loads = torch.tensor(on_ranks(body, RANKS))
    limit = {"least_loaded": 1.15 * loads.mean(), "static_padded": -(-loads.sum() // 16) * 4}
    assert loads.max() <= limit.get(plan, loads.mean().ceil())


def test_exact_reduction_gives_the_same_bits() -> None:
    """Wherever experts are: in other slots, in copies, or where a plan puts them."""
    backend = {"name": "alltoall", "reduction": "exact"}

    def body(group: Group) -> list[list[Tensor | None]]:
        rank, results = group.rank(), []
        moved: dict[str, Any] = {"balance": None}
        for more in ({}, moved, PLACED, BALANCED, PLANS["exact"]):
            dispatcher = build_dispatcher(small_config(backend, **more), group)
            if more in (moved, PLACED):
                drawn = Scenario(name="", spare=dispatcher.config.spare_slots(RANKS), seed=1).placement(RANKS)
                dispatcher.place(drawn or ExpertPlacement(8, ((1, 0), (3, 2), (5, 7), (6, 4))))
            x, routing = random_rows(33 + rank, seed=rank).requires_grad_(), zipf_routing(33 + rank, rank)
            y, _ = scaled_layer(dispatcher, rank, x, Routing(routing.topk_ids, routing.topk_weights.requires_grad_()))
            y.square().sum().backward()
            results.append([y.detach(), x.grad, routing.topk_weights.grad])
        return results

    for expected, *others in on_ranks(body, RANKS):
        for found in others:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rows_go_where_the_planner_says() -> None:
    """The planner is told of the real rows only. All others of the batch name expert 5."""

    def body(group: Group) -> tuple[Any, list[int], list[int]]:
        dispatcher = build_dispatcher(small_config(**BALANCED), group)
        ids = torch.cat([zipf_routing(60, group.rank()).topk_ids, torch.tensor([[5, 6]] * 60)])
        sent = dispatcher.dispatch(random_rows(120).view(1, 120, -1), Routing(ids, torch.ones(120, 2)), BSHD([60]))
        assert isinstance(sent, Dispatched)
        counts = torch.bincount(ids[:60].flatten(), minlength=8).tolist()
        return sent.placement, counts, sent.real_tokens_per_expert.tolist()

    placements, counts, slots = zip(*on_ranks(body, RANKS), strict=True)
    home = ExpertPlacement.contiguous(8, RANKS, spare=1)
    planned = least_loaded(torch.tensor(counts), home, ranks_per_node=RANKS)
    assert set(placements) == {planned}
    assert planned != home
    expected = expected_rows(torch.tensor(counts), planned, ranks_per_node=RANKS)
    assert (torch.tensor(slots).sum(1) - expected).abs().max() <= 4  # a row of rounding for each sender


def test_cost_is_one_small_all_gather() -> None:
    def body(group: Group) -> dict[str, tuple[int, int]]:
        counts = {}
        for name, more in (("without", {}), ("with", BALANCED)):
            dispatcher = build_dispatcher(small_config(**more), group)
            with count_collectives() as seen, torch.no_grad():
                dispatcher.dispatch(random_rows(5), zipf_routing(5, 0))
            gathers = [call for call in seen.calls if "allgather" in call.op]
            counts[name] = len(seen.calls), sum(call.nbytes for call in gathers)
        return counts

    for found in on_ranks(body, 2):
        assert found == {"without": (2, 0), "with": (3, 8 * (1 + 8))}


def test_a_refused_call_is_told_to_the_peers() -> None:
    def body(group: Group) -> str:
        dispatcher = build_dispatcher(small_config(**BALANCED), group)
        routing = zipf_routing(5, 0)
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.dispatch(random_rows(5 + group.rank()), routing)
        dispatcher.dispatch(random_rows(5), routing)  # the ranks are still in step
        return f"{caught.type.__name__}: {caught.value}"

    first, second = on_ranks(body, 2)
    assert second.startswith("InputError: Dispatcher.dispatch: x has 6 tokens but routing has 5")
    assert first.startswith("PeerError: rank 1 refused: Dispatcher.dispatch: x has 6 tokens but routing has 5")


this_rank = threading.local()  # what a planner is not told


def raises(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
    if this_rank.number == 1:
        raise ArithmeticError("planted")
    return home


def nonsense(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> Any:
    return home if this_rank.number else 7


def differs(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
    return ExpertPlacement(8, ((0, 1, 2, 3, 4), (4, 5, 6, 7, -1))) if this_rank.number else home


RAISED = "Planner 'other' must return a placement, but it raised ArithmeticError: planted"
NONSENSE = "Planner 'other' must return an ExpertPlacement, got int"
DISAGREE = "InputError: Ranks disagree on the expert slots of rank 0: rank 0 has [0, 1, 2, 3, -1], rank 1 has"


@pytest.mark.parametrize(
    ("planner", "told"),
    [
        (raises, (f"PeerError: rank 1 refused: {RAISED}", f"ConfigError: {RAISED}")),
        (nonsense, (f"ConfigError: {NONSENSE}", f"PeerError: rank 0 refused: {NONSENSE}")),
        (differs, (DISAGREE, DISAGREE)),
    ],
    ids=["raises", "nonsense", "differs"],
)
def test_a_planner_that_fails_on_one_rank(
    install_planner: Callable[[str], None], planner: Callable[..., Any], told: tuple[str, str]
) -> None:
    install_planner(f"{__name__}:{planner.__name__}")

    def body(group: Group) -> str:
        this_rank.number = group.rank()
        dispatcher = build_dispatcher(small_config(balance={"name": "other", "spare_experts_per_rank": 1}), group)
        with pytest.raises((ConfigError, InputError, PeerError)) as caught:
            dispatcher.dispatch(random_rows(5), zipf_routing(5, 0))
        return f"{caught.type.__name__}: {caught.value}"

    for start, text in zip(told, on_ranks(body, 2), strict=True):
        assert text.startswith(start), text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"balance": {"name": "least_loaded", "spare_experts_per_rank": 0}},
            r"balance\.spare_experts_per_rank: Input should be greater than or equal to 1, got 0",
        ),
        ({"balance": "least_loded"}, r"Unknown planner 'least_loded'.*Did you mean 'least_loaded'\?"),
        (
            {**BALANCED, "graph_safe": True, "max_tokens_per_rank": 8},
            r"balance must be \"exact\" or \"manual\" with graph_safe, got 'least_loaded': it plans on the host",
        ),
        ({"balance": {"name": "eplb", "bound": 1.1}}, r"balance\.bound: Extra inputs are not permitted, got 1\.1"),
        (
            {"graph_safe": True, "max_tokens_per_rank": 4, "balance": {"name": "exact", "min_rows": 8}},
            r"balance\.min_rows must be left out with graph_safe, got 8: without a copy",
        ),
    ],
)
def test_configs_that_cannot_work_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, **fields)


@pytest.mark.parametrize("fields", [BALANCED, {"balance": "exact"}], ids=str)
def test_place_and_compiled_calls_are_refused(fields: dict[str, Any]) -> None:
    """Also on one rank, so that a job meets no new refusal when it gets larger."""
    torch.compiler.reset()  # what was refused once is not traced again
    dispatcher = build_dispatcher(small_config("local", **fields))
    with pytest.raises(ConfigError, match=r'balance must be "manual", got .*(least_loaded|exact).*, which plans'):
        dispatcher.place(ExpertPlacement.contiguous(8, 1, spare=1))
    routing = zipf_routing(3, 0)
    given = random_rows(3), routing.topk_ids, routing.topk_weights

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        assert isinstance(sent, Dispatched)
        return sent.rows

    with pytest.raises(Exception, match=r"operators carry no plan of balance"):
        torch.compile(call, fullgraph=True, backend="eager")(*given)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.moe_dispatch.dispatch.default])
    with pytest.raises(StateError, match="operators carry no plan of balance"):  # also where the graph may break
        torch.compile(call, backend="eager")(*given)
    with pytest.raises(StateError, match="operators carry no plan of balance"):
        checkpoint(call, *given, use_reentrant=False, context_fn=contexts)


def test_nodes_must_have_equal_numbers_of_ranks() -> None:
    """One node may have fewer ranks."""

    def body(group: Group) -> None:
        backend = {"name": "deepep", "emulate": "v2.5.0"}
        dispatcher = build_dispatcher(small_config({**backend, "ranks_per_node": 8}, hidden_size=256, **EXACT), group)
        with pytest.raises(ConfigError, match=r"ep_size \(4\) must be a multiple of ranks_per_node, got 3"):
            build_dispatcher(small_config({**backend, "ranks_per_node": 3}, hidden_size=256, **EXACT), group)
        sent = dispatcher.dispatch(random_rows(5, 256, dtype=torch.bfloat16), zipf_routing(5, 0))
        dispatcher.combine(sent.rows, sent)

    on_ranks(body, RANKS)
