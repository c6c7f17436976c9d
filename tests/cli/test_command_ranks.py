"""The ranks of a command: whichever way one fails, it is told once, and nobody is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send, num_ranks, on_ranks

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


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the variables that an operator of Kubernetes sets in a pod, and further ones. Ranks wait for 0.2 s."""
    monkeypatch.setattr("moe_dispatch_tools.place.TIMEOUT", timedelta(seconds=0.2))

    def set_all(**environment: str) -> None:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("environment", "kind", "told"),
    [
        ({"LOCAL_RANK": "1"}, ConfigError, "must be set together, got only LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "2"}, ConfigError, "got only LOCAL_WORLD_SIZE"),
        ({}, RankFailed, r"rank 0 of 2 cannot join .*MASTER_ADDR expected, but not set\. Start .*; or unset RANK"),
        (
            {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            RankFailed,
            r"rank 1 of 2 cannot join the other ranks: .*127\.0\.0\.1.*Start all of them",
        ),
    ],
)
def test_rank_in_a_pod_that_meets_nobody(
    environment: dict[str, str], kind: type[Exception], told: str, in_a_pod: Callable[..., None]
) -> None:
    in_a_pod(**environment)
    assert num_ranks(4) == 2
    with pytest.raises(kind, match=told):
        on_ranks(raising_rank, 4, on_message=lambda message: None)


@pytest.mark.slow
def test_doctor_in_two_pods(in_a_pod: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    in_a_pod(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=str(ROOT))
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
