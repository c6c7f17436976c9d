"""Ranks for tests return results by rank, and raise the error that caused the others."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import RankFailed, Ranks, run_processes, run_ranks

SHORT = datetime.timedelta(seconds=0.5)


def ranks_summed(group: dist.ProcessGroup) -> int:
    total = torch.tensor(group.rank() + 1)
    group.allreduce([total]).wait()
    return int(total)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_by_rank(size: int) -> None:
    assert run_ranks(ranks_summed, size) == [size * (size + 1) // 2] * size
    assert run_ranks(lambda group: group.rank(), size) == list(range(size))


def failing_on_rank_1(group: dist.ProcessGroup) -> int:
    if group.rank() == 1:
        raise KeyError("the cause")
    return ranks_summed(group)


def test_the_cause_comes_out_and_not_the_time_outs() -> None:
    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(failing_on_rank_1, 3, timeout=SHORT)
    assert caught.value.__notes__ == ["on rank 1 of 3"]


def test_groups_are_kept_until_an_error() -> None:
    ranks = Ranks(timeout=SHORT)
    first = ranks.run(id, 2)
    assert ranks.run(ranks_summed, 2) == [3, 3]
    assert ranks.run(id, 2) == first
    with pytest.raises(KeyError, match="the cause"):
        ranks.run(failing_on_rank_1, 2)
    assert ranks.run(ranks_summed, 2) == [3, 3]


def process(rank: int, way: str) -> int:
    if rank == 1 and way == "raises":
        raise KeyError("the cause")
    if rank == 1 and way == "dies":
        os._exit(7)
    group = dist.group.WORLD
    assert group is not None
    return ranks_summed(group)


def reporting_rank(rank: int, way: str, *, send: Callable[[object], None]) -> tuple[int, str, Tensor]:
    send((rank, "first"))
    send((rank, "second"))
    return process(rank, way), os.environ["GIVEN"], torch.full((1000,), rank)


def test_processes_return_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors outlive their processes, which have the environment of the call. Messages of rank 0 arrive in order."""
    for value in ("first", "second"):
        monkeypatch.setenv("GIVEN", value)
        heard: list[object] = []
        results = run_processes(reporting_rank, 2, "returns", on_message=heard.append)
        assert [result[:2] for result in results] == [(3, value)] * 2
        assert [result[2].unique().tolist() for result in results] == [[0], [1]]
        assert heard == [(0, "first"), (0, "second")]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("raises", "rank 1 of 2: Traceback(.|\n)*KeyError: 'the cause'"),
        ("dies", "rank 1 of 2 ended without an error of its own, exit code 7"),
    ],
)
def test_processes_tell_the_cause(way: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message) as caught:
        run_processes(process, 2, way)
    assert "rank 0" not in str(caught.value)


def refusing_rank(rank: int) -> None:
    raise ConfigError("this group is refused")


def test_errors_of_the_library_are_told_without_a_traceback() -> None:
    with pytest.raises(RankFailed, match="this group is refused") as caught:
        run_processes(refusing_rank, 2)
    assert re.fullmatch(r"rank \d of 2: this group is refused", str(caught.value))
    assert "in refusing_rank" in caught.value.__notes__[0]


def waiting_rank(rank: int, *, send: Callable[[object], None]) -> None:
    send("started")
    time.sleep(60)


def test_no_process_outlives_an_error_of_the_caller() -> None:
    def interrupt(message: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_processes(waiting_rank, 2, on_message=interrupt)
    assert multiprocessing.active_children() == []
