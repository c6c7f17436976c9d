"""A Qwen3-MoE of NeMo Automodel, sharded by Automodel's own functions, against one rank with its own experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.recompute import keep_routes_in
from tests.idle_groups import garbage_in_idle_groups
from tests.integration.deep_ep_users.dense import gradient
from tests.integration.frameworks.sources import import_real
from tests.integration.megatron_core.on_cpu import cpu_for_cuda
from tests.integration.steps import FAULTS, accumulate, difference, planted, train
from tests.integration.transformers.models import HIDDEN, TOP_K, VOCABULARY, config_of

EXPERTS, EP, STEPS = 4, 2, 8
Batch = tuple[Tensor, Tensor]  # ids, and what is padding


def compared(rank: int, kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What each kind of dispatch gives.

    "lost" and "twice" have a fault in how gradients of copies come home. "offloaded" keeps copies of saved tensors, as
    torch's ``save_on_cpu`` does on a GPU. On as many ranks as hold the experts, only gradients are compared.
    """
    parallelizer = import_real("nemo_automodel.components.moe.parallelizer")
    found: dict[str, Any] = {}
    with cpu_for_cuda(), mock.patch("torch.cuda.current_device", return_value=0):
        for kind, fields in kinds.items():
            for together in (False, True):
                found[f"{kind}, {together}"] = _accumulated(parallelizer, rank, fields, together=together)
        if dist.get_world_size() == EP:
            return found
        runs = {kind: _sharded(parallelizer, kinds[kind]) for kind in ("plain", "balanced")}
        found |= {f"{kind}, train": _trained(model, rank) for kind, model in runs.items()}
        with saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept):
            found["offloaded"] = _accumulated(parallelizer, rank, kinds["balanced"], together=False)["error"]
        for fault in FAULTS:
            with planted(fault):
                found[fault] = _accumulated(parallelizer, rank, kinds["balanced"], together=False)["error"]
    return found


def checkpointed(rank: int, ways: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """What Automodel's activation checkpointing gives with kept routes; one forward is live at a time, or two are."""
    parallelizer = import_real("nemo_automodel.components.moe.parallelizer")
    found: dict[str, Any] = {}
    with cpu_for_cuda(), mock.patch("torch.cuda.current_device", return_value=0):
        for way, checkpoints in ways.items():
            for together in (False, True):
                found[f"{way}, {together}"] = _accumulated(
                    parallelizer, rank, {}, together=together, checkpoints=checkpoints
                )
    return found


def of_experts(rank: int, kinds: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """How far gradients and outputs of Automodel's experts are from what they are with zeros in masked rows.

    All rows go to experts of the first rank. The others idle, with the grouped GEMM of Blackwell.
    """
    parallelizer = import_real("nemo_automodel.components.moe.parallelizer")
    found: dict[str, float] = {}
    with cpu_for_cuda(), mock.patch("torch.cuda.current_device", return_value=0):
        for kind, fields in kinds.items():
            want = _layer(parallelizer, fields, 0.0)
            for filler in (torch.nan, torch.inf):
                with garbage_in_idle_groups():
                    found[f"{kind}, {filler}"] = difference(_layer(parallelizer, fields, filler), want)
    return found


def _layer(parallelizer: Any, fields: Mapping[str, Any], filler: float) -> dict[str, Tensor]:
    from moe_dispatch.integrations.nemo_automodel import use_moe_dispatch

    use_moe_dispatch(backend="alltoall", **fields)
    model = _favoured(experts="torch_mm", dispatcher="hybridep")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // EP, EP), mesh_dim_names=("ep_shard", "ep"))
    parallelizer.apply_ep(model, mesh["ep"])
    experts = next(iter(model.model.layers.children())).mlp.experts
    mask = torch.tensor([False, True, True, False])
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(3))
    x[~mask] = filler
    x.requires_grad_()
    ids = torch.tensor([[0, 1]] * 4)[:, :TOP_K]
    y = experts(x, mask, torch.full(ids.shape, 0.5), ids)
    y[mask].square().sum().backward()
    gradients = {name: gradient(weight) for name, weight in experts.named_parameters()}
    return {
        "y": y.detach()[mask],
        "x": gradient(x),
        **{n: getattr(g, "to_local", lambda g=g: g)() for n, g in gradients.items()},
    }


def _favoured(**backend: str) -> Any:
    """A model of Automodel in float32 whose routers choose the first two of four experts, those of the first rank."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM

    config = config_of("qwen3_moe", num_experts=EXPERTS, dtype="float32")
    chosen = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, **backend)
    model = Qwen3MoeForCausalLM(config, backend=chosen)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        scale = weight.shape[-2] ** -0.5 if weight.dim() > 1 else 1
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(3)
        for layer in model.model.layers.children():
            direction = layer.post_attention_layernorm.weight
            layer.mlp.gate.weight[:2] += 5 * direction / direction.norm()
    return model


def _sharded(parallelizer: Any, fields: Mapping[str, Any], checkpoints: Mapping[str, Any] | None = None) -> Any:
    from moe_dispatch.integrations.nemo_automodel import use_moe_dispatch

    use_moe_dispatch(backend="alltoall", **fields)
    model, ranks = _favoured(experts="torch_mm", dispatcher="hybridep"), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // EP, EP), mesh_dim_names=("ep_shard", "ep"))
    parallelizer.apply_ep(model, mesh["ep"])
    if checkpoints is not None:
        parallelizer.apply_ac(model, **checkpoints)
        keep_routes_in(model)
    parallelizer.apply_fsdp(
        model,
        init_device_mesh("cpu", (ranks,)),
        ep_enabled=True,
        ep_shard_enabled=ranks > EP,
        ep_shard_mesh=mesh["ep_shard"],
        mp_policy=MixedPrecisionPolicy(),
        reshard_after_forward=True,
    )
    return model


def _batches(rank: int) -> tuple[Batch, Batch]:
    """Two of a rank, of other lengths. The second one of rank 0 has no token."""
    pair = []
    for number in range(2):
        ids = torch.randint(
            VOCABULARY, (2, 6 + rank + number), generator=torch.Generator().manual_seed(2 * rank + number)
        )
        is_padding = torch.zeros(ids.shape, dtype=torch.bool)
        is_padding[1, -2:] = True
        pair.append((ids, is_padding | (rank == 0 and number == 1)))
    return pair[0], pair[1]


def _loss(model: Any, batch: Batch) -> Tensor:
    ids, is_padding = batch
    output = model(ids, attention_mask=torch.ones_like(ids), padding_mask=is_padding)
    loss: Tensor = -(getattr(output, "logits", output).log_softmax(-1)[..., 0] * ~is_padding).sum()
    return loss


def _accumulated(
    parallelizer: Any,
    rank: int,
    fields: Mapping[str, Any],
    *,
    together: bool,
    checkpoints: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The error of the gradients of two micro-batches. ``together``: both forwards run before one backward."""
    model = _sharded(parallelizer, fields, checkpoints)
    before = _dispatcher(model).metrics().dispatches  # those of earlier models are on the same channel
    fired = accumulate(model, [partial(_loss, model, batch) for batch in _batches(rank)], together=together)
    whole, ranks = _favoured(experts="torch", dispatcher="torch"), dist.get_world_size()
    for other in range(ranks):
        for batch in _batches(other):
            _loss(whole, batch).backward()
    got, want = dict[str, Tensor](), dict[str, Tensor]()
    for (name, weight), (_, reference) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        # FSDP takes the mean over all ranks, and for experts over those that share them.
        mean = ranks // EP if ".experts." in name else ranks
        grad: Any = weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        got[name], want[name] = grad * mean, gradient(reference)
    return {
        "error": difference(got, want),
        "fired": set(fired.values()),
        "hooked": len(fired) == len(got),
        "keys": list(model.state_dict()) == list(whole.state_dict()),
        "fetches": _dispatcher(model).metrics().collectives.get("weights", 0),
        "dispatches": _dispatcher(model).metrics().dispatches - before,
    }


def _dispatcher(model: Any) -> Any:
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher

    experts = next(iter(model.model.layers.children())).mlp.experts
    assert isinstance(experts.token_dispatcher, AutomodelDispatcher)
    assert experts.get_pipeline_runtime_initializers() == ()
    return experts.token_dispatcher.dispatcher(HIDDEN)


def _trained(model: Any, rank: int) -> dict[str, Any]:
    """Losses of some steps, and rows of the busiest rank divided by the mean over all of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = train(optimizer, STEPS, lambda _: _loss(model, _batches(rank)[0]))
    return {"losses": losses, "imbalance": _dispatcher(model).metrics(gather=True).rank_imbalance}


def refused(rank: int) -> None:
    """What the dispatcher of Automodel refuses."""
    import_real("nemo_automodel.components.moe.experts")
    from moe_dispatch.integrations.nemo_automodel import AutomodelDispatcher, use_moe_dispatch

    with pytest.raises(ConfigError, match=r"use_moe_dispatch: options must not set .*, got top_k. Leave these out"):
        use_moe_dispatch(backend="alltoall", top_k=2)
    with pytest.raises(ConfigError, match="Unknown backend 'altoall'"):
        use_moe_dispatch(backend="altoall")
    with pytest.raises(ConfigError, match=r"use_moe_dispatch: .* read no quantised rows"):
        use_moe_dispatch(backend="alltoall", wire={"dtype": "mxfp8", "deliver": "quantised"}, pad_multiple=32)
    sizes = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOP_K)
    world = dist.group.WORLD
    assert world is not None
    dispatcher = AutomodelDispatcher(4, range(4), sizes, world, backend="local")
    assert AutomodelDispatcher(4, range(4), sizes, world, backend="local", wire="mxfp8") is not None
    for fields in ({"balance": "exact"}, {"chunks": 2}):
        driven = AutomodelDispatcher(4, range(4), sizes, world, backend="local", **fields)
        with pytest.raises(ConfigError, match=r"need Automodel's GroupedExpertsDeepEP, got other experts\. Set exp"):
            driven.token_permutation2(torch.empty(0, HIDDEN), 0, torch.empty(0, 2), torch.empty(0, 2))
    with pytest.raises(StateError, match="token_permutation2 must come before it, got nothing in flight"):
        dispatcher.token_unpermutation(torch.empty(0, HIDDEN))
