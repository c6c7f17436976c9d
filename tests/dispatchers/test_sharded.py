"""tp 2 with sequence parallelism, cp 2 zigzag, ep 2, packed sequences with gaps: gradients of the unsharded model."""

from __future__ import annotations

import datetime

import pytest
import torch

from moe_dispatch_testing import run_processes
from tests.sharded.grid import Grid, Place
from tests.sharded.model import Sizes, run_whole
from tests.sharded.packing import Packed
from tests.sharded.part import Job, run_job

TIMEOUT = datetime.timedelta(seconds=60)  # eight processes start slowly on two cores

GRID = Grid(tp=2, cp=2, dp=2)
# Padded to multiples of 2 * cp * tp, and not all to the next one.
HALVES = (Packed(lengths=(5, 8, 1), padded=(8, 8, 16), seed=0), Packed(lengths=(13, 0, 7), padded=(16, 8, 8), seed=1))


@pytest.mark.slow
def test_gradients_of_eight_ranks_are_those_of_one() -> None:
    """Experts lie over the two halves of the data, so that ranks of one group hold different sequences."""
    job = Job(
        grid=GRID,
        sizes=Sizes(layers=1),
        step=[HALVES],
        expert_groups=GRID.groups("dp"),
        dtype=torch.float64,
        fields={"backend": "alltoall", "pad_multiple": 4},
    )
    expected = run_whole(job.sizes, job.step)
    found = run_processes(run_job, GRID.size, job, timeout=TIMEOUT)[0].tensors
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13, msg=name)
    assert found["tokens"].tolist() == expected.tokens_per_expert.tolist()


@pytest.mark.parametrize("dp", range(GRID.dp))
def test_layouts_of_the_ranks_name_the_real_rows_that_the_model_counts(dp: int) -> None:
    batch = HALVES[dp]
    for cp in range(GRID.cp):
        for tp in range(GRID.tp):
            rows = batch.held_rows(GRID, Place(tp=tp, cp=cp, dp=dp))
            valid = batch.layout.shard(cp, GRID.cp, "zigzag").shard(tp, GRID.tp).valid_T(len(rows))
            assert valid is not None
            assert torch.equal(valid, batch.real_T[rows])
