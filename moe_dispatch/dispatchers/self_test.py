"""Test a dispatcher at start-up: with identity experts, the result must be x times the sum of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_dispatch.backends.wire import wire_format
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers.dispatcher import make
from moe_dispatch.errors import StateError
from moe_dispatch.layouts import Rows
from moe_dispatch.seams.call import Call
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.dispatcher import Dispatcher

_ROWS = 32


def run_self_test(dispatcher: Dispatcher, device: torch.device, dtype: torch.dtype | None) -> None:
    """Run forward and backward with identity experts, and compare with the exact results. Collective.

    The number of rows differs between ranks, unless the config promises equal numbers.

    Raises:
        StateError: The output or a gradient is wrong on some rank. Raised on every rank. Or it is a dry run.
    """
    channel = dispatcher._channel
    if channel.communicator.dry_run:
        raise StateError(
            "Dispatcher.self_test: ranks must exchange rows, got a dry run on torch's fake process group. Test on real "
            "ranks."
        )
    if dtype is None:
        carries_float32 = channel.needs.dtypes is None or channel.shape.wire_dtype is not None
        dtype = torch.float32 if carries_float32 else torch.bfloat16
    # The caller may have turned gradients off. They are part of the test, unless the backend has none.
    with torch.inference_mode(False), torch.set_grad_enabled(channel.needs.differentiable):
        mine = _differences(dispatcher, device, dtype)
    of_dtype = 8 * max(torch.finfo(each).eps for each in (dtype, torch.float32))
    tolerance = max(of_dtype, wire_format(channel.shape.wire_dtype).tolerance)
    for rank, differences in enumerate(channel.control.gather_json(mine, label="self_test")):
        for what, difference in differences.items():
            if not difference <= tolerance:
                raise StateError(
                    f"Dispatcher.self_test: a difference of {difference:.3g} in the {what} on backend "
                    f"{channel.backend_name!r}, rank {rank}, is above {tolerance:g}. Do not train with it here."
                )


def _differences(dispatcher: Dispatcher, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    config, channel = dispatcher.config, dispatcher._channel
    differentiable = channel.needs.differentiable
    generator = torch.Generator(device="cpu").manual_seed(channel.communicator.rank)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)

    rows = _ROWS if config.row_counts in ("assume", "check") else _ROWS + channel.communicator.rank % 3
    rows = min(rows, config.max_rows_per_dispatch or rows, channel.needs.most_rows or rows)
    if channel.capacity is not None:  # so few that no routing overflows
        each = channel.communicator.size * min(config.top_k, channel.shape.num_local_experts)
        rows = min(rows, max(1, channel.capacity.rows // each), channel.capacity.pair_rows or rows)
    x = (draw(rows, config.hidden_size) - 0.5).to(device, dtype).requires_grad_(differentiable)
    ids = draw(rows, config.num_experts).argsort(1)[:, : config.top_k].to(device)
    weights = draw(rows, config.top_k).to(device).requires_grad_(differentiable)

    def experts(sent: Dispatched) -> Tensor:
        return sent.rows if config.weights == "combine" else (sent.rows * sent.weights.unsqueeze(1)).to(dtype)

    sent = make(dispatcher, Call(x=x, routing=Routing(ids, weights), plan=Rows(), trains=False))
    assert isinstance(sent, Dispatched)
    y = dispatcher.combine(experts(sent), sent)
    total = weights.detach().sum(1, keepdim=True)
    found = {"output": _difference(y.detach(), x.detach() * total)}
    if differentiable:
        upstream = (draw(rows, config.hidden_size) - 0.5).to(device, dtype)
        grad_x, grad_weights = torch.autograd.grad(y, (x, weights), upstream)
        dots = (x.detach().double() * upstream.double()).sum(1, keepdim=True)
        found["gradient of x"] = _difference(grad_x, upstream * total)
        found["gradient of the weights"] = _difference(grad_weights, dots.expand_as(weights))
    return found


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected value. If any value is NaN, the result is NaN."""
    if got.numel() == 0:
        return 0.0
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))
