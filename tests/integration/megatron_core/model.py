"""Megatron's whole models of tiny sizes: a GPTModel, and a block of layers that are nothing but their MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.integration.megatron_core.layer import EXPERTS, Case, gradients_of, groups, own_spec, transformer_config

VOCABULARY, LENGTH, BATCH = 64, 8, 2


def gpt_model(case: Case, change: Callable[[Any], Any] = lambda spec: spec) -> Any:
    """A GPTModel by Megatron's own spec without transformer-engine, changed by ``change``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = change(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False))
    torch.manual_seed(case.seed)
    return GPTModel(
        transformer_config(case),
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pg_collection=groups(case.parallel),
    )


def gpt_outcome(model: Any, rank: int) -> dict[str, Tensor]:
    """Losses of one batch of this rank, and all gradients; ``model`` may be in DDP of Megatron."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    model.zero_grad()
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    losses.sum().backward()
    if hasattr(model, "finish_grad_sync"):
        model.finish_grad_sync()
    grads = gradients_of(model)
    assert any("experts" in name for name in grads)
    return {"losses": losses.detach()} | grads


def moe_block(case: Case, spec: Any = None, *, of_globals: bool = False) -> Any:
    """A TransformerBlock whose layers have neither attention nor norms, as attention without CUDA takes no packing.

    With ``of_globals`` its groups are those of ``parallel_state``.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    submodules = TransformerLayerSubmodules(mlp=spec or own_spec(), mlp_bda=get_bias_dropout_add)
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    config = transformer_config(case)
    torch.manual_seed(case.seed)
    return TransformerBlock(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers),
        post_layer_norm=False,
        **({} if of_globals else {"pg_collection": groups(case.parallel)}),
    )
