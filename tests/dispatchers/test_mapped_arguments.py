"""Arguments of a module that FSDP2 wraps: it maps over dataclasses, and casts what is floating in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors  # what FSDP2 casts arguments with

from moe_dispatch import BSHD, Routing, build_dispatcher
from moe_dispatch.dispatchers import run_in_chunks
from moe_dispatch.errors import InputError
from moe_dispatch.quantised import deep_gemm_pair
from tests.dispatchers.layer import SAFE, Group, by_operators, on_ranks, random_routing, random_rows, small_config

Argument = TypeVar("Argument")


def same(argument: Argument) -> Argument:
    return _apply_to_tensors(lambda tensor: tensor, argument)  # type: ignore[no-any-return]


def in_bfloat16(argument: Argument) -> Argument:
    cast: Argument = _apply_to_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, argument)
    return cast


@pytest.mark.parametrize(
    ("fields", "call", "change"),
    [
        ({}, None, in_bfloat16),
        ({"backend": "allgather"}, None, in_bfloat16),
        ({**SAFE, "max_tokens_per_rank": 6}, None, same),
        ({**SAFE, "max_tokens_per_rank": 6}, None, in_bfloat16),
        ({"spare_experts_per_rank": 1, "balance": "exact", "balance_min_rows": 0}, None, same),
        ({}, by_operators, in_bfloat16),
    ],
)
def test_mapped_plans_routings_and_results_do_as_the_originals(
    fields: dict[str, Any], call: Callable[..., Any] | None, change: Callable[[Any], Any]
) -> None:
    def body(group: Group) -> None:
        rank = group.rank()
        dispatcher, way = build_dispatcher(small_config(**fields), group), random_routing(6, rank)
        # With few bits nothing is rounded, except where sums are.
        x = random_rows(6, seed=rank).mul(4).round().view(2, 3, -1).requires_grad_()
        weights = way.topk_weights.mul(8).round().requires_grad_()
        found: list[list[Tensor]] = []
        changes: tuple[Callable[[Any], Any], ...] = (lambda argument: argument, change)
        for each in changes:
            plan = each(dispatcher.plan(BSHD([3, 1]), like=x))

            def layer(x: Tensor, plan: Any = plan, each: Any = each) -> Tensor:
                sent = each(dispatcher.dispatch(each(x), each(Routing(way.topk_ids, weights)), plan))
                return dispatcher.combine(sent.rows * 2, sent)

            y = layer(x) if call is None else call(layer, x)
            assert y.dtype == (torch.bfloat16 if each is in_bfloat16 else torch.float32)
            found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weights])])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))

    on_ranks(body, 2)


def test_quantised_rows_that_were_cast_are_refused_when_they_are_used() -> None:
    config = small_config("local", hidden_size=128, wire_dtype="float8_e4m3fn", deliver="quantised", pad_multiple=128)
    sent = build_dispatcher(config).dispatch(random_rows(6, 128), random_routing(6))
    assert torch.equal(same(sent).rows, sent.rows)
    for use in (lambda sent: sent.rows, deep_gemm_pair):
        with pytest.raises(InputError, match=r"values must be .*float8_e4m3fn, got .*bfloat16.*cast_forward_inp"):
            use(in_bfloat16(sent))


@pytest.mark.parametrize("fields", [{}, {"chunk_tokens": 2}], ids=["whole", "chunks"])
def test_hooks_on_the_output_stay_when_it_is_changed_in_place(fields: dict[str, Any]) -> None:
    dispatcher = build_dispatcher(small_config("local", **fields))
    x, seen = random_rows(6).view(2, 3, -1).requires_grad_(), list[Tensor]()
    y = run_in_chunks(dispatcher, lambda sent: sent.rows, x, random_routing(6))
    y.register_hook(seen.append)  # as FSDP2 does, to gather parameters before the backward
    y += x
    y.sum().backward()
    assert len(seen) == 1
