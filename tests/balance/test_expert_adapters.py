"""Adapters of low rank in one's own layer, on frozen experts: copies of experts carry the adapters of the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.dispatchers import SlotWeights
from tests.pages import blocks
from tests.ranks import run_ranks

EXPERTS, RANKS, HIDDEN, RANK = 8, 4, 16, 2
ROWS = (24, 0, 7, 12)
BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}
STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 24}
ALPHA = 3.0
SCALES = {"lora": ALPHA / RANK, "rslora": ALPHA / RANK**0.5, "dora": ALPHA / RANK}
NAMES = ("base", "down", "up", "magnitude")


def weights(kind: str) -> tuple[Tensor, ...]:
    """Base, A and B of all experts, and with DoRA the magnitudes of their output columns."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((EXPERTS, HIDDEN, HIDDEN), (EXPERTS, HIDDEN, RANK), (EXPERTS, RANK, HIDDEN))
    base, down, up = (torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes)
    return (base, down, up, torch.rand(EXPERTS, HIDDEN, generator=generator) + 0.5)[: 3 + (kind == "dora")]


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids that favour expert 0, and weights."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(ROWS[rank], HIDDEN, generator=generator)
    ids = torch.stack([torch.zeros(ROWS[rank]).long(), torch.randint(1, EXPERTS, x.shape[:1], generator=generator)], 1)
    return x, ids, torch.rand(ids.shape, generator=generator)


class Adapted(Dispatcher):
    """A layer of experts x W + s x A B, of which W is frozen, with the norm of each column of the sum for DoRA."""

    def __init__(self, config: DispatcherConfig, group: ProcessGroup, kind: str) -> None:
        super().__init__(config, group)
        self.slot_weights, self.scale = SlotWeights(self), SCALES[kind]
        for name, weight in zip(NAMES, weights(kind), strict=False):
            own = nn.Parameter(weight.chunk(RANKS)[group.rank()].clone(), requires_grad=name != "base")
            self.register_parameter(name, own)

    def run_experts(self, sent: Any) -> Tensor:
        return self.slot_weights.run(sent, self.adapted, *self.parameters())[1]

    def adapted(self, part: Dispatched, base: Tensor, down: Tensor, up: Tensor, *magnitude: Tensor) -> Tensor:
        assert not base.requires_grad, "the backward would compute gradients that nobody needs"
        if magnitude:  # as in PEFT, the norm is a constant for the backward
            whole = base + self.scale * torch.bmm(down, up)
            factors = magnitude[0] / torch.linalg.vector_norm(whole.detach(), dim=1)
            return part.grouped_mm(part.rows, whole * factors.unsqueeze(1))
        adapted: Tensor = part.grouped_mm(part.grouped_mm(part.rows, down), up) * self.scale
        return part.grouped_mm(part.rows, base) + adapted


def on_rank(group: ProcessGroup, fields: dict[str, Any], kind: str = "lora") -> dict[str, Any]:
    config = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, **fields)
    layer = Adapted(config, group, kind)
    x, ids, shares = batch(group.rank())
    y = layer(x.requires_grad_(), Routing(ids, shares))
    (y * y).sum().backward()
    assert layer.base.grad is None
    return {
        "y": y.detach(),
        "x": x.grad,
        "grads": [weight.grad for weight in layer.parameters() if weight.requires_grad],
        "sent": layer.metrics().bytes_sent,
    }


def dense(kind: str) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor | None]]:
    """Outputs and gradients of rows, by rank, and the gradients of what is trained, of all experts."""
    base, *trained = weights(kind)
    down, up, *magnitude = (weight.requires_grad_() for weight in trained)
    found = []
    for rank in range(RANKS):
        x, ids, shares = batch(rank)
        x.requires_grad_()
        every = torch.einsum("td,edh->teh", x, base) + SCALES[kind] * torch.einsum("td,edr,erh->teh", x, down, up)
        if magnitude:
            every = every * magnitude[0] / (base + SCALES[kind] * down @ up).detach().square().sum(1).sqrt()
        y = (every.gather(1, ids[:, :, None].expand(-1, -1, HIDDEN)) * shares[:, :, None]).sum(1)
        (y * y).sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    return found, [weight.grad for weight in trained]


def of_page(group: ProcessGroup, fields: dict[str, Any]) -> dict[str, Any]:
    """What the layer of docs/adapters.md computes, before and after its adapters are those of ``weights``."""
    (code,) = [block for block in blocks("docs/adapters.md", "python") if "class Adapted" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    config = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, **fields)
    base, *given = (weight.chunk(RANKS)[group.rank()].clone() for weight in weights("lora"))
    layer = names["Adapted"](config, group, base, RANK, ALPHA)
    x, ids, shares = batch(group.rank())
    first = layer(x, Routing(ids, shares)).detach()
    assert layer.down.any()
    with torch.no_grad():
        layer.down.copy_(given[0])
        layer.up.copy_(given[1])
    y = layer(x.requires_grad_(), Routing(ids, shares))
    (y * y).sum().backward()
    return {"first": first, "y": y.detach(), "x": x.grad, "grads": [layer.down.grad, layer.up.grad]}


@pytest.mark.parametrize("fields", [{}, BALANCED], ids=["plain", "balanced"])
def test_the_layer_of_the_page_is_the_dense_layer_and_starts_at_its_base(fields: dict[str, Any]) -> None:
    results = run_ranks(lambda group: of_page(group, fields), RANKS)
    rows, grads = dense("lora")
    base = weights("lora")[0]
    for rank, result in enumerate(results):
        x, ids, shares = batch(rank)
        frozen = (torch.einsum("td,tkdh->tkh", x, base[ids]) * shares[:, :, None]).sum(1)
        torch.testing.assert_close(result["first"], frozen, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["y"], rows[rank][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["x"], rows[rank][1], rtol=1e-4, atol=1e-5)
        for got, want in zip(result["grads"], grads, strict=True):
            assert want is not None
            torch.testing.assert_close(got, want.chunk(RANKS)[rank], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(
    "fields", [{}, BALANCED, {"balance": "exact", **STATIC}], ids=["plain", "balanced", "balanced, graph-safe"]
)
def test_adapters_in_ones_own_layer_train_as_in_the_dense_layer(fields: dict[str, Any], kind: str) -> None:
    results = run_ranks(lambda group: on_rank(group, fields, kind), RANKS)
    rows, grads = dense(kind)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["y"], rows[rank][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["x"], rows[rank][1], rtol=1e-4, atol=1e-5)
        for got, want in zip(result["grads"], grads, strict=True):
            assert want is not None
            torch.testing.assert_close(got, want.chunk(RANKS)[rank], rtol=1e-4, atol=1e-4)


def test_frozen_weights_send_no_gradients_home() -> None:
    """Copies get base weights and adapters, twice; home come only the gradients of the adapters."""
    results = run_ranks(lambda group: on_rank(group, BALANCED), RANKS)
    there = sum(result["sent"].get("weights", 0) for result in results)
    back = sum(result["sent"].get("weights.backward", 0) for result in results)
    assert back > 0
    assert there == 2 * back * (HIDDEN + 2 * RANK) / (2 * RANK)
