"""Set-ups of the recipes of docs/training.md, whose one process is a dense model in plain torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from moe_dispatch import DispatcherConfig
from moe_dispatch_testing.prove import Setup
from tests.training.recipes import HIDDEN, MICRO_BATCHES, RECIPES, Model, batch, loss_of

CONFIG = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=HIDDEN)
MESHES = {
    "ddp, 2 x 2": {"copies": 2, "ep": 2},
    "fsdp, 1 x 4": {"copies": 1, "ep": 4},
    "fsdp, 2 x 2": {"copies": 2, "ep": 2},
    "hsdp, 2 x 2": {"copies": 2, "ep": 2},
    "one fully_shard, 2 x 2": {"copies": 2, "ep": 2},
    "tp": {"ep": 2, "tp": 2},
    "tp, spread": {"ep": 2, "tp": 2},
    "tp x fsdp": {"ep": 2, "tp": 2},
    "cp": {"dp": 2, "cp": 2},
    "pp x ep": {"pp": 2, "ep": 2},
}


def build(_mesh: Any, *, recipe: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    run = RECIPES[recipe](CONFIG)
    return run.wrapped, run, torch.optim.AdamW(run.wrapped.parameters(), lr=1e-2)


def build_one(_mesh: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = Model(CONFIG, None)
    return model, None, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(_number: int, *, losses: int) -> list[Tensor]:
    return [batch(data) for data in range(losses)]


def step(model: nn.Module, run: Any, optimizer: torch.optim.Optimizer, data: Any) -> dict[str, Any]:
    optimizer.zero_grad()
    if run is None:
        together = data if isinstance(data, list) else [data]
        for micro_batch in [x for one in together for x in one]:
            (loss_of(model(micro_batch[None])) / MICRO_BATCHES / len(together)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    else:
        run.backward()
        run.setup.reduce(run.wrapped)
        norm = run.setup.clip(run.wrapped, 0.05)
    optimizer.step()
    return {"norm": norm}


def name_of(own: str, _model: nn.Module) -> str:
    return own.replace("block.", "")


def setup(recipe: str) -> Setup:
    mesh = MESHES[recipe]
    same = ("tp", "pp")
    losses = torch.Size(size for name, size in mesh.items() if name not in same).numel()
    return Setup(
        build=functools.partial(build, recipe=recipe),
        build_one=build_one,
        step=step,
        batches=functools.partial(batches, losses=losses),
        mesh=mesh,
        same_batch=same,
        join=list,
        name=name_of,
    )
