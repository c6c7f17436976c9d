"""The profile of a layer: every range of both verbs is in the Chrome trace, and the picture is drawn from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import profile_layer
from moe_dispatch_testing import run_processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_trace_and_picture(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "profile_layer.py"), "--ranks", "2", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
    events = sorted(profile_layer.ranges(tmp_path / "trace.json"), key=lambda event: float(event["ts"]))
    names = [event["name"].removeprefix("moe_dispatch::") for event in events]
    assert names == ["dispatch", "experts", "combine", "combine.backward", "dispatch.backward"]
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_steps_in_chunks_are_timed_beside_one_dispatch() -> None:
    found, _ = run_processes(profile_layer.time_chunks, 2, "alltoall", 4, 1)
    assert list(found) == ["one dispatch", "chunks", "chunks without overlap", "chunks with recomputation"]
    assert found["one dispatch"][1] == 1
