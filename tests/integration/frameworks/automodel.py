"""The grouped experts of NeMo Automodel on two ranks, against a loop over all experts in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe_dispatch.errors import ConfigError, StateError
from tests.integration.deep_ep_users.cpu import cpu_for_cuda
from tests.integration.frameworks.sources import import_real

BALANCED: dict[str, Any] = {"balance": "exact", "balance_min_rows": 0}  # copies also for these few rows
RANKS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY = 2, 4, 2, 32, 16, 64


def trained(rank: int) -> dict[str, tuple[str, float, bool]]:
    """By routing: the backend; the largest error of outputs and gradients; whether padding gets zeros."""
    _refused()
    return {
        f"{name}, {fields}": _trained(rank, experts, fields)
        for name, experts in {"all": EXPERTS, "those of rank 0": 2}.items()
        for fields in (
            {},
            BALANCED,
            {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": 8},
            {"chunk_tokens": 2},
            {"chunk_tokens": 2, **BALANCED},
        )
    }


def _refused() -> None:
    import_real("nemo_automodel.components.moe.experts")
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher, use_moe_dispatch

    with pytest.raises(ConfigError, match=r"use_moe_dispatch: options must not set .*, got top_k. Leave these out"):
        use_moe_dispatch(backend="alltoall", top_k=2)
    with pytest.raises(ConfigError, match="Unknown backend 'altoall'"):
        use_moe_dispatch(backend="altoall")
    with pytest.raises(ConfigError, match=r"use_moe_dispatch: .* read no quantised rows"):
        use_moe_dispatch(backend="alltoall", wire_dtype="mxfp8", deliver="quantised", pad_multiple=32)
    sizes = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOP_K)
    world = dist.group.WORLD
    assert world is not None
    dispatcher = AutomodelDispatcher(4, range(4), sizes, world, backend="local")
    for fields in ({"balance": "exact"}, {"chunk_tokens": 2}):
        driven = AutomodelDispatcher(4, range(4), sizes, world, backend="local", **fields)
        with pytest.raises(ConfigError, match=r"need Automodel's GroupedExpertsDeepEP, got other experts\. Set exp"):
            driven.token_permutation2(torch.empty(0, HIDDEN), 0, torch.empty(0, 2), torch.empty(0, 2))
    with pytest.raises(StateError, match="token_permutation2 must come before it, got nothing in flight"):
        dispatcher.token_unpermutation(torch.empty(0, HIDDEN))


def _trained(rank: int, routed: int, fields: dict[str, Any]) -> tuple[str, float, bool]:
    experts = import_real("nemo_automodel.components.moe.experts")
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher, use_moe_dispatch

    use_moe_dispatch(backend="alltoall", **fields)
    config = moe_config(expert_bias="graph_safe" not in fields)  # Automodel adds biases to as many rows as are counted
    with cpu_for_cuda():
        layer = experts.GroupedExpertsDeepEP(config, dispatcher_backend="hybridep")
        mesh = init_device_mesh("cpu", (RANKS,))
        generator = torch.Generator().manual_seed(0)
        whole = {
            name: torch.randn(weight.shape, generator=generator).to(weight.dtype) * weight.shape[-2] ** -0.5
            for name, weight in layer.named_parameters()
        }
        for name, weight in whole.items():
            setattr(layer, name, torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
        layer.init_token_dispatcher(mesh)
        assert isinstance(layer.token_dispatcher, AutomodelDispatcher)
        assert layer.get_pipeline_runtime_initializers() == ()
        x, mask, weights, ids = inputs(rank, routed)
        y = layer(x, mask, weights, ids)
        y.float().square().sum().backward()
    want_x, want_weights = (leaf.detach().double().requires_grad_() for leaf in (x, weights))
    reference = {name: weight.double() for name, weight in whole.items()}
    want = loop(reference, want_x, mask, want_weights, ids)
    want.square().sum().backward()
    errors = [error(y, want), error(x.grad, want_x.grad), error(weights.grad, want_weights.grad)]
    name = layer.token_dispatcher.dispatcher(HIDDEN).backend_name
    # Alone, Automodel gives a rank without rows no gradients of biases.
    weighed = [weight for name, weight in layer.named_parameters() if "balance" in fields or "bias" not in name]
    assert all(weight.grad is not None for weight in weighed)
    return name, max(errors), bool((y[~mask] == 0).all())


def whole_model(rank: int) -> dict[str, tuple[float, float]]:
    """By backend: errors of loss and gradients of a Qwen3-MoE, beside Automodel's own experts without ranks."""
    import_real("nemo_automodel.components.models.qwen3_moe.model")
    from moe_dispatch.integrations.nemo_automodel import use_moe_dispatch

    found = {}
    with cpu_for_cuda(), mock.patch("torch.cuda.current_device", return_value=0):
        mesh = init_device_mesh("cpu", (RANKS,))
        theirs = qwen3_moe(experts="torch", dispatcher="torch")
        want = _step(theirs, rank)
        for backend in ("alltoall", "allgather"):
            use_moe_dispatch(backend=backend)
            ours = qwen3_moe(experts="torch_mm", dispatcher="hybridep")
            for module in ours.modules():
                if hasattr(module, "init_token_dispatcher"):
                    for name, weight in module.named_parameters():
                        setattr(module, name, torch.nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)])))
                    module.init_token_dispatcher(mesh)
            loss = _step(ours, rank)
            errors = []
            for (name, weight), (_, reference) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
                got, grad = weight.grad, reference.grad.clone()
                if ".experts." in name:  # they see the rows of all ranks
                    assert isinstance(got, DTensor)
                    dist.all_reduce(grad)
                    got, grad = got.to_local(), grad.chunk(RANKS)[rank]
                errors.append(error(got, grad))
            found[backend] = abs(float(loss / want - 1)), max(errors)
    return found


def qwen3_moe(**backend: str) -> Any:
    """A model of Automodel in float32, with the same weights in each call."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=64,
        dtype="float32",
    )
    chosen = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, **backend)
    model = Qwen3MoeForCausalLM(config, backend=chosen)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        scale = weight.shape[-2] ** -0.5 if weight.dim() > 1 else 1
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model


def _step(model: Any, rank: int) -> Tensor:
    """Forward and backward of two sequences, of another length on each rank. The second one ends with padding."""
    ids = torch.randint(VOCABULARY, (2, 6 + rank), generator=torch.Generator().manual_seed(rank))
    is_padding = torch.zeros(ids.shape, dtype=torch.bool)
    is_padding[1, -2:] = True
    output = model(ids, attention_mask=(~is_padding).long(), padding_mask=is_padding)
    loss: Tensor = (getattr(output, "logits", output).log_softmax(-1)[..., 0] * ~is_padding).sum()
    loss.backward()
    return loss.detach()


def moe_config(*, expert_bias: bool) -> Any:
    from nemo_automodel.components.moe.config import MoEConfig

    return MoEConfig(
        n_routed_experts=EXPERTS,
        n_shared_experts=0,
        n_activated_experts=TOP_K,
        n_expert_groups=1,
        n_limited_groups=1,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        route_scale=1.0,
        dim=HIDDEN,
        inter_dim=INNER,
        moe_inter_dim=INNER,
        norm_topk_prob=False,
        expert_bias=expert_bias,
    )


def inputs(rank: int, routed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    rows = 6 + rank
    x = torch.randn(rows, HIDDEN, generator=generator).bfloat16().requires_grad_()
    scores = torch.randn(rows, routed, generator=generator).softmax(1)
    weights, ids = scores.topk(TOP_K)
    mask = torch.ones(rows, dtype=torch.bool)
    mask[-2:] = False
    return x, mask, weights.clone().requires_grad_(), ids


def loop(weight: dict[str, Tensor], x: Tensor, mask: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    y, biased = torch.zeros_like(x), "down_proj_bias" in weight
    for expert in range(EXPERTS):
        bias, down_bias = (weight[f"{name}_proj_bias"][expert] if biased else 0 for name in ("gate_up", "down"))
        gate, up = (x @ weight["gate_and_up_projs"][expert] + bias).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ weight["down_projs"][expert] + down_bias
        share = (weights * (ids == expert) * mask[:, None]).sum(1, keepdim=True)
        y = y + share * out
    return y


def error(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    return float((got.double() - want).abs().max() / want.abs().max())
