"""What ranks do with adapters of PEFT: train them, save them, and load them on another number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from moe_dispatch.training import Setup
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, Batch, build
from tests.integration.transformers.ranks import Case as Sharded
from tests.integration.transformers.ranks import Mesh, load
from tests.integration.transformers.wiring import loss_of, targets

ATTENTION, EXPERTS = ("q_proj", "v_proj"), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RATE = 0.5


@final
@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A model with adapters. ``sharded``: transformers shards its experts, so they are wired without a group."""

    family: str = "qwen3_moe"
    modules: tuple[str, ...] = ATTENTION
    parameters: tuple[str, ...] = EXPERTS
    options: Mapping[str, Any] = field(default_factory=dict)  # of LoraConfig
    fields: Mapping[str, Any] = field(default_factory=dict)  # of our config
    sharded: bool = False


def with_adapters(case: Adapted, model: Any, seed: int = 11) -> Any:
    """The model in PEFT, the same on every rank with the same seed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = {"target_modules": list(case.modules), "target_parameters": list(case.parameters) or None}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **targets, **case.options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:  # as initialised, it is 0
                parameter.normal_(0, 0.2)
    return adapted


def wired(case: Adapted, group: dist.ProcessGroup | None = None) -> Any:
    """A model whose experts run through us, without adapters."""
    if case.sharded:
        size = dist.get_world_size()
        return load(Sharded(family=case.family, mesh=Mesh(fsdp=size, ep=size), fields=case.fields))
    model = build(case.family)
    config = config_for(model.config, backend="alltoall", **case.fields)
    ranks = dist.group.WORLD if group is None else group
    name = f"adapted-{dist.get_world_size(ranks)}-{config.digest}"
    register(config, group=ranks, name=name)
    model.set_experts_implementation(name)
    attach(model)
    return model


def summed_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of what is trained, summed over ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return found


def trained(case: Adapted, rank: int) -> dict[str, Any]:
    """Loss and gradients beside those of the PEFT model in one process; what travelled for the weights of experts."""
    model = with_adapters(case, wired(case)).train()
    dispatcher = next(iter(dispatchers_of(model).values()))
    before = dict(dispatcher.metrics().collectives)
    loss = loss_of(model, BATCHES[rank], targets(*BATCHES[: dist.get_world_size()]))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    after = dispatcher.metrics().collectives
    whole = with_adapters(case, build(case.family)).train()
    want = 0.0
    for batch in BATCHES[: dist.get_world_size()]:
        expected = loss_of(whole, batch, targets(*BATCHES[: dist.get_world_size()]))
        expected.backward()
        want += expected.item()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.requires_grad}
    return {
        "loss": abs(float(total) / want - 1),
        "gradients": difference(summed_gradients(model), gradients),
        "names": sorted(gradients),
        "collectives": {label: count - before.get(label, 0) for label, count in after.items()},
    }


def set_up(case: Adapted, rank: int) -> float:
    """How far gradients of adapters that ranks drew apart are from one process, after ``start`` and ``reduce``."""
    setup, size = Setup(), dist.get_world_size()
    model = with_adapters(case, wired(case), seed=11 + rank).train()
    setup.start(model)
    loss_of(model, BATCHES[rank], targets(*BATCHES[:size])).backward()
    setup.reduce(model)
    whole = with_adapters(case, build(case.family)).train()
    for batch in BATCHES[:size]:
        loss_of(whole, batch, targets(*BATCHES[:size])).backward()
    wants = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad * size for name, parameter in model.named_parameters() if parameter.requires_grad}
    return difference(found, wants)


def refused(case: Adapted, rank: int) -> str:
    """What is raised by PEFT, by ``attach`` or in the first forward."""
    try:
        model = with_adapters(case, wired(case))
        attach(model)
        loss_of(model, BATCHES[rank], 1)
    except ValueError as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return "not refused"


def saved(case: Adapted, folder: str, rank: int) -> dict[str, float]:
    """Outputs of adapters that all ranks trained, and then saved: loaded by two pairs of ranks, and without ranks."""
    from peft import PeftModel

    model = with_adapters(case, wired(case)).train()
    loss_of(model, BATCHES[rank], targets(*BATCHES)).backward()
    for name, grad in summed_gradients(model).items():
        model.get_parameter(name).data -= RATE * grad
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    want = _logits(model.eval(), BATCHES[rank])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    apart = {}
    for name, other in {
        "pairs": wired(case, pairs[rank // 2]),
        "one process": build(case.family),
    }.items():
        loaded = PeftModel.from_pretrained(other, folder).eval()
        if name == "pairs":
            attach(loaded)
        got = _logits(loaded, BATCHES[rank])
        apart[name] = difference({"logits": got}, {"logits": want})
    untrained = with_adapters(case, build(case.family)).eval()
    apart["untrained"] = difference({"logits": _logits(untrained, BATCHES[rank])}, {"logits": want})
    return apart


def _logits(model: Any, batch: Batch) -> Tensor:
    """Of the positions that hold a token."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits[batch.attention_mask != 0]


def balanced(case: Adapted) -> Adapted:
    return dataclasses.replace(case, fields={**case.fields, "balance": {"name": "exact", "min_rows": 0}})
