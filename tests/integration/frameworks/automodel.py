"""The grouped experts of NeMo Automodel on two ranks, against a loop over all experts in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moe_dispatch.errors import ConfigError, StateError
from tests.integration.deep_ep_users.cpu import cpu_for_cuda
from tests.integration.frameworks.sources import import_real

RANKS, EXPERTS, TOP_K, HIDDEN, INNER = 2, 4, 2, 32, 16


def trained(rank: int) -> dict[str, tuple[str, float, bool]]:
    """By routing: the backend; the largest error of outputs and gradients; whether padding gets zeros."""
    _refused()
    return {name: _trained(rank, experts) for name, experts in {"all": EXPERTS, "those of rank 0": 2}.items()}


def _refused() -> None:
    import_real("nemo_automodel.components.moe.experts")
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher, use_moe_dispatch

    with pytest.raises(ConfigError, match=r"use_moe_dispatch: options must not set .*, got top_k. Leave these out"):
        use_moe_dispatch(backend="alltoall", top_k=2)
    with pytest.raises(ConfigError, match="Unknown backend 'altoall'"):
        use_moe_dispatch(backend="altoall")
    with pytest.raises(ConfigError, match="use_moe_dispatch: spare_experts_per_rank must be 0"):
        use_moe_dispatch(backend="alltoall", spare_experts_per_rank=1, balance="least_loaded")
    sizes = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOP_K)
    world = dist.group.WORLD
    assert world is not None
    dispatcher = AutomodelDispatcher(4, range(4), sizes, world, backend="local")
    with pytest.raises(StateError, match="token_permutation2 must come before it, got nothing in flight"):
        dispatcher.token_unpermutation(torch.empty(0, HIDDEN))


def _trained(rank: int, routed: int) -> tuple[str, float, bool]:
    experts = import_real("nemo_automodel.components.moe.experts")
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher, use_moe_dispatch

    use_moe_dispatch(backend="alltoall")
    config = moe_config()
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
    assert all(weight.grad is not None for weight in layer.parameters())
    return name, max(errors), bool((y[~mask] == 0).all())


def moe_config() -> Any:
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
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ weight["gate_and_up_projs"][expert]).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ weight["down_projs"][expert]
        share = (weights * (ids == expert) * mask[:, None]).sum(1, keepdim=True)
        y = y + share * out
    return y


def error(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    return float((got.double() - want).abs().max() / want.abs().max())
