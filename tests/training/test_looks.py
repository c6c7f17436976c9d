"""The first forward warns of a wrapper that mixes different experts, and of nothing else."""

from __future__ import annotations

import gc
import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.training import Setup
from moe_dispatch_testing import run_processes
from tests.training.test_table import mesh_of, refusal

CONFIG = DispatcherConfig(num_experts=4, top_k=2, hidden_size=6)

REFUSED = (
    "Setup: the model must not be wrapped in FullyShardedDataParallel, which joins parameters of all kinds in flat"
)


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
            "DDP": "DistributedDataParallel",
        }.items():
            (said,) = found[case]
            start = f"Dispatcher.combine: {by} must leave out the parameters of experts, got 1 that it manages ("
            assert said.startswith(f"{start}1.stack.up) among ranks that hold different experts"), case
        (said,) = found["adapters, False"]
        assert "fully_shard does not average the gradients of 1 adapters, which were added after it (0.lora_A" in said
        assert not found["adapters, True"]
        assert not found["shard"] + found["ddp"] + found["unwrapped"]


class Up(nn.Module):
    """Experts that a dispatcher holds as a module, which FSDP can wrap."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(held, 6, 6))

    def forward(self, sent: Dispatched) -> Tensor:
        return sent.grouped_mm(sent.rows, self.up)


class ModuleLayer(Layer):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.stack = Up(4 // group.size())  # type: ignore[assignment]

    def run_experts(self, sent: Dispatched) -> Tensor:
        rows: Tensor = self.stack(sent)
        return rows


def looks_at_fsdp1(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = mesh_of(copies=1, ep=2)
    setup, group = Setup(mesh), mesh["ep"].get_group()
    fsdp1 = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), ModuleLayer(group))

    found["none"] = said_by(model())
    for originals in (False, True):
        whole = fsdp1(model(), use_orig_params=originals)
        found[f"model, {originals=}"] = said_by(whole), refusal(setup, whole)
        experts = model()
        layer: Any = experts[1]
        layer.stack = fsdp1(layer.stack, use_orig_params=originals)
        found[f"experts, {originals=}"] = said_by(experts), refusal(setup, experts)
    inner = model()
    fsdp1(inner, use_orig_params=True)
    found["model inside"] = refusal(setup, inner)
    copies = model()
    layer = copies[1]
    layer.stack = fsdp1(layer.stack, process_group=mesh["copies"].get_group())
    found["copies"] = said_by(copies)
    frozen = model()
    frozen[1].stack.requires_grad_(False)
    found["frozen"] = said_by(fsdp1(frozen, use_orig_params=True), frozen=True)
    for originals in (False, True):
        late = model()
        found["none"] += said_by(late)
        late.zero_grad()
        found[f"late, {originals=}"] = said_by(fsdp1(late, use_orig_params=originals))
    found["fully_shard"] = len(_composable_state._module_state_mapping)
    return found


@pytest.mark.filterwarnings("ignore:.*FSDP.*:FutureWarning")
def test_fsdp1_is_warned_of_and_refused_where_nobody_used_fully_shard() -> None:
    for found in run_processes(looks_at_fsdp1, 2, timeout=timedelta(seconds=60)):
        assert found["fully_shard"] == 0
        for originals in (False, True):
            (said,) = found[f"late, {originals=}"]
            assert "FullyShardedDataParallel must leave out the parameters of experts, got " in said
            for case in ("model", "experts"):
                (said,), refused = found[f"{case}, {originals=}"]
                assert said.startswith(
                    "Dispatcher.combine: FullyShardedDataParallel must leave out the parameters of experts, got "
                ), case
                assert "among ranks that hold different experts" in said
                assert REFUSED in refused
        assert REFUSED in found["model inside"]
        (said,) = found["frozen"]
        assert "FullyShardedDataParallel must leave out" in said
        assert not found["none"] + found["copies"]


def said_by_pipelines(rank: int) -> dict[str, list[str]]:
    """What the first step of a stage says under a schedule that splits the backward, and under another."""
    found: dict[str, list[str]] = {}
    mesh = mesh_of(pp=2, copies=1, ep=2)
    setup, place = Setup(mesh), mesh["pp"].get_local_rank()
    wraps: dict[str, Any] = {
        "fully_shard": partial(setup.shard, reshard_after_forward=True),
        "shard": setup.shard,
        "DDP": setup.ddp,
    }
    for by, wrap in wraps.items():
        for kind in (Schedule1F1B, ScheduleInterleavedZeroBubble):
            model = wrap(nn.Sequential(nn.Linear(6, 6), Layer(mesh["ep"].get_group())))
            stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
            schedule: Any = kind(stage if kind is Schedule1F1B else [stage], 2, loss_fn=lambda y, _: y.square().mean())  # type: ignore[arg-type]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                schedule.step(*([torch.randn(8, 6)] if place == 0 else []), target=torch.zeros(8, 6))
            told = [str(warning.message) for warning in caught]
            found[f"{by}, {kind.__name__}"] = [text for text in told if "Dispatcher.combine" in text]
            del schedule, stage, model
            gc.collect()
    return found


@pytest.mark.slow
def test_the_first_step_warns_of_wrappers_that_lose_gradients_under_a_split_backward() -> None:
    for found in run_processes(said_by_pipelines, 4, timeout=timedelta(seconds=90)):
        (lost,), (first,) = (found.pop(f"{by}, ScheduleInterleavedZeroBubble") for by in ("fully_shard", "DDP"))
        assert lost == (
            "Dispatcher.combine: ScheduleInterleavedZeroBubble computes the gradients of weights after those of "
            "inputs, and fully_shard has freed the parameters by then, so gradients get lost, without an error. Pass "
            "reshard_after_forward=False, or call shard of moe_dispatch.training.Setup."
        )
        assert (
            "DistributedDataParallel averages the first stage only, without an error. Leave stages unwrapped" in first
        )
        assert not any(found.values()), found


def looks_at_accelerate(rank: int) -> dict[str, list[str]]:
    """What the first forward says of FSDP2 as accelerate's plug-in calls it, which picks it on a GPU only."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    mesh = mesh_of(copies=1, ep=2)
    job = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    os.environ |= job | {"ACCELERATE_USE_CPU": "true"}  # whose group exists already, so nobody connects
    accelerator = Accelerator(cpu=True)
    found = {}
    for efficient in (False, True):
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient)  # then it broadcasts the weights of rank 0
        plugin: Any = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=efficient
        )
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        model = nn.Sequential(nn.Linear(6, 6), Layer(mesh["ep"].get_group()))
        prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        found[f"{type(prepared).__name__}, {efficient=}"] = said_by(prepared)
    return found


@pytest.mark.slow
def test_fully_shard_of_accelerate_is_warned_of() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    for found in run_processes(looks_at_accelerate, 2, timeout=timedelta(seconds=60)):
        assert [*found] == ["FSDPSequential, efficient=False", "FSDPSequential, efficient=True"]
        for (said,) in found.values():
            assert "fully_shard must leave out the parameters of experts, got 1 that it manages (1.stack.up)" in said
