"""Megatron's own training loop with balanced experts: its schedules, DDP and distributed optimizer."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import BALANCED, EXPERTS, RANKS
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.training import Training
from tests.integration.needs import needs

pytestmark = needs("megatron")

STEPS, MICRO_BATCHES, FAVOURED = 7, 2, 2
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "balanced": BALANCED}
HAS_PSUTIL = find_spec("psutil") is not None


TOP_K = {"moe_router_topk": FAVOURED}
GATHERED = "ep 2, optimizer and gather in parts"
OVERLAPPED = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
# How the four ranks are divided, and options of DDP.
JOBS: dict[str, tuple[Training, tuple[str, ...]]] = {
    GATHERED: (Training(ep=2, config=TOP_K), OVERLAPPED),
    "pp 2, ep 2": (Training(ep=2, pp=2, config=TOP_K), ()),
}


@final
class _CpuTensorsOfCudaType(TorchFunctionMode):
    """Megatron's optimizer asks for the names of CUDA's tensor types."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


def built(training: Training) -> Any:
    """A GPTModel, or the part of a stage, whose routers choose experts of the first rank."""
    from megatron.core import parallel_state

    (model,) = training.chunks()
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // training.ep
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            generator = torch.Generator().manual_seed(sum(map(ord, name)) + (first if ".experts." in name else 0))
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        for layer in model.decoder.layers:
            layer.pre_mlp_layernorm.bias.fill_(1.0)
            layer.mlp.router.weight[:FAVOURED] += 1.0
    return model


def start(model: Any, fields_of_ddp: tuple[str, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Convert a model, wrap it in Megatron's DDP, and build Megatron's optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from moe_dispatch.integrations.megatron import convert

    convert(model, **options)
    fields = dict.fromkeys(fields_of_ddp, True)
    # Buckets are so small that each layer's experts have some of their own.
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=2000, **fields)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    fields.pop("overlap_grad_reduce", None)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, **fields), [ddp])
    model.config.no_sync_func, model.config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    return ddp, optimizer


def train(ddp: Any, optimizer: Any, training: Training, steps: range) -> list[float]:
    """Take steps with Megatron's schedule. Return the mean losses of all ranks."""
    losses = []
    for number in steps:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        found = training.step([ddp], range(number % 2, number % 2 + MICRO_BATCHES))
        optimizer.step()
        total = sum((one["loss"] for one in found), torch.zeros(()))  # only the last stage has losses
        dist.all_reduce(total)
        losses.append(float(total) / MICRO_BATCHES / (RANKS // training.pp))
    return losses


def trained(rank: int, training: Training, fields: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Losses of some steps, rows of the busiest rank over the mean, and how often gathers of weights were under way."""
    from moe_dispatch.integrations.megatron.slots import SlotExperts

    gathered, waits = SlotExperts._gathered_parameters, 0

    def watched(slots: SlotExperts) -> dict[str, Tensor]:
        nonlocal waits
        groups = {ddp.param_to_bucket_group[parameter] for parameter in slots._experts.parameters()}
        waits += any(not group.param_gather_dispatched or group.param_gather_handle for group in groups)
        found = gathered(slots)
        assert all(group.param_gather_dispatched and group.param_gather_handle is None for group in groups)
        return found

    with _CpuTensorsOfCudaType(), training.global_groups():
        model = built(training)
        ddp, optimizer = start(model, fields, options)
        overlaps = "overlap_param_gather" in fields
        with mock.patch.object(SlotExperts, "_gathered_parameters", watched) if overlaps else nullcontext():
            losses = train(ddp, optimizer, training, range(STEPS))
        metrics = model.decoder.layers[0].mlp.token_dispatcher.dispatcher.metrics(gather=True)
    return {
        "losses": losses,
        "imbalance": metrics.rank_imbalance,
        "fetches": metrics.collectives.get("weights", 0),
        "waits": waits,
    }


def resumed(rank: int, folder: str) -> dict[str, list[float]]:
    """Save an unbalanced run with Megatron's distributed checkpoints. Return losses of runs that load it."""
    from megatron.core import dist_checkpointing

    training = Training(ep=2, config=TOP_K)
    losses = {}
    with _CpuTensorsOfCudaType(), training.global_groups():
        model = built(training)
        losses["first"] = train(*start(model, (), {}), training, range(3))
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
            dist_checkpointing.save(model.sharded_state_dict(), folder)
        for kind, options in KINDS.items():
            model = built(training)
            ddp, optimizer = start(model, (), options)
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))
            optimizer.reload_model_params()
            losses[kind] = train(ddp, optimizer, training, range(3, 6))
    return losses


@functools.cache
def results() -> dict[str, list[Any]]:
    checks: dict[str, Check] = {
        f"{name}, {kind}": functools.partial(trained, training=training, fields=fields, options=options)
        for name, (training, fields) in JOBS.items()
        for kind, options in KINDS.items()
    }
    with TemporaryDirectory() as folder:
        if HAS_PSUTIL:
            checks["resumed"] = functools.partial(resumed, folder=folder)
        return run_megatron(checks)


@pytest.mark.parametrize("name", JOBS)
def test_losses_are_the_same_with_and_without_balance(name: str) -> None:
    found = (require(results()[f"{name}, {kind}"]) for kind in KINDS)
    for plain, balanced in zip(*found, strict=True):
        assert plain["losses"][-1] < plain["losses"][0] - 0.2
        assert balanced["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert plain["imbalance"] > 0.9 * JOBS[name][0].ep
        assert balanced["imbalance"] < 1.05
        assert balanced["fetches"]
        assert not plain["fetches"]


def test_weights_are_read_after_their_gathers() -> None:
    """The gathers of all but the first step are under way or not yet started when a layer asks for the weights."""
    for found in require(results()[f"{GATHERED}, balanced"]):
        assert found["waits"] >= STEPS - 1


@pytest.mark.skipif(not HAS_PSUTIL, reason="Megatron writes distributed checkpoints with psutil: install psutil")
def test_a_checkpoint_of_an_unbalanced_run_is_loaded() -> None:
    for found in require(results()["resumed"]):
        assert found["plain"][0] < found["first"][-1]
        assert found["balanced"] == pytest.approx(found["plain"], rel=1e-4)
