"""Prove the set-up of train_fsdp2.py on four ranks: ``moe-dispatch prove examples/prove_fsdp2.py``."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch import DispatcherConfig
from moe_dispatch.training import Setup
from train_fsdp2 import AUXILIARY, EXPERTS, HIDDEN, TOP_K, LanguageModel, packs, shard

mesh = {"copies": 2, "ep": 2}  # one process gets a mesh of 1 x 1


def build(mesh: DeviceMesh) -> tuple[LanguageModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)
    model = LanguageModel(config, mesh)
    shard(model, mesh, torch.get_default_dtype())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(number: int) -> list[Any]:
    return [[pack] for pack in islice(packs(), 4 * number, 4 * number + 4)]  # one pack for each rank


def join(batches: list[Any]) -> list[Any]:
    return list(chain.from_iterable(batches))


def step(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: list[Any]) -> Tensor:
    num_real = torch.stack([(targets >= 0).sum() for _, targets, _ in batch]).sum()
    dist.all_reduce(num_real)
    total = torch.zeros(())
    for tokens, targets, layout in batch:
        logits, auxiliary = model(tokens, layout)
        loss = F.cross_entropy(logits, targets, reduction="sum") + AUXILIARY * auxiliary
        (loss * dist.get_world_size() / num_real).backward()
        total += loss.detach() / num_real
    Setup().clip(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total
