"""A set-up for ``moe-dispatch plan``: two MoE layers whose rows go to all experts evenly, and a dense part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.training import Setup

EXPERTS, TOP_K, HIDDEN, ROWS = 8, 2, 32, 24
mesh = {"copies": 2, "ep": 2}


class Layer(Dispatcher):
    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        config = DispatcherConfig(
            backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, pad_multiple=8
        )
        super().__init__(config, mesh["ep"], name=name)
        self.matrices = nn.Parameter(torch.randn(self.num_local_experts, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def run_experts(self, sent: Dispatched) -> Tensor:
        sharded: Any = self.matrices  # ``Setup.shard`` has made a DTensor of it
        return sent.grouped_mm(sent.rows, sharded.to_local()).tanh()


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer(mesh, f"layers.{number}") for number in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ids = (torch.arange(len(x)).unsqueeze(1) * TOP_K + torch.arange(TOP_K)) % EXPERTS
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x, Routing(ids, torch.ones(ids.shape) / TOP_K))
        return x


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model(mesh)
    Setup(mesh).shard(model)
    return model, torch.optim.AdamW(model.parameters())


def batches(number: int) -> list[Any]:
    return [torch.randn(ROWS, HIDDEN) for _ in range(4)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in batch.split(ROWS // 2):  # micro-batches, of which autograd keeps one at a time
        loss = model(part).square().mean() / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total
