"""``check``: backends by their path, right and wrong ones, and how a report reads."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from moe_dispatch.backends import known_backends
from moe_dispatch_testing import SCENARIOS, kit
from tests.cli.conftest import Command

RING = Path(__file__).parents[2] / "examples" / "own_backend"
FEW = ("skewed", "one_expert", "float64", "wire_bfloat16", "skewed_graph_safe")
HALVED = "tests.cli.planted:Halved"


@pytest.fixture(autouse=True)
def few_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SCENARIOS", tuple(one for one in SCENARIOS if one.name in FEW))
    monkeypatch.syspath_prepend(RING)


def test_right_backend_of_another_package_conforms(command: Command) -> None:
    answer = command("check", "moe_dispatch_ring:RingOptions", "--ep", "1,2")
    assert answer.status == 0
    assert "excused by graph_safe False, on 1, 2 ranks: 1 scenario\n" in answer.out
    assert "excused by wire_dtypes none, on 1, 2 ranks: 1 scenario\n" in answer.out
    assert answer.out.endswith("ok     backend ring conforms: 22 cases passed, 0 failed, on 1, 2 ranks\n")
    assert "ring" in known_backends()


def test_wrong_backend_does_not_conform(command: Command) -> None:
    answer = command("check", HALVED, "--ep", "2")
    assert answer.status == 1
    lines = answer.out.splitlines()
    failed = [line for line in lines if line.startswith("failed")]
    assert len(failed) == len(lines), "a line for each case, and one for all"
    one = r"failed skewed-ep2-rows-agree: ConformanceError: y: entry \(\d+, \d+\) must be .* on rank [01] of 2"
    assert re.fullmatch(one, failed[0])
    assert "Traceback" not in answer.out
    assert failed[-1].startswith("failed backend halved does not conform: 0 cases passed, 19 failed")


def test_verbose_lists_everything(command: Command) -> None:
    answer = command("check", HALVED, "--ep", "2", "--verbose")
    assert answer.out.count("Traceback (most recent call last)") == 19
    right = command("check", "moe_dispatch_ring:RingOptions", "--ep", "1", "-v").out
    assert "ok     skewed-ep1-rows-agree\n" in right
    assert "on 1 rank: skewed_graph_safe\n" in right


def test_json_has_its_keys(command: Command) -> None:
    answer = command("check", HALVED, "--ep", "1", "--json")
    assert answer.status == 1
    report = json.loads(answer.out)
    assert list(report) == ["conforms", "ep_sizes", "backend", "passed", "excused", "failed"]
    assert (report["conforms"], report["ep_sizes"], report["backend"]) == (False, [1], "halved")
    assert list(report["failed"][0]) == ["case", "summary", "error"]
    ring = json.loads(command("check", "moe_dispatch_ring:RingOptions", "--ep", "1", "--json").out)
    assert ring["excused"][0] == {"scenario": "wire_bfloat16", "ep_size": 1, "reason": "wire_dtypes none"}


def test_backend_that_cannot_run_does_not_conform(command: Command) -> None:
    answer = command("check", "tests.cli.planted:Absent", "--ep", "1")
    assert answer.status == 1
    assert "excused by it cannot be used here: it was planted so, on 1 rank: 5 scenarios" in answer.out


def test_options_of_a_known_backend(command: Command) -> None:
    answer = command("check", "local+reduction=exact", "--ep", "1")
    assert answer.status == 0
    assert "backend local reduction=exact conforms" in answer.out


def test_own_module_need_not_be_installed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "near_by.py").write_text("from tests.cli.planted import Absent as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "it was planted so" in command("check", "near_by:Mine", "--ep", "1").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["altoall"], "Unknown backend 'altoall'. Known backends: .*Did you mean 'alltoall'?"),
        (["no_such_package:B"], "backend 'no_such_package:B': importing 'no_such_package' raised ModuleNotFoundError"),
        (["tests.cli.planted:None"], "'None' of tests.cli.planted must be a subclass of .*Options, got None. Write"),
        (["tests.cli.planted:Tensor"], "must be a subclass of .*BackendOptions, got <class 'torch.Tensor'>"),
        (["alltoall+reduction"], "options must be written NAME\\+OPTION=VALUE, got 'reduction'"),
        (["alltoall+speed=2"], "backend 'alltoall\\+speed=2': speed: Extra inputs.*Its options: reduction, pair_rows."),
        (["local", "--ep", "1,zero"], "--ep must be whole numbers from 1 on, separated by commas, got '1,zero'"),
    ],
)
def test_wrong_requests_are_refused(arguments: list[str], told: str, command: Command) -> None:
    answer = command("check", *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: .*{told}", answer.error), answer.error
    assert answer.error.count("\n") == 1
