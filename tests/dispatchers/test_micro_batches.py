"""The same tokens in differently cut and padded micro-batches: the same gradients of tokens, router and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, SBHD, THD, Dispatcher, Routing, build_dispatcher
from moe_dispatch.layouts import Layout
from tests.dispatchers.layer import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Group,
    apply_experts,
    expert_weights,
    local_part,
    on_ranks,
    random_rows,
    small_config,
)

LENGTHS = [5, 9, 1, 3, 6]
SEQUENCES = range(len(LENGTHS))


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its layout, its tensor, and the tokens that lie behind it."""

    layout: Layout
    x: Tensor


Form = Callable[[list[Tensor]], Batch]


def _thd(sequences: list[Tensor]) -> Batch:
    cu = [0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()]
    return Batch(THD(cu), torch.cat(sequences))


def _thd_with_gaps(sequences: list[Tensor]) -> Batch:
    cu = [0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()]
    cu_padded = [0, *torch.tensor([-(-len(s) // 4) * 4 for s in sequences]).cumsum(0).tolist()]
    return Batch(THD(cu, cu_padded), torch.cat([_padded(s, -(-len(s) // 4) * 4) for s in sequences]))


def _bshd(length: int) -> Form:
    def form(sequences: list[Tensor]) -> Batch:
        x = torch.stack([_padded(s, length) for s in sequences])
        return Batch(BSHD([len(s) for s in sequences]), x)

    return form


def _sbhd(sequences: list[Tensor]) -> Batch:
    batch = _bshd(12)(sequences)
    return Batch(SBHD([len(s) for s in sequences]), batch.x.transpose(0, 1))


def _padded(sequence: Tensor, length: int) -> Tensor:
    """Padding is not zero: as a model's hidden states of padding are not."""
    garbage = torch.full((length - len(sequence), sequence.shape[1]), 7.0, dtype=sequence.dtype)
    return torch.cat((sequence, garbage))


# Sequences of each rank's micro-batches, and how they are laid out.
Cut = tuple[Form, list[list[list[int]]]]
CUTS: dict[str, Cut] = {
    "one packed batch": (_thd, [[[0, 1, 2, 3, 4]]]),
    "packed, by rank": (_thd, [[[0, 1]], [[2, 3, 4]]]),
    "packed, one sequence each": (_thd, [[[4], [2], [0]], [[3], [1], []]]),
    "packed with gaps": (_thd_with_gaps, [[[0, 2], [1]], [[4], [3]]]),
    "padded to the longest": (_bshd(9), [[[0, 1, 2, 3, 4]]]),
    "padded far": (_bshd(16), [[[1], [0]], [[2, 4], [3]]]),
    "padded, sequence first": (_sbhd, [[[3, 0]], [[1, 2, 4]]]),
}


def _step(backend: str, cut: Cut, dtype: torch.dtype, pad_multiple: int = 1) -> Tensor:
    """All gradients of one step in one vector: tokens, router, experts."""
    form, by_rank = cut
    whole = random_rows(sum(LENGTHS), dtype=dtype)
    wanted = random_rows(sum(LENGTHS), seed=1, dtype=dtype).split(LENGTHS)
    router = random_rows(HIDDEN, NUM_EXPERTS, seed=2, dtype=dtype)
    experts = expert_weights(dtype=dtype)

    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        dispatcher = build_dispatcher(small_config(backend, pad_multiple=pad_multiple), group)
        x, router_DE = whole.clone().requires_grad_(), router.clone().requires_grad_()
        experts_LDD = local_part(experts, group)
        for chosen in by_rank[0 if group is None else group.rank()]:
            batch = form([x.split(LENGTHS)[i] for i in chosen]) if chosen else Batch(THD([0]), x[:0])
            y = _moe(dispatcher, batch, router_DE, experts_LDD)
            target = form([wanted[i] for i in chosen]) if chosen else Batch(THD([0]), x[:0])
            real = batch.layout.valid_T(y.shape[:-1].numel())
            error = (y - target.x).reshape(-1, HIDDEN).square()
            (error.sum() if real is None else error[real].sum()).div(sum(LENGTHS)).backward()
        assert x.grad is not None
        assert router_DE.grad is not None
        assert experts_LDD.grad is not None
        return x.grad, router_DE.grad, experts_LDD.grad

    parts = on_ranks(body, len(by_rank))
    tokens, router_grad = sum(part[0] for part in parts), sum(part[1] for part in parts)
    assert isinstance(tokens, Tensor)
    assert isinstance(router_grad, Tensor)
    return torch.cat((tokens.flatten(), router_grad.flatten(), *(part[2].flatten() for part in parts)))


def _moe(dispatcher: Dispatcher, batch: Batch, router_DE: Tensor, experts_LDD: Tensor) -> Tensor:
    probabilities, ids = torch.softmax(batch.layout.flatten(batch.x) @ router_DE, 1).topk(TOP_K)
    sent = dispatcher.dispatch(batch.x, Routing(ids, probabilities), batch.layout)
    return dispatcher.combine(apply_experts(sent, experts_LDD), sent) + batch.x


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("name", list(CUTS)[1:])
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_gradients_do_not_depend_on_the_cut(backend: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = _step("local", CUTS["one packed batch"], dtype)
    got = _step(backend, CUTS[name], dtype, pad_multiple=4)
    assert float((got - expected).norm() / expected.norm()) < tolerance


def test_a_lost_token_would_show() -> None:
    """The smallest error the comparison is for: one token's gradient, in one cut."""
    expected = _step("local", CUTS["one packed batch"], torch.float64)
    got = expected.clone()
    got[:HIDDEN] = 0
    assert float((got - expected).norm() / expected.norm()) > 1e-2
