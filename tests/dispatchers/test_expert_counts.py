"""The counts of a layer are what the training step routes, once; every other call counts on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.recompute import keep_routes, keep_routes_of
from tests.dispatchers.layer import Group, by_operators, on_ranks, random_routing, random_rows, small_config

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 9},
    "placed": {"balance": {"name": "manual", "spare_experts_per_rank": 1}},
    "exact": {"balance": "exact"},
    "chunks": {"chunks": {"tokens": 4}},
    "recomputed chunks": {"chunks": {"tokens": 4, "recompute": True}},
}
PLACEMENT = ExpertPlacement(8, ((7, 6, 5, 4, 0), (3, 2, 1, 0, -1)))
ROWS = (9, 2)
EVALUATED = Routing(torch.tensor([[6, 7]]).expand(5, 2).contiguous(), torch.ones(5, 2))


class _Layer(Dispatcher):
    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.rows * 2


def _layer(group: Group, mode: str, backend: str = "alltoall") -> _Layer:
    layer = _Layer(small_config(backend, **MODES[mode]), group)
    if mode == "placed":
        layer.place(PLACEMENT)
    return layer


def _no_grad(layer: _Layer, x: Tensor) -> None:
    with torch.no_grad():
        layer(x, EVALUATED)


def _inference(layer: _Layer, x: Tensor) -> None:
    with torch.inference_mode():
        layer(x, EVALUATED)


EVALUATIONS: dict[str, Callable[[_Layer, Tensor], object]] = {
    "no_grad": _no_grad,
    "inference_mode": _inference,
    "log-probs that are recorded and dropped": lambda layer, x: layer(x, EVALUATED),
    "in eval mode": lambda layer, x: layer.eval()(x.requires_grad_(), EVALUATED),
}
CHECKPOINTS: dict[str, Callable[[_Layer, Tensor, Routing], Tensor]] = {
    "plain": lambda layer, x, routing: layer(x, routing),
    "reentrant": lambda layer, x, routing: checkpoint(layer, x, routing, use_reentrant=True),
    "non-reentrant": lambda layer, x, routing: checkpoint(layer, x, routing, use_reentrant=False),
    "keep_routes": lambda layer, x, routing: checkpoint(layer, x, routing, use_reentrant=False, context_fn=keep_routes),
    "keep_routes_of": lambda layer, x, routing: checkpoint(keep_routes_of(layer), x, routing, use_reentrant=True),
    "nested": lambda layer, x, routing: checkpoint(
        lambda x: checkpoint(layer, x, routing, use_reentrant=True), x, use_reentrant=True
    ),
    "operators": lambda layer, x, routing: by_operators(lambda x: layer(x, routing), x),
}


def _expected(*seeds: int) -> list[int]:
    ids = [random_routing(rows, 4 * rows + seed).topk_ids for rows in ROWS for seed in seeds]
    return torch.cat(ids).flatten().bincount(minlength=8).tolist()


def _total(found: list[Tensor]) -> list[int]:
    return torch.stack(found).sum(0).tolist()


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_trained_counts(mode: str, way: str) -> None:
    """Two steps, with evaluations of every kind before them, between a forward and its backward, and behind them."""
    if way == "operators" and mode not in ("eager", "graph-safe", "placed"):
        pytest.skip("operators carry no plan and no chunks")

    def body(group: Group) -> tuple[list[Tensor], Tensor]:
        layer, rows = _layer(group, mode), ROWS[group.rank()]

        def evaluate() -> Tensor:
            for evaluation in EVALUATIONS.values():
                evaluation(layer, random_rows(5))
            layer.train()
            return layer.expert_counts()

        seen = [evaluate()]
        for step in range(2):
            y = CHECKPOINTS[way](layer, random_rows(rows).requires_grad_(), random_routing(rows, 4 * rows + step))
            seen.append(evaluate())
            y.sum().backward()
            seen.append(evaluate())
        return seen, layer.expert_counts(every_call=True)

    results = on_ranks(body, 2)
    before, *found = (_total([seen[at] for seen, _ in results]) for at in range(5))
    assert before == [0] * 8
    assert found == [[0] * 8, _expected(0), _expected(0), _expected(0, 1)]
    evaluated = [0] * 6 + [2 * 5 * len(EVALUATIONS) * 5] * 2
    every = [mine + more for mine, more in zip(_expected(0, 1), evaluated, strict=True)]
    assert _total([all_calls for _, all_calls in results]) == every


def test_a_self_test_counts_in_the_metrics_only() -> None:
    def body(group: Group) -> tuple[Tensor, Tensor]:
        layer = _layer(group, "eager")
        layer.self_test()
        return layer.expert_counts(), layer.metrics(gather=True).real_tokens_per_expert

    for trained, every in on_ranks(body, 2):
        assert trained.sum() == 0 < every.sum()


@pytest.mark.parametrize("way", ["plain", "non-reentrant", "keep_routes", "keep_routes_of"])
def test_a_second_backward_and_a_changed_count_change_nothing(way: str) -> None:
    """A caller may all-reduce the counts of a dispatch in place, and run the backward of one forward twice."""

    class Reduced(_Layer):
        def run_experts(self, sent: Dispatched) -> Tensor:
            sent.real_tokens_per_expert.mul_(100)
            return sent.rows * 2

    def body(group: Group) -> Tensor:
        rows = ROWS[group.rank()]
        layer = Reduced(small_config(pad_multiple=4), group)
        x, routing = random_rows(rows).requires_grad_(), random_routing(rows, 4 * rows)
        y = CHECKPOINTS[way](layer, x, routing).sum()
        y.backward(retain_graph=True)
        y.backward()
        return layer.expert_counts()

    assert _total(on_ranks(body, 2)) == _expected(0)


def test_rows_that_take_a_route_again_count_once() -> None:
    def body(group: Group) -> tuple[Tensor, Tensor]:
        rows = ROWS[group.rank()]
        dispatcher, routing = build_dispatcher(small_config(), group), random_routing(rows, 4 * rows)
        with torch.no_grad():
            first = dispatcher.dispatch(random_rows(rows), routing)
        again = [dispatcher.dispatch(random_rows(rows).requires_grad_(), again=first) for _ in range(2)]
        between = dispatcher.expert_counts()
        sum(dispatcher.combine(sent.rows, sent).sum() for sent in again).backward()  # type: ignore[union-attr]
        return between, dispatcher.expert_counts()

    between, after = zip(*on_ranks(body, 2), strict=True)
    assert _total(list(between)) == [0] * 8
    assert _total(list(after)) == _expected(0)


@pytest.mark.parametrize("trained", ["x", "weights", "experts", "nothing"])
def test_one_rank_counts_where_a_gradient_comes(trained: str) -> None:
    dispatcher = build_dispatcher(small_config("local"))
    x, routing, factor = random_rows(9), random_routing(9), torch.ones((), requires_grad=trained == "experts")
    x.requires_grad_(trained == "x")
    routing.topk_weights.requires_grad_(trained == "weights")
    sent = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(sent.rows * factor, sent) + torch.zeros((), requires_grad=True)
    y.sum().backward()
    counts = routing.topk_ids.flatten().bincount(minlength=8).tolist()
    assert dispatcher.expert_counts().tolist() == ([0] * 8 if trained == "nothing" else counts)
    assert dispatcher.expert_counts(every_call=True).tolist() == counts


def test_ranks_that_train_other_parts_count_alike() -> None:
    """One rank's model is frozen, the other trains its experts only, and both take part in the backward."""

    def body(group: Group) -> Tensor:
        rows = ROWS[group.rank()]
        dispatcher = build_dispatcher(small_config(), group)
        sent = dispatcher.dispatch(random_rows(rows), random_routing(rows, 4 * rows))
        outputs = sent.rows.detach() * torch.ones((), requires_grad=group.rank() == 1)
        dispatcher.combine(outputs, sent).sum().backward()
        return dispatcher.expert_counts()

    assert _total(on_ranks(body, 2)) == _expected(0)


def test_the_bias_of_a_router_ignores_evaluations() -> None:
    """The recipe of the tuning page, with an evaluation that sends all rows to experts 6 and 7."""

    def biased(evaluates: bool) -> list[float]:
        def body(group: Group) -> Tensor:
            rows = ROWS[group.rank()]
            layer, bias, seen = _layer(group, "eager"), torch.zeros(8), torch.zeros(8, dtype=torch.int64)
            for step in range(4):
                layer(random_rows(rows).requires_grad_(), random_routing(rows, 4 * rows + step)).sum().backward()
                total = layer.expert_counts()
                counts = (total - seen).float()
                group.allreduce([counts], dist.AllreduceOptions()).wait()
                bias, seen = bias + (counts.mean() - counts).sign(), total
                if evaluates:
                    _no_grad(layer, random_rows(5))
            return bias

        biases = on_ranks(body, 2)
        assert biases[0].tolist() == biases[1].tolist()
        return biases[0].tolist()

    plain = biased(evaluates=False)
    assert biased(evaluates=True) == plain
    assert any(plain)


def test_a_step_that_is_run_again_counts_once() -> None:
    """The first run overflows on a layer that has trained before, and on one that has not."""

    def body(group: Group) -> tuple[list[int], list[Tensor]]:
        rows = ROWS[group.rank()]
        safe = {"capacity_factor": 1.0, "on_overflow": "drop"}
        fields: dict[str, Any] = {"graph_safe": safe, "max_tokens_per_rank": 9}
        layers = [_Layer(small_config(**fields), group, name=str(number)) for number in range(2)]
        layers[0](random_rows(1).requires_grad_(), Routing(torch.tensor([[0, 7]]), torch.ones(1, 2))).sum().backward()
        skewed, runs = Routing(torch.tensor([[0, 1]]).expand(rows, 2).contiguous(), torch.ones(rows, 2)), []

        def step() -> None:
            runs.append(0)
            for layer in layers:
                layer(random_rows(rows).requires_grad_(), skewed).sum().backward()

        layers[0].retry_on_overflow(step)
        return runs, [layer.expert_counts() for layer in layers]

    results = on_ranks(body, 2)
    assert [runs for runs, _ in results] == [[0, 0]] * 2
    assert _total([counts[0] for _, counts in results]) == [13, 11, 0, 0, 0, 0, 0, 2]
    assert _total([counts[1] for _, counts in results]) == [11, 11, 0, 0, 0, 0, 0, 0]
