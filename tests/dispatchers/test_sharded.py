"""tp 2 with sequence parallelism, cp 2 zigzag, ep 2, packed sequences with gaps: gradients of the unsharded model."""

from __future__ import annotations

import datetime

import pytest
import torch

from moe_dispatch import THD
from moe_dispatch.testing import run_processes
from tests.dispatchers.sharded_model import CP, DP, TP, half, held_rows, sharded_gradients, whole_gradients

TIMEOUT = datetime.timedelta(seconds=60)  # eight processes start slowly on two cores


@pytest.mark.slow
def test_gradients_of_eight_ranks_are_those_of_one() -> None:
    expected = whole_gradients()
    results = run_processes(sharded_gradients, DP * CP * TP, "alltoall", timeout=TIMEOUT)
    for rank, found in enumerate(results):
        dp, cp, tp = rank // (CP * TP), rank // TP % CP, rank % TP
        wanted = {
            "query": expected["query"],
            "router": expected["router"],
            "experts": expected["experts"].chunk(DP)[dp],
            "x": expected[f"x{dp}"][held_rows(half(dp), cp, tp)],
        }
        for name, gradient in wanted.items():
            got = torch.tensor(found[name], dtype=torch.float64)
            torch.testing.assert_close(got, gradient, rtol=1e-11, atol=1e-13, msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("dp", range(DP))
def test_layouts_of_the_ranks_name_the_real_rows_that_the_model_counts(dp: int) -> None:
    batch = half(dp)
    layout = THD(batch.cu, batch.cu_padded)
    for cp in range(CP):
        for tp in range(TP):
            rows = held_rows(batch, cp, tp)
            valid = layout.shard(cp, CP, "zigzag").shard(tp, TP).valid_T(len(rows))
            assert valid is not None
            assert torch.equal(valid, batch.real[rows])
