"""torchtitan's RoutedExperts with its DeepEP or HybridEP dispatcher. Operators run on the CPU; all else is theirs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library import opaque_object
from torch._opaque_base import OpaqueBase
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.deep_ep_users.dense import Case, Given, Outcome, draw, draw_weights, gradient
from tests.integration.deep_ep_users.rank import Job


@final
class TitanRunning:
    """A RoutedExperts that has gone forward.

    Options: ``dispatcher`` names the class, and the others are fields of its configuration. But these are of the test:
    ``training=False`` goes without gradients, ``deterministic=True`` opens a buffer in torch's deterministic mode, and
    ``uneven=True`` goes past the dispatcher, which takes its own number of rows for everyone's, to what it calls.
    """

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup) -> None:
        options = dict(job.options)
        training, uneven = options.pop("training", True), options.pop("uneven", False)
        given = draw(job.case, rank)
        self._upstream_TD = given.upstream_TD
        self._x_TD = given.x_TD.clone().requires_grad_()
        self._weights_TK = given.weights_TK.clone().requires_grad_()
        ids_TK = _an_expert_in_every_slot(given, job.case)
        with _deterministic(options.pop("deterministic", False)), torch.set_grad_enabled(training):
            self._layer = _layer(job.case, rank, group, options)
            self._y_TD = self._uneven(ids_TK, job.case) if uneven else self._forward(ids_TK, job.case)

    def _forward(self, ids_TK: Tensor, case: Case) -> Tensor:
        counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
        y_BLD: Tensor = self._layer(self._x_TD[None], self._weights_TK[None], ids_TK[None], counts_E)
        return y_BLD[0]

    def _uneven(self, ids_TK: Tensor, case: Case) -> Tensor:
        from torchtitan.distributed.deepep import deepep

        local = case.experts // case.ep_size
        rows_RD, counts_L, state = deepep.dispatch_tokens(
            self._x_TD, ids_TK, self._weights_TK, local, case.experts, num_tokens_per_rank=max(case.tokens)
        )
        y_TD: Tensor = deepep.combine_tokens(self._layer.inner_experts(rows_RD, counts_L), state)
        deepep.sync_combine()
        return y_TD

    def backward(self) -> Outcome:
        if not self._y_TD.requires_grad:
            return Outcome(y_TD=self._y_TD)
        self._y_TD.backward(self._upstream_TD)
        experts = self._layer.inner_experts
        return Outcome(
            y_TD=self._y_TD.detach(),
            grad_x_TD=gradient(self._x_TD),
            grad_weights_TK=self._weights_TK.grad,
            grad_gate_LFD=gradient(experts.w1_EFD),
            grad_up_LFD=gradient(experts.w3_EFD),
            grad_down_LDF=gradient(experts.w2_EDF),
        )


def _an_expert_in_every_slot(given: Given, case: Case) -> Tensor:
    """Ids without -1: torchtitan says by a weight of zero that a slot is not to be used."""
    ids_TK = given.ids_TK
    free_TE = torch.ones(ids_TK.shape[0], case.experts + 1).scatter(1, ids_TK.remainder(case.experts + 1), 0.0)
    free_TK = free_TE[:, :-1].topk(case.top_k).indices
    return torch.where(ids_TK < 0, free_TK, ids_TK)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic mode and a new buffer in it; without filling fresh memory, which deep_ep does not allow."""
    if not wanted:
        yield
        return
    from torchtitan.distributed.deepep import deepep

    deepep._buffer = None
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _layer(case: Case, rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    from torchtitan.models.common import token_dispatcher
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    # torchtitan 0.3.0 names the base of opaque objects as torch does after 2.13.
    opaque_object.CustomClassBase = OpaqueBase  # type: ignore[attr-defined]
    dispatcher = getattr(token_dispatcher, options.pop("dispatcher"))
    sizes = {"hidden_dim": case.hidden, "num_max_tokens_per_rank": max(case.tokens)}
    layer = RoutedExperts.Config(
        # The experts of this rank, as they are where parameters are sharded.
        inner_experts=GroupedExperts.Config(
            dim=case.hidden, hidden_dim=case.inner, num_experts=case.experts // case.ep_size
        ),
        token_dispatcher=dispatcher.Config(num_experts=case.experts, top_k=case.top_k, **(sizes | options)),
    ).build()
    weights = draw_weights(case).of(case.local(rank))
    layer.inner_experts.w1_EFD = nn.Parameter(weights.gate_EFD)
    layer.inner_experts.w3_EFD = nn.Parameter(weights.up_EFD)
    layer.inner_experts.w2_EDF = nn.Parameter(weights.down_EDF)
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
