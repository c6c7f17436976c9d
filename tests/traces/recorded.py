"""What these tests record: two dispatchers on one channel, layouts of every kind, ids of -1, ranks without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_dispatch import BSHD, SBHD, THD, Dispatcher, DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.layouts import Layout, Masked
from moe_dispatch_tools.traces import Trace
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, TOP_K, Group, random_rows, small_config

Given = tuple[Tensor, Routing, Layout]


def batches(rank: int) -> list[Given]:
    """What a rank dispatches, step by step: its own number of rows in each; none at all on rank 1 in step 1."""
    rows = 7 + 3 * rank
    gaps = THD([0, 2, 2, 5], [0, 4, 4, rows])
    return [
        (random_rows(rows, seed=rank), routing(rows, rank), gaps),
        (random_rows(0 if rank == 1 else 4, seed=rank), routing(0 if rank == 1 else 4, 10 + rank), Rows()),
        (random_rows(6, seed=rank).view(2, 3, HIDDEN), routing(6, 20 + rank), BSHD([1, 3])),
        (random_rows(6, seed=rank).view(3, 2, HIDDEN), routing(6, 30 + rank), SBHD([2 + rank % 2, 0]).shard(0, 1)),
        (random_rows(8, seed=rank), routing(8, 40 + rank), THD([0, 3, 14], [0, 4, 16]).shard(rank % 2, 2)),
        (random_rows(5, seed=rank), routing(5, 50 + rank), Rows(3)),
        (random_rows(4, seed=rank), routing(4, 60 + rank), Masked(torch.tensor([True, False, rank > 0, True]))),
    ]


def routing(rows: int, seed: int) -> Routing:
    """Every third row uses one slot only, and every fifth names an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
    ids[::3, 0] = -1
    ids[1::5] = ids[1::5, :1]
    dtype = torch.float32 if seed % 20 < 10 else torch.bfloat16
    return Routing(ids, torch.rand(rows, TOP_K, generator=generator).to(dtype))


def run(dispatcher: Dispatcher, given: Given) -> Tensor:
    x, way, layout = given
    sent = dispatcher.dispatch(x, way, layout)
    return dispatcher.combine(sent.rows, sent)


def record_batches(group: Group, path: Path, config: DispatcherConfig | None = None, **options: Any) -> None:
    """Two layers, every batch of this rank through each."""
    config = config or small_config()
    first, second = (build_dispatcher(config, group, name=name) for name in ("layers.0", ""))
    rank = 0 if group is None else group.rank()
    with Trace.record(first, path, **options):
        for given in batches(rank):
            for dispatcher in (first, second):
                run(dispatcher, given)
    run(first, batches(rank)[0])  # not recorded any more
