"""``doctor``: what it finds of usable, unusable and broken backends, and how it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch.backends import register_backend
from moe_dispatch.errors import PeerError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools import machine
from moe_dispatch_tools.doctor import self_tests
from tests.cli.conftest import Command, on_threads
from tests.cli.planted import Absent, Halved, Raising

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
    assert by_place["te", "cpu"]["reason"].startswith("transformer-engine's kernels run on CUDA devices only")
    assert len(by_place) == 6


def test_constraints_are_said_in_sentences(command: Command) -> None:
    shown = command("doctor", *SMALL, "-b", "alltoall").out
    told = "on 2 ranks: supports wire_dtype bfloat16, float8_e4m3fn, mxfp8; supports graph-safe mode; "
    assert shown.endswith(f"{told}supports torch.compile\n")


def test_toolkit_that_hybridep_needs_is_looked_for(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    shown = command("doctor", *SMALL, "-b", "local").out
    assert f"\nCUDA_HOME: {tmp_path}, without lib64/libcudart*, which HybridEP needs\n" in shown
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart.so.13").touch()
    assert f"\nCUDA_HOME: {tmp_path}\n" in command("doctor", *SMALL, "-b", "local").out


def test_nccl_is_that_which_is_loaded(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "loaded_nccl", lambda: (2, 32, 3))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 0))
    assert "NCCL 2.32.3," in command("doctor", *SMALL, "-b", "local").out


def test_missing_library_is_told_and_what_emulates_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_dispatch.backends.deep_ep.library.find_spec", lambda name: None)
    backend = named(found(command, "--backend", "deepep", status=1), "deepep")
    assert backend["reason"] == "no module named 'deep_ep' is installed"
    assert backend["emulations"] == ["v1.2.1", "v2-2.1.0", "v2.5.0"]
    assert backend["constraints"] == {}
    answer = command("doctor", "--backend", "deepep")
    assert "deepep: not usable: no module named 'deep_ep' is installed" in answer.out
    assert "can be emulated (--emulated): v1.2.1, v2-2.1.0, v2.5.0" in answer.out


def test_emulations_are_tested_on_request(command: Command) -> None:
    report = found(command, "--emulated")
    emulated = [one for one in report["backends"] if one["emulates"]]
    assert {one["emulates"] for one in emulated} >= {"v1.2.1", "v2-2.1.0", "v2.5.0", "hybridep-746"}
    assert all((one["self_test"]["passed"], one["self_test"]["ranks"]) == (True, 2) for one in emulated)
    assert named(report, "hybridep", "hybridep-34152ae")["constraints"]["row_multiple"] == 64
    assert named(report, "deepep", "v2-2.1.0")["constraints"]["group_sizes"] == "1 to 1024"


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


def test_rank_that_fails_costs_one_self_test(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(Raising)
    report = found(command, status=1)
    assert named(report, "raising")["self_test"] == {
        "ranks": 2,
        "device": "?",
        "passed": False,
        "error": "a rank of 2: planted in dispatch",
    }
    assert report["permutations"][0]["self_test"]["passed"] is True, "what comes after it is tested"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = command("doctor", *SMALL, "-b", "raising")
    assert (answer.status, answer.out) == (2, ""), "torchrun's ranks cannot be started anew"
    assert answer.error == "Error: a rank of 2: planted in dispatch\n"


def test_other_ranks_of_torchrun_leave_the_answer_to_the_first(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_backend(Halved)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = command("doctor", *SMALL, "-b", "halved")
    assert (answer.status, answer.out, answer.error) == (0, "", "")
    answer = command("doctor", *SMALL, "-b", "altoall")
    assert (answer.status, answer.out, answer.error) == (2, "", "")


def test_backend_that_another_rank_refuses_has_failed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise PeerError("rank 1 refused: no device")

    monkeypatch.setattr(self_tests, "build_dispatcher", refused)
    test = named(found(command, "-b", "alltoall", status=1), "alltoall")["self_test"]
    assert (test["passed"], test["error"]) == (False, "rank 1 refused: no device")


def test_failure_before_any_test_is_an_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise RankFailed("rank 0 of 2: no store")

    monkeypatch.setattr(self_tests, "on_ranks", failing)
    answer = command("doctor")
    assert (answer.status, answer.error) == (2, "Error: rank 0 of 2: no store\n")


def test_whatever_a_third_party_raises_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: object) -> None:
        raise ArithmeticError("planted in constraints")

    register_backend(Raising)
    monkeypatch.setattr(Raising, "constraints", raising)
    backend = named(found(command, "-b", "raising", status=1), "raising")
    assert "planted in constraints" in backend["self_test"]["error"]
    assert (backend["constraints"], backend["self_test"]["passed"]) == ({}, False)


def test_rejected_backend_is_told(command: Command) -> None:
    register_backend(Absent)
    backend = named(found(command), "absent")
    assert (backend["usable"], backend["reason"], backend["self_test"]) == (False, "it was planted so", None)
    assert found(command, "-b", "absent", status=1)["permutations"] == []


def test_unknown_backend_is_an_error_with_a_hint(command: Command) -> None:
    answer = command("doctor", "--backend", "altoall")
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith("Error: Unknown backend 'altoall'. Known backends: ")
    assert answer.error.endswith("Did you mean 'alltoall'? [MD01]\n")


def test_backend_with_options_is_an_error_with_the_way_out(command: Command) -> None:
    answer = command("doctor", "--backend", "alltoall+reduction=exact")
    assert answer.status == 2
    assert (
        "must be a name without options, got 'alltoall+reduction=exact'. Write --backend alltoall, or" in answer.error
    )


def test_topology_is_that_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_tests, "on_ranks", on_threads)
    hosts = iter(["a", "a", "b", "b"])
    monkeypatch.setattr("socket.gethostname", lambda: next(hosts))
    _, topology = self_tests.run_self_tests({}, 4, lambda done, of: None)
    assert (topology["ranks"], topology["nodes"], topology["transport"]) == (4, 2, "gloo")
