"""``make gpu`` itself, on the CPU: steps run, the report is written, and a bad step does not take the next one down.

``python -m tests.gpu.first_hour --device simulated`` runs the steps on simulated CUDA.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.first_hour import __main__ as first_hour
from tests.gpu.first_hour.steps import STEPS, Device


class Scripted:
    """A step that runs a program of the test."""

    seconds, tests, shows = 60, (), "nothing"

    def __init__(self, name: str, program: str, seconds: int = 60) -> None:
        self.name, self.program, self.seconds = name, program, seconds

    def command(self, device: Device) -> list[str]:
        return [sys.executable, "-c", self.program]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str, steps: list[Any]) -> dict[str, Any]:
    monkeypatch.setattr(first_hour, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["first_hour", "--device", "cpu", "--out", str(out), *arguments])
    status = first_hour.main()
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return {**report, "status": status}


@pytest.mark.slow
def test_steps_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [step for step in STEPS if step.name in ("kernels", "graphs", "host-syncs")]
    report = run(monkeypatch, tmp_path, steps=steps)
    assert report["status"] == 0
    assert {name: step["status"] for name, step in report["steps"].items()} == {
        "kernels": "passed",
        "graphs": "skipped",
        "host-syncs": "passed",
    }
    assert report["steps"]["host-syncs"]["values"]["alltoall eager"] == "dispatch 0, combine 0, backward 0"
    page = (tmp_path / "report.md").read_text()
    assert "of the copy" in page


def test_a_bad_step_does_not_take_the_next_one_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_WRITES_LATER!r}, sys.argv[1]]).wait()"
    late = tmp_path / "late"
    steps = [
        Scripted("hangs", child.replace("sys.argv[1]", repr(str(late))), seconds=1),
        Scripted("dies", "import os; os.abort()"),
        Scripted("fails", "raise SystemExit('it broke')"),
        Scripted("works", "print('{\"speed\": 7}')"),
    ]
    report = run(monkeypatch, tmp_path, steps=steps)
    assert report["status"] == 1
    found = report["steps"]
    assert [found[name]["status"] for name in ("hangs", "dies", "fails", "works")] == [
        "timed out",
        "failed",
        "failed",
        "passed",
    ]
    assert "it broke" in found["fails"]["output"]
    assert found["works"]["values"] == {"speed": 7}
    time.sleep(2)
    assert not late.exists()  # what the step started was ended too


_WRITES_LATER = "import sys, time; time.sleep(2.5); open(sys.argv[1], 'w').close()"


def test_a_cut_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    count = f"open({str(ran)!r}, 'a').write('x'); print('{{}}')"
    first, second = Scripted("first", count), Scripted("second", count)
    run(monkeypatch, tmp_path, steps=[first])
    run(monkeypatch, tmp_path, steps=[first, second])
    assert ran.read_text() == "xx"  # the first step ran once
    run(monkeypatch, tmp_path, "--again", steps=[first])
    assert ran.read_text() == "xxx"
    monkeypatch.setattr(first_hour, "_commit", lambda: "another")
    run(monkeypatch, tmp_path, steps=[first])
    assert ran.read_text() == "xxxx"  # a report of another commit is not continued
