"""``doctor``: what it finds of usable, unusable and broken backends, and how it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_dispatch.backends import register_backend
from moe_dispatch.errors import PeerError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools.doctor import diagnosis, self_tests
from tests.cli.conftest import Command, on_threads
from tests.cli.planted import Absent, Halved, Raising
from tests.cli.test_command import start

SMALL = ("--num-experts", "8", "--top-k", "2", "--hidden", "512")
# Frozen: scripts read it.
KEYS = {
    "": "machine topology model backends permutations",
    "machine": "moe_dispatch python torch cuda nccl gloo cpu_cores gpus",
    "topology": "launcher ranks ranks_per_node nodes transport",
    "model": "num_experts top_k hidden_size",
    "backends": "name emulates package usable reason version features ep_size constraints refused emulations self_test",
    "permutations": "name device usable reason version features self_test",
}
SELF_TEST_KEYS = "ranks device passed error"


def found(command: Command, *arguments: str, status: int = 0) -> dict[str, Any]:
    """What ``--json`` says."""
    answer = command("doctor", *SMALL, *arguments, "--json")
    assert answer.status == status, answer
    report: dict[str, Any] = json.loads(answer.out)
    return report


def named(report: dict[str, Any], name: str, emulates: str | None = None) -> dict[str, Any]:
    (backend,) = [one for one in report["backends"] if (one["name"], one["emulates"]) == (name, emulates)]
    return dict(backend)


def test_json_has_its_keys(command: Command) -> None:
    report = found(command)
    for name, keys in KEYS.items():
        part = report[name] if name else report
        for one in part if isinstance(part, list) else [part]:
            assert list(one) == keys.split()
    tests = [one["self_test"] for one in (*report["backends"], *report["permutations"]) if one["usable"]]
    assert all(list(test) == SELF_TEST_KEYS.split() for test in tests)


def test_what_can_be_used_is_tested(command: Command) -> None:
    report = found(command)
    for name, ranks in (("allgather", 2), ("alltoall", 2), ("local", 1)):
        backend = named(report, name)
        assert backend["usable"]
        assert backend["package"] == "moe_dispatch"
        assert backend["ep_size"] == ranks
        assert backend["self_test"] == {"ranks": ranks, "device": "cpu", "passed": True, "error": None}
    assert named(report, "allgather")["constraints"]["equal_rows"] is True
    assert "equal_rows" not in named(report, "alltoall")["constraints"]
    by_place = {(one["name"], one["device"]): one for one in report["permutations"]}
    assert by_place["torch", "cpu"]["self_test"]["passed"] is True
    assert by_place["te", "cpu"]["reason"].startswith("transformer-engine's kernels run on CUDA devices only")
    assert len(by_place) == 6


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
    assert [one["emulates"] for one in emulated] == [
        "v1.2.1",
        "v2-2.1.0",
        "v2.5.0",
        "hybridep-34152ae",
        "hybridep-94a9f8f",
        "hybridep-744",
        "hybridep-746",
    ]
    assert all((one["self_test"]["passed"], one["self_test"]["ranks"]) == (True, 2) for one in emulated)
    assert named(report, "hybridep", "hybridep-34152ae")["constraints"]["row_multiple"] == 64
    assert named(report, "deepep", "v2-2.1.0")["constraints"]["group_sizes"] == "1 to 1024"


def test_model_that_a_backend_refuses_is_the_answer(command: Command) -> None:
    assert found(command, "--backend", "alltoall", "--ep", "4")["backends"][0]["refused"] is None
    backend = found(command, "--backend", "alltoall", "--ep", "3", status=1)["backends"][0]
    assert backend["refused"] == ("num_experts (8) must be divisible by ep_size (3). Use 9 experts or ep_size 2.")
    assert backend["self_test"]["passed"] is True


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
    assert backend["package"] == "tests"
    assert backend["self_test"]["passed"] is False
    assert "identity experts must give x times the weight sum" in backend["self_test"]["error"]
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


def test_failure_before_any_test_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise RankFailed("rank 0 of 2: no store")

    monkeypatch.setattr(self_tests, "on_ranks", failing)
    with pytest.raises(RankFailed, match="no store"):
        diagnosis.diagnose(diagnosis.Request(), lambda done, of: None)


def test_whatever_a_third_party_raises_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: object) -> None:
        raise ArithmeticError("planted in constraints")

    register_backend(Raising)
    monkeypatch.setattr(Raising, "constraints", raising)
    backend = named(found(command, "-b", "raising", status=1), "raising")
    assert backend["refused"] == "constraints() raised ArithmeticError: planted in constraints"
    assert backend["self_test"]["passed"] is False


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


def test_topology_is_that_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_tests, "on_ranks", on_threads)
    hosts = iter(["a", "a", "b", "b"])
    monkeypatch.setattr("socket.gethostname", lambda: next(hosts))
    _, topology = self_tests.run_jobs({}, 4, lambda done, of: None)
    assert (topology.ranks, topology.nodes, topology.transport) == (4, 2, "gloo")


@pytest.mark.slow
def test_command_prints_json_and_nothing_else() -> None:
    process = start("doctor", *SMALL, "--ranks", "1", "--backend", "alltoall", "--json")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert json.loads(out)["backends"][0]["self_test"]["passed"] is True
    assert error == ""
