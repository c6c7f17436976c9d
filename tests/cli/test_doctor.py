"""``doctor``: what it finds of usable, unusable and broken backends, and how it answers."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.backends import Constraints, known_backends, register_backend
from moe_dispatch.errors import PeerError
from moe_dispatch_testing import SCENARIOS, RankFailed, kit
from moe_dispatch_tools import machine
from moe_dispatch_tools.doctor import self_tests
from tests.cli.conftest import Command
from tests.cli.planted import Absent, Halved, Planted, Raising

SMALL = ("--num-experts", "8", "--top-k", "2", "--hidden", "512")


def found(command: Command, *arguments: str, status: int = 0) -> dict[str, Any]:
    """What ``--json`` says."""
    answer = command("doctor", *SMALL, *arguments, "--json")
    assert answer.status == status, answer
    report: dict[str, Any] = json.loads(answer.out)
    return report


def named(report: dict[str, Any], name: str, emulates: str | None = None) -> dict[str, Any]:
    (backend,) = [one for one in report["backends"] if (one["name"], one["emulates"]) == (name, emulates)]
    return dict(backend)


def test_what_can_be_used_is_tested(command: Command) -> None:
    report = found(command)
    for name, ranks in (("allgather", 2), ("alltoall", 2), ("local", 1)):
        backend = named(report, name)
        assert backend["usable"]
        assert backend["ep_size"] == ranks
        assert backend["self_test"] == {"ranks": ranks, "device": "cpu", "passed": True, "error": None}
    assert named(report, "allgather")["constraints"]["equal_rows"] is True
    assert "equal_rows" not in named(report, "alltoall")["constraints"]
    by_place = {(one["name"], one["device"]): one for one in report["permutations"]}
    assert by_place["torch", "cpu"]["self_test"]["passed"] is True
    assert len(by_place) == 4
    shown = command("doctor", *SMALL, "-b", "alltoall").out
    told = "on 2 ranks: supports wire bfloat16, float8_e4m3fn, mxfp8; supports graph-safe mode; "
    assert shown.endswith(f"{told}supports torch.compile\n"), "constraints are sentences"


def test_environment_of_a_report_is_what_torch_collects(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.collect_env.run_and_read_all", lambda *_: None)  # starts no other program
    assert "PyTorch version: " + torch.__version__ in found(command, "-b", "local", "--environment")["environment"]
    answer = command("doctor", *SMALL, "-b", "local", "--environment")
    assert "local: version" in answer.out.partition(f"\nPyTorch version: {torch.__version__}\n")[0]
    assert "\nPython version: " in answer.out


def test_variables_stand_for_options_that_are_left_out(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "local")
    monkeypatch.setenv("MOE_DISPATCH_TOP_K", "3")
    report = json.loads(command("doctor", "--num-experts", "8", "--hidden", "512", "--json").out)
    assert report["model"] == {"num_experts": 8, "top_k": 3, "hidden_size": 512}
    assert [one["name"] for one in report["backends"]] == ["local"]
    assert not caplog.messages
    caplog.set_level(logging.WARNING, logger="moe_dispatch")  # the ranks, threads here, have raised it
    report = json.loads(command("doctor", *SMALL, "-b", "allgather", "--json").out)
    assert [one["name"] for one in report["backends"]] == ["allgather"]
    assert any(
        "BACKEND='local' is not used: the program sets backend to 'allgather'" in told for told in caplog.messages
    )
    assert any("TOP_K='3' is not used" in told for told in caplog.messages)
    caplog.set_level(logging.WARNING, logger="moe_dispatch")
    assert command("check", "nowhere").status == 2
    assert "MOE_DISPATCH_TOP_K is not used: check sets all fields itself. Unset it." in caplog.messages


@pytest.fixture
def broken_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A toolkit of CUDA without its libraries, an NCCL that is newer than torch's, and no deep_ep."""
    monkeypatch.setattr("torch.version.cuda", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "loaded_nccl", lambda: (2, 32, 3))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 0))
    monkeypatch.setattr("moe_dispatch.backends.deep_ep.library.find_spec", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    return tmp_path


def test_libraries_of_deep_ep_are_looked_for(command: Command, broken_cuda: Path) -> None:
    backend = named(found(command, "--backend", "deepep", status=1), "deepep")
    assert backend["reason"] == "no module named 'deep_ep' is installed"
    assert backend["emulations"] == ["v1.2.1", "v2-2.1.0", "v2.5.0", "uccl-da914a2", "rocm-92b4ae1"]
    assert backend["constraints"] == {}
    shown = command("doctor", "--backend", "deepep").out
    assert "deepep: not usable: no module named 'deep_ep' is installed" in shown
    assert "can be emulated (--emulated): v1.2.1, v2-2.1.0, v2.5.0, uccl-da914a2, rocm-92b4ae1" in shown
    assert "NCCL 2.32.3," in shown, "the one that is loaded"
    assert f"\nCUDA_HOME: {broken_cuda}, without lib64/libcudart*, which HybridEP needs\n" in shown
    (broken_cuda / "lib64").mkdir()
    (broken_cuda / "lib64" / "libcudart.so.13").touch()
    assert f"\nCUDA_HOME: {broken_cuda}\n" in command("doctor", "--backend", "deepep").out


def test_emulations_are_tested_on_request(command: Command) -> None:
    report = found(command, "--emulated")
    emulated = [one for one in report["backends"] if one["emulates"]]
    assert {one["emulates"] for one in emulated} >= {"v1.2.1", "v2-2.1.0", "v2.5.0", "hybridep-746"}
    assert all((one["self_test"]["passed"], one["self_test"]["ranks"]) == (True, 2) for one in emulated)
    assert named(report, "hybridep", "hybridep-94a9f8f")["constraints"]["row_multiple"] == 2
    assert named(report, "deepep", "v2-2.1.0")["constraints"]["group_sizes"] == "1 to 1024"
    for release, name in (("uccl-da914a2", "UCCL-EP"), ("rocm-92b4ae1", "ROCm DeepEP")):
        assert named(report, "deepep", release)["version"] == f"{name} {release}"


@pytest.mark.usefixtures("two_hosts")
def test_topology_is_that_of_the_ranks(command: Command) -> None:
    topology = found(command, "--ranks", "4", "-b", "alltoall")["topology"]
    assert (topology["ranks"], topology["nodes"], topology["ranks_per_node"]) == (4, 2, 2)
    assert topology["transport"] == "gloo"


def test_model_that_cannot_be_tested_here_is_no_failure(command: Command) -> None:
    report = found(command, "--ranks", "3")
    test = named(report, "alltoall")["self_test"]
    assert test["passed"] is None
    assert test["error"].startswith("num_experts (8) must be divisible by ep_size (3).")
    assert command("doctor", *SMALL, "--ranks", "3", "-b", "alltoall").status == 1


def test_failed_self_test_is_the_answer(command: Command) -> None:
    register_backend(Halved)
    report = found(command, status=1)
    backend = named(report, "halved")
    assert backend["self_test"]["passed"] is False
    assert "a difference of " in backend["self_test"]["error"]
    assert named(report, "local")["self_test"]["passed"] is True
    assert "failed halved: version" in command("doctor", *SMALL, "-b", "halved").out


def test_rank_that_fails_costs_one_self_test(command: Command) -> None:
    register_backend(Raising)
    report = found(command, status=1)
    assert named(report, "raising")["self_test"] == {
        "ranks": 2,
        "device": "?",
        "passed": False,
        "error": "a rank of 2: planted in dispatch",
    }
    assert report["permutations"][0]["self_test"]["passed"] is True, "what comes after it is tested"
    answer = command("doctor", *SMALL, "-b", "raising", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert (answer.status, answer.out) == (2, ""), "torchrun's ranks cannot be started anew"
    assert answer.error == "Error: a rank of 2: planted in dispatch\n"


def test_other_ranks_of_torchrun_leave_the_answer_to_the_first(command: Command) -> None:
    register_backend(Halved)
    for name, status in (("halved", 0), ("altoall", 2)):
        answer = command("doctor", *SMALL, "-b", name, env={"RANK": "1", "WORLD_SIZE": "2"})
        assert (answer.status, answer.out, answer.error) == (status, "", "")


def test_whatever_a_third_party_raises_is_told(command: Command) -> None:
    class Unbounded(Planted):
        name = "unbounded"

        def constraints(self, shape: object) -> Constraints:
            raise ArithmeticError("planted in constraints")

    register_backend(Unbounded)
    backend = named(found(command, "-b", "unbounded", status=1), "unbounded")
    assert "planted in constraints" in backend["self_test"]["error"]
    assert (backend["constraints"], backend["self_test"]["passed"]) == ({}, False)


def test_rejected_backend_is_told(command: Command) -> None:
    register_backend(Absent)
    backend = named(found(command), "absent")
    assert (backend["usable"], backend["reason"], backend["self_test"]) == (False, "it was planted so", None)
    assert found(command, "-b", "absent", status=1)["permutations"] == []


def test_failures_of_ranks_are_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that another rank refuses has failed; ranks that fail before any test are an error."""

    def raising(error: Exception) -> Callable[..., None]:
        def failing(*arguments: object, **options: object) -> None:
            raise error

        return failing

    monkeypatch.setattr(self_tests, "build_dispatcher", raising(PeerError("rank 1 refused: no device")))
    test = named(found(command, "-b", "alltoall", status=1), "alltoall")["self_test"]
    assert (test["passed"], test["error"]) == (False, "rank 1 refused: no device")
    monkeypatch.setattr(self_tests, "on_ranks", raising(RankFailed("rank 0 of 2: no store")))
    answer = command("doctor")
    assert (answer.status, answer.error) == (2, "Error: rank 0 of 2: no store\n")


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
    assert "excused by wire.dtypes none, on 1, 2 ranks: 1 scenario\n" in answer.out
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
