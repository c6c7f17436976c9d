"""megatron-core's MoELayer with its flex dispatcher. Routing is given instead of learned; all else is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.deep_ep_users.dense import EXPERTS, INNER, Case, Tensors, draw, draw_weights, gradient
from tests.integration.megatron_core import layer


@final
class GivenRouter(torch.nn.Module):
    """Stands where Megatron's router stands, and returns what it was given: float32 (T, E) and bool (T, E)."""

    answer: tuple[Tensor, Tensor]

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.answer


def forward(case: Case, rank: int, group: dist.ProcessGroup) -> Callable[[], Tensors]:
    layer.RANKS = case.ep_size
    config = {"hidden_size": case.hidden, "moe_router_load_balancing_type": "none", **case.options}
    parallel = layer.Parallel(ep=case.ep_size)
    moe: Any = layer.build(layer.own_spec(), layer.Case(parallel=parallel, config=config, dtype=torch.bfloat16))
    experts = moe.experts.local_experts
    weights = {name: weight[case.local(rank)] for name, weight in draw_weights(case).items()}
    with torch.no_grad():
        for expert, gate, up, down in zip(experts, *weights.values(), strict=True):
            expert.linear_fc1.weight.copy_(torch.cat([gate, up]))
            expert.linear_fc2.weight.copy_(down)
    given = draw(case, rank)
    x_TD, weights_TK = (given[name].clone().requires_grad_() for name in ("x", "weights"))
    # One column more, where slots that go nowhere end, is cut off.
    ids_TK = given["ids"].remainder(EXPERTS + 1)
    zeros_TE = torch.zeros(len(ids_TK), EXPERTS + 1)
    moe.router = GivenRouter()
    moe.router.answer = (
        zeros_TE.scatter(1, ids_TK, weights_TK)[:, :-1],
        zeros_TE.scatter(1, ids_TK, 1.0)[:, :-1].bool(),
    )
    y_TD = moe(x_TD.unsqueeze(1))[0].squeeze(1)  # [sequence, batch, hidden], as Megatron has it

    def backward() -> Tensors:
        y_TD.backward(given["upstream"])
        gate_up = torch.stack([gradient(expert.linear_fc1.weight) for expert in experts])
        down = torch.stack([gradient(expert.linear_fc2.weight) for expert in experts])
        grads = {"x": gradient(x_TD), "weights": gradient(weights_TK)}
        return {"y": y_TD.detach(), **grads, "gate": gate_up[:, :INNER], "up": gate_up[:, INNER:], "down": down}

    return backward
