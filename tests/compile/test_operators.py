"""The operators themselves: torch's own checks of schemas, fake kernels and gradients; their names; their channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import build_dispatcher
from moe_dispatch.dispatchers.autograd import anchor_for, make_anchor
from moe_dispatch.errors import StateError
from tests.compile.layer import dispatcher_for, operator_names, tensors
from tests.dispatchers.layer import small_config
from tests.ranks import run_ranks

Arguments = tuple[Any, ...]

BACKENDS: dict[str, dict[str, Any]] = {
    "local": {"pad_multiple": 4},
    "allgather": {},
    "alltoall": {"pad_multiple": 4},
    "exact": {"backend": {"name": "alltoall", "reduction": "exact"}},
}


def _calls(channel: str, real_rows: Tensor | None, table: Sequence[Tensor] = ()) -> dict[str, Arguments]:
    """Arguments of each operator, in the order of one layer."""
    x, ids, weights = tensors(10, 0, torch.float32)
    ids[ids[:, 0] == ids[:, 1], 1] = -1  # what comes to an operator has no duplicates
    sizes, anchor = [-1] * 6, torch.empty(0, requires_grad=True)
    calls: dict[str, Arguments] = {
        "dispatch": (x, ids, weights, real_rows, None, list(table), channel, True, sizes, anchor)
    }
    with torch.no_grad():
        rows, weights_R, _, *route = torch.ops.moe_dispatch.dispatch(*calls["dispatch"])
    rows, weights_R = rows.requires_grad_(), weights_R.requires_grad_()
    grad, way = torch.ones_like(rows), (route, real_rows)
    calls["dispatch_again"] = (x, weights_R, *way, channel, len(x), len(rows), anchor)
    calls["combine"] = (rows, weights_R, *way, channel, 10)
    calls["combine_backward"] = (torch.ones(10, 16), rows.detach(), weights_R.detach(), *way, channel, len(rows))
    calls["split"] = (rows, torch.tensor([3, 0, len(rows) - 3]))
    matrices, offs = torch.ones(3, 16, 4, requires_grad=True), torch.tensor([3, 3, len(rows)], dtype=torch.int32)
    calls["aligned_mm"] = (rows, matrices, offs)
    calls["dispatch_backward"] = (grad, grad[:, 0].clone(), *way, channel, [10, 16], [10, 2], anchor, None)
    return calls


@pytest.mark.parametrize(
    ("name", "cut"), [("local", True), ("allgather", False), ("alltoall", False), ("alltoall", True), ("exact", True)]
)
def test_torch_finds_nothing_wrong(name: str, cut: bool) -> None:
    placed = cut and name == "alltoall"
    dispatcher = dispatcher_for(**{"backend": name, **BACKENDS[name]}, balance="manual" if placed else None)
    slots = dispatcher._lease.slots
    calls = _calls(
        dispatcher.plan(like=torch.empty(10, 16)).owner,
        torch.tensor([0, 2, 3, 7]) if cut else None,
        () if slots is None else slots.tensors(),
    )
    assert len(calls["dispatch"][5]) == 2 * placed
    assert set(calls) == operator_names()
    for operator, arguments in calls.items():
        overload = getattr(torch.ops.moe_dispatch, operator).default
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))


def test_channel_that_is_not_there() -> None:
    x, ids, weights = tensors(10, 0, torch.float32)
    with pytest.raises(StateError, match=r"channel 'alltoall-0-0' is not open"):
        torch.ops.moe_dispatch.dispatch(x, ids, weights, None, None, [], "alltoall-0-0", True, [-1] * 6, None)


def test_training_can_save_an_anchor_that_an_evaluation_made() -> None:
    device = torch.device("meta")

    def body(group: dist.ProcessGroup) -> bool:
        dispatcher = build_dispatcher(small_config(), group)
        with torch.inference_mode():
            make_anchor(device)
        anchor = anchor_for(torch.empty(0, device=device), dispatcher._channel)
        assert anchor is not None
        return anchor.device == device and not anchor.is_inference()

    assert run_ranks(body, 2) == [True, True]
