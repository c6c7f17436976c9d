"""Trainings of a decoder that torchtitan shards and clips itself, to be proven against its own unsharded modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_dispatch_testing.prove import Setup
from tests.integration.deep_ep_users.dense import TOLERANCE
from tests.integration.titan.moe import HIDDEN, RANKS, moe_config
from tests.integration.titan.test_titan_balance import BALANCE, TOKENS, Case, Decoder, built_model

MAX_NORM = 0.05  # which every step reaches
Built = tuple[nn.Module, ExitStack | None, torch.optim.Optimizer]


def build(_mesh: Any, *, case: Case) -> Built:
    stack = ExitStack()  # torchtitan's code runs in the block, which lasts as long as the process
    model = stack.enter_context(built_model(case))
    return model, stack, torch.optim.SGD(model.parameters(), lr=1.0)


def build_one(_mesh: Any) -> Built:
    model = Decoder(moe_config())
    return model, None, torch.optim.SGD(model.parameters(), lr=1.0)


def batches(_number: int) -> list[Tensor]:
    return [torch.randn(1, TOKENS[rank], HIDDEN) / 2 for rank in range(RANKS)]


def join(batches: Any) -> Tensor:
    return torch.cat(list(batches), 1)


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def step(
    model: nn.Module, stack: ExitStack | None, optimizer: torch.optim.Optimizer, x: Tensor, *, fault: str
) -> dict[str, Any]:
    tokens = max(1, RANKS * x.shape[1]) if fault == "mean of means" and stack is not None else sum(TOKENS)
    loss = (model(x) - x.cos()).square().sum() / (HIDDEN * tokens)  # torchtitan adds up gradients, and divides none
    loss.backward()
    parameters = [*model.parameters()]
    if stack is None:
        norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    elif fault == "clipped per rank":
        mine = [local(parameter.grad) for parameter in parameters]
        norm = nn.utils.get_total_norm(mine)
        torch._foreach_mul_(mine, MAX_NORM / norm.item())
    else:
        from torchtitan.distributed.utils import clip_grad_norm_

        norm = clip_grad_norm_(parameters, MAX_NORM, ep_enabled=True)
    optimizer.step()
    optimizer.zero_grad()
    return {"norm": norm}


def setup(mesh: Mapping[str, int], case: Case, fault: str = "") -> Setup:
    return Setup(
        build=functools.partial(build, case=case),
        build_one=build_one,
        step=functools.partial(step, fault=fault),
        batches=batches,
        join=join,
        mesh=mesh,
        tolerance=TOLERANCE,  # torchtitan's experts compute in bfloat16
    )


SETUPS = {
    "ep 4": setup({"ep": 4}, Case(ep=4, options=())),
    "ep 4, balanced": setup({"ep": 4}, Case(ep=4, options=tuple(BALANCE.items()))),
    "ep 2 x fsdp 2": setup({"efsdp": 2, "ep": 2}, Case(ep=2, options=())),
    "ep 2 x replicas 2, recomputed": setup({"copies": 2, "ep": 2}, Case(ep=2, replicate=2, options=(), recompute=True)),
}
FAULTY = {fault: setup({"ep": 4}, Case(ep=4, options=()), fault) for fault in ("mean of means", "clipped per rank")}
