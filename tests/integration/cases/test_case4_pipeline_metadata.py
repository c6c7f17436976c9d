"""Case 4: packed metadata on every pipeline stage. NVIDIA/Megatron-LM#4150, for #4092.

4 stages of 2 tensor-parallel ranks, 8 processes over gloo.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from moe_dispatch_testing import run_processes
from tests.integration.cases.pipeline import LOST, MICRO_BATCHES, MIDDLE, STAGES, TP, draw, rank_body, written
from tests.integration.needs import needs
from tests.pages import run_page

pytestmark = needs("megatron")

RANKS = range(STAGES * TP)
LOSER, PEER = LOST * TP + 1, LOST * TP
FIRST = {
    "cu_seqlens": [0, 5, 8, 17],
    "cu_seqlens_padded": [0, 6, 10, 20],
    "max_seqlen": 9,
    "dtype": "torch.int32",
}


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_processes(rank_body, len(RANKS), timeout=timedelta(seconds=300))


def test_every_rank_of_every_stage_has_the_layout() -> None:
    expected = [written(draw(index).layout) for index in range(len(MICRO_BATCHES))]
    assert expected[0] == FIRST
    assert [found["train"]["layouts"] for found in results()] == [expected] * len(RANKS)


def test_gradients_are_those_of_the_unsharded_model() -> None:
    for rank, found in enumerate(results()):
        errors = found["train"]["errors"]
        assert len(errors) == 4 + (len(MICRO_BATCHES) if rank < TP else 0)
        assert all(error < 1e-12 for error in errors.values()), errors


def test_a_rank_that_never_got_the_layout_is_told_so_by_name() -> None:
    told = [found["lost"] for found in results()]
    assert "broadcast_layout brings the layout of a micro-batch to every rank" in told[LOSER]
    assert f"In the dispatcher 'stage {LOST}, rank 1 of its 2'." in told[LOSER]
    assert f"In the dispatcher 'stage {LOST}, rank 0 of its 2'." in told[PEER]
    # With a plan, the peer hears of it in debug mode.
    for key, verb in {"lost": "dispatch", "lost before a plan": "plan"}.items():
        told = [found[key] for found in results()]
        assert told[LOSER].startswith(f"moe_dispatch.errors.LayoutError: Dispatcher.{verb}: a plan or a layout must be")
        assert told[PEER].startswith("moe_dispatch.errors.PeerError: rank 1 refused")
        assert [told[rank] for rank in RANKS if rank not in (LOSER, PEER)] == ["gaps are zero"] * 6


def test_by_hand_nobody_is_told() -> None:
    """With layouts inferred, the rank without one takes gaps for tokens."""
    told = [found["lost by hand"] for found in results()]
    assert told[LOSER] == "gaps went through experts"
    assert [told[rank] for rank in RANKS if rank != LOSER] == ["gaps are zero"] * 7


def test_megatrons_own_container_and_broadcast() -> None:
    """#4092 is repaired in megatron-core 0.19.2, but for the padded ends: without context parallelism they stay."""
    of_stage = results()[MIDDLE * TP : (MIDDLE + 1) * TP]
    for tp_rank, found in enumerate(outcome["megatron"] for outcome in of_stage):
        assert found["container"] == FIRST
        assert found["cu_seqlens"] == FIRST["cu_seqlens"]
        assert found["max_seqlen"] == FIRST["max_seqlen"]
        assert found["has padded"] is (tp_rank == 0)


def test_the_code_of_the_page_runs() -> None:
    assert run_page("cases/4-pipeline-metadata.md")["arrived"] == [(9, [0, 5, 8, 17])] * 8
