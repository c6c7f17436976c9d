"""``Dispatched.grouped_mm`` and ``Dispatched.per_expert``: the results of a loop over experts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_dispatch import Dispatched, Routing, build_dispatcher
from moe_dispatch.errors import InputError, StateError
from moe_dispatch_testing import refuse_host_syncs, trace_static
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient
from tests.dispatchers.layer import NUM_EXPERTS, Group, local_part, on_ranks, random_routing, random_rows, small_config

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "padded": {"pad_multiple": 8},
    "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 16},
    "graph-safe, padded": {"graph_safe": True, "max_tokens_per_rank": 16, "pad_multiple": 8},
}
# How many tokens, and the highest expert that is chosen.
LOADS = {"all experts": (9, 7), "some experts": (9, 2), "nowhere": (9, -1), "no tokens": (0, 7)}


def random_matrices(hidden: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(NUM_EXPERTS, hidden, inner), (NUM_EXPERTS, inner, hidden)]
    return [torch.randn(*shape, generator=generator).div(shape[1] ** 0.5).to(dtype) for shape in shapes]


def by_grouped_mm(sent: Dispatched, up_LDH: Tensor, down_LHD: Tensor) -> Tensor:
    return sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, up_LDH)), down_LHD)


def with_nan_in_padding(sent: Dispatched, up_LDH: Tensor, down_LHD: Tensor) -> Tensor:
    """The same with NaN in padding, and behind the last expert, wherever something is read, in both directions."""
    unused_R = padding_rows(sent)
    rows = poison(poison_gradient(sent.rows, unused_R), unused_R)
    inner = torch.tanh(sent.grouped_mm(rows, up_LDH))
    out = sent.grouped_mm(poison(poison_gradient(inner, unused_R), unused_R), down_LHD)
    return poison(poison_gradient(out, unused_R), unused_R)


def by_per_expert(sent: Dispatched, up_LDH: Tensor, down_LHD: Tensor) -> Tensor:
    def mlp(up_DH: Tensor, down_HD: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ up_DH) @ down_HD

    return sent.per_expert(partial(mlp, *matrices) for matrices in zip(up_LDH, down_LHD, strict=True))


def by_hand(x: Tensor, routing: Routing, up_EDH: Tensor, down_EHD: Tensor) -> Tensor:
    """Every expert on every row, in float64."""
    is_named_TKE = routing.topk_ids.unsqueeze(-1) == torch.arange(NUM_EXPERTS)
    weights_TE = (routing.topk_weights.double().unsqueeze(-1) * is_named_TKE).sum(1)
    return torch.einsum("te,etd->td", weights_TE, torch.tanh(x @ up_EDH) @ down_EHD)


def routed(kind: str) -> Routing:
    count, highest = LOADS[kind]
    routing = random_routing(count)
    return Routing(routing.topk_ids.masked_fill(routing.topk_ids > highest, -1), routing.topk_weights)


def check(
    group: Group, helper: Callable[..., Tensor], kind: str, sizes: tuple[int, int], dtype: torch.dtype, mode: str
) -> None:
    """Compare y and the gradients of x and of both matrices with those computed by hand."""
    routing, matrices = routed(kind), random_matrices(*sizes, dtype)
    x = random_rows(len(routing.topk_ids), sizes[0], dtype=dtype).requires_grad_()
    held = [local_part(whole, group) for whole in matrices]
    dispatcher = build_dispatcher(small_config("alltoall", hidden_size=sizes[0], **MODES[mode]), group)
    sent = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(helper(sent, *held), sent)
    y.square().sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *matrices)]
    wanted_y = by_hand(exact[0], routing, *exact[1:])
    wanted_y.square().sum().backward()
    ranks = 1 if group is None else group.size()
    wanted = [wanted_y.detach(), exact[0].grad]
    # Every rank sends the same tokens, so that experts get the gradient of each rank once more.
    wanted += [ranks * local_part(leaf.grad, group).detach() for leaf in exact[1:] if leaf.grad is not None]
    for found, of in zip([y.detach(), x.grad, *(leaf.grad for leaf in held)], wanted, strict=True):
        assert found is not None
        assert of is not None
        largest = float(of.abs().max()) if of.numel() else 0.0
        torch.testing.assert_close(found.double(), of, rtol=0, atol=TOLERANCES[dtype] * max(largest, 1e-3))


WIDE, ODD = (16, 32), (5, 7)  # hidden and inner size: rows that start at a multiple of 16 bytes, and some that do not
# Where rows go does not depend on their dtype: each load in float64, and each dtype with one load.
CASES: list[tuple[torch.dtype, str, tuple[int, int], str]] = [
    *((torch.float64, "all experts", ODD, mode) for mode in MODES),
    *((torch.float64, kind, WIDE, "graph-safe, padded") for kind in LOADS),
    *((torch.float64, kind, ODD, "eager") for kind in ("some experts", "nowhere", "no tokens")),
    *((dtype, "all experts", WIDE, mode) for dtype in [*TOLERANCES][1:] for mode in MODES),
    *((dtype, "all experts", ODD, "padded") for dtype in [*TOLERANCES][1:]),
]


@pytest.mark.parametrize(("dtype", "kind", "sizes", "mode"), CASES)
def test_grouped_mm_equals_a_loop(dtype: torch.dtype, kind: str, sizes: tuple[int, int], mode: str) -> None:
    helper = by_grouped_mm if mode == "eager" else with_nan_in_padding
    check(None, helper, kind, sizes, dtype, mode)


@pytest.mark.parametrize(("kind", "mode"), [*((kind, "padded") for kind in LOADS), ("some experts", "eager")])
def test_per_expert_equals_a_loop(kind: str, mode: str) -> None:
    check(None, by_per_expert, kind, ODD, torch.float64, mode)


@pytest.mark.parametrize("helper", [by_grouped_mm, by_per_expert])
@pytest.mark.parametrize("kind", LOADS)
def test_both_on_ranks_of_which_some_have_no_rows(kind: str, helper: Callable[..., Tensor]) -> None:
    on_ranks(lambda group: check(group, helper, kind, (16, 8), torch.float32, "eager"), 4)


def test_grouped_mm_reads_nothing_on_the_host_in_graph_safe_mode() -> None:
    """Nor does a shape depend on values."""
    dispatcher = build_dispatcher(small_config("local", permutation="torch", **MODES["graph-safe, padded"]))
    routing = routed("all experts")

    def layer(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        return dispatcher.combine(by_grouped_mm(sent, up, down), sent)

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        up, down = random_matrices(16, 8, dtype)
        x = random_rows(9, dtype=dtype).requires_grad_()
        with refuse_host_syncs():
            layer(x, routing.topk_ids, routing.topk_weights, up.requires_grad_(), down).square().sum().backward()
        assert up.grad is not None
        assert up.grad.any()
    given = (x, routing.topk_ids, routing.topk_weights, *random_matrices(16, 8, torch.bfloat16))
    assert trace_static(layer, *given, device="meta").shape == (9, 16)


def sent_in(mode: str = "eager") -> Dispatched:
    return build_dispatcher(small_config("local", **MODES[mode])).dispatch(random_rows(9), routed("all experts"))


@pytest.mark.parametrize(("rows", "inner"), [(9, 8), (9, 7), (0, 8)])
def test_a_plain_sum_may_follow(rows: int, inner: int) -> None:
    """Its gradient is expanded, which torch's operator refuses, also if it is empty and counts as contiguous."""
    sent = build_dispatcher(small_config("local")).dispatch(random_rows(rows), random_routing(rows))
    matrices = torch.ones(NUM_EXPERTS, 16, inner, requires_grad=True)
    sent.grouped_mm(sent.rows, matrices).sum().backward()
    assert matrices.grad is not None
    torch.testing.assert_close(matrices.grad.sum(0)[:, 0], sent.rows.sum(0))


def test_matrices_and_rows_that_are_views() -> None:
    sent = sent_in()
    wide = torch.cat((sent.rows, sent.rows), dim=1)
    matrices = torch.randn(NUM_EXPERTS, 8, 16)
    torch.testing.assert_close(
        sent.grouped_mm(wide.chunk(2, dim=1)[1], matrices.transpose(1, 2)),
        sent.per_expert(partial(F.linear, weight=matrix) for matrix in matrices),
    )


def test_grouped_mm_follows_autocast() -> None:
    torch.manual_seed(0)  # with some numbers the difference is larger
    sent, matrices = sent_in(), torch.randn(NUM_EXPERTS, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sent.grouped_mm(sent.rows, matrices)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), sent.grouped_mm(sent.rows, matrices), rtol=5e-2, atol=5e-2)


def _any(value: object) -> Any:
    """The same value; a type checker takes it for what it is not."""
    return value


ONES = torch.ones(8, 16, 8)
WRONG: list[tuple[Callable[[Dispatched], Any], str]] = [
    (lambda sent: sent.grouped_mm(sent.rows, torch.ones(9, 16, 8)), r"rows must be .*\(9, 16, 8\)\. Pass the matrices"),
    (lambda sent: sent.grouped_mm(sent.rows, ONES.mT), r"\(8, 8, 16\)\. nn\.Linear .*transpose"),
    (lambda sent: sent.grouped_mm(sent.rows, _any(nn.Linear(16, 8))), "weights must be a Tensor, got Linear"),
    (lambda sent: sent.per_expert(_any(nn.Linear(16, 8))), "one function for each of 8 experts, .* got one L"),
    (lambda sent: sent.per_expert(_any([lambda rows: None] * 8)), "must return tensors, got NoneType"),
    (lambda sent: sent.grouped_mm(sent.rows, ONES[0]), r"got torch\.float32 \(18, 16\) and"),
    (lambda sent: sent.grouped_mm(torch.ones(9, 16), ONES), r"\(R=18, D\).*\(9, 16\)"),
    (lambda sent: sent.grouped_mm(sent.rows, ONES.bfloat16()), r"same dtype, got .*float32 .* and .*bfloat16"),
    (lambda sent: sent.per_expert(nn.ModuleList([nn.Identity()])), r"Dispatched\.per_expert: got 1"),
]


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_what_does_not_fit_is_refused(call: Callable[[Dispatched], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        call(sent_in())


def test_per_expert_is_refused_in_graph_safe_mode() -> None:
    with pytest.raises(StateError, match=r"per_expert: with graph_safe only the device has.*Use grouped_mm"):
        sent_in("graph-safe").per_expert([nn.Identity()] * NUM_EXPERTS)
