"""Pipeline stages whose layers fully_shard has wrapped one by one, under a schedule that splits the backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from moe_dispatch_testing.prove import Setup

HIDDEN = 8
Built = tuple[nn.Module, Any, torch.optim.Optimizer]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def build(mesh: DeviceMesh, *, by: str) -> Built:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)]
    if mesh.size() == 1:
        whole = nn.Sequential(*layers)
        return whole, None, torch.optim.AdamW(whole.parameters(), lr=1e-2)
    layer = layers[mesh["pp"].get_local_rank()]
    stage = nn.Sequential(layer)
    for module in (layer[0], layer[2], stage):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=by == "fully_shard")
    number, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    of = PipelineStage(stage, number, size, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleInterleavedZeroBubble([of], 2, loss_fn=loss_of)
    return stage, schedule, torch.optim.AdamW(stage.parameters(), lr=1e-2)


def name_of(own: str, model: nn.Module) -> str:
    """Return the name in the whole model: layers of a stage are numbered from 0."""
    return f"1{own[1:]}" if torch.distributed.get_rank() >= 2 else own


def step(model: nn.Module, schedule: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    if schedule is None:
        loss_of(model(x), x).backward()
    else:
        of = schedule._stages[0]
        schedule.step(*([x] if of.is_first else []), **({"target": x, "losses": []} if of.is_last else {}))
    optimizer.step()


def batches(_number: int) -> list[Tensor]:
    return [torch.randn(4, HIDDEN) for _ in range(2)]


def setup(by: str) -> Setup:
    return Setup(
        build=functools.partial(build, by=by),
        step=step,
        batches=batches,
        mesh={"pp": 2, "dp": 2},
        name=name_of,
    )
