"""The ranks of a command: whichever way one fails, it is told once, and nobody is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send, _place_here, num_ranks, on_ranks

ROOT = Path(__file__).parents[2]
UNDER_TORCHRUN = """
from moe_dispatch_tools.ranks import PeerFailed, on_ranks, this_rank
from moe_dispatch_testing import RankFailed

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


def in_a_pod(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """Set the variables that an operator of Kubernetes sets in a pod; torchrun would set LOCAL_RANK too."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)


def test_rank_in_a_pod_is_alone_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch)
    assert (num_ranks(4), _place_here()) == (2, (0, 1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK and LOCAL_WORLD_SIZE must be set together, got only LOCAL_RANK\."
    ):
        _place_here()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _place_here() == (1, 2)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match=r"got only LOCAL_WORLD_SIZE\. Set both; or set neither"):
        _place_here()


def test_rank_that_does_not_know_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch)
    with pytest.raises(
        RankFailed, match=r"rank 0 of 2 cannot join .*MASTER_ADDR expected, but not set\. Start .*; or unset RANK, and"
    ):
        on_ranks(raising_rank, 4, on_message=lambda message: None)


def test_rank_that_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_dispatch_tools.place.TIMEOUT", timedelta(seconds=1))
    in_a_pod(monkeypatch, RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    with pytest.raises(RankFailed, match=r"rank 1 of 2 cannot join the other ranks: .*127\.0\.0\.1.*Start all of them"):
        on_ranks(raising_rank, 4, on_message=lambda message: None)


@pytest.mark.slow
def test_doctor_in_two_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    in_a_pod(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "moe_dispatch_tools", "doctor", "-b", "alltoall", "--json"]
    pods = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    (out, error), others = [pod.communicate(timeout=300) for pod in pods]
    assert ([pod.returncode for pod in pods], others[0]) == ([0, 0], ""), (error, others)
    assert [backend["self_test"]["ranks"] for backend in json.loads(out)["backends"]] == [2]
