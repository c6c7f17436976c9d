"""What one of four ranks does: train, generate or go wrong on a mesh, and compare with the model unsharded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist

from moe_dispatch.dispatchers import even_rounds
from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, PROMPTS, Batch, build
from tests.integration.transformers.wiring import (
    Gradients,
    gradients,
    loss_of,
    targets,
    unsharded,
    with_lora,
)

OURS, THEIRS = "moe_dispatch", "all_to_all"
BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}  # copies also for these few rows


@final
@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes, as DistributedConfig has them."""

    fsdp: int = 1
    tp: int = 1
    ep: int

    def batch_of(self, rank: int) -> int:
        """Tensor-parallel ranks share one."""
        return rank // self.tp


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a mesh; ``fields`` are those of our config."""

    family: str = "qwen3_moe"
    mesh: Mesh
    implementation: str = OURS
    backend: Any = "alltoall"
    fields: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: bool = False
    dtype: torch.dtype = torch.float32


def load(case: Case) -> Any:
    """The model as ``from_pretrained(distributed_config=...)`` shards it, from weights that are here already."""
    from transformers.distributed import DistributedConfig

    model = build(case.family, dtype=case.dtype, **case.changes)
    name = case.implementation
    if name == OURS:
        config = config_for(model.config, backend=case.backend, **case.fields)
        name = f"moe_dispatch-{config.digest}"
        register(config, name=name)
    sizes = DistributedConfig(
        fsdp_size=case.mesh.fsdp, tp_size=case.mesh.tp, ep_size=case.mesh.ep, ep_implementation=name
    )
    sizes, _, meshes = model.prepare_distribute_model(sizes)
    model = model.maybe_distribute_model(model, sizes, meshes)
    if case.implementation == OURS:
        attach(model)
    return model


def train(case: Case, rank: int) -> dict[str, float]:
    """Errors of loss and gradients, and what was not dispatched."""
    batches = BATCHES[: case.mesh.fsdp]
    model = load(case).train()
    before = _counts(case, model)
    if case.checkpoint:
        model.activation_checkpointing_enable()
    batch = batches[case.mesh.batch_of(rank)]
    loss = loss_of(model, batch, targets(*batches))
    (loss * case.mesh.fsdp).backward()  # FSDP takes the mean over batches
    total = loss.detach().clone()
    dist.all_reduce(total)
    wanted, wanted_gradients = _unsharded(case.family, batches, case.dtype)
    return {
        "loss": abs(float(total) / case.mesh.tp / wanted - 1),
        "gradients": difference(gradients(model), wanted_gradients),
        **_difference(_counts(case, model), before),
    }


@cache
def _unsharded(family: str, batches: tuple[Batch, ...], dtype: torch.dtype) -> tuple[float, Gradients]:
    return unsharded(family, batches, dtype=dtype)


def _counts(case: Case, model: Any) -> dict[str, float]:
    """Of the channel, which jobs of one config share."""
    if case.implementation != OURS:
        return {}
    metrics = next(iter(dispatchers_of(model).values())).metrics(gather=True)
    return {
        "skipped": sum(metrics.rows_skipped.values()),
        "slots": float(metrics.real_tokens_per_expert.sum()),
        "agreements": metrics.collectives.get("sizes", 0),
        "fetches": metrics.collectives.get("weights", 0),
    }


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def generate(case: Case, rank: int) -> list[list[int]]:
    """Tokens of this rank's prompt, and those of the unsharded model; ranks stop after different numbers."""
    batch = PROMPTS[case.mesh.batch_of(rank) % 2]
    arguments = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "max_new_tokens": 2 + case.mesh.batch_of(rank),
        "do_sample": False,
        "eos_token_id": None,
    }
    model = load(case).eval()
    got = model.generate(**arguments, synced_gpus=True)
    dist.barrier()
    wanted = build(case.family, **case.changes).eval().generate(**arguments)
    return [got.flatten().tolist(), wanted.flatten().tolist()]


def generate_in_rounds(case: Case, rank: int) -> list[list[int]]:
    """Generate from 0, 1, 3 and 5 prompts. A rank that is done generates from any prompt, and drops the result."""
    arguments: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    prompts = [torch.arange(3, 6 + number + rank).unsqueeze(0) for number in range((0, 1, 3, 5)[rank])]
    model, whole, found = load(case).eval(), build(case.family, **case.changes).eval(), list[int]()
    empty = torch.ones(1, 1, dtype=torch.int64)
    for ids in even_rounds(prompts, empty, dist.group.WORLD):
        got = model.generate(ids, attention_mask=torch.ones_like(ids), synced_gpus=True, **arguments)
        if ids is not empty:
            found += got.flatten().tolist()
    wanted = [whole.generate(ids, attention_mask=torch.ones_like(ids), **arguments) for ids in prompts]
    return [found, [token for tokens in wanted for token in tokens.flatten().tolist()]]


def by_function(case: Case, rank: int, *, adapted: bool = False) -> dict[str, float]:
    """Data parallelism by hand around whole experts on every rank: gradients are summed over ranks.

    If ``adapted``, the model is one of PEFT, and each rank trains the adapters of its share of the experts.
    """
    whole, model = build(case.family), build(case.family)
    config = config_for(model.config, backend=case.backend, **case.fields)
    register(config, group=dist.group.WORLD, name=f"function-{config.digest}")
    model.set_experts_implementation(f"function-{config.digest}")
    attach(model)
    if adapted:
        model, whole = with_lora(model), with_lora(whole)
    before = _counts(case, model)
    loss_of(model.train(), BATCHES[rank], targets(*BATCHES)).backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
    for batch in BATCHES:
        loss_of(whole.train(), batch, targets(*BATCHES)).backward()
    errors = {"gradients": difference(gradients(model), gradients(whole))}
    return {**errors, **_difference(_counts(case, model), before)}


def round_trip(case: Case, rank: int) -> dict[str, Any]:
    """Keys of the state dict, and the largest difference of any whole parameter from the unsharded model's."""
    whole, model = build(case.family), load(case)
    wanted = whole.state_dict()
    got = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return {
        "keys": list(got) == list(wanted),
        "difference": max(float((got[name] - wanted[name]).abs().max()) for name in wanted),
    }


def resume(case: Case, rank: int) -> dict[str, Any]:
    """Losses after a checkpoint of torch, without a break and in a new model; and what Trainer says of resuming."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from transformers import Trainer, TrainingArguments

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss = loss_of(model, BATCHES[(rank + number) % 4], targets(*BATCHES))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = load(case).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = made()
    for number in range(2):
        step(model, optimizer, number)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder[0])
    unbroken = [step(model, optimizer, number) for number in (2, 3)]
    model, optimizer = made()
    fresh = get_state_dict(model, optimizer)
    dcp.load({"model": fresh[0], "optimizer": fresh[1]}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=fresh[0], optim_state_dict=fresh[1])
    resumed = [step(model, optimizer, number) for number in (2, 3)]
    try:
        Trainer(model, TrainingArguments(folder[0], use_cpu=True, report_to=[]))
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"unbroken": unbroken, "resumed": resumed, "refused": refused}


def indivisible(case: Case, rank: int) -> str:
    """What is raised where the experts do not divide over the ranks, with the registry and with the function."""
    config = config_for(build(case.family, **case.changes).config, backend=case.backend)
    texts = []
    for attempt in (lambda: load(case), lambda: register(config, group=dist.group.WORLD, name="indivisible")):
        try:
            attempt()
        except ValueError as error:
            texts.append(str(error))
    return " | ".join(texts)
