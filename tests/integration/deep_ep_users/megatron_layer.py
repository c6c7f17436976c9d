"""megatron-core's MoELayer with its flex dispatcher. Routing is given instead of learned; all else is theirs."""

from __future__ import annotations

import functools
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.integration.deep_ep_users.dense import Case, Given, Outcome, draw, draw_weights, gradient
from tests.integration.deep_ep_users.rank import Job
from tests.integration.megatron_core.layer import ON_CPU


@final
class GivenRouter(torch.nn.Module):
    """Stands where Megatron's router stands, and returns what it was given: float32 (T, E) and bool (T, E)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.answer: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.answer is not None
        return self.answer


@final
class MegatronRunning:
    """A MoELayer that has gone forward."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup) -> None:
        self._inner = job.case.inner
        self._layer = _layer(job, rank, group)
        given = draw(job.case, rank)
        self._upstream_TD = given.upstream_TD
        self._x_TD = given.x_TD.clone().requires_grad_()
        self._weights_TK = given.weights_TK.clone().requires_grad_()
        self._layer.router.answer = _dense_routing(job.case, given, self._weights_TK)
        # [sequence, batch, hidden], as Megatron has it.
        self._y_TD = self._layer(self._x_TD.unsqueeze(1))[0].squeeze(1)

    def backward(self) -> Outcome:
        self._y_TD.backward(self._upstream_TD)
        experts = self._layer.experts.local_experts
        grad_fc1 = torch.stack([gradient(expert.linear_fc1.weight) for expert in experts])
        return Outcome(
            y_TD=self._y_TD.detach(),
            grad_x_TD=gradient(self._x_TD),
            grad_weights_TK=gradient(self._weights_TK),
            grad_gate_LFD=grad_fc1[:, : self._inner],
            grad_up_LFD=grad_fc1[:, self._inner :],
            grad_down_LDF=torch.stack([gradient(expert.linear_fc2.weight) for expert in experts]),
        )


def _dense_routing(case: Case, given: Given, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and choices by expert: one column more, where slots that go nowhere end, is cut off."""
    ids_TK = given.ids_TK.masked_fill(given.ids_TK < 0, case.experts)
    zeros_TE = torch.zeros(ids_TK.shape[0], case.experts + 1)
    weights_TE = zeros_TE.scatter(1, ids_TK, weights_TK)[:, :-1]
    chosen_TE = zeros_TE.scatter(1, ids_TK, 1.0)[:, :-1].bool()
    return weights_TE, chosen_TE


def _layer(job: Job, rank: int, group: dist.ProcessGroup) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(experts=functools.partial(SequentialMLP, submodules=linears), router=GivenRouter)
    layer = MoELayer(_config(job), submodules, pg_collection=_groups(rank, group))
    weights = draw_weights(job.case).of(job.case.local(rank))
    with torch.no_grad():
        for local, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(torch.cat([weights.gate_EFD[local], weights.up_EFD[local]]))
            expert.linear_fc2.weight.copy_(weights.down_EDF[local])
    return layer


def _config(job: Job) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    case = job.case
    return TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=1,
        ffn_hidden_size=case.inner,
        moe_ffn_hidden_size=case.inner,
        gated_linear_unit=True,
        activation_func=F.silu,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=case.ep_size,
        bf16=True,
        params_dtype=torch.bfloat16,
        moe_token_dispatcher_type="flex",
        **ON_CPU,
        **job.options,
    )


@functools.cache
def _groups(rank: int, group: dist.ProcessGroup) -> Any:
    """Experts over all ranks, and no other parallelism. Made once: each makes process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = [dist.new_group([member]) for member in range(group.size())][rank]
    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = group
    groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = groups.expt_tp = groups.expt_dp = alone
    return groups
