"""A rank that dies in the middle of a step must end its peers with an error, within the group's timeout."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_dispatch import build_dispatcher
from moe_dispatch_testing import RankFailed, run_processes
from tests.dispatchers.layer import random_routing, random_rows, small_config

TIMEOUT_S = 8


def _step(rank: int, reports: Path) -> None:
    dispatcher = build_dispatcher(small_config(num_experts=9), dist.group.WORLD)
    x = random_rows(4).requires_grad_()
    try:
        for step in range(3):
            sent = dispatcher.dispatch(x, random_routing(4))
            if rank == 1 and step == 1:
                os._exit(3)
            dispatcher.combine(sent.rows, sent).sum().backward()
    except Exception as error:
        (reports / str(rank)).write_text(type(error).__name__)
        raise


def test_a_dead_rank_ends_the_others(tmp_path: Path) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    with pytest.raises(RankFailed, match="exit code 3"):
        run_processes(_step, 3, tmp_path, timeout=timeout, grace_seconds=2 * TIMEOUT_S)
    for survivor in ("0", "2"):
        assert (tmp_path / survivor).read_text() in ("RuntimeError", "DistBackendError")
