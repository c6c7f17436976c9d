"""One rank of a conformance case: its dispatcher, the tensors of its calls, and its experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan, Routing
from moe_dispatch_testing.host_syncs import allow_host_syncs
from moe_dispatch_testing.input_layouts import InputLayout
from moe_dispatch_testing.reference import check_dispatched, slots_of_rank
from moe_dispatch_testing.scenario import Batch, Experts, Scenario


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """Tensors of one call of a layer on one rank, as a model would hold them. The T rows of x include padding.

    Attributes:
        input_layout: Layout of ``x``, and the rows of its tokens.
        x: Input in the shape of the layout, NaN in rows that are not tokens.
        ids_TK: Expert ids by row of x; rows that are not tokens name arbitrary experts.
        weights_TK: Weights by row of x, NaN in rows that are not tokens.
        upstream: Gradient of the output y, NaN in rows that are not tokens.
        experts: Parameters of all experts, as leaves.
        batches: Tokens of all ranks.
    """

    input_layout: InputLayout
    x: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    upstream: Tensor
    experts: Experts
    batches: tuple[Batch, ...]

    def to(self, device: str) -> LayerCall:
        """Return a copy on a device, with its own leaves."""
        experts = Experts(
            matrix_EWW=_moved(self.experts.matrix_EWW, device), bias_ED=_moved(self.experts.bias_ED, device)
        )
        return dataclasses.replace(
            self,
            x=_moved(self.x, device),
            ids_TK=_moved(self.ids_TK, device),
            weights_TK=_moved(self.weights_TK, device),
            upstream=_moved(self.upstream, device),
            experts=experts,
        )

    @property
    def routing(self) -> Routing:
        """Return the ids and weights."""
        return Routing(self.ids_TK, self.weights_TK)

    @property
    def layout(self) -> Layout:
        """Return the layout that the dispatcher is given."""
        return self.input_layout.layout


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankContext:
    """One rank that runs a schedule: its dispatcher and the tensors of its calls."""

    scenario: Scenario
    dispatcher: Dispatcher
    rank: int
    calls: tuple[LayerCall, ...]

    @allow_host_syncs()
    def plan(self, call: LayerCall) -> Plan:
        """Make the plan of a call, on which all ranks agree."""
        return self.dispatcher.plan(call.layout, like=call.x)

    def dispatch(self, call: LayerCall, plan: Plan | Layout | None, *, x: Tensor | None = None) -> Dispatched:
        """Dispatch, and compare the rows that this rank received with the tokens of all ranks."""
        sent = self.dispatcher.dispatch(call.x if x is None else x, call.routing, plan)
        self.check(sent, call.batches)
        return sent

    @allow_host_syncs()
    def check(self, sent: Dispatched, batches: tuple[Batch, ...]) -> None:
        """Compare the rows that this rank received with the tokens of all ranks."""
        check_dispatched(sent, batches, self.scenario, self.rank, self.dispatcher._channel.ranks_per_node)

    @allow_host_syncs()
    def run_experts(self, sent: Dispatched, experts: Experts, numbers: Sequence[int] | None = None) -> Tensor:
        """Apply this rank's experts in float64 and round once. Rows after the last expert's rows become NaN.

        Args:
            sent: Rows of this rank.
            experts: Parameters of experts.
            numbers: The entry of ``experts`` for each expert slot; None for experts of the whole group.
        """
        counts = sent.tokens_per_expert.tolist()
        if self.scenario.skips_empty and not sum(counts):
            return torch.zeros_like(sent.rows)
        rows, weights = sent.rows, sent.weights
        padding_R = padding_rows(sent)
        if self.scenario.poisons_padding:
            rows, weights = poison_gradient(rows, padding_R), poison_gradient(weights, padding_R)
        if numbers is None:
            numbers = slots_of_rank(self.scenario, self.rank, self.dispatcher._channel.shape.ep_size)
        *parts, slack = rows.split([*counts, len(rows) - sum(counts)])
        slack = torch.full_like(slack, float("nan"), dtype=torch.float64)
        outputs = torch.cat([*(experts.apply(e, part) for e, part in zip(numbers, parts, strict=True)), slack])
        if self.scenario.weights == "experts":
            outputs = outputs * weights.unsqueeze(1)
        outputs = outputs.to(rows.dtype)
        return poison(outputs, padding_R) if self.scenario.poisons_padding else outputs

    def combine(self, call: LayerCall, sent: Dispatched) -> Tensor:
        """Apply this rank's experts to the rows it received, and combine."""
        return self.dispatcher.combine(self.run_experts(sent, call.experts), sent)

    def layer(self, call: LayerCall, plan: Plan | Layout | None, x: Tensor | None = None) -> Tensor:
        """Run the whole layer: dispatch, experts, combine."""
        return self.combine(call, self.dispatch(call, plan, x=x))


def make_call(
    scenario: Scenario, input_layout: InputLayout, batches: tuple[Batch, ...], rank: int, experts: Experts
) -> LayerCall:
    """Make the tensors of one call on one rank. The scenario says which of ``x`` and the weights collect gradients."""
    batch, nan = batches[rank], float("nan")
    weight_dtype = torch.promote_types(scenario.torch_dtype, torch.float32)
    shape = (*input_layout.leading, scenario.hidden)
    ids_TK = input_layout.place(batch.ids_TK, 0)
    others_T = torch.ones(input_layout.num_rows, 1, dtype=torch.bool).index_fill_(0, input_layout.real_T, False)
    noise_TK = torch.arange(ids_TK.numel()).view_as(ids_TK) % scenario.num_experts
    return LayerCall(
        input_layout=input_layout,
        x=input_layout.place(batch.x_TD.to(scenario.torch_dtype), nan)
        .view(shape)
        .requires_grad_("x" in scenario.requires_grad),
        ids_TK=torch.where(others_T, noise_TK, ids_TK),
        weights_TK=input_layout.place(batch.weights_TK.to(weight_dtype), nan).requires_grad_(
            "weights" in scenario.requires_grad
        ),
        upstream=input_layout.place(batch.upstream_TD.to(scenario.torch_dtype), nan).view(shape),
        experts=experts.leaves(),
        batches=batches,
    )


def _moved(leaf: Tensor, device: str) -> Tensor:
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


def padding_rows(sent: Dispatched) -> Tensor:
    """Return bool (R,): True for the padding rows of each expert and for the rows after the last expert's rows."""
    pairs = zip(sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist(), strict=True)
    parts = [torch.arange(padded) >= real for padded, real in pairs]
    slack = torch.ones(len(sent.rows) - sum(map(len, parts)), dtype=torch.bool)
    return torch.cat([*parts, slack]).to(sent.rows.device)


def poison(rows: Tensor, padding_R: Tensor) -> Tensor:
    """Set padding rows to NaN. Leave the gradient unchanged, so that a gradient of padding reaches the parameters."""
    result: Tensor = _Poison.apply(rows, padding_R)  # type: ignore[no-untyped-call]
    return result


def poison_gradient(rows: Tensor, padding_R: Tensor) -> Tensor:
    """Set padding rows of the gradient to NaN, and leave the rows unchanged."""
    result: Tensor = _PoisonGradient.apply(rows, padding_R)  # type: ignore[no-untyped-call]
    return result


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, padding_R: Tensor) -> Tensor:
        return rows.masked_fill(padding_R.unsqueeze(1), float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, padding_R: Tensor) -> Tensor:
        ctx.padding_R = padding_R
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        padding_R = ctx.padding_R.view(-1, *[1] * (grad.dim() - 1))
        return grad.masked_fill(padding_R, float("nan")), None
