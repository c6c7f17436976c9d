"""The recipes of the page, run as they stand on four ranks."""

from __future__ import annotations

import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_dispatch_testing.ranks import run_processes
from tests.integration.transformers.models import BATCHES, LAYERS, TOP_K, build
from tests.integration.transformers.replaying import draw_table
from tests.pages import run_page

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="from_pretrained needs accelerate to shard")


def run_blocks(rank: int, path: str) -> list[int]:
    """What each layer of the first block has counted on this rank. The last block replays a table."""
    batch = BATCHES[rank]
    namespace = run_page(
        "integrations/transformers.md",
        path=path,
        ep_group=dist.group.WORLD,
        table=draw_table(LAYERS),
        names=[f"{rank}.{row}" for row in range(len(batch.labels))],
        step=0,
        batch={"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels},
    )
    namespace["table"].check_used(namespace["names"])
    namespace["model"](**namespace["batch"]).loss.backward()
    return [int(counts.sum()) for counts in namespace["counts"].values()]


def test_recipes_run(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    ranks = run_processes(run_blocks, 4, str(tmp_path), timeout=datetime.timedelta(seconds=180))
    tokens = sum(batch.num_real for batch in BATCHES)
    assert [sum(counts) for counts in zip(*ranks, strict=True)] == [tokens * TOP_K] * LAYERS
