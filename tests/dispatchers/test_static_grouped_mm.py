"""``torch._grouped_mm`` over a buffer of fixed size, with NaN in its slack: the results of the eager dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient
from tests.dispatchers.layer import (
    Group,
    expert_weights,
    local_part,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

WEIGHTS = expert_weights(dtype=torch.bfloat16)
BACKENDS = [("local", 1), ("allgather", 2), ("alltoall", 1), ("alltoall", 2)]
T, MOST = 13, 19
# The last expert that is named.
KINDS = {"all experts": 7, "some experts": 3, "nowhere": -1}


def slack_rows(sent: Dispatched) -> Tensor:
    """bool (R,): behind the last group. Padding of experts is left alone: a grouped product reads it."""
    return torch.arange(len(sent.rows)) >= sent.offs[-1]


def grouped(sent: Dispatched, experts_LDD: Tensor) -> Tensor:
    return torch._grouped_mm(sent.rows, experts_LDD, offs=sent.offs)


def grouped_with_nan(sent: Dispatched, experts_LDD: Tensor) -> Tensor:
    """The same with NaN in slack wherever something is read, in both directions, and in padding of what comes out."""
    slack_R = slack_rows(sent)
    assert slack_R.any()
    rows = poison(poison_gradient(sent.rows, slack_R), slack_R)
    out = torch._grouped_mm(rows, experts_LDD, offs=sent.offs)
    return poison(poison_gradient(out, slack_R), padding_rows(sent))


def layer(config: DispatcherConfig, group: Group, kind: str) -> list[Tensor]:
    """y, and gradients of x, of the weights and of the experts."""
    rank = 0 if group is None else group.rank()
    x, routing = random_rows(T - rank, seed=rank, dtype=torch.bfloat16), random_routing(T - rank, seed=rank)
    ids = routing.topk_ids.masked_fill(routing.topk_ids > KINDS[kind], -1)
    leaves = [x.requires_grad_(), routing.topk_weights.requires_grad_(), local_part(WEIGHTS, group)]
    dispatcher = build_dispatcher(config, group)
    sent = dispatcher.dispatch(leaves[0], Routing(ids, leaves[1]))
    rows = (grouped_with_nan if config.graph_safe else grouped)(sent, leaves[2])
    if config.weights == "experts":
        weights = poison_gradient(sent.weights, padding_rows(sent)) if config.graph_safe else sent.weights
        rows = (rows * weights.unsqueeze(1)).to(rows.dtype)
    y = dispatcher.combine(rows, sent)
    y.backward(random_rows(T - rank, seed=rank + 9, dtype=torch.bfloat16))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("room", [{}, {"capacity_factor": 2.0, "on_overflow": "raise"}], ids=["worst", "finite"])
@pytest.mark.parametrize("weights", ["combine", "experts"])
@pytest.mark.parametrize("pad_multiple", [8, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_results_equal_the_eager_ones(
    backend: str, size: int, kind: str, pad_multiple: int, weights: str, room: dict[str, Any]
) -> None:
    eager = small_config(backend, pad_multiple=pad_multiple, weights=weights)
    static = eager.replace(graph_safe=True, max_tokens_per_rank=MOST, **room)
    results = on_ranks(lambda group: (layer(static, group, kind), layer(eager, group, kind)), size)
    for mine, theirs in results:
        assert len(mine) == len(theirs) == 4
        for got, wanted in zip(mine, theirs, strict=True):
            assert torch.equal(got, wanted)


def test_without_offs_the_nan_would_be_seen() -> None:
    """The control: groups that reach to the end of the buffer take the slack with them."""
    config = small_config("local", pad_multiple=8, graph_safe=True, max_tokens_per_rank=MOST)
    sent = build_dispatcher(config).dispatch(random_rows(T, dtype=torch.bfloat16), random_routing(T))
    rows = poison(sent.rows, slack_rows(sent))
    to_the_end = sent.offs.index_fill(0, torch.tensor([7]), len(rows))
    assert torch._grouped_mm(rows, WEIGHTS, offs=to_the_end).isnan().any()
    assert not torch._grouped_mm(rows, WEIGHTS, offs=sent.offs)[: int(sent.offs[-1])].isnan().any()
