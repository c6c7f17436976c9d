"""The first forward warns of a wrapper that mixes different experts, and of nothing else."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.training import Setup
from moe_dispatch_testing import run_processes
from tests.training.test_table import mesh_of

CONFIG = DispatcherConfig(num_experts=4, top_k=2, hidden_size=6)


class Layer(Dispatcher):
    """A dispatcher that holds its router, too."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(CONFIG, group)
        self.router = nn.Linear(6, 4, bias=False)
        self.stack = nn.ParameterDict({"up": torch.randn(4 // group.size(), 6, 6)})

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        weights, ids = self.router(x).softmax(1).topk(2)
        return super().forward(x, Routing(ids, weights))

    def run_experts(self, sent: Dispatched) -> Tensor:
        up = self.stack["up"]
        return sent.grouped_mm(sent.rows, up.to_local() if hasattr(up, "to_local") else up)


def said_by(model: nn.Module, *, frozen: bool = False, of: str = "must leave out") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x = torch.randn(5, 6, requires_grad=frozen)
            model(x).sum().backward()
    return [str(warning.message) for warning in caught if of in str(warning.message)]


def looks(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    mesh = mesh_of(copies=1, ep=2)

    def model(*, frozen: bool = False) -> nn.Sequential:
        layer = Layer(mesh["ep"].get_group())
        layer.stack.requires_grad_(not frozen)
        return nn.Sequential(nn.Linear(6, 6), layer)

    for frozen in (False, True):
        sharded = model(frozen=frozen)
        fully_shard(sharded, mesh=mesh["ep"])
        found[f"fully_shard, {frozen=}"] = said_by(sharded, frozen=frozen)
    found["FSDP1"] = said_by(FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True))
    found["DDP"] = said_by(DistributedDataParallel(model()))
    right = model()
    Setup(mesh).shard(right)
    found["shard"] = said_by(right)
    found["ddp"] = said_by(Setup(mesh).ddp(model()))
    for setup in (None, Setup(mesh)):
        adapted = model()
        Setup(mesh).shard(adapted)
        adapted[0].base_layer = nn.Linear(6, 6)  # as PEFT wraps a layer
        adapted[0].lora_A = nn.Linear(6, 6, bias=False)
        if setup is not None:
            setup.start(adapted)
        found[f"adapters, {setup is not None}"] = said_by(adapted, of="adapters")
    late = model()
    found["unwrapped"] = said_by(late)
    fully_shard(late, mesh=mesh["ep"])
    found["wrapped later"] = said_by(late)
    return found


def test_the_first_forward_warns_of_wrappers_that_mix_experts() -> None:
    for found in run_processes(looks, 2, timeout=timedelta(seconds=60)):
        for case, by in {
            "fully_shard, frozen=False": "fully_shard",
            "fully_shard, frozen=True": "fully_shard",
            "wrapped later": "fully_shard",
            "FSDP1": "FullyShardedDataParallel",
            "DDP": "DistributedDataParallel",
        }.items():
            (said,) = found[case]
            number, name = (
                (4, "1.router.weight") if case == "FSDP1" else (1, "1.stack.up")
            )  # which flattens all of them
            start = f"Dispatcher.combine: {by} must leave out the parameters of experts, got {number} that it manages ("
            assert said.startswith(start), case
            assert f"{name}) among ranks that hold different experts" in said, case
        (said,) = found["adapters, False"]
        assert "fully_shard does not average the gradients of 1 adapters, which were added after it (0.lora_A" in said
        assert not found["adapters, True"]
        assert not found["shard"] + found["ddp"] + found["unwrapped"]
