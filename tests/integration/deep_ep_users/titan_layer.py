"""torchtitan's RoutedExperts with its DeepEP or HybridEP dispatcher. Operators run on the CPU; all else is theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._library import opaque_object
from torch._opaque_base import OpaqueBase
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.deep_ep_users.dense import EXPERTS, INNER, TOP_K, Case, Tensors, draw, draw_weights, gradient


def forward(case: Case, rank: int, group: dist.ProcessGroup) -> Callable[[], Tensors]:
    """Run a RoutedExperts forward.

    Options: ``dispatcher`` names the class, and the others are fields of its configuration. But ``training=False`` is
    of the test, and goes without gradients.
    """
    options = dict(case.options)
    training = options.pop("training", True)
    given = draw(case, rank)
    x_TD, weights_TK = (given[name].clone().requires_grad_() for name in ("x", "weights"))
    # torchtitan says by a weight of zero that a slot is not to be used, and has an expert in every slot.
    free_TE = torch.ones(len(x_TD), EXPERTS + 1).scatter(1, given["ids"].remainder(EXPERTS + 1), 0.0)
    ids_TK = torch.where(given["ids"] < 0, free_TE[:, :-1].topk(TOP_K).indices, given["ids"])
    with torch.set_grad_enabled(training):
        layer = _layer(case, rank, group, options)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS)
        y_TD = layer(x_TD[None], weights_TK[None], ids_TK[None], counts_E)[0]

    def backward() -> Tensors:
        if not training:
            return {"y": y_TD}
        y_TD.backward(given["upstream"])
        experts = layer.inner_experts
        grads = {"x": x_TD, "weights": weights_TK, "gate": experts.w1_EFD, "up": experts.w3_EFD, "down": experts.w2_EDF}
        # The weights of the slots get no gradient on a rank that receives nothing.
        found = {name: gradient(leaf) for name, leaf in grads.items() if leaf.grad is not None or name != "weights"}
        return {"y": y_TD.detach(), **found}

    return backward


def _layer(case: Case, rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    from torchtitan.models.common import token_dispatcher
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    # torchtitan 0.3.0 names the base of opaque objects as torch does after 2.13.
    opaque_object.CustomClassBase = OpaqueBase  # type: ignore[attr-defined]
    dispatcher = getattr(token_dispatcher, options.pop("dispatcher"))
    sizes = {"hidden_dim": case.hidden, "num_max_tokens_per_rank": max(case.tokens)}
    layer = RoutedExperts.Config(
        # The experts of this rank, as they are where parameters are sharded.
        inner_experts=GroupedExperts.Config(dim=case.hidden, hidden_dim=INNER, num_experts=EXPERTS // case.ep_size),
        token_dispatcher=dispatcher.Config(num_experts=EXPERTS, top_k=TOP_K, **(sizes | options)),
    ).build()
    weights = draw_weights(case)
    for name, drawn in {"w1_EFD": "gate", "w3_EFD": "up", "w2_EDF": "down"}.items():
        setattr(layer.inner_experts, name, nn.Parameter(weights[drawn][case.local(rank)]))
    _operators_on_cpu(dispatcher.__name__)
    layer.token_dispatcher.wire_meshes(ep_mesh=_mesh(group))
    return layer


@functools.cache
def _mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))


@functools.cache
def _operators_on_cpu(dispatcher: str) -> None:
    """Their operators are registered for CUDA tensors alone: the same functions, for CPU tensors too."""
    if dispatcher == "DeepEPTokenDispatcher":
        from torchtitan.distributed.deepep import deepep

        torch.library.register_kernel("deepep::dispatch", "cpu", deepep._dispatch_op_impl)
        torch.library.register_kernel("deepep::combine", "cpu", deepep._combine_op_impl)
        return
    from torchtitan.distributed.deepep import hybridep

    for name in ("_dispatch_impl", "_combine_impl", "_dispatch_bwd_impl", "_combine_bwd_impl"):
        operator = getattr(hybridep, name)
        operator.register_kernel("cpu", operator._init_fn)
