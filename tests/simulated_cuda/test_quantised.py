"""Passes over rows between the wire and a quantised grouped GEMM, counted as launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_dispatch import Routing
from moe_dispatch.backends.rank_major import expand
from moe_dispatch.capabilities.quantised.formats import Mxfp8, quantise
from moe_dispatch.capabilities.quantised.rows import widen
from tests.simulated_cuda.device import recorded
from tests.simulated_cuda.layer import EXPERTS, HIDDEN, TOP_K, dispatcher_of

TOKENS, MXFP8 = 4096, Mxfp8


def _launches(action: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result, and the number of blocks of each launch: at least 1024 if it reads or writes all rows."""
    with recorded() as records:
        result = action()
    return result, [record.amount for record in records if record.kind == "kernel"]


def test_one_launch_reads_quantised_rows_before_the_gemm() -> None:
    """By hand they are widened, copied to their experts and quantised again, in three launches of kernels."""
    torch.use_deterministic_algorithms(False)  # which fills memory by launches; conftest.py restores it
    device = torch.device("cuda", 0)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOP_K)
    arrived, routes = quantise(x, MXFP8), list[Any]()
    for deliver in ("quantised", "rows"):
        dispatcher = dispatcher_of("local", None, wire={"dtype": "mxfp8", "deliver": deliver}, pad_multiple=32)
        routes.append(dispatcher.dispatch(x, Routing(ids, weights)).state.route)
    found, launches = _launches(lambda: expand(routes[0], arrived, x.dtype))
    assert len(launches) == 1
    assert launches[0] > TOKENS, "the kernel has blocks for each row, and for padding"
    wide, widening = _launches(lambda: widen(arrived, x.dtype))
    copied, copying = _launches(lambda: expand(routes[1], wide, x.dtype))
    again, quantising = _launches(lambda: quantise(copied, MXFP8))
    rows, fused = _launches(lambda: expand(routes[1], arrived, x.dtype))
    assert [len(step) for step in (widening, copying, quantising, fused)] == [1, 1, 1, 1]
    assert torch.equal(rows, copied)
    real = rows.abs().sum(1) > 0

    def widened(quantised: Any) -> Tensor:
        return widen(quantised, x.dtype)[real]

    assert torch.equal(widened(found), widened(again))
