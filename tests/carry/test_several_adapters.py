"""The layer of docs/adapters.md with several adapters in one batch, against a dense layer on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, DispatcherConfig, Routing
from tests.deep_ep_backends.vendors import V25
from tests.dispatchers.layer import Group, on_ranks, rank_of
from tests.pages import blocks, relative

E, K, D, RANK, ADAPTERS, COUNTS = 8, 2, 16, 4, 3, (7, 0, 12, 5)
Weights = dict[str, Tensor]


def page_class() -> Any:
    (code,) = [block for block in blocks("docs/adapters.md", "python") if "class SeveralAdapters" in block]
    names: dict[str, Any] = {"torch": torch, "Dispatcher": Dispatcher}
    exec(code, names)
    return names["SeveralAdapters"]


def weights_of(hidden: int, dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(7)
    shapes = {"base": (E, hidden, hidden), "down": (ADAPTERS, E, hidden, RANK), "up": (ADAPTERS, E, RANK, hidden)}
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) / 4).to(dtype)
        for name, shape in shapes.items()
    }


def batch(rank: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Routing, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(COUNTS[rank], hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights, ids = torch.rand(COUNTS[rank], E, generator=generator, dtype=torch.float64).topk(K)
    adapters = torch.randint(0, ADAPTERS, (COUNTS[rank],), generator=generator)
    return x, Routing(ids, weights.to(dtype).requires_grad_()), adapters


def dense(hidden: int, dtype: torch.dtype, size: int) -> tuple[list[tuple[Tensor, ...]], Weights]:
    """Outputs and gradients of each rank's tokens, token by token, and the gradients of the weights."""
    weights, found = weights_of(hidden, dtype), list[tuple[Tensor, ...]]()
    weights = {name: weight.double().requires_grad_(name != "base") for name, weight in weights.items()}
    for rank in range(size):
        x, routing, adapters = batch(rank, hidden, dtype)
        x64, w64 = x.detach().double().requires_grad_(), routing.topk_weights.detach().double().requires_grad_()
        rows = []
        for token, (ids, adapter) in enumerate(zip(routing.topk_ids.tolist(), adapters.tolist(), strict=True)):
            outputs = [
                x64[token] @ weights["base"][expert]
                + x64[token] @ weights["down"][adapter, expert] @ weights["up"][adapter, expert]
                for expert in ids
            ]
            rows.append(sum(output * w64[token, slot] for slot, output in enumerate(outputs)))
        y = torch.stack(rows) if rows else x64 * w64.sum()  # type: ignore[arg-type]
        y.square().sum().backward()
        assert x64.grad is not None
        assert w64.grad is not None
        found.append((y.detach(), x64.grad, w64.grad))
    return found, {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


@pytest.mark.parametrize("fields", [{}, {"graph_safe": True, "max_tokens_per_rank": 12}], ids=["eager", "graph-safe"])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("alltoall", torch.float64, 1e-12), ("allgather", torch.float64, 1e-12), (V25, torch.bfloat16, 6e-2)],
    ids=["alltoall", "allgather", "deepep"],
)
def test_a_layer_with_three_adapters_is_the_dense_one(
    backend: Any, dtype: torch.dtype, tolerance: float, fields: dict[str, Any]
) -> None:
    size, hidden = 4, 256 if backend == V25 else D
    wanted, wanted_grads = dense(hidden, dtype, size)
    config = DispatcherConfig(backend=backend, num_experts=E, top_k=K, hidden_size=hidden, **fields)

    def near(got: Tensor | None, want: Tensor) -> None:
        assert got is not None
        assert relative(got, want) <= tolerance

    def body(group: Group) -> Weights:
        rank = rank_of(group)
        layer, local = page_class()(config, group), slice(rank * E // size, (rank + 1) * E // size)
        given = weights_of(hidden, dtype)
        layer.base = given["base"][local].clone()
        layer.down, layer.up = (given[name][:, local].clone().requires_grad_() for name in ("down", "up"))
        x, routing, adapters = batch(rank, hidden, dtype)
        y = layer(x, routing, carry={"adapter": adapters})
        y.double().square().sum().backward()
        for got, want in zip((y.detach(), x.grad, routing.topk_weights.grad), wanted[rank], strict=True):
            near(got, want)
        layer.close()
        return {"down": layer.down.grad, "up": layer.up.grad}

    of_ranks = on_ranks(body, size)
    for name, want in wanted_grads.items():
        near(torch.cat([grads[name] for grads in of_ranks], 1), want)
