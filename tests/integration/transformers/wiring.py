"""Models wired to us as transformers does it, and their numbers beside those of the same model unsharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from tests.integration.transformers.models import LAYERS, Batch, build

Gradients = dict[str, Tensor]


def wire(model: Any, mesh: DeviceMesh, implementation: str = "moe_dispatch") -> Any:
    """Its experts over the mesh's dimension "ep", with the plan that the model brings."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {rule.replace("*", str(i)): style for i in range(LAYERS) for rule, style in model.ep_plan.items()}
    return apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation=implementation)


def registered(model_config: Any, *, name: str, backend: Any = "local", **fields: Any) -> str:
    register(config_for(model_config, backend=backend, **fields), name=name)
    return name


def ready(family: str, mesh: DeviceMesh, *, name: str, backend: Any = "local", **fields: Any) -> Any:
    """A model of the family, its experts wired and watched."""
    model = build(family)
    registered(model.config, name=name, backend=backend, **fields)
    attach(wire(model, mesh, name))
    return model


def with_lora(model: Any) -> Any:
    """The model in PEFT, with LoRA on its stacked experts and on a plain linear layer, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:  # as initialised, it is 0
                parameter.normal_(0, 0.2)
    return adapted


def loss_of(model: Any, batch: Batch, num_items: int) -> Tensor:
    """Cross entropy, summed over the batch's tokens and divided by ``num_items``."""
    loss: Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        num_items_in_batch=num_items,
    ).loss
    return loss


def targets(*batches: Batch) -> int:
    return sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)


def gradients(model: Any) -> Gradients:
    """Whole, on every rank."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in found.items()}


def unsharded(family: str, batches: tuple[Batch, ...], **changes: Any) -> tuple[float, Gradients]:
    """Loss and gradients of the model as transformers has it, over all batches."""
    model = build(family, **changes).train()
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model, batch, targets(*batches))
        loss.backward()
        total += loss.detach()
    return float(total), gradients(model)


def rows_cut(model: Any) -> int:
    """Padding that was never dispatched, over all layers: they share one channel."""
    dispatcher = next(iter(dispatchers_of(model).values()))
    metrics = dispatcher.metrics()
    assert metrics.rows_skipped["masked"] == 0
    return metrics.rows_skipped["cut"]


def rows_real(model: Any, top_k: int) -> int:
    """Rows that this rank's experts were given, over all layers, each counted once per slot."""
    dispatcher = next(iter(dispatchers_of(model).values()))
    slots = int(dispatcher.metrics().real_tokens_per_expert.sum())
    assert slots % top_k == 0
    return slots // top_k
