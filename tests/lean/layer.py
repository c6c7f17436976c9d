"""A layer whose experts are the lean ones, and the same layer computed densely in float64 in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.lean import first_mm, last_mm, swiglu
from tests.dispatchers.layer import Group, on_ranks

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 8
Experts = Callable[[Dispatched, Sequence[Tensor]], Any]


class Whole(NamedTuple):
    """The tensors of all ranks, in float64. ``matrices`` are those of ``NAMES``, with all experts."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    upstream: Tensor
    matrices: tuple[Tensor, ...]


NAMES = ("gate", "up", "down", "first bias", "last bias")


def whole_layer(tokens: int, *, highest: int = NUM_EXPERTS - 1, seed: int = 0) -> Whole:
    """Draw a layer. Experts above ``highest`` are idle; -1 sends every token nowhere."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    shapes = [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN), (INNER,), (HIDDEN,)]
    matrices = tuple(draw(NUM_EXPERTS, *shape) / 4 for shape in shapes)
    weights = torch.rand(tokens, TOP_K, generator=generator).double()
    return Whole(draw(tokens, HIDDEN), ids.masked_fill(ids > highest, -1), weights, draw(tokens, HIDDEN), matrices)


def rows_of_bias(sent: Dispatched, bias: Tensor) -> Tensor:
    """The bias of each row's expert."""
    rows = torch.arange(sent.in_graph.shape[0])
    return bias[torch.searchsorted(sent.offs, rows, right=True).clamp(max=len(bias) - 1)]


def weigh(sent: Dispatched, rows: Any) -> Any:
    """Apply the weights of tokens, if the experts do so."""
    by_experts = sent.state.lease.channel.config.weights == "experts"
    return (rows * sent.weights.unsqueeze(1)).to(rows.dtype) if by_experts else rows


def lean_two(sent: Dispatched, matrices: Sequence[Tensor]) -> Any:
    """Two first matrices, and an activation that is computed again."""
    gate, up, down, *_ = matrices
    if sent.state.lease.channel.config.weights == "experts":
        return last_mm(sent, weigh(sent, swiglu(*first_mm(sent, gate, up))), down)
    return last_mm(sent, first_mm(sent, gate, up), down, activation=swiglu)


def lean_one(sent: Dispatched, matrices: Sequence[Tensor]) -> Any:
    """One first matrix that holds both."""
    gate, up, down, *_ = matrices
    merged = first_mm(sent, torch.cat([gate, up], 2))
    if sent.state.lease.channel.config.weights == "experts":
        return last_mm(sent, weigh(sent, swiglu(merged)), down)
    return last_mm(sent, merged, down, activation=swiglu)


def lean_plain(sent: Dispatched, matrices: Sequence[Tensor]) -> Any:
    """An activation of the model's own, which autograd saves."""
    gate, up, down, *_ = matrices
    first, second = first_mm(sent, gate, up)
    return last_mm(sent, weigh(sent, F.silu(first) * second), down)


def lean_function(sent: Dispatched, matrices: Sequence[Tensor]) -> Any:
    """A function of the model's own that is computed again."""
    gate, up, down, *_ = matrices
    if sent.state.lease.channel.config.weights == "experts":
        return lean_plain(sent, matrices)
    return last_mm(sent, first_mm(sent, gate, up), down, activation=lambda gate, up: F.silu(gate) * up)


def lean_biased(sent: Dispatched, matrices: Sequence[Tensor]) -> Any:
    """Biases of both products, as gpt-oss has them."""
    gate, up, down, first_bias, last_bias = matrices
    if sent.state.lease.channel.config.weights == "experts":
        last_bias = last_bias * 0
    first, second = first_mm(sent, gate, up)
    return last_mm(sent, weigh(sent, F.silu(first + rows_of_bias(sent, first_bias)) * second), down, last_bias)


KINDS: dict[str, Experts] = {
    "two matrices": lean_two,
    "one matrix": lean_one,
    "saved activation": lean_plain,
    "own function": lean_function,
    "biases": lean_biased,
}


def expected(whole: Whole, kind: str, *, by_experts: bool = False) -> dict[str, Tensor]:
    """Output and gradients, computed densely in float64: every expert on every row."""
    x, weights = (tensor.clone().requires_grad_() for tensor in (whole.x, whole.weights))
    gate, up, down, first_bias, last_bias = matrices = [matrix.clone().requires_grad_() for matrix in whole.matrices]
    is_named_TKE = whole.ids.unsqueeze(-1) == torch.arange(NUM_EXPERTS)
    weights_TE = (weights.unsqueeze(-1) * is_named_TKE).sum(1)
    first = torch.einsum("td,edh->teh", x, gate)
    if kind == "biases":
        first = first + first_bias
    out = torch.einsum("teh,ehd->ted", F.silu(first) * torch.einsum("td,edh->teh", x, up), down)
    if kind == "biases" and not by_experts:
        out = out + last_bias
    y = torch.einsum("te,ted->td", weights_TE, out)
    y.backward(whole.upstream)
    named = dict(zip(NAMES, matrices, strict=True))
    grads = {name: matrix.grad for name, matrix in named.items() if matrix.grad is not None}
    assert x.grad is not None
    assert weights.grad is not None
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def run_layer(
    config: DispatcherConfig,
    whole: Whole,
    cut: Sequence[int],
    experts: Experts,
    dtype: torch.dtype = torch.float64,
    *,
    frozen: Sequence[str] = (),
    change: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Tensor]:
    """Output and gradients of all tokens and experts, in global order, where rank r has ``cut[r]`` of the tokens."""

    def body(group: Group) -> dict[str, Tensor]:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())

        def part(tensor: Tensor) -> Tensor:
            mine: Tensor = tensor.split(list(cut))[rank].clone()
            return mine

        x, weights = part(whole.x).to(dtype), part(whole.weights).float().to(torch.promote_types(dtype, torch.float32))
        x.requires_grad_("x" not in frozen)
        weights.requires_grad_("weights" not in frozen)
        held = {
            name: matrix.chunk(size)[rank].to(dtype, copy=True).requires_grad_(name not in frozen)
            for name, matrix in zip(NAMES, whole.matrices, strict=True)
        }
        dispatcher = build_dispatcher(config, group)
        sent = dispatcher.dispatch(x, Routing(part(whole.ids), weights))
        y = dispatcher.combine(change(experts(sent, [*held.values()])), sent)
        if y.requires_grad:
            y.backward(part(whole.upstream).to(dtype))
        dispatcher.close()
        grads = {"x": x.grad, "weights": weights.grad, **{name: matrix.grad for name, matrix in held.items()}}
        return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}

    results = on_ranks(body, len(cut))
    names = {name for result in results for name in result}
    return {name: torch.cat([result[name] for result in results if name in result]) for name in names}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Every result that was found is as wanted, beside the largest wanted number."""
    for name, tensor in found.items():
        if name in wanted:
            largest = float(wanted[name].abs().max()) or 1.0
            worst = float((tensor.double() - wanted[name]).abs().max()) / largest if len(tensor) else 0.0
            assert worst <= tolerance, f"{name}: off by {worst:.1e}"
