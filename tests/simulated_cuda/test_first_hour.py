"""``make gpu`` writes its whole report: a dry run on simulated devices, with all measurements but without the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.first_hour.steps import steps
from tests.gpu.first_hour.verbs import VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the report."""
    folder = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "tests.gpu.first_hour", "--device", "simulated", "--dry", "--out", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + (folder / "report.md").read_text()[-4000:]
    return folder


@pytest.fixture
def values(out: Path) -> dict[str, Any]:
    """Return the values of each measurement."""
    found: dict[str, Any] = json.loads((out / "report.json").read_text())["steps"]
    return {name: step["values"] for name, step in found.items() if "values" in step}


def test_the_report_has_every_step(out: Path) -> None:
    found = json.loads((out / "report.json").read_text())["steps"]
    statuses = {step.name: "collected" if step.tests else "passed" for step in steps()}
    assert {name: step["status"] for name, step in found.items()} == statuses
    assert not any(step["closing"].startswith("0") for step in found.values() if "closing" in step)
    page = (out / "report.md").read_text()
    assert all(f"| {name} | {step['shows']} | {step['status']}" in page for name, step in found.items())
    measured = {name for name, status in statuses.items() if status == "passed"}
    assert {line[3:] for line in page.splitlines() if line.startswith("## ")} == measured


def test_kernels_are_held_against_a_copy(values: dict[str, Any]) -> None:
    told = {key.split(": ")[1]: text for key, text in values["kernels"].items() if key.startswith("triton")}
    assert "GB/s" in told.pop("copy")
    assert {
        "index_select",
        "packets, each row scattered to 2",
        "packets, expanded",
        "packets, summed into",
        "weights on expert-major rows",
        "weights on expert-major rows, backward",
        "float8_e4m3fn, encoded",
        "mxfp8, widened and expanded",
        "mxfp8, expanded as sent",
    } <= told.keys()
    assert all("of the copy" in text for text in told.values())


def test_verbs_have_a_time_on_the_host_and_on_the_device(values: dict[str, Any]) -> None:
    asked = {
        f"{backend} {mode}, {rows} rows, {verb}"
        for backend in ("local", "alltoall")
        for mode in ("eager", "graph-safe")
        for rows in (8, 16)
        for verb in VERBS
    }
    assert values["verbs"].keys() == asked
    assert all(text.startswith("host ") and ", device " in text for text in values["verbs"].values())


def test_rates_are_held_against_a_bare_exchange(values: dict[str, Any]) -> None:
    asked = {f"{size} ranks, {mode}, {verb}" for size in (4, 2) for mode in ("eager", "graph-safe") for verb in VERBS}
    assert values["rates"].keys() == asked
    assert all("of the bare rate" in text and "(0.000 MB" not in text for text in values["rates"].values())


def test_compilations_are_counted(values: dict[str, Any]) -> None:
    counted = values["compilations"]
    assert counted["eager: versions compiled in the first 5 steps"] > 5
    assert counted["eager: versions compiled later"] == counted["graph-safe: versions compiled later"] == 0
