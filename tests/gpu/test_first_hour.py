"""``make gpu`` itself, on the CPU: steps run, the report is written, and a bad step does not take the next one down.

``python -m tests.gpu.first_hour --device simulated`` runs the steps on simulated CUDA, and
``tests/simulated_cuda/test_first_hour.py`` reads the report of a dry run there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.first_hour import __main__ as first_hour
from tests.gpu.first_hour.steps import Device, steps


class Scripted:
    """A step that runs a program of the test."""

    tests, shows, source, library = (), "nothing", "", ""

    def __init__(self, name: str, program: str, seconds: int = 60) -> None:
        self.name, self.program, self.seconds = name, program, seconds

    def command(self, device: Device, out: Path, *, dry: bool) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", self.program]


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run steps of a test on the CPU. Return the report, and the status with which ``make gpu`` ends."""

    def started(*arguments: str, steps: list[Any]) -> dict[str, Any]:
        monkeypatch.setattr(first_hour, "steps", lambda sources: steps)
        monkeypatch.setattr(sys, "argv", ["first_hour", "--device", "cpu", "--out", str(tmp_path), *arguments])
        status = first_hour.main()
        return {**json.loads((tmp_path / "report.json").read_text()), "status": status}

    return started


@pytest.mark.slow
def test_steps_run_on_the_cpu(run: Run, tmp_path: Path) -> None:
    report = run(steps=[step for step in steps() if step.name in ("kernels", "trace", "graphs", "host-syncs")])
    assert report["status"] == 0
    assert {name: step["status"] for name, step in report["steps"].items()} == {
        "kernels": "passed",
        "trace": "passed",
        "graphs": "skipped",
        "host-syncs": "passed",
    }
    assert report["steps"]["host-syncs"]["values"]["alltoall eager"] == "dispatch 0, combine 0, backward 0"
    assert (tmp_path / report["steps"]["trace"]["values"]["file"]).stat().st_size > 1000
    page = (tmp_path / "report.md").read_text()
    assert "of the copy" in page


def test_a_bad_step_does_not_take_the_next_one_down(run: Run, tmp_path: Path) -> None:
    late, begin = tmp_path / "late", time.monotonic()
    later = f"import time; time.sleep(1.3); open({str(late)!r}, 'w').close()"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {later!r}]).wait()"
    steps = [
        Scripted("hangs", child, seconds=1),
        Scripted("dies", "import os; os.abort()"),
        Scripted("fails", "raise SystemExit('it broke')"),
        Scripted("works", "print('{\"speed\": 7}')"),
    ]
    report = run(steps=steps)
    assert report["status"] == 1
    found = report["steps"]
    statuses = {"hangs": "timed out", "dies": "failed", "fails": "failed", "works": "passed"}
    assert {name: step["status"] for name, step in found.items()} == statuses
    assert "it broke" in found["fails"]["output"]
    assert found["works"]["values"] == {"speed": 7}
    time.sleep(max(0.0, begin + 1.8 - time.monotonic()))
    assert not late.exists()  # what the step started was ended too


@pytest.mark.slow
def test_libraries_are_built_and_a_failing_build_is_a_row(run: Run, tmp_path: Path) -> None:
    """A dry run only collects the tests of a library, with its build in the path."""
    sources, setup = tmp_path / "sources", "from setuptools import setup; setup(name='it', py_modules=['deep_ep'])"
    for name, program in (("bad", "raise SystemExit('no compiler')"), ("good", setup)):
        (sources / name).mkdir(parents=True)
        (sources / name / "setup.py").write_text(program)
    (sources / "good" / "deep_ep.py").write_text("")
    asked = "build-bad", "build-good", "bad-1", "good-1"
    found = run("--dry", steps=[step for step in steps(sources) if step.name in asked])["steps"]
    assert [*found] == [*asked]
    assert [each["status"] for each in found.values()] == ["failed", "passed", "skipped", "collected"]
    assert "no compiler" in found["build-bad"]["output"]
    assert found["bad-1"]["reason"] == "bad was not built"
    assert (tmp_path / "built" / "good" / "deep_ep.py").exists()
    assert found["good-1"]["closing"].startswith("3/12 tests collected")


def test_a_cut_run_goes_on(run: Run, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    count = f"open({str(ran)!r}, 'a').write('x'); print('{{}}')"
    first, second = Scripted("first", count), Scripted("second", count)
    run(steps=[first])
    run(steps=[first, second])
    assert ran.read_text() == "xx"  # the first step ran once
    run("--again", steps=[first])
    assert ran.read_text() == "xxx"
    written = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**written, "commit": "another"}))
    run(steps=[first])
    assert ran.read_text() == "xxxx"  # a report of another commit is not continued
