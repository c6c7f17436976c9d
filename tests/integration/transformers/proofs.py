"""Trainings of transformers' Qwen3-MoE under FSDP2 and expert parallelism, to be proven against the unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_dispatch_testing.prove import Setup
from tests.integration.transformers.models import BATCHES, Batch
from tests.integration.transformers.models import build as unsharded
from tests.integration.transformers.ranks import BALANCED, THEIRS, Case, Mesh, load
from tests.integration.transformers.wiring import loss_of, targets

Built = tuple[nn.Module, Case | None, torch.optim.Optimizer]


def build(_mesh: Any, *, case: Case) -> Built:
    model = load(case).train()
    return model, case, torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_one(_mesh: Any) -> Built:
    model = unsharded("qwen3_moe").train()
    return model, None, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(number: int, *, count: int) -> list[Batch]:
    return [BATCHES[(rank + number) % len(BATCHES)] for rank in range(count)]


def step(model: nn.Module, case: Case | None, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    together = batch if isinstance(batch, list) else [batch]
    number, losses = torch.tensor(float(targets(*together))), 1
    if case is not None:
        dist.all_reduce(number)
        number, losses = number / case.mesh.tp, case.mesh.fsdp
    total = torch.zeros(())
    for one in together:
        loss = loss_of(model, one, int(number))
        (loss * losses).backward()  # FSDP takes the mean over batches
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def setup(mesh: Mapping[str, int], case: Case) -> Setup:
    return Setup(
        build=functools.partial(build, case=case),
        build_one=build_one,
        step=step,
        batches=functools.partial(batches, count=case.mesh.fsdp),
        mesh=mesh,
        join=list,
    )


SETUPS = {
    "fsdp 4, ep 4": setup({"ep": 4}, Case(mesh=Mesh(fsdp=4, ep=4))),
    "fsdp 4, ep 2": setup({"copies": 2, "ep": 2}, Case(mesh=Mesh(fsdp=4, ep=2))),
    "fsdp 2, tp 2, ep 2": setup({"dp": 2, "tp": 2}, Case(mesh=Mesh(fsdp=2, tp=2, ep=2))),
    "balanced": setup({"ep": 4}, Case(mesh=Mesh(fsdp=4, ep=4), fields=BALANCED)),
    "their exchange": setup({"ep": 4}, Case(mesh=Mesh(fsdp=4, ep=4), implementation=THEIRS)),
}
