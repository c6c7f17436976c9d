"""A small transformer with a mixture of experts in every layer: whole in float64, plain torch, without the library.

What the sharded model shares with it is ``layer``: there the weights are a rank's part, and groups bring the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from tests.sharded.exchange import Group, gather_rows, sum_rows
from tests.sharded.packing import Packed

Weights = Mapping[str, Tensor]  # of one layer, by name
# (rows, weights, ids, shares of the slots): what the experts add to the rows.
Experts = Callable[[Tensor, Weights, Tensor, Tensor], Tensor]

# What a token is drawn to its experts by, beside the router: so far apart that rounding on the way changes no choice.
_LEANING = 4.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the model; ``inner`` is an expert's width."""

    layers: int
    hidden: int = 16
    heads: int = 2
    head: int = 4
    inner: int = 8
    experts: int = 8
    top_k: int = 2

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer; rows times matrix, so inputs come first."""
        wide = self.heads * self.head
        return {
            "query": (self.hidden, wide),
            "key": (self.hidden, wide),
            "value": (self.hidden, wide),
            "out": (wide, self.hidden),
            "router": (self.hidden, self.experts),
            "up": (self.experts, self.hidden, self.inner),
            "down": (self.experts, self.inner, self.hidden),
        }


def parameters(sizes: Sizes) -> list[dict[str, Tensor]]:
    """float64, by layer."""
    generator = torch.Generator().manual_seed(9)

    def normal(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5
        return drawn

    made = [{name: normal(*shape) for name, shape in sizes.shapes.items()} for _ in range(sizes.layers)]
    for weights in made:
        weights["router"] /= 4
        weights["up"] /= 2  # away from where tanh is flat: there its slope, and so a gradient, is mostly rounding
    return made


def leanings(batch: Packed, sizes: Sizes) -> list[Tensor]:
    """(T, E) by layer: what is added to the router's scores."""
    zeros_TE = torch.zeros(batch.num_rows, sizes.experts, dtype=torch.float64)
    chosen = [batch.random(sizes.experts, salt=index + 1).topk(sizes.top_k).indices for index in range(sizes.layers)]
    return [zeros_TE.scatter(1, chosen_TK, _LEANING) for chosen_TK in chosen]


def route(h_TD: Tensor, router_DE: Tensor, leaning_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Shares and ids of the slots, (T, K)."""
    shares_TK, ids_TK = torch.topk(torch.softmax(h_TD @ router_DE + leaning_TE, 1), top_k)
    return shares_TK, ids_TK


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """What the rows at hand know of their batch: all of it, or what one rank holds, with the groups that hold the rest.

    Attributes:
        sees_TS: bool, which keys a row of this context-parallel rank attends to.
        leaning_TE: by layer.
    """

    sees_TS: Tensor
    leaning_TE: list[Tensor]
    tp: Group = None
    cp: Group = None


def attention(x_TD: Tensor, weights: Weights, view: View, head: int) -> Tensor:
    """Heads divided over ``tp``, with sequence parallelism; keys of the other context-parallel ranks gathered."""
    rows = gather_rows(x_TD, view.tp)
    query, key, value = (rows @ weights[name] for name in ("query", "key", "value"))
    keys, values = gather_rows(key, view.cp).split(head, 1), gather_rows(value, view.cp).split(head, 1)
    mixed = []
    for q, k, v in zip(query.split(head, 1), keys, values, strict=True):
        scores = (q @ k.t() / head**0.5).masked_fill(~view.sees_TS, -1e9)
        mixed.append(scores.softmax(1) @ v)
    return x_TD + sum_rows(torch.cat(mixed, 1) @ weights["out"], view.tp)


def layer(x_TD: Tensor, index: int, weights: Weights, *, view: View, sizes: Sizes, experts: Experts) -> Tensor:
    """Attention and a mixture of experts, each added to its input."""
    h_TD = attention(x_TD, weights, view, sizes.head)
    shares_TK, ids_TK = route(h_TD, weights["router"], view.leaning_TE[index], sizes.top_k)
    return h_TD + experts(h_TD, weights, ids_TK, shares_TK)


def expert(rows: Tensor, up_DF: Tensor, down_FD: Tensor) -> Tensor:
    return torch.tanh(rows @ up_DF) @ down_FD


def every_expert(h_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
    """The dense mixture: each expert on all rows."""
    y_TD = torch.zeros_like(h_TD)
    for which, (up_DF, down_FD) in enumerate(zip(weights["up"], weights["down"], strict=True)):
        share_T1 = (shares_TK * (ids_TK == which)).sum(1, keepdim=True)
        y_TD = y_TD + share_T1 * expert(h_TD, up_DF, down_FD)
    return y_TD


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """What the unsharded model makes of a step.

    Attributes:
        tensors: gradients by "layer.name"; gradients of inputs by "x.micro-batch.dp", and outputs, zero where there is
            padding, by "y.micro-batch.dp".
        tokens_per_expert: (E,) real tokens of the step, over all layers.
    """

    tensors: dict[str, Tensor]
    tokens_per_expert: Tensor


Step = Sequence[Sequence[Packed]]  # micro-batches, each by data-parallel rank


def named(held: Sequence[Weights]) -> dict[str, Tensor]:
    return {f"{index}.{name}": tensor for index, weights in enumerate(held) for name, tensor in weights.items()}


def real_tokens(step: Step) -> int:
    return sum(sum(batch.lengths) for micro_batch in step for batch in micro_batch)


def run_whole(sizes: Sizes, step: Step) -> Whole:
    held = parameters(sizes)
    leaves = {name: parameter.requires_grad_() for name, parameter in named(held).items()}
    outputs: dict[str, Tensor] = {}
    counts_E = torch.zeros(sizes.experts, dtype=torch.int64)

    for number, micro_batch in enumerate(step):
        for dp, batch in enumerate(micro_batch):
            x_TD = leaves[f"x.{number}.{dp}"] = batch.random(sizes.hidden).requires_grad_()
            rows = list(range(batch.num_rows))
            view = View(sees_TS=batch.sees(rows, rows), leaning_TE=leanings(batch, sizes))

            def experts(h_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
                counts_E.add_(ids_TK[batch.real_T].flatten().bincount(minlength=sizes.experts))  # noqa: B023
                return every_expert(h_TD, weights, ids_TK, shares_TK)

            for index, weights in enumerate(held):
                x_TD = layer(x_TD, index, weights, view=view, sizes=sizes, experts=experts)
            outputs[f"y.{number}.{dp}"] = x_TD.detach() * batch.real_T.unsqueeze(1)
            loss(x_TD, batch.real_T, step).backward()
    tensors = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert tensors.keys() == leaves.keys()
    return Whole(tensors=tensors | outputs, tokens_per_expert=counts_E)


def loss(y_TD: Tensor, real_T: Tensor, step: Step) -> Tensor:
    """Of these rows; all of a step add up to the mean over its real tokens."""
    return y_TD[real_T].square().sum() / real_tokens(step)
