"""A layer in graph-safe mode whose experts leave NaN wherever nothing may be read, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, Routing
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient

PER_EXPERT = torch.tensor([2.0**expert for expert in range(8)])


def _with_nan(rows: Tensor, padding_R: Tensor) -> Tensor:
    """Rows or weights, and their gradients, with NaN in padding and behind the last expert's rows."""
    flat = rows if rows.dim() == 2 else rows.unsqueeze(1)
    return poison(poison_gradient(flat, padding_R), padding_R).view_as(rows)


def poisoned(sent: Dispatched) -> Dispatched:
    """What was dispatched, with NaN in weights and gradients that nobody may read."""
    rows, weights = (_with_nan(part, padding_rows(sent)) for part in (sent.rows, sent.weights))
    return dataclasses.replace(sent, edge=rows, weights=weights)


def experts(sent: Dispatched, function: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    """Each expert's function of its rows, times a power of two of its own; NaN where nothing may be read."""
    first = first_expert(sent)
    counts = sent.tokens_per_expert
    factor = PER_EXPERT[first : first + len(counts)].repeat_interleave(counts)
    factor = torch.nn.functional.pad(factor, (0, len(sent.rows) - len(factor)), value=1.0)
    return _with_nan(function(sent.rows) * factor.unsqueeze(1), padding_rows(sent))


def first_expert(sent: Dispatched) -> int:
    """The first of the experts of the rank that this was dispatched to."""
    rank: int = sent.state.lease.shared.communicator.rank
    return rank * len(sent.tokens_per_expert)


def one_layer(dispatcher: Dispatcher, x: Tensor, routing: Routing) -> dict[str, Tensor]:
    """Everything that a layer computes: outputs and gradients, with rows sent again, twice combined and interleaved."""
    x, weights = x.clone().requires_grad_(), routing.topk_weights.clone().requires_grad_()
    again = x.detach().neg().requires_grad_()
    first = poisoned(dispatcher.dispatch(x, Routing(routing.topk_ids, weights)))
    other = poisoned(dispatcher.dispatch(x, Routing(routing.topk_ids.flip(1).roll(1, 0), weights)))
    repeated = poisoned(dispatcher.dispatch(again, again=first))
    results = {
        "second call": dispatcher.combine(experts(other), other),
        "first call": dispatcher.combine(experts(first), first),
        "combined twice": dispatcher.combine(experts(first, torch.sin), first),
        "again": dispatcher.combine(experts(repeated), repeated),
    }
    scale = torch.linspace(-1, 1, x.shape[1])
    sum((y * scale).sum() * (i + 1) for i, y in enumerate(results.values())).backward()  # type: ignore[union-attr]
    for name, leaf in {"x": x, "weights": weights, "again": again}.items():
        assert leaf.grad is not None
        results[f"gradient of {name}"] = leaf.grad
    for name, sent in {"first": first, "second": other}.items():
        results[f"counts of the {name} call"] = sent.tokens_per_expert
        results[f"real counts of the {name} call"] = sent.real_tokens_per_expert
    return {name: value.detach() for name, value in results.items()}
