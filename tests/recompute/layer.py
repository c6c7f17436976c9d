"""What these tests share: a layer with a router, and a step of checkpointed calls of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.recompute import keep_ids, keep_routes, keep_routes_of
from tests.dispatchers.layer import Group, rank_of

E, K, D, WIDTH = 8, 2, 16, 8
TOKENS = (7, 12, 0, 5)
Function = Callable[..., Tensor]


class Layer(nn.Module):
    """A residual layer: a router, and experts of two matrices.

    Attributes:
        noise: Added to the logits of the router in calls after the first ``quiet`` ones.
        gives_ids: Whether the router uses ``keep_ids``.
        seen: What each dispatch was: the ids of the router.
    """

    def __init__(self, config: DispatcherConfig, group: Group, name: str = "layers.1") -> None:
        super().__init__()
        rank, hidden = rank_of(group), config.hidden_size
        self.dispatcher = build_dispatcher(config, group, name=name)
        local = E // (1 if group is None else group.size())
        self.gate = _parameter(hidden, E, seed=5)
        self.first = _parameter(local, hidden, WIDTH, seed=10 + rank)
        self.second = _parameter(local, WIDTH, hidden, seed=20 + rank)
        self.noise, self.quiet, self.calls, self.gives_ids = 0.0, 0, 0, False

    def forward(self, x: Tensor) -> Tensor:
        sent = self.dispatcher.dispatch(x, self.route(x))
        rows = torch.tanh(sent.grouped_mm(sent.rows, self.first))
        return x + self.dispatcher.combine(sent.grouped_mm(rows, self.second), sent)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = super().__call__(x)
        return y

    def route(self, x: Tensor) -> Routing:
        self.calls += 1
        logits = x.flatten(0, -2) @ self.gate
        chosen = logits
        if self.calls > self.quiet:
            generator = torch.Generator().manual_seed(self.calls)
            chosen = logits + self.noise * torch.randn(logits.shape, generator=generator)
        ids = chosen.topk(K, 1).indices
        if self.gives_ids:
            ids = keep_ids(ids)
        return Routing(ids, logits.softmax(1).gather(1, ids))


def _parameter(*shape: int, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-2] ** 0.5)


def layer_config(backend: str | dict[str, Any] = "alltoall", **fields: Any) -> DispatcherConfig:
    if isinstance(backend, dict) and "emulate" in backend:
        fields = {"hidden_size": 256, "wire": "bfloat16", **fields}
    return DispatcherConfig(backend=backend, **{"num_experts": E, "top_k": K, "hidden_size": D, **fields})


def tokens(group: Group, hidden: int = D, seed: int = 0) -> Tensor:
    rank = rank_of(group)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(TOKENS[rank], hidden, generator=generator).requires_grad_()


def called(how: str, function: Function, *arguments: Any) -> Tensor:
    """Call a function plainly, or checkpoint it: ``anew`` dispatches again, ``kept`` and ``reentrant`` keep routes.

    Behind these two, ``, only added`` leaves the last combine out in any case.
    """
    how, *only_added = how.split(", ")
    y: Tensor
    if how == "plain":
        y = function(*arguments)
    elif how == "anew":
        y = checkpoint(function, *arguments, use_reentrant=False)
    elif how == "kept":
        y = checkpoint(
            function, *arguments, use_reentrant=False, context_fn=partial(keep_routes, only_added=bool(only_added))
        )
    else:
        assert how == "reentrant"
        y = checkpoint(keep_routes_of(function, only_added=bool(only_added)), *arguments, use_reentrant=True)
    return y


def gradients(x: Tensor, layer: nn.Module) -> list[Tensor]:
    found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [grad.clone() for grad in found if grad is not None]


def step(layer: Layer, x: Tensor, how: str, calls: int = 2) -> list[Tensor]:
    """Call the layer several times on its own output, and return the output and all gradients."""
    y = x
    for _ in range(calls):
        y = called(how, layer, y)
    y.square().sum().backward()
    return [y.detach(), *gradients(x, layer)]


def assert_equal(results: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for rank, (mine, its) in enumerate(zip(results, wanted, strict=True)):
        assert len(mine) == len(its)
        for number, (one, other) in enumerate(zip(mine, its, strict=True)):
            assert torch.equal(one, other), f"rank {rank}, tensor {number}"
