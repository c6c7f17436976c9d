"""Sums in a buffer of fixed size, which are bags of three bfloat16 parts, and a dispatcher that uses them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch import build_dispatcher
from moe_dispatch.permutation import Permutation, TorchPermutation
from moe_dispatch.permutation.rows import bag, in_bfloat16_parts
from moe_dispatch_testing.rank_context import padding_rows
from tests.backends.permutations import INTERPRETED, implementations
from tests.backends.tables import Table, reduced, rows_of, static_index
from tests.dispatchers.layer import random_routing, random_rows, small_config

NAN, INF = float("nan"), float("inf")
FIXED = settings(max_examples=15 if INTERPRETED else 40, deadline=None, derandomize=True)
EAGER = TorchPermutation()
STATIC: dict[str, Permutation] = {"torch": TorchPermutation(fixed_size=True)}
if INTERPRETED:
    STATIC["triton"] = implementations()["triton"]


def bags_of(counts: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Members and edges of bags, with members behind the last that belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([0, *counts]).cumsum(0)
    return torch.randint(0, 9, (int(edges[-1]) + 4,), generator=generator), edges


# bfloat16 has float32's range, but behind the least of its numbers it has no bits for a second and third part.
NUMBERS = st.floats(-(2.0**66), 2.0**66, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)


@FIXED
@given(st.lists(NUMBERS, min_size=1, max_size=12))
def test_three_parts_are_the_weight_exactly(weights: list[float]) -> None:
    weights_N, members_N = torch.tensor(weights), torch.arange(len(weights))
    members, edges, parts = in_bfloat16_parts(members_N, torch.arange(len(weights) + 1), weights_N)
    sums = [parts[begin:end].double().sum().item() for begin, end in itertools.pairwise(edges)]
    assert sums == weights_N.double().tolist()
    counts = edges.diff()
    assert members[: int(edges[-1])].tolist() == members_N.repeat_interleave(counts).tolist()
    assert counts.min() >= 1
    assert counts.max() <= 3


def test_sums_of_parts_are_the_exact_sum_rounded() -> None:
    """To a bfloat16 or its neighbour where the exact sum lies in the middle of two, up to the float32 of the sums."""
    counts = torch.randint(0, 5, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    members_N, cu_S = bags_of(counts, 0)
    rows, weights_N = rows_of(9, dtype=torch.bfloat16), rows_of(len(members_N), 1, seed=1).squeeze(1)
    got = torch.empty(240, 6, dtype=torch.bfloat16)
    bag(rows, *in_bfloat16_parts(members_N, cu_S, weights_N), got)
    terms = rows.double().index_select(0, members_N) * weights_N.double().unsqueeze(1)
    exact = torch.stack([terms[begin:end].sum(0) for begin, end in itertools.pairwise(cu_S)])
    wrong = got != exact.bfloat16()
    near = torch.stack([(exact * (1 + sign * 1e-6)).bfloat16() for sign in (-1, 1)])
    assert (~wrong | (got == near).any(0)).all()
    assert wrong.double().mean() < 0.01


WEIGHTS = [1.0, 0.5, 1 + 2**-12, -0.3, 1e-6, 0.0, INF, NAN]


@pytest.mark.parametrize("value", [INF, -INF, NAN, 3e38, 1.5])
def test_what_is_infinite_stays_so(value: float) -> None:
    """As the eager sums have it: parts that are 0 must not make NaN of an infinite row."""
    table = Table([[0, 1]], 2, 2, 1)
    rows = torch.tensor([[value] * 6, [1.0] * 6], dtype=torch.bfloat16)
    for weight in WEIGHTS:
        weights = torch.tensor([weight, 0.25])
        wanted = reduced(EAGER, rows, table.index, weights)
        got = reduced(STATIC["torch"], rows, static_index(table), weights)
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_a_graph_safe_dispatcher_with_this_permutation(name: str, backend: str) -> None:
    routing = random_routing(6)
    config = small_config(backend, graph_safe=True, max_tokens_per_rank=9, pad_multiple=4, permutation=name)
    x = random_rows(6).requires_grad_()
    dispatcher = build_dispatcher(config)
    sent = dispatcher.dispatch(x, routing)
    rows = sent.rows.masked_fill(padding_rows(sent).unsqueeze(1), NAN)
    y = dispatcher.combine(rows, sent)
    scale = routing.topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(y, x * scale)
    y.sum().backward()
    torch.testing.assert_close(x.grad, scale.expand_as(x))
