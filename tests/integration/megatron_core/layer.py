"""Megatron's MoE layers of tiny sizes, over the process groups of four ranks, built by Megatron's own specs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.deep_ep_users.dense import gradient

RANKS = 4
HIDDEN, INNER, EXPERTS, TOP_K = 32, 48, 8, 3
BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}  # copies also for these few rows


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How four ranks are divided: for attention into ``tp`` and data parallel, for experts into ``etp`` and ``ep``."""

    ep: int = 4
    etp: int = 1
    tp: int = 1
    cp: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layer and its call.

    Attributes:
        config: fields of a TransformerConfig.
        unchecked: further ones, set afterwards: what it refuses without transformer-engine.
        tokens: S of each rank's [S, B, H].
        batch: B.
    """

    parallel: Parallel = Parallel()
    config: dict[str, Any] = field(default_factory=dict)
    unchecked: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (6, 6, 6, 6)
    batch: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def hidden(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        shape = (self.tokens[rank], self.batch, self.config.get("hidden_size", HIDDEN))
        return torch.randn(shape, generator=generator).to(self.dtype)


# Without CUDA, transformer-engine and Apex.
ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    "add_bias_linear": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
# Of a TransformerConfig of a small model without dropout.
FIELDS: dict[str, Any] = ON_CPU | {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "ffn_hidden_size": INNER,
    "moe_ffn_hidden_size": INNER,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
}


def transformer_config(case: Case) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = case.parallel
    fields = FIELDS | {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
    }
    config = TransformerConfig(**(fields | case.config))
    for name, value in case.unchecked.items():
        setattr(config, name, value)
    return config


@functools.cache
def groups(parallel: Parallel) -> Any:
    """The groups of this rank; every rank makes all of them, in the same order."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    made = ProcessGroupCollection()
    made.tp = _own_group(_blocks(parallel.tp))
    made.cp = _own_group(_strides(parallel.tp, parallel.cp))
    made.tp_cp = _own_group(_blocks(parallel.tp * parallel.cp))
    made.expt_tp = _own_group(_blocks(parallel.etp))
    made.ep = _own_group(_strides(parallel.etp, parallel.ep))
    made.tp_ep = _own_group(_blocks(parallel.etp * parallel.ep))
    made.expt_dp = _own_group(_strides(parallel.etp * parallel.ep, RANKS // (parallel.etp * parallel.ep)))
    made.tp_dp_cp = made.dp = made.dp_cp = _own_group(_blocks(RANKS))
    made.embd = made.pos_embd = made.mp = None
    made.pp = made.expt_dp_gtp_remat = _own_group(_blocks(1))
    return made


def _blocks(size: int) -> list[list[int]]:
    """Neighbours."""
    return [list(range(first, first + size)) for first in range(0, RANKS, size)]


def _strides(stride: int, size: int) -> list[list[int]]:
    """Every ``stride``-th rank, ``size`` of them."""
    block = stride * size
    return [
        [first + offset + stride * i for i in range(size)]
        for first in range(0, RANKS, block)
        for offset in range(stride)
    ]


def _own_group(members: list[list[int]]) -> Any:
    made = [dist.new_group(ranks) for ranks in members]
    return next(group for group, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)


def own_spec() -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    return get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)


def build(spec: Any, case: Case) -> Any:
    """A layer from its spec as a transformer layer would build it; the same weights in every layer of a case."""
    from megatron.core import parallel_state
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    config, pg_collection = transformer_config(case), groups(case.parallel)
    torch.manual_seed(case.seed)
    if isinstance(spec, ModuleSpec):  # 0.16, whose shared experts look here for what they are given elsewhere
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = pg_collection.tp
        parallel_state._DATA_PARALLEL_GROUP = pg_collection.dp
        layer = build_module(spec, config=config, pg_collection=pg_collection)
    else:
        layer = spec(config=config, pg_collection=pg_collection, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(1)
    _draw_weights(layer, case)
    return layer


def _draw_weights(layer: nn.Module, case: Case) -> None:
    generator = torch.Generator().manual_seed(1000 + case.seed)
    # Routers are the same on all ranks, experts are not.
    with torch.no_grad():
        for name, parameter in sorted(layer.named_parameters(), key=lambda named: "router" not in named[0]):
            if "router" not in name:
                generator.manual_seed(2000 + case.seed + 10 * dist.get_rank() + sum(map(ord, name)))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)


Outcome = dict[str, Tensor]


def gradients_of(module: nn.Module) -> Outcome:
    """By name; under DDP of Megatron or with delayed computations they are in ``main_grad``."""
    found = {name: getattr(weight, "main_grad", weight.grad) for name, weight in module.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def outcome(layer: nn.Module, hidden: Tensor, **kwargs: Any) -> Outcome:
    """Output and gradients of one call, by name."""
    hidden = hidden.clone().requires_grad_()
    layer.zero_grad()
    output, bias = layer(hidden, **kwargs)
    assert bias is None
    upstream = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    output.backward(upstream)
    grads = gradients_of(layer)
    assert any("router" in name for name in grads)
    return {"output": output.detach(), "hidden": gradient(hidden)} | grads


def has_copied_experts(model: nn.Module) -> bool:
    """Whether weights of experts have travelled for any layer of a converted model."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "token_dispatcher")]
    metrics = [module.token_dispatcher.dispatcher.metrics() for module in modules]
    return any(layer.collectives.get("weights") for layer in metrics)
