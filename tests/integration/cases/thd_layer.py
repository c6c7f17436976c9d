"""One mixture of experts over packed sequences, on ranks that are threads, and the dense layer that it must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatcher, Plan, Routing
from moe_dispatch.replay import RoutingTable, replayed
from tests.integration.deep_ep_users.dense import gradient
from tests.sharded.model import every_expert
from tests.sharded.packing import Packed
from tests.sharded.stage import apply_experts

HIDDEN, INNER, EXPERTS, TOP_K, PAD_MULTIPLE = 256, 16, 8, 2, 16

# By step and rank: 14, 3, 0 and 37 tokens; a rank without rows; and other counts again.
STEPS = (
    (
        Packed(lengths=(5, 9), padded=(8, 16), seed=0),
        Packed(lengths=(3,), padded=(4,), seed=1),
        Packed(lengths=(0, 0), padded=(8, 4), seed=2),
        Packed(lengths=(31, 0, 6), padded=(40, 8, 8), seed=3),
    ),
    (
        Packed(lengths=(70,), padded=(72,), seed=4),
        Packed(lengths=(), padded=(), seed=5),
        Packed(lengths=(1, 1, 1), padded=(4, 4, 4), seed=6),
        Packed(lengths=(12,), padded=(12,), seed=7),
    ),
    (
        Packed(lengths=(2,), padded=(8,), seed=8),
        Packed(lengths=(33, 4), padded=(64, 8), seed=9),
        Packed(lengths=(8,), padded=(8,), seed=10),
        Packed(lengths=(19,), padded=(20,), seed=11),
    ),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """Of one rank: its output and gradients, and how many rows its experts saw."""

    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor  # (T, E) of the scores if the ids were replayed
    grad_up_LDF: Tensor
    grad_down_LFD: Tensor
    num_rows: int = 0
    real_tokens_per_expert: tuple[int, ...] = ()
    tokens_per_expert: tuple[int, ...] = ()


def experts() -> tuple[Tensor, Tensor]:
    """float64 (E, D, F) and (E, F, D)."""
    generator = torch.Generator().manual_seed(77)

    def normal(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        return drawn

    return normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, INNER, HIDDEN)


def ids_of(batch: Packed) -> Tensor:
    return batch.random(EXPERTS, salt=1).topk(TOP_K).indices


def weights_of(batch: Packed) -> Tensor:
    return batch.random(TOP_K, salt=2).softmax(1)


def scores_of(batch: Packed) -> Tensor:
    """(T, E) of a router that would choose other experts than ``ids_of``."""
    return batch.random(EXPERTS, salt=4).softmax(1)


def names_of(batch: Packed) -> list[str]:
    return [f"{batch.seed}.{index}" for index in range(len(batch.lengths))]


def table_of(step: tuple[Packed, ...]) -> RoutingTable:
    """``ids_of`` the tokens of a step, as an engine gives them."""
    parts = [
        (name, ids[:length, None])
        for batch in step
        for name, length, ids in zip(
            names_of(batch), batch.lengths, ids_of(batch).split(list(batch.padded)), strict=True
        )
    ]
    return RoutingTable(parts, num_experts=EXPERTS)


def sent_and_back(
    dispatcher: Dispatcher,
    group: dist.ProcessGroup,
    batch: Packed,
    plan: Plan | None = None,
    table: RoutingTable | None = None,
) -> Result:
    """The layer on one rank; rows that are no tokens hold NaN. With a table its router has scores, and no choice."""
    padding_T1 = ~batch.real_T.unsqueeze(1)
    x_TD = batch.random(HIDDEN).float().masked_fill(padding_T1, float("nan")).requires_grad_()
    weights_TK = (weights_of(batch) if table is None else scores_of(batch)).float().requires_grad_()
    routing = Routing(ids_of(batch), weights_TK)
    if table is not None:
        routing = replayed(table.routing_for(0, batch.layout, names_of(batch)), weights_TK, normalize=True)
    up_LDF, down_LFD = (whole.chunk(group.size())[group.rank()].float().requires_grad_() for whole in experts())
    sent = dispatcher.dispatch(x_TD, routing, plan or batch.layout)
    y_TD = dispatcher.combine(apply_experts(sent, up_LDF, down_LFD), sent)
    y_TD.backward(batch.random(HIDDEN, salt=3).float())
    return Result(
        y_TD=y_TD.detach(),
        grad_x_TD=gradient(x_TD),
        grad_weights_TK=gradient(weights_TK),
        grad_up_LDF=gradient(up_LDF),
        grad_down_LFD=gradient(down_LFD),
        num_rows=len(sent.rows),
        real_tokens_per_expert=tuple(sent.real_tokens_per_expert.tolist()),
        tokens_per_expert=tuple(sent.tokens_per_expert.tolist()),
    )


def dense(step: tuple[Packed, ...], *, forced: bool = False) -> list[Result]:
    """The same of all ranks, without padding: rows that are no tokens get zero, and give zero.

    If ``forced``, the weights are a router's scores at given ids.
    """
    up_EDF, down_EFD = (whole.requires_grad_() for whole in experts())
    inputs: list[Any] = []
    for batch in step:
        given = scores_of(batch) if forced else weights_of(batch)
        leaves = x_TD, weights_TK = batch.random(HIDDEN).requires_grad_(), given.requires_grad_()
        real_T1 = batch.real_T.unsqueeze(1)
        if forced:
            weights_TK = weights_TK.gather(1, ids_of(batch))
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        y_TD = every_expert(x_TD, {"up": up_EDF, "down": down_EFD}, ids_of(batch), weights_TK) * real_T1
        y_TD.backward(batch.random(HIDDEN, salt=3))
        inputs.append((y_TD.detach(), *map(gradient, leaves)))
    ups, downs = (gradient(whole).chunk(len(step)) for whole in (up_EDF, down_EFD))
    return [
        Result(y_TD=y, grad_x_TD=x, grad_weights_TK=weights, grad_up_LDF=up, grad_down_LFD=down)
        for (y, x, weights), up, down in zip(inputs, ups, downs, strict=True)
    ]
