"""Metrics and collectives are those that really happened: tokens, padding by cause, bytes, host syncs; profiles."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import THD, Dispatched, Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import Metrics
from moe_dispatch_testing import HostRead, count_collectives, count_host_syncs
from tests.dispatchers.layer import Group, by_operators, on_ranks, random_routing, random_rows, small_config

IDS = [torch.tensor([[0, 1], [0, 5], [0, -1]]), torch.tensor([[0, 4], [7, 6], [7, -1], [-1, -1], [0, 7]])]
TOKENS = [5, 1, 0, 0, 1, 1, 1, 3]


def _step(dispatcher: Dispatcher, rank: int) -> None:
    rows = len(IDS[rank])
    sent = dispatcher.dispatch(random_rows(rows).requires_grad_(), Routing(IDS[rank], torch.ones(rows, 2)))
    dispatcher.combine(sent.rows, sent).sum().backward()


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_tokens_and_padding(backend: str) -> None:
    def body(group: Group) -> tuple[Metrics, Metrics]:
        dispatcher = build_dispatcher(small_config(backend, pad_multiple=4), group)
        for _ in range(2):
            _step(dispatcher, group.rank())
        return dispatcher.metrics(), dispatcher.metrics(gather=True)

    results = on_ranks(body, 2)
    for rank, (mine, everyone) in enumerate(results):
        assert mine.backend == everyone.backend == backend
        assert (mine.dispatches, everyone.dispatches) == (2, 4)
        assert mine.real_tokens_per_expert.tolist() == [2 * n for n in TOKENS[4 * rank : 4 * rank + 4]]
        assert everyone.real_tokens_per_expert.tolist() == [2 * n for n in TOKENS]
        assert everyone.imbalance == pytest.approx(5 / (sum(TOKENS) / 8))
        assert mine.imbalance == pytest.approx([5 / 1.5, 3 / 1.5][rank])
        by_expert = [2 * (3 + 3), 2 * (3 + 3 + 3 + 1)]
        by_rank = [2 * 2, 0] if backend == "allgather" else [0, 0]
        assert mine.rows_padded == {"rank": by_rank[rank], "expert": by_expert[rank]}
        assert everyone.rows_padded == {"rank": sum(by_rank), "expert": sum(by_expert)}
        for name in ("dispatch", "combine", "combine.backward", "dispatch.backward"):
            assert mine.collectives[name] == 2
            assert everyone.bytes_sent[name] == sum(one.bytes_sent[name] for one, _ in results)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_rows_that_are_no_tokens(graph_safe: bool) -> None:
    """Cut where the host knows them; in graph-safe mode their ids become -1."""
    fields = {"graph_safe": True, "max_tokens_per_rank": 8} if graph_safe else {}
    dispatcher = build_dispatcher(small_config("local", pad_multiple=3, **fields))
    x, way = random_rows(8), random_routing(8)
    expected = x * way.topk_weights.sum(1, keepdim=True)
    expected[[2, 3, 7]] = 0
    sent = dispatcher.dispatch(x, way, THD([0, 2, 5], [0, 4, 8]))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)
    metrics = dispatcher.metrics()
    assert metrics.rows_skipped == ({"cut": 0, "masked": 3} if graph_safe else {"cut": 3, "masked": 0})
    assert int(metrics.real_tokens_per_expert.sum()) == 5 * 2


class _Layer(Dispatcher):
    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.rows * 2


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 9},
    "placed": {"balance": {"name": "manual", "spare_experts_per_rank": 1}},
    "operators": {},
    "reentrant checkpoint": {},
    "checkpoint": {},
    "chunks": {"chunks": {"tokens": 4, "recompute": True}},
    "chunks in a checkpoint": {"chunks": {"tokens": 4, "recompute": True}},
}


def _train(layers: list[_Layer], routings: list[Routing], way: str) -> None:
    y = random_rows(len(routings[0].topk_ids)).requires_grad_()
    for layer, routing in zip(layers, routings, strict=True):
        if way == "operators":
            y = by_operators(lambda x, layer=layer, routing=routing: layer(x, routing), y)  # type: ignore[misc]
        elif "checkpoint" in way:
            y = checkpoint(layer, y, routing, use_reentrant="reentrant" in way)
        else:
            y = layer(y, routing)
    y.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_counts_of_a_layer_and_a_step(way: str) -> None:
    """Two layers share a channel, ranks have other numbers of rows, and a recomputed row counts once."""
    rows = (9, 2)
    routings = [
        [[random_routing(n, 4 * n + 2 * step + layer) for layer in range(2)] for n in rows] for step in range(2)
    ]

    def body(group: Group) -> tuple[list[list[Tensor]], Metrics]:
        layers = [_Layer(small_config(**WAYS[way]), group, name=f"layer {number}") for number in range(2)]
        if way == "placed":
            layers[0].place(ExpertPlacement(8, ((7, 6, 5, 4, 0), (3, 2, 1, 0, -1))))
        seen = [[layer.expert_counts() for layer in layers]]
        for calls in routings:
            _train(layers, calls[group.rank()], way)
            seen.append([layer.expert_counts() for layer in layers])
        return seen, layers[0].metrics(gather=True)

    results = on_ranks(body, 2)
    total = [torch.zeros(8, dtype=torch.int64) for _ in range(2)]
    for step, calls in enumerate(routings):
        for layer in range(2):
            ids = torch.cat([of_rank[layer].topk_ids for of_rank in calls])
            found = torch.stack([seen[step + 1][layer] - seen[step][layer] for seen, _ in results]).sum(0)
            assert found.tolist() == ids.flatten().bincount(minlength=8).tolist()
            total[layer] += found
    for _, metrics in results:
        assert {name: of.tolist() for name, of in metrics.tokens_by_layer.items()} == {
            f"layer {layer}": of.tolist() for layer, of in enumerate(total)
        }
        assert metrics.real_tokens_per_expert.tolist() == torch.stack(total).sum(0).tolist()


def test_nothing_dispatched_yet() -> None:
    """Nothing is exchanged either, unless the metrics of all ranks are asked for."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(pad_multiple=7), group)
        assert dispatcher.expert_counts().tolist() == [0] * 8
        for gather in (False, True):
            with count_collectives() as seen:
                metrics = dispatcher.metrics(gather=gather)
            assert len(seen.calls) == (2 if gather else 0)
            assert (metrics.dispatches, metrics.imbalance) == (0, 0.0)
            assert metrics.real_tokens_per_expert.tolist() == [0] * (8 if gather else 4)
            assert metrics.rows_padded == {"rank": 0, "expert": 0}

    on_ranks(body, 2)


def test_reading_counts_in_graph_safe_mode_does_not_wait() -> None:
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=4))
    with count_host_syncs() as reads:
        dispatcher.dispatch(random_rows(4), random_routing(4))
        dispatcher.expert_counts()
    assert not reads


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # of torch 2.10
@pytest.mark.parametrize("backend", ["local", "alltoall", "allgather"])
def test_profiles_show_each_verb_and_its_backward(backend: str) -> None:
    dispatcher = build_dispatcher(small_config(backend))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(dispatcher, 0)
    shown = Counter(event.name for event in profile.events() if event.name.startswith("moe_dispatch::"))
    verbs = ("dispatch", "combine", "combine.backward", "dispatch.backward")
    assert shown == dict.fromkeys((f"moe_dispatch::{verb}" for verb in verbs), 1)


LAYERS, ROWS = 4, 5
POLICIES = ("agree", "check", "assume", "static")

ALLTOALL = {"alltoall_base": 5 * LAYERS}  # counts, rows, and back; backwards of both
ALLGATHER = {"allgather_base": 2 * LAYERS, "reduce_scatter_base": 2 * LAYERS}

# backend, policy, with a plan -> collectives and host syncs per rank of one step
TABLE: list[tuple[str, str, bool, dict[str, int], int]] = [
    *(("alltoall", policy, planned, ALLTOALL, LAYERS) for policy in POLICIES for planned in (True, False)),
    *(("allgather", policy, planned, ALLGATHER, LAYERS) for policy in POLICIES[2:] for planned in (True, False)),
    *(("allgather", policy, True, {**ALLGATHER, "allreduce": 1}, LAYERS + 1) for policy in POLICIES[:2]),
    *(("allgather", policy, False, {**ALLGATHER, "allreduce": LAYERS}, LAYERS) for policy in POLICIES[:2]),
]


@pytest.mark.parametrize(("backend", "policy", "planned", "collectives", "syncs"), TABLE)
def test_a_step_of_four_layers(
    backend: str, policy: str, planned: bool, collectives: dict[str, int], syncs: int
) -> None:
    config = small_config(backend, row_counts=policy, max_tokens_per_rank=8, top_k=1)

    def body(group: Group) -> tuple[Counter[str], int]:
        layers = [build_dispatcher(config, group) for _ in range(LAYERS)]
        x, way = random_rows(ROWS).requires_grad_(), random_routing(ROWS, top_k=1)
        read_before = _reads_here(reads)
        with count_collectives() as seen:
            plan, y = layers[0].plan(Rows(), like=x) if planned else None, x
            for layer in layers:
                sent = layer.dispatch(y, way, plan)
                y = layer.combine(sent.rows, sent)
            y.sum().backward()
        return seen.counts, _reads_here(reads) - read_before

    with count_host_syncs() as reads:
        assert on_ranks(body, 2) == [(Counter(collectives), syncs)] * 2


def _reads_here(reads: list[HostRead]) -> int:
    """By this rank."""
    return sum(read.thread == threading.current_thread().name for read in reads)
