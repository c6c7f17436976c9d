"""The start-up test of a dispatcher: identity experts must give x times the weight sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_dispatch.errors import StateError
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.dispatcher import Dispatcher

_ROWS = 32


def run_self_test(dispatcher: Dispatcher, device: torch.device, dtype: torch.dtype) -> None:
    """Forward and gradient through identity experts, with a count of rows that differs between ranks.

    Raises:
        StateError: the result is not x times the weight sum on some rank; raised on every rank alike.
    """
    config, channel = dispatcher.config, dispatcher._lease.channel
    generator = torch.Generator().manual_seed(channel.communicator.rank)
    rows = _ROWS if config.row_counts in ("assume", "check") else _ROWS + channel.communicator.rank % 3
    rows = min(rows, config.max_tokens_per_rank or rows)
    x = torch.randn(rows, config.hidden_size, generator=generator).to(device, dtype).requires_grad_()
    ids = torch.rand(rows, config.num_experts, generator=generator).argsort(1)[:, : config.top_k].to(device)
    weights = torch.rand(rows, config.top_k, generator=generator).to(device)
    sent = dispatcher.dispatch(x, Routing(ids, weights), Rows())
    outputs = sent.rows
    if config.weights == "experts":
        outputs = (outputs * sent.weights.unsqueeze(1)).to(dtype)
    y = dispatcher.combine(outputs, sent)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    total = weights.sum(1, keepdim=True)
    with torch.no_grad():
        mine = {"output": _difference(y, x * total), "gradient": _difference(grad, total.expand_as(x))}
    tolerance = _tolerance(dtype, config.wire_dtype)
    for rank, differences in enumerate(channel.control.gather_json(mine, label="self_test")):
        for what, difference in differences.items():
            if not difference <= tolerance:
                raise StateError(
                    f"Dispatcher.self_test: identity experts must give x times the weight sum within {tolerance:g}, "
                    f"got a relative difference of {difference:.3g} in the {what} on backend {channel.backend_name!r}, "
                    f"rank {rank}. Do not train on these machines with this backend."
                )


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest expected value; NaN anywhere is NaN."""
    if got.numel() == 0:
        return 0.0
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))


def _tolerance(dtype: torch.dtype, wire: str | None) -> float:
    if wire == "float8_e4m3fn":
        return 0.08
    carried = torch.bfloat16 if wire == "bfloat16" else dtype
    return 8 * max(torch.finfo(carried).eps, torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
