"""torchao's AdamW with states of 8 bits steps stacks of experts, plain ones and those of ``Setup.shard``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.training import Setup
from moe_dispatch_testing import run_processes
from tests.training.test_table import mesh_of

HIDDEN, EXPERTS = 64, 4  # torchao takes tensors of 4096 numbers and more
CONFIG = DispatcherConfig(num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN)


class Experts(Dispatcher):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(CONFIG, group)
        self.up = nn.Parameter(torch.randn(EXPERTS // group.size(), HIDDEN, HIDDEN) / 8)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        weights, ids = x[:, :EXPERTS].softmax(1).topk(2)
        return super().forward(x, Routing(ids, weights))

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.grouped_mm(sent.rows, self.up.to_local() if isinstance(self.up, DTensor) else self.up)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moment(optimizer: torch.optim.Optimizer, model: Experts) -> Tensor:
    state: Any = local(optimizer.state[model.up]["exp_avg"])
    moments: Tensor = state.dequantize()
    return moments


def trained(rank: int, folder: str, sharded: bool) -> dict[str, float]:
    from torchao.optim import AdamW8bit

    mesh = mesh_of(copies=1, ep=2)
    setup = Setup(mesh)

    def built(kind: Any) -> tuple[Experts, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = Experts(mesh["ep"].get_group())
        if sharded:
            setup.shard(model)
        return model, kind(model.parameters(), lr=1e-3)

    def steps(model: Experts, optimizer: torch.optim.Optimizer) -> Tensor:
        before = local(model.up).detach().clone()
        for step in range(5):
            x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x) - x).square().mean().backward()
            setup.reduce(model)
            setup.clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return local(model.up).detach() - before

    model, optimizer = built(AdamW8bit)
    got, want = steps(model, optimizer), steps(*built(torch.optim.AdamW))
    dcp.save({"training": setup.state(model, optimizer)}, checkpoint_id=folder)
    again, other = built(AdamW8bit)
    dcp.load({"training": setup.state(again, other)}, checkpoint_id=folder)
    lost = (moment(other, again) - moment(optimizer, model)).abs().max()
    return {"apart": ((got - want).norm() / want.norm()).item(), "lost": lost.item()}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_adamw_in_8_bits_steps_stacks_and_comes_back_from_a_checkpoint(sharded: bool, tmp_path: Any) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    for found in run_processes(trained, 2, str(tmp_path / "saved"), sharded, timeout=timedelta(seconds=200)):
        assert 0 < found["apart"] < 0.05  # 8 bits round the moments
        assert found["lost"] == 0
