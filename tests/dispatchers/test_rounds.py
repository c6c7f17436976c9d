"""Ranks with 0, 1, 3 and 5 micro-batches: gradients and outputs are those of one process, in every mode of a layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, Routing
from moe_dispatch.dispatchers import SlotWeights, even_rounds
from moe_dispatch.errors import ConfigError, PeerError
from moe_dispatch.recompute import keep_routes
from tests.dispatchers.layer import (
    Group,
    by_operators,
    expert_weights,
    local_part,
    on_ranks,
    outcomes,
    random_routing,
    random_rows,
    small_config,
)
from tests.pages import relative

STEPS = (0, 1, 3, 5)
Batch = tuple[Tensor, list[Routing]]


class Layer(Dispatcher):
    """A layer of experts, ``tanh(rows @ weights)``, of which rows that carry numbers are multiplied by them."""

    def __init__(self, seed: int, group: Group, *, hidden: int, **fields: Any) -> None:
        super().__init__(small_config(hidden_size=hidden, **fields), group, name=f"layer {seed}")
        self.weights = local_part(expert_weights(hidden=hidden, seed=seed), group)
        self.copies = SlotWeights(self) if "balance" in fields else None

    def run_experts(self, sent: Dispatched) -> Tensor:
        return self.computed(sent, self.weights)

    def computed(self, sent: Dispatched, weights: Tensor) -> Tensor:
        outputs = torch.tanh(sent.grouped_mm(sent.rows, weights.to(sent.rows.dtype)))
        return outputs if sent.carried is None else outputs * sent.carried["factor"].unsqueeze(1)

    def forward(self, x: Tensor, routing: Routing, plan: Any = None, *, carry: Any = None) -> Tensor:
        if self.copies is None:
            return super().forward(x, routing, plan, carry=carry)
        sent, outputs = self.copies.run(self.dispatch(x, routing, plan, carry=carry), self.computed, self.weights)
        return self.combine(outputs, sent)


def micro_batch(rank: int, step: int, hidden: int) -> Batch:
    """Return x and the routing of two layers. The number of rows changes, and is sometimes 0."""
    rows, seed = (7 * rank + 5 * step) % 11, 10 * rank + step
    routings = [random_routing(rows, seed + 100 * layer) for layer in range(2)]
    return random_rows(rows, hidden, seed).requires_grad_(), routings


def no_rows(hidden: int) -> Batch:
    return random_rows(0, hidden).requires_grad_(), [random_routing(0) for _ in range(2)]


def run(layers: list[Layer], batch: Batch, way: str) -> Tensor:
    x, routings = batch
    y = x
    for layer, routing in zip(layers, routings, strict=True):
        if way == "plan":
            sent = layer.dispatch(y, routing, layer.plan(like=y))
            y = y + layer.combine(layer.run_experts(sent), sent)
        elif way == "carry":
            y = y + layer(y, routing, carry={"factor": torch.arange(1, 1 + len(y))})
        elif way == "operators":
            y = y + by_operators(partial(layer, routing=routing), y)
        elif way == "reentrant":
            y = y + checkpoint(layer, y, routing, use_reentrant=True)
        elif way in ("recomputed", "kept"):
            how: Any = {"context_fn": keep_routes} if way == "kept" else {}
            y = y + checkpoint(layer, y, routing, use_reentrant=False, **how)
        elif way == "in flight":
            sent = layer.dispatch(y, routing, async_op=True).wait()
            y = y + layer.combine(layer.run_experts(sent), sent)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                y = y + layer(y, routing)
    return y


@functools.cache
def dense(hidden: int, way: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of x by rank and step, and those of all experts by layer, on one rank."""
    layers = [Layer(seed, None, hidden=hidden, backend="local") for seed in range(2)]
    batches = [[micro_batch(rank, step, hidden) for step in range(count)] for rank, count in enumerate(STEPS)]
    for batch in (batch for of_rank in batches for batch in of_rank):
        run(layers, batch, way).square().sum().backward()
    grads = [[cast(Tensor, x.grad) for x, _ in of_rank] for of_rank in batches]
    return grads, [cast(Tensor, layer.weights.grad) for layer in layers]


def trained(group: Group, hidden: int, way: str, **fields: Any) -> tuple[list[Tensor], list[Tensor], int]:
    """Return the gradients of this rank's micro-batches and experts, and the number of rounds."""
    layers = [Layer(seed, group, hidden=hidden, **fields) for seed in range(2)]
    batches, rounds = [micro_batch(group.rank(), step, hidden) for step in range(STEPS[group.rank()])], 0
    for batch in even_rounds(iter(batches), no_rows(hidden), group):
        run(layers, batch, way).square().sum().backward()
        rounds += 1
    found = [cast(Tensor, layer.weights.grad) for layer in layers]
    for layer in layers:
        layer.close()
    return [cast(Tensor, x.grad) for x, _ in batches], found, rounds


BFLOAT16: dict[str, Any] = {"wire": "bfloat16"}
QUANTISED: dict[str, Any] = {"wire": {"dtype": "float8_e4m3fn", "deliver": "quantised"}, "pad_multiple": 128}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 11}
EXACT: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}
LEVELS: dict[str, Any] = {"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}}
# How a model calls its layers, its hidden size, the config, and how far results may be from those of the dense model.
RUNS: list[tuple[str, int, dict[str, Any], float]] = [
    ("plain", 16, {"backend": "alltoall", "debug": True, "watchdog": 30}, 1e-5),
    ("plan", 16, {"backend": "allgather"}, 1e-5),
    ("in flight", 16, LEVELS, 1e-5),
    ("autocast", 16, {"backend": "alltoall"}, 0.02),
    ("operators", 16, {"backend": "allgather"}, 1e-5),
    ("recomputed", 16, {"backend": {"name": "alltoall", "reduction": "exact"}, "pad_multiple": 8}, 1e-5),
    ("recomputed", 16, {"backend": "alltoall", "chunks": 3}, 1e-5),
    ("kept", 16, {"backend": "alltoall"}, 1e-5),
    ("reentrant", 16, LEVELS, 1e-5),
    *(("plain", 16, {"backend": backend, **SAFE}, 1e-5) for backend in ("alltoall", "allgather")),
    ("recomputed", 16, {"backend": "alltoall", **SAFE, "chunks": 4}, 1e-5),
    ("plain", 16, {"backend": "alltoall", **EXACT}, 1e-5),
    ("recomputed", 16, {"backend": "allgather", **EXACT}, 1e-5),
    ("plain", 16, {"backend": "alltoall", **EXACT, **SAFE}, 1e-5),
    ("carry", 16, {"backend": "alltoall"}, 1e-5),
    ("carry", 16, {"backend": "allgather", **SAFE}, 1e-5),
    ("plain", 256, {"backend": {"name": "deepep", "emulate": "v1.2.1"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": {"name": "deepep", "emulate": "v2.5.0"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": {"name": "hybridep", "emulate": "hybridep-746"}, **BFLOAT16}, 0.02),
    ("plain", 256, {"backend": "alltoall", **QUANTISED}, 0.1),
]


@pytest.mark.parametrize(("way", "hidden", "fields", "tolerance"), RUNS, ids=str)
def test_gradients_are_those_of_one_process(way: str, hidden: int, fields: dict[str, Any], tolerance: float) -> None:
    """Up to the rounding of rows that travel in a narrower dtype."""
    expected_x, expected_experts = dense(hidden, "carry" if way == "carry" else "plain")
    results = on_ranks(lambda group: trained(group, hidden, way, **fields), len(STEPS))
    assert [rounds for *_, rounds in results] == [max(STEPS)] * len(STEPS)
    for (grads, *_), expected in zip(results, expected_x, strict=True):
        for one, other in zip(grads, expected, strict=True):
            assert relative(one, other) <= tolerance
    for layer, experts in enumerate(expected_experts):
        assert relative(torch.cat([found[layer] for _, found, _ in results]), experts) <= tolerance


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fields", [{}, SAFE, EXACT], ids=str)
def test_outputs_of_an_evaluation_are_those_of_one_process(mode: Any, fields: dict[str, Any]) -> None:
    def outputs(layers: list[Layer], batches: Any) -> list[Tensor]:
        with mode():
            return [run(layers, batch, "plain").clone() for batch in batches]

    def body(group: Group) -> list[Tensor]:
        layers = [Layer(seed, group, hidden=16, **fields) for seed in range(2)]
        own = [micro_batch(group.rank(), step, 16) for step in range(STEPS[group.rank()])]
        return outputs(layers, even_rounds(own, no_rows(16), group))

    alone = [Layer(seed, None, hidden=16, backend="local") for seed in range(2)]
    for rank, found in enumerate(on_ranks(body, len(STEPS))):
        wanted = outputs(alone, [micro_batch(rank, step, 16) for step in range(STEPS[rank])])
        assert [len(y) for y in found[STEPS[rank] :]] == [0] * (max(STEPS) - STEPS[rank])
        for one, other in zip(found, wanted, strict=False):
            assert relative(one, other) <= 1e-5


def test_one_token_that_goes_nowhere_in_place_of_an_empty_batch() -> None:
    """For models that cannot take zero tokens. The token gets zeros, and experts have no gradient of it."""
    nowhere = random_rows(1), [Routing(torch.full((1, 2), -1), torch.zeros(1, 2)) for _ in range(2)]

    def body(group: Group) -> list[Tensor]:
        layers = [Layer(seed, group, hidden=16) for seed in range(2)]
        for batch in even_rounds([micro_batch(3, 0, 16)] * group.rank(), nowhere, group):
            y = run(layers, batch, "plain")
            assert batch is not nowhere or torch.equal(y, nowhere[0])
            (y.square().sum() * (batch is not nowhere)).backward()
        return [cast(Tensor, layer.weights.grad) for layer in layers]

    layers = [Layer(seed, None, hidden=16, backend="local") for seed in range(2)]
    run(layers, micro_batch(3, 0, 16), "plain").square().sum().backward()
    for layer, *parts in zip(layers, *on_ranks(body, 2), strict=True):
        assert relative(torch.cat(parts), layer.weights.grad) <= 1e-5


def counted(group: Group, batches: Any) -> int:
    return sum(1 for _ in even_rounds(batches, None, group))


def test_an_error_of_the_batches_is_raised_on_every_rank() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no such shard")

    results = outcomes(lambda group: counted(group, broken() if group.rank() == 1 else range(5)), 3)
    assert str(results.pop(1)) == "no such shard"
    for result in results:
        assert isinstance(result, PeerError)
        assert "rank 1 refused: OSError: no such shard [MD08]" in str(result)


def test_an_iterator_that_starts_again_is_asked_once_for_its_end() -> None:
    """As that of a loader which shuffles anew for each epoch."""

    class Loader:
        def __init__(self) -> None:
            self.left = 2

        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> int:
            self.left -= 1
            if self.left < 0:
                self.left = 2
                raise StopIteration
            return self.left

    def body(group: Group) -> list[int | None]:
        return list(even_rounds(range(5) if group.rank() else Loader(), None, group))

    assert on_ranks(body, 2) == [[1, 0, None, None, None], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("size", "batches"), [(1, 3), (1, 0), (3, 0)])
def test_one_rank_alone_and_ranks_without_data(size: int, batches: int) -> None:
    assert on_ranks(lambda group: counted(group, range(batches)), size) == [batches] * size


def test_what_is_no_group() -> None:
    with pytest.raises(
        ConfigError, match=r"^even_rounds: a group must be a process group that this rank is in, got int"
    ):
        next(even_rounds([], None, cast(Any, -100)))
