"""The ranks of a command: whichever way one fails, it is told once, and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_dispatch.cli.place import Place
from moe_dispatch.cli.ranks import Send, on_ranks, this_rank
from moe_dispatch.testing import RankFailed

ROOT = Path(__file__).parents[2]
UNDER_TORCHRUN = """
from moe_dispatch.cli.ranks import PeerFailed, on_ranks, this_rank
from moe_dispatch.testing import RankFailed

def body(place, send):
    send(place.rank)
    if place.size == 2 and place.rank == 1:
        raise ArithmeticError("planted on rank 1")
    place.sum(__import__("torch").ones(1))

try:
    on_ranks(body, 2, lambda message: print("heard", message, flush=True))
except RankFailed as failure:
    print("told", str(failure).replace("\\n", " "), flush=True)
except PeerFailed:
    print("silent on", this_rank(), flush=True)
"""


def raising_rank(place: Place, send: Send) -> None:
    if place.rank == 1:
        raise ArithmeticError("planted on rank 1")
    place.sum(torch.ones(1))


def dying_rank(place: Place, send: Send) -> None:
    if place.rank == 1:
        os._exit(7)
    place.sum(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (raising_rank, r"\Arank 1 of 2: Traceback[^\0]*ArithmeticError: planted on rank 1\s*\Z"),
        (dying_rank, r"\Arank 1 of 2 ended without an error of its own, exit code 7.\Z"),
    ],
)
def test_rank_that_fails_is_told_once_and_takes_the_others_along(
    body: Callable[[Place, Send], None], message: str
) -> None:
    with pytest.raises(RankFailed, match=message):
        on_ranks(body, 2, on_message=lambda message: None)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_rank_of_torchrun_that_fails_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = sorted(finished.stdout.splitlines())
    assert [line.split()[0] for line in lines] == ["heard", "silent", "told"], finished.stdout
    assert lines[0] == "heard 0"
    assert lines[1] == "silent on 0"
    assert lines[2].startswith("told rank 1 of 2: Traceback")
    assert lines[2].strip().endswith("ArithmeticError: planted on rank 1")


def test_rank_of_a_process_alone() -> None:
    assert this_rank() == 0
