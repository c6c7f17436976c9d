"""Trainings of DeepSpeed with AutoEP and our dispatchers, to be proven against the unsharded model."""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch_testing.prove import Setup, look
from tests.integration.deepspeed.engines import MOMENTUM, RATE, Case, engine_of, loss_of, model_of, on_cpu

RANKS = 2
Built = tuple[nn.Module, Any, Any]


def build(_mesh: Any, *, case: Case) -> Built:
    stack = ExitStack()  # DeepSpeed runs in the block, which lasts as long as the process
    stack.enter_context(on_cpu(RANKS))
    engine = engine_of(case)
    return engine.module, engine, stack


def build_one(_mesh: Any, *, case: Case) -> Built:
    model = model_of(case)
    return model, None, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def batches(number: int) -> list[tuple[int, int]]:
    return [(number, rank) for rank in range(RANKS)]


def step(model: nn.Module, engine: Any, optimizer: Any, batch: Any, *, case: Case, fault: str) -> Tensor:
    """DeepSpeed takes the mean of the losses of the ranks."""
    if engine is None:
        losses = [loss_of(case, model, number, 0, rank) / RANKS for number, rank in batch]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach()
    number, rank = batch
    loss = loss_of(case, engine, number, 0, rank)
    engine.backward(loss * (RANKS if fault == "sum of losses" else rank if fault == "lost" else 1))
    look()  # the optimizer steps on tensors of DeepSpeed
    engine.step()
    return loss.detach()


def value(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else nullcontext():
        return parameter.detach().clone()


def gradient(parameter: nn.Parameter) -> Tensor | None:
    from deepspeed.utils import safe_get_full_grad

    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):  # of ZeRO 3, or 1 and 2
        found: Tensor | None = safe_get_full_grad(parameter)
        return found
    return parameter.grad


def name_of(own: str, _model: nn.Module) -> str:
    return own.replace(".mlp.router.gate.", ".mlp.gate.")


def places(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """AutoEP holds stacks of the experts of a rank, and cuts the first product in two. ZeRO 3 leaves no shape."""
    if dist.get_world_size() == 1:
        return {}
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        path, _, last = name.rpartition(".")
        if path.endswith(".experts"):
            held, rows, columns = shape
            parts = 1 if last == "w2" else 2
            whole = torch.arange(RANKS * held * parts * rows * columns).view(RANKS * held, parts * rows, columns)
            mine = whole.chunk(RANKS)[dist.get_rank()].chunk(parts, 1)[1 if last == "w3" else 0]
            found[name] = (f"{path}.{'down_proj' if last == 'w2' else 'gate_up_proj'}", mine)
        else:
            found[name] = (name_of(name, model), torch.arange(torch.Size(shape).numel()).view(shape))
    return found


def setup(stage: int, fault: str = "") -> Setup:
    case = Case(stage=stage)
    return Setup(
        build=functools.partial(build, case=case),
        build_one=functools.partial(build_one, case=case),
        step=functools.partial(step, case=case, fault=fault),
        batches=batches,
        mesh={"ep": RANKS},
        join=list,
        name=name_of,
        places=places,
        value=value,
        gradient=gradient,
    )


SETUPS = {f"ZeRO {stage}": setup(stage) for stage in range(4)}
FAULTY = {fault: setup(2, fault) for fault in ("sum of losses", "lost")}
