"""A small model of MoE layers: whole in float64, plain torch, without the library; what a sharded one is held against.

Tensor and context parallelism appear as what a dispatcher sees of them: which rows a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from tests.sharded.packing import Packed

Weights = Mapping[str, Tensor]  # of one layer, by name
# (rows, weights, ids, shares of the slots): what the experts add to the rows.
Experts = Callable[[Tensor, Weights, Tensor, Tensor], Tensor]
Step = Sequence[Sequence[Packed]]  # micro-batches, each by data-parallel rank

# What a token is drawn to its experts by, beside the router: so far apart that rounding on the way changes no choice.
_LEANING = 4.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the model; ``inner`` is an expert's width."""

    layers: int
    hidden: int = 16
    inner: int = 8
    experts: int = 8
    top_k: int = 2

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer; rows times matrix, so inputs come first."""
        return {
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


def leaning(batch: Packed, sizes: Sizes, index: int) -> Tensor:
    """(T, E): what is added to the scores of a layer's router."""
    chosen_TK = batch.random(sizes.experts, salt=index + 1).topk(sizes.top_k).indices
    return torch.zeros(batch.num_rows, sizes.experts, dtype=torch.float64).scatter(1, chosen_TK, _LEANING)


def layer(x_TD: Tensor, weights: Weights, leaning_TE: Tensor, top_k: int, experts: Experts) -> Tensor:
    """A mixture of experts, added to its input."""
    shares_TK, ids_TK = torch.topk(torch.softmax(x_TD @ weights["router"] + leaning_TE, 1), top_k)
    return x_TD + experts(x_TD, weights, ids_TK, shares_TK)


def expert(rows: Tensor, up_DF: Tensor, down_FD: Tensor) -> Tensor:
    return torch.tanh(rows @ up_DF) @ down_FD


def every_expert(x_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
    """The dense mixture: each expert on all rows."""
    y_TD = torch.zeros_like(x_TD)
    for which, (up_DF, down_FD) in enumerate(zip(weights["up"], weights["down"], strict=True)):
        share_T1 = (shares_TK * (ids_TK == which)).sum(1, keepdim=True)
        y_TD = y_TD + share_T1 * expert(x_TD, up_DF, down_FD)
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


def run_whole(sizes: Sizes, step: Step) -> Whole:
    held = parameters(sizes)
    named = {f"{index}.{name}": tensor for index, weights in enumerate(held) for name, tensor in weights.items()}
    leaves = {name: parameter.requires_grad_() for name, parameter in named.items()}
    outputs: dict[str, Tensor] = {}
    counts_E = torch.zeros(sizes.experts, dtype=torch.int64)
    for number, micro_batch in enumerate(step):
        for dp, batch in enumerate(micro_batch):
            x_TD = leaves[f"x.{number}.{dp}"] = batch.random(sizes.hidden).requires_grad_()

            def experts(x_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
                counts_E.add_(ids_TK[batch.real_T].flatten().bincount(minlength=sizes.experts))  # noqa: B023
                return every_expert(x_TD, weights, ids_TK, shares_TK)

            for index, weights in enumerate(held):
                x_TD = layer(x_TD, weights, leaning(batch, sizes, index), sizes.top_k, experts)
            outputs[f"y.{number}.{dp}"] = x_TD.detach() * batch.real_T.unsqueeze(1)
            loss(x_TD, batch.real_T, step).backward()
    tensors = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert tensors.keys() == leaves.keys()
    return Whole(tensors=tensors | outputs, tokens_per_expert=counts_E)


def loss(y_TD: Tensor, real_T: Tensor, step: Step) -> Tensor:
    """Of these rows; all of a step add up to the mean over its real tokens."""
    tokens = sum(sum(batch.lengths) for micro_batch in step for batch in micro_batch)
    return y_TD[real_T].square().sum() / tokens
