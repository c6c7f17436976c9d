"""Failures that users of other systems reported and no other file tests: `tests/reported_failures.py` lists all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from moe_dispatch import THD, Dispatcher, Routing, build_dispatcher
from moe_dispatch.replay import RoutingTable, replayed
from moe_dispatch.seams.group_observers import CollectiveObserver, Work, observers_of
from moe_dispatch_testing import count_collectives
from moe_dispatch_testing.ranks import run_ranks, thread_group
from tests import ranks
from tests.dispatchers.layer import cut_layer, expert_weights, random_routing, random_rows, small_config

ROWS = (5, 0, 1, 7)  # of each rank

BACKENDS: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "weights by experts": {"backend": "alltoall", "weights": "experts"},
    "exact": {"backend": {"name": "alltoall", "reduction": "exact"}},
    "by node": {"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}},
    "graph-safe": {"backend": "alltoall", "graph_safe": True, "max_tokens_per_rank": 8},
    "allgather": {"backend": "allgather"},
    "deepep": {"backend": {"name": "deepep", "emulate": True}, "wire": "bfloat16"},
    "hybridep": {"backend": {"name": "hybridep", "emulate": True}, "wire": "bfloat16"},
}
Layer = Callable[[Tensor], Tensor]


def train(group: dist.ProcessGroup, fields: dict[str, Any], arrange: Callable[[list[Layer], Tensor], Tensor]) -> None:
    """Two layers, forward and backward."""

    def run(dispatcher: Dispatcher, x: Tensor) -> Tensor:
        routing = random_routing(len(x))
        sent = dispatcher.dispatch(x, Routing(routing.topk_ids, routing.topk_weights.requires_grad_()))
        return x + dispatcher.combine(2 * sent.rows, sent)

    config = small_config(hidden_size=256, watchdog=60, **fields)
    layers = [partial(run, build_dispatcher(config, group, name=f"layers.{number}")) for number in range(2)]
    arrange([*layers], random_rows(ROWS[group.rank()], 256).requires_grad_()).sum().backward()


def checkpointed(layers: list[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def side_by_side(layers: list[Layer], x: Tensor) -> Tensor:
    return sum((layer(x) for layer in layers), torch.zeros_like(x))


class Order(CollectiveObserver):
    """Keeps the collectives of a rank in their order, and the layers that make them."""

    def __init__(self) -> None:
        self.layer, self.found = "", list[str]()

    def called(self, name: str) -> None:
        self.layer = name

    def collective(self, label: str, nbytes: int, tensor: Tensor, start: Callable[[Any], Work], options: Any) -> Work:
        self.found.append(f"{label} of {self.layer}")
        return start(options)


@pytest.mark.parametrize(("name", "arrange"), [*zip(BACKENDS, [side_by_side, checkpointed] * 4, strict=True)])
def test_all_ranks_call_collectives_in_one_order(name: str, arrange: Callable[[list[Layer], Tensor], Tensor]) -> None:
    """Megatron #1810, #5749: two ranks were in different collectives, and the job hung after some hundred steps."""

    def body(group: dist.ProcessGroup) -> list[str]:
        order = Order()
        observers_of(group).append(order)
        train(group, BACKENDS[name], arrange)
        return order.found

    started = run_ranks(body, len(ROWS))
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
