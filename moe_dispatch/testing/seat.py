"""One rank of a conformance case: its dispatcher, its tensors, and the expert layer around them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.layouts import Layout
from moe_dispatch.testing.arrival import check_arrival
from moe_dispatch.testing.forms import Form
from moe_dispatch.testing.host_syncs import allow_host_syncs
from moe_dispatch.testing.scenario import Batch, Experts, Scenario
from moe_dispatch.types import Dispatched, Plan, Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The tensors of one call on one rank, as a model would hold them.

    Attributes:
        form: where tokens stand in ``x``.
        x: in the form's shape, NaN in rows that are no tokens.
        ids_TK: by row of x; rows that are no tokens name experts at random.
        weights_TK: by row of x; rows that are no tokens have NaN.
        upstream: the gradient of y, NaN in rows that are no tokens.
        experts: the parameters, leaves.
        batches: the tokens of all ranks.
    """

    form: Form
    x: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    upstream: Tensor
    experts: Experts
    batches: tuple[Batch, ...]

    def to(self, device: str) -> Call:
        """The same on a device, with leaves of its own."""
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
        """Ids and weights."""
        return Routing(self.ids_TK, self.weights_TK)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seat:
    """What a program works with."""

    scenario: Scenario
    dispatcher: Dispatcher
    rank: int
    calls: tuple[Call, ...]

    @allow_host_syncs()
    def plan(self, call: Call) -> Plan:
        """Sizes of a call, settled by all ranks."""
        return self.dispatcher.plan(call.form.layout, like=call.x)

    def send(self, call: Call, settled: Plan | Layout | None, *, x: Tensor | None = None) -> Dispatched:
        """Dispatch, and check what arrived against the tokens of all ranks."""
        sent = self.dispatcher.dispatch(call.x if x is None else x, call.routing, settled)
        self.check(sent, call.batches)
        return sent

    @allow_host_syncs()
    def check(self, sent: Dispatched, batches: tuple[Batch, ...]) -> None:
        """Hold what arrived against the tokens of all ranks."""
        check_arrival(sent, batches, self.scenario, self.rank)

    @allow_host_syncs()
    def run_experts(self, sent: Dispatched, experts: Experts) -> Tensor:
        """This rank's experts on the rows that arrived, in float64 and rounded once; NaN in the slack behind them."""
        counts = sent.tokens_per_expert.tolist()
        if self.scenario.skips_empty and not sum(counts):
            return torch.zeros_like(sent.rows)
        rows, weights = sent.rows, sent.weights
        padding_R = padding_rows(sent)
        if self.scenario.poisons_padding:
            rows, weights = poison_gradient(rows, padding_R), poison_gradient(weights, padding_R)
        first = self.rank * len(sent.tokens_per_expert)
        *parts, slack = rows.split([*counts, len(rows) - sum(counts)])
        slack = torch.full_like(slack, float("nan"), dtype=torch.float64)
        outputs = torch.cat([*(experts.apply(first + i, part) for i, part in enumerate(parts)), slack])
        if self.scenario.weights == "experts":
            outputs = outputs * weights.unsqueeze(1)
        outputs = outputs.to(rows.dtype)
        return poison(outputs, padding_R) if self.scenario.poisons_padding else outputs

    def layer(self, call: Call, settled: Plan | Layout | None, x: Tensor | None = None) -> Tensor:
        """The whole MoE layer."""
        sent = self.send(call, settled, x=x)
        return self.dispatcher.combine(self.run_experts(sent, call.experts), sent)


def make_call(scenario: Scenario, form: Form, batches: tuple[Batch, ...], rank: int, experts: Experts) -> Call:
    """One rank's tensors of one call; ``x`` and the weights are leaves that collect gradients as the scenario says."""
    batch, nan = batches[rank], float("nan")
    weight_dtype = torch.promote_types(scenario.torch_dtype, torch.float32)
    shape = (*form.leading, scenario.hidden)
    ids_TK = form.place(batch.ids_TK, 0)
    others_T = torch.ones(form.num_rows, 1, dtype=torch.bool).index_fill_(0, form.real_T, False)
    noise_TK = torch.arange(ids_TK.numel()).view_as(ids_TK) % scenario.num_experts
    return Call(
        form=form,
        x=form.place(batch.x_TD.to(scenario.torch_dtype), nan)
        .view(shape)
        .requires_grad_("x" in scenario.requires_grad),
        ids_TK=torch.where(others_T, noise_TK, ids_TK),
        weights_TK=form.place(batch.weights_TK.to(weight_dtype), nan).requires_grad_(
            "weights" in scenario.requires_grad
        ),
        upstream=form.place(batch.upstream_TD.to(scenario.torch_dtype), nan).view(shape),
        experts=experts.leaves(),
        batches=batches,
    )


def _moved(leaf: Tensor, device: str) -> Tensor:
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


def padding_rows(sent: Dispatched) -> Tensor:
    """bool (R,): the rows that stand behind an expert's real ones."""
    pairs = zip(sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist(), strict=True)
    parts = [torch.arange(padded) >= real for padded, real in pairs]
    slack = torch.ones(len(sent.rows) - sum(map(len, parts)), dtype=torch.bool)
    return torch.cat([*parts, slack]).to(sent.rows.device)


def poison(rows: Tensor, padding_R: Tensor) -> Tensor:
    """NaN in padding rows; the gradient passes as it is, so that one of padding rows would reach the parameters."""
    result: Tensor = _Poison.apply(rows, padding_R)  # type: ignore[no-untyped-call]
    return result


def poison_gradient(rows: Tensor, padding_R: Tensor) -> Tensor:
    """The other way round: rows pass, padding rows of the gradient become NaN."""
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
