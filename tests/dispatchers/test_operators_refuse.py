"""What an eager call refuses, a call by operators refuses too, and the reverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, Rows, build_dispatcher
from moe_dispatch.errors import InputError, LayoutError
from tests.dispatchers.layer import HIDDEN, Group, by_operators, on_ranks, random_routing, random_rows, small_config

ROWS = 5


def _again(dispatcher: Dispatcher, other: Tensor) -> Any:
    def layer(x: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, random_routing(ROWS))
        return dispatcher.combine(dispatcher.dispatch(other, again=sent).rows, sent)

    return layer


@pytest.mark.parametrize("shape", [(3, HIDDEN), (7, HIDDEN), (ROWS, HIDDEN * 2)], ids=["fewer", "more", "wider"])
@pytest.mark.parametrize("operators", [False, True])
def test_rows_sent_again_must_be_as_many(operators: bool, shape: tuple[int, int]) -> None:
    """Operators cropped or padded them without a word."""
    dispatcher, x = build_dispatcher(small_config("local")), random_rows(ROWS).requires_grad_()
    layer = _again(dispatcher, torch.zeros(shape))
    with pytest.raises((InputError, LayoutError), match="again=sent was made with floating"):
        by_operators(layer, x) if operators else layer(x)


@pytest.mark.parametrize("operators", [False, True])
def test_a_layout_is_checked(operators: bool) -> None:
    """Operators took a layout of 100 real rows for x with 5."""
    dispatcher, x = build_dispatcher(small_config("local")), random_rows(ROWS).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return dispatcher.dispatch(x, random_routing(ROWS), Rows(100)).rows

    with pytest.raises(LayoutError, match="100"):
        by_operators(layer, x) if operators else layer(x)


def test_rows_of_experts_are_kept_only_for_a_gradient_of_the_weights() -> None:
    """A frozen router needs no dot products; on several ranks they were made, and the rows kept, all the same."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        found = []
        for frozen in (True, False):
            routing = random_routing(ROWS)
            weights = routing.topk_weights.requires_grad_(not frozen)
            sent = dispatcher.dispatch(random_rows(ROWS).requires_grad_(), type(routing)(routing.topk_ids, weights))
            saved: list[Tensor] = []

            def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = dispatcher.combine(sent.rows * 2, sent)
            y.sum().backward()
            found.append(sum(tensor.dim() == 2 for tensor in saved))
        return found

    assert on_ranks(body, 2) == [[0, 1]] * 2
