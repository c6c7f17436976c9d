"""The example with Ray replays the routing of a rollout. It needs the packages of the extra ``ray-example``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_replay.py"


def test_trainer_routes_as_the_rollout_did(tmp_path: Path) -> None:
    for package in ("ray", "transformers"):
        pytest.importorskip(package, reason="the packages of the ray-example extra are not installed")
    command = [sys.executable, str(EXAMPLE), "--samples", "4", "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stderr
    replayed, free = finished.stdout.splitlines()[-2:]
    assert re.match(r"with replay: 0\.0 % of the slots differ .* by at most \d\.\de-1[3-6], ", replayed)
    drift = re.match(r"without replay: (\d+\.\d) % of the slots differ", free)
    assert drift is not None
    assert float(drift[1]) > 0.1
    assert (tmp_path / "replay.png").stat().st_size > 10_000
