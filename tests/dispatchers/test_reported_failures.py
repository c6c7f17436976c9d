"""Failures that users of other systems reported and that no other file tests: docs/complaints.md lists all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import THD, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.replay import RoutingTable, replayed
from moe_dispatch_testing import count_collectives
from moe_dispatch_testing.ranks import run_ranks, thread_group
from tests import ranks
from tests.dispatchers.layer import cut_layer, expert_weights, random_routing, random_rows, small_config
from tests.pages import relative

RANKS, EXPERTS, TOP_K, HIDDEN, LAYERS = 4, 8, 2, 256, 2
ROWS = (5, 0, 1, 7)  # of each rank

BACKENDS: dict[str, tuple[dict[str, Any], float]] = {
    "alltoall": ({"backend": "alltoall"}, 1e-5),
    "weights by experts": ({"backend": "alltoall", "weights": "experts"}, 1e-5),
    "exact": ({"backend": {"name": "alltoall", "reduction": "exact"}}, 1e-5),
    "two levels": ({"backend": {"name": "alltoall", "levels": 2, "ranks_per_node": 2}}, 1e-5),
    "graph-safe": ({"backend": "alltoall", "graph_safe": True, "max_tokens_per_rank": 8}, 1e-5),
    "allgather": ({"backend": "allgather"}, 1e-5),
    "deepep": ({"backend": {"name": "deepep", "emulate": True}, "wire_dtype": "bfloat16"}, 0.02),
    "hybridep": ({"backend": {"name": "hybridep", "emulate": True}, "wire_dtype": "bfloat16"}, 0.02),
}
Layer = Callable[[Tensor], Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).div(shape[-1] ** 0.5)


ROUTERS = [4 * drawn(EXPERTS, HIDDEN, seed=layer) for layer in range(LAYERS)]
MATRICES = [drawn(EXPERTS, HIDDEN, HIDDEN, seed=10 + layer) for layer in range(LAYERS)]
TOKENS = [16 * drawn(rows, HIDDEN, seed=20 + rank) for rank, rows in enumerate(ROWS)]


def dense_gradients() -> list[Tensor]:
    """Of the routers, without the library: every expert on every row of all ranks, in float64."""
    routers = [router.clone().requires_grad_() for router in ROUTERS]
    x_TD = torch.cat(TOKENS)
    for router, matrices in zip(routers, MATRICES, strict=True):
        weights_TK, ids_TK = (x_TD @ router.T).softmax(1).topk(TOP_K)
        weights_TE = torch.zeros(len(x_TD), EXPERTS, dtype=x_TD.dtype).scatter(1, ids_TK, weights_TK)
        x_TD = x_TD + torch.einsum("te,td,edf->tf", weights_TE, x_TD, matrices)
    return list(torch.autograd.grad(x_TD.square().sum(), routers))


def layer_of(dispatcher: Dispatcher, router: Tensor, matrices: Tensor) -> Layer:
    def layer(x: Tensor) -> Tensor:
        weights, ids = (x @ router.T).softmax(1).topk(TOP_K)
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        rows = sent.grouped_mm(sent.rows, matrices)
        if dispatcher.config.weights == "experts":
            rows = rows * sent.weights.unsqueeze(1)
        return x + dispatcher.combine(rows, sent)

    return layer


def train(
    group: dist.ProcessGroup, fields: dict[str, Any], arrange: Callable[[list[Layer], Tensor], Tensor]
) -> list[Tensor]:
    """Gradients of this rank's tokens, and of the router and the experts of each layer."""
    rank = group.rank()
    config = DispatcherConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, **fields)
    layers, leaves = [], [TOKENS[rank].float().requires_grad_()]
    for number, (router, matrices) in enumerate(zip(ROUTERS, MATRICES, strict=True)):
        mine = [router.float().requires_grad_(), matrices.chunk(RANKS)[rank].float().requires_grad_()]
        layers.append(layer_of(build_dispatcher(config, group, name=f"layers.{number}"), *mine))
        leaves += mine
    arrange(layers, leaves[0]).square().sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def one_by_one(layers: list[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def checkpointed(layers: list[Layer], x: Tensor, *, use_reentrant: bool = False) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    return x


reentrant = partial(checkpointed, use_reentrant=True)


def side_by_side(layers: list[Layer], x: Tensor) -> Tensor:
    return sum((layer(x) for layer in layers), torch.zeros_like(x))


@pytest.mark.parametrize("name", BACKENDS)
def test_router_gradients_are_those_of_the_dense_model(name: str) -> None:
    """transformers #48687: the loss was right and the gradient of the router was not."""
    fields, tolerance = BACKENDS[name]
    of_ranks = ranks.run_ranks(lambda group: train(group, fields, one_by_one), RANKS)
    for number, want in enumerate(dense_gradients()):
        got = torch.stack([gradients[1 + 2 * number] for gradients in of_ranks]).sum(0)
        assert relative(got, want) <= tolerance, f"layer {number}"


@pytest.mark.parametrize(("name", "arrange"), [*zip(BACKENDS, [checkpointed, reentrant] * 4, strict=True)])
def test_full_checkpointing_with_uneven_rows(name: str, arrange: Callable[[list[Layer], Tensor], Tensor]) -> None:
    """Automodel #3325: the recomputation had other shapes, and torch raised CheckpointError."""
    fields, _ = BACKENDS[name]

    def body(group: dist.ProcessGroup) -> bool:
        want, got = (train(group, fields, way) for way in (one_by_one, arrange))
        return all(torch.equal(one, other) for one, other in zip(want, got, strict=True))

    assert ranks.run_ranks(body, RANKS) == [True] * RANKS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """The collectives of each rank, in their order. The watchdog knows which layer makes them."""
    found: dict[int, list[str]] = defaultdict(list)
    start = Communicator._start

    def recorded(self: Communicator, *arguments: Any, label: str, **others: Any) -> Any:
        assert self.watch is not None
        found[self.rank].append(f"{label} of {self.watch.layer}")
        return start(self, *arguments, label=label, **others)

    monkeypatch.setattr(Communicator, "_start", recorded)
    return found


@pytest.mark.parametrize(("name", "arrange"), [*zip(BACKENDS, [side_by_side, checkpointed] * 4, strict=True)])
def test_all_ranks_call_collectives_in_one_order(
    name: str, arrange: Callable[[list[Layer], Tensor], Tensor], started: dict[int, list[str]]
) -> None:
    """Megatron #1810, #5749: two ranks were in different collectives, and the job hung after some hundred steps."""
    fields, _ = BACKENDS[name]
    run_ranks(lambda group: train(group, {**fields, "watchdog": 60}, arrange), RANKS)
    assert started[0] == started[1] == started[2] == started[3]
    of_layers = ["combine.backward of layers.0", "combine.backward of layers.1"]
    assert name in ("deepep", "hybridep") or set(of_layers) <= set(started[0])  # their kernels are no collectives


def test_outputs_and_gradients_at_ep_32() -> None:
    """Automodel #2676: with ep_size 32 the loss was wrong, with 16 it was right. 256 ids need more than a byte."""
    size, rows, experts, top_k, hidden = 32, 3, 256, 6, 16
    config = small_config("alltoall", num_experts=experts, top_k=top_k, hidden_size=hidden)
    x, grad = (random_rows(size * rows, hidden, seed=seed) for seed in (0, 1))
    routing = random_routing(size * rows, num_experts=experts, top_k=top_k)
    weights = expert_weights(experts, hidden)
    got = cut_layer(config, [rows] * size, x, routing, grad, weights)
    want = cut_layer(config.replace(backend="local"), [size * rows], x, routing, grad, weights)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-5)


def test_padding_of_a_replayed_routing_goes_to_no_expert() -> None:
    """prime-rl #3350, verl #7524: the rows of padding were all sent to expert 0, which ran out of memory."""
    lengths = {"a": 3, "b": 4}
    ids = {name: 1 + torch.rand(length, 1, 7).argsort(2)[..., :2] for name, length in lengths.items()}  # never expert 0
    table = RoutingTable(ids, num_experts=8)

    def body(group: dist.ProcessGroup) -> list[int]:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        x = torch.ones(32, 16)
        layout = THD([0, 3, 7], [0, 16, 32])
        cut = table.cut(layout, ["a", "b"], like=x)
        routing = replayed(cut.routing_for(0), torch.rand(32, 8).softmax(1), normalize=True)
        for given in (layout, None):  # the layout says what is padding, and so do the ids alone
            sent = dispatcher.dispatch(x, routing, given)
            dispatcher.combine(sent.rows, sent)
        counts: list[int] = dispatcher.metrics(gather=True).real_tokens_per_expert.tolist()
        return counts

    for counts in ranks.run_ranks(body, 2):
        assert counts[0] == 0
        assert sum(counts) == 2 * 2 * sum(lengths.values()) * 2  # ranks, dispatches, tokens, slots


@pytest.mark.parametrize("has_control_group", [False, True])
def test_a_communicator_opens_before_the_first_step(has_control_group: bool) -> None:
    """ms-swift #9486: NCCL opened a communicator in the first optimizer step, when the memory was full.

    With a control group, the self-test is what uses the group of the rows first.
    """
    store = HashStore()

    def body(group: dist.ProcessGroup) -> tuple[bool, bool]:
        control = thread_group(store, group.rank(), 2) if has_control_group else None
        with count_collectives(group) as seen:
            dispatcher = build_dispatcher(small_config("alltoall"), group, control_group=control)
            built = bool(seen.calls)
            dispatcher.self_test()
        return built, bool(seen.calls)

    assert run_ranks(body, 2) == [(not has_control_group, True)] * 2
