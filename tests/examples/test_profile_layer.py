"""The profile of a layer: every range of both verbs is in the Chrome trace, and the picture is drawn from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import profile_layer

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
