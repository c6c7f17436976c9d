"""``check``: backends by their path, right and wrong ones, and how a report reads."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from moe_dispatch.backends import known_backends
from moe_dispatch_testing import SCENARIOS, kit
from tests.cli.conftest import Command

RING = Path(__file__).parents[2] / "examples" / "own_backend"
FEW = ("skewed", "wire_bfloat16", "skewed_graph_safe")
HALVED = "tests.cli.planted:Halved"
ABSENT = ("tests.cli.planted:Absent", "--ep", "1")


@pytest.fixture(autouse=True)
def few_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SCENARIOS", tuple(one for one in SCENARIOS if one.name in FEW))
    monkeypatch.syspath_prepend(RING)  # what a command adds to the path goes after the test, too


def test_right_backend_of_another_package_conforms(command: Command) -> None:
    answer = command("check", "moe_dispatch_ring:RingOptions", "--ep", "1,2")
    assert answer.status == 0
    assert "excused by graph_safe False, on 1, 2 ranks: 1 scenario\n" in answer.out
    assert "excused by wire_dtypes none, on 1, 2 ranks: 1 scenario\n" in answer.out
    assert answer.out.endswith("ok     backend ring conforms: 10 cases passed, 0 failed, on 1, 2 ranks\n")
    assert "ring" in known_backends()


def test_verbose_lists_everything(command: Command) -> None:
    answer = command("check", "local+reduction=exact", "--ep", "1", "-v")
    assert answer.status == 0
    assert "ok     skewed-ep1-rows-agree\n" in answer.out
    assert "backend local reduction=exact conforms" in answer.out
    assert re.search(r"on 1 rank: \w+, \w+, \w+\n", command("check", *ABSENT, "-v").out), "names of scenarios"


def test_wrong_backend_does_not_conform(command: Command) -> None:
    answer = command("check", HALVED, "--ep", "2")
    assert answer.status == 1
    lines = answer.out.splitlines()
    failed = [line for line in lines if line.startswith("failed")]
    assert len(failed) == len(lines), "a line for each case, and one for all"
    one = r"failed skewed-ep2-rows-agree: ConformanceError: .* must be .* on rank [01] of 2"
    assert re.fullmatch(one, failed[0])
    assert "Traceback" not in answer.out
    assert failed[-1].startswith(f"failed backend halved does not conform: 0 cases passed, {len(lines) - 1} failed")
    told = command("check", HALVED, "--ep", "1", "--verbose").out
    assert told.count("Traceback (most recent call last)") == told.count("\nfailed") > 1


def test_json_has_its_keys(command: Command) -> None:
    answer = command("check", HALVED, "--ep", "1", "--json")
    assert answer.status == 1
    report = json.loads(answer.out)
    assert list(report) == ["conforms", "ep_sizes", "backend", "passed", "excused", "failed"]
    assert (report["conforms"], report["ep_sizes"], report["backend"]) == (False, [1], "halved")
    assert list(report["failed"][0]) == ["case", "summary", "error"]


def test_backend_that_cannot_run_does_not_conform(command: Command) -> None:
    answer = command("check", *ABSENT)
    assert answer.status == 1
    assert "excused by it cannot be used here: it was planted so, on 1 rank: 3 scenarios" in answer.out
    reason = "it cannot be used here: it was planted so"
    excused = json.loads(command("check", *ABSENT, "--json").out)["excused"]
    assert excused[0] == {"scenario": "skewed", "ep_size": 1, "reason": reason}


def test_own_module_need_not_be_installed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "near_by.py").write_text("from tests.cli.planted import Absent as Mine\n")
    with contextlib.chdir(tmp_path):
        assert "it was planted so" in command("check", "near_by:Mine", "--ep", "1").out
