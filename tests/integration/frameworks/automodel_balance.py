"""A Qwen3-MoE of NeMo Automodel with balanced experts, sharded by Automodel's own functions, against one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.integration.checkpoints import carry
from tests.integration.deep_ep_users.cpu import cpu_for_cuda
from tests.integration.frameworks.automodel import VOCABULARY, error, qwen3_moe
from tests.integration.frameworks.sources import import_real
from tests.integration.planted import FAULTS, planted

EP, STEPS = 2, 8
Batch = tuple[Tensor, Tensor]  # ids, and what is padding


def compared(rank: int, kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What each kind of dispatch gives.

    "lost" and "twice" have a fault in how gradients of copies come home. "offloaded" keeps copies of saved tensors, as
    torch's ``save_on_cpu`` does for tensors of a GPU. "resumed" loads a checkpoint of the unbalanced run. On as many
    ranks as hold the experts, only gradients are compared.
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
        loading = {kind: _sharded(parallelizer, kinds[kind]) for kind in runs}
        carry(runs["plain"], *loading.values())
        found["resumed"] = {kind: _trained(model, rank)["losses"] for kind, model in loading.items()}
        for fault in FAULTS:
            with planted(fault):
                found[fault] = _accumulated(parallelizer, rank, kinds["balanced"], together=False)["error"]
    return found


def _favoured(**backend: str) -> Any:
    """A model whose routers choose the first two of four experts, those of the first rank."""
    model = qwen3_moe(**backend)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(3)
        for layer in model.model.layers.children():
            direction = layer.post_attention_layernorm.weight
            layer.mlp.gate.weight[:2] += 5 * direction / direction.norm()
    return model


def _sharded(parallelizer: Any, fields: Mapping[str, Any]) -> Any:
    from moe_dispatch.integrations.nemo_automodel import use_moe_dispatch

    use_moe_dispatch(backend="alltoall", **fields)
    model, ranks = _favoured(experts="torch_mm", dispatcher="hybridep"), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // EP, EP), mesh_dim_names=("ep_shard", "ep"))
    parallelizer.apply_ep(model, mesh["ep"])
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


def _accumulated(parallelizer: Any, rank: int, fields: Mapping[str, Any], *, together: bool) -> dict[str, Any]:
    """The error of the gradients of two micro-batches. ``together``: both forwards run before one backward."""
    model = _sharded(parallelizer, fields)
    fired: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    losses = []
    for batch in _batches(rank):
        losses.append(_loss(model, batch))
        if not together:
            losses.pop().backward()
    if together:
        torch.stack(losses).sum().backward()
    whole, ranks = _favoured(experts="torch", dispatcher="torch"), dist.get_world_size()
    for other in range(ranks):
        for batch in _batches(other):
            _loss(whole, batch).backward()
    errors = []
    for (name, weight), (_, reference) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        # FSDP takes the mean over all ranks, and for experts over those that share them.
        mean = ranks // EP if ".experts." in name else ranks
        grad = weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append(error(grad * mean, reference.grad))
    return {
        "error": max(errors),
        "fired": set(fired.values()),
        "hooked": len(fired) == len(errors),
        "keys": list(model.state_dict()) == list(whole.state_dict()),
        "fetches": _dispatcher(model).metrics().collectives.get("weights", 0),
    }


def _dispatcher(model: Any) -> Any:
    from tests.integration.frameworks.automodel import HIDDEN

    layer = next(iter(model.model.layers.children()))
    return layer.mlp.experts.token_dispatcher.dispatcher(HIDDEN)


def _trained(model: Any, rank: int) -> dict[str, Any]:
    """Losses of some steps, and rows of the busiest rank divided by the mean over all of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = _loss(model, _batches(rank)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return {"losses": losses, "imbalance": _dispatcher(model).metrics(gather=True).rank_imbalance}
