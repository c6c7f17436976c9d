"""The group of one rank over NCCL that tests on a GPU share."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def nccl() -> Iterator[dist.ProcessGroup]:
    """Make the default group, over NCCL, with this process as its only rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=datetime.timedelta(minutes=1))
        group = dist.group.WORLD
        assert group is not None
        yield group
        dist.destroy_process_group()
