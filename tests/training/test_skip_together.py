"""``Setup.skip_together`` lets all ranks skip a step, or none, where a gradient scaler would decide on each rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from moe_dispatch.training import Setup
from moe_dispatch_testing import run_processes
from tests.training.test_looks import Layer
from tests.training.test_table import mesh_of


def steps(together: bool, sharded: bool) -> dict[str, Any]:
    """Four steps with a scaler. In the second one an expert of rank 1 has an infinite gradient."""
    mesh = mesh_of(copies=1, ep=2)
    setup, rank = Setup(mesh), mesh["ep"].get_local_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), Layer(mesh["ep"].get_group()))
    if sharded:
        setup.shard(model)
    else:
        setup.start(model)
    named = dict(model.named_parameters())
    experts = [p for name, p in named.items() if ".stack." in name]
    optimizers = [torch.optim.AdamW([p for p in named.values() if p not in {*experts}]), torch.optim.AdamW(experts)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    told, scales = [], []
    for number in range(4):
        x = torch.randn(5 + rank, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        scaler.scale(model(x).square().mean()).backward()
        setup.reduce(model)
        if number == 1 and rank == 1:
            gradient: Any = experts[0].grad
            (gradient.to_local() if sharded else gradient)[0, 0, 0] = torch.inf
        if together:
            told.append(bool(setup.skip_together(model)))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = setup.clip(model, 1.0)
        assert not together or norm.isfinite() == (number != 1)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
    dense = [p.full_tensor() if sharded else p for name, p in named.items() if ".stack." not in name]  # type: ignore[attr-defined]
    count = [int(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) for optimizer in optimizers]
    return {"told": told, "scales": scales, "steps": count, "dense": torch.cat([p.detach().flatten() for p in dense])}


def on_rank(rank: int) -> dict[str, Any]:
    return {
        f"{together=}, {sharded=}": steps(together, sharded) for together in (True, False) for sharded in (True, False)
    }


def test_all_ranks_skip_a_step_or_none() -> None:
    first, second = run_processes(on_rank, 2, timeout=timedelta(seconds=90))
    for case in ("together=True, sharded=True", "together=True, sharded=False"):
        for of_rank in (first[case], second[case]):
            assert of_rank["told"] == [False, True, False, False]
            assert of_rank["scales"] == [1024, 512, 512, 512]
            assert of_rank["steps"] == [3, 3]
            assert of_rank["dense"].isfinite().all()
        assert torch.equal(first[case]["dense"], second[case]["dense"])
    case = "together=False, sharded=False"  # what a scaler does alone
    assert first[case]["scales"] != second[case]["scales"]
