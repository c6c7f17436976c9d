"""What one rank does with balanced experts: accumulate gradients, count hooks, and train for some steps."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from tests.integration.steps import FAULTS, accumulate, difference, planted, train
from tests.integration.transformers.models import BATCHES, Batch, build, draw_batch
from tests.integration.transformers.ranks import BALANCED, Case, load
from tests.integration.transformers.wiring import gradients, loss_of, targets

FAVOURED = 2  # experts that get nearly all rows: those of rank 0 if it holds two
STEPS = 8


def favour(model: Any) -> Any:
    """Let all tokens share a direction that the first routers' rows look for. Other experts get few rows or none."""
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(3)
        model.config.use_cache = False  # which a layer that is used twice would fill twice
        for layer in model.model.layers:
            direction = layer.post_attention_layernorm.weight
            layer.mlp.gate.weight[:FAVOURED] += 5 * direction / direction.norm()
    return model


def micro_batches(rank: int) -> tuple[Batch, Batch]:
    """Two of a rank, of other sizes. The third rank has no token in its first one, and the first has none later."""
    return BATCHES[rank], draw_batch(10 + rank, [0, 0] if rank == 0 else [4 + rank, 3], 9, "left")


def accumulated(case: Case, rank: int, *, together: bool = False) -> dict[str, Any]:
    """Errors of the gradients of two micro-batches, and how often the hook of each parameter ran.

    ``together``: both forwards run before one backward, so each layer is used twice in one graph.
    """
    ranks = dist.get_world_size()
    everyone = [batch for other in range(ranks) for batch in micro_batches(other)]
    with mock.patch("tests.integration.transformers.ranks.build", favoured):
        model = (_data_parallel if case.mesh.fsdp == 1 else load)(case)
    everything = targets(*everyone)
    # Data parallelism takes the mean.
    losses = [lambda batch=batch: loss_of(model, batch, everything) * ranks for batch in micro_batches(rank)]
    fired = accumulate(model, losses, together=together)
    whole = favoured(case.family).train()
    if case.mesh.fsdp == 1:
        _use_one_layer_twice(whole)
    for batch in everyone:
        loss_of(whole, batch, everything).backward()
    got = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
    metrics = next(iter(dispatchers_of(model).values())).metrics(gather=True)
    return {
        "error": difference(got, gradients(whole)),
        "fired": set(fired.values()),
        "hooked": len(fired) == len(got),
        "keys": [name.removeprefix("module.") for name in model.state_dict()] == list(whole.state_dict()),
        "fetches": metrics.collectives.get("weights", 0),
        "idle": int((metrics.real_tokens_per_expert == 0).sum()),
    }


def favoured(family: str, **changes: Any) -> Any:
    return favour(build(family, **changes))


def _use_one_layer_twice(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def _data_parallel(case: Case) -> Any:
    """A model in DDP whose experts run by the registry of functions, and whose layers are one and the same."""
    model = favoured(case.family).train()
    _use_one_layer_twice(model)
    config = config_for(model.config, backend=case.backend, **case.fields)
    name = f"ddp-{config.digest}"
    register(config, group=dist.group.WORLD, name=name)
    model.set_experts_implementation(name)
    attach(model)
    return DistributedDataParallel(model)


def faulty(case: Case, rank: int) -> list[float]:
    """Errors of the gradients if those of copies are lost on their way home, and if they are counted twice."""
    errors = []
    for fault in FAULTS:
        with planted(fault):
            errors.append(accumulated(case, rank)["error"])
    return errors


def trained(case: Case, rank: int) -> dict[str, Any]:
    """Losses of some steps, and rows of the busiest rank divided by the mean over all of them."""
    with mock.patch("tests.integration.transformers.ranks.build", favoured):
        model = load(case).train()
    return steps(model, rank)


def resumed(case: Case, rank: int) -> dict[str, list[float]]:
    """Losses of an unbalanced run, and of an unbalanced and a balanced run that load what it saved."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with mock.patch("tests.integration.transformers.ranks.build", favoured):
        model = load(case).train()
    losses = {"first": steps(model, rank)["losses"]}
    with TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        (folder,) = shared
        model.save_pretrained(folder)
        dist.barrier()
        for kind, fields in {"plain": {}, "balanced": BALANCED}.items():
            config = config_for(AutoConfig.from_pretrained(folder), backend=case.backend, **fields)
            name = f"moe_dispatch-{config.digest}"
            register(config, name=name)
            sizes = DistributedConfig(fsdp_size=case.mesh.fsdp, ep_size=case.mesh.ep, ep_implementation=name)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes).train()
            attach(model)
            losses[kind] = steps(model, rank)["losses"]
        dist.barrier()  # the folder stays until the last rank is done
    return losses


def steps(model: Any, rank: int) -> dict[str, Any]:
    """Train for some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ranks = dist.get_world_size()
    batches = [draw_batch(20 + other, [24, 17 + other], 24, "right") for other in range(ranks)]
    losses = train(optimizer, STEPS, lambda _: loss_of(model, batches[rank], targets(*batches)), scale=ranks)
    metrics = next(iter(dispatchers_of(model).values())).metrics(gather=True)
    return {"losses": losses, "imbalance": metrics.rank_imbalance}
