"""The kit itself: its report, its excuses, and the ways to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from moe_dispatch.backends import Constraints, register_backend, registry
from moe_dispatch.backends.local import LocalOptions
from moe_dispatch_testing import SCENARIOS, Case, check_backend, kit, run_case
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.emulation.releases import LIKE_V1
from moe_dispatch_testing.kit import describe, excuse, fitted
from moe_dispatch_testing.scenario import Scenario
from tests.cli.planted import Halved
from tests.conformance.backends import BACKENDS, EXAMPLE, more_backends


def test_report_of_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [scenario for scenario in SCENARIOS if scenario.name in ("skewed", "float32_experts", "float64", "nowhere")]
    needs = Constraints(group_sizes=frozenset({1}), dtypes=frozenset({torch.float32}))
    monkeypatch.setattr(kit, "SCENARIOS", tuple(few))
    monkeypatch.setattr(registry, "_REGISTERED", {**registry._REGISTERED})
    monkeypatch.setattr(Halved, "constraints", lambda options, shape: needs)
    report = check_backend(register_backend(Halved).name, (1, 2))
    assert not report.conforms
    assert {failure.case for failure in report.failed} == {
        f"{name}-ep1-{form}-agree"
        for name in ("skewed", "float32_experts")
        for form in ("rows", "bshd", "thd_with_gaps_on_device")
    }
    assert all(re.search("ConformanceError: (y|weights): entry", failure.error) for failure in report.failed)
    assert {name.partition("-")[0] for name in report.passed} == {"nowhere"}
    assert {(e.scenario, e.ep_size): e.reason for e in report.excused if e.ep_size == 1} == {
        ("float64", 1): "dtypes torch.float32"
    }
    assert str(report).startswith("backend halved: 3 passed, 6 failed, 5 scenarios excused")


def test_report_of_a_right_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SCENARIOS", SCENARIOS[:2])
    report = check_backend({"name": "local", "reduction": "exact"}, (1,))
    assert report.conforms
    assert report.backend == "local reduction=exact"
    assert not report.excused


def test_a_backend_that_ran_nothing_does_not_conform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SCENARIOS", SCENARIOS[:2])
    assert not check_backend("local", (2,)).conforms


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("devices", frozenset({"cuda"}), "devices cuda"),
        ("dtypes", frozenset({torch.bfloat16}), "dtypes torch.bfloat16"),
        ("max_hidden", 16, "max_hidden 16"),
        ("max_local_experts", 4, "max_local_experts 4"),
        ("local_experts_multiple", 16, "local_experts_multiple"),
        ("max_top_k", 2, "max_top_k 2"),
        ("max_rows", 8, "max_rows 8"),
        ("group_sizes", frozenset({8, 16}), "group_sizes 8, 16"),
    ],
)
def test_excuses_name_the_constraint(field: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Constraints(**{field: value})  # type: ignore[arg-type]
    monkeypatch.setattr(LocalOptions, "constraints", lambda options, shape: needs)
    assert excuse("local", SCENARIOS[0], 1) == reason


def test_scenarios_of_the_same_data_share_it() -> None:
    """The kit draws data once per ``drawn``, so the fields that ``drawn`` resets must not change the data."""
    assert len({scenario.drawn for scenario in SCENARIOS}) < len(SCENARIOS) / 2
    for scenario in SCENARIOS:
        own, shared = scenario.batches(2, 1, 1), scenario.drawn.batches(2, 1, 1)
        for one, other in zip(own, shared, strict=True):
            for name in ("x_TD", "ids_TK", "weights_TK", "upstream_TD"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(scenario.experts(1).matrix_EWW, scenario.drawn.experts(1).matrix_EWW)


def alone() -> list[Any]:
    """Return a test parameter for each backend that runs on one rank, and each of a few scenarios."""
    names = ("balanced", "nowhere", "two_in_flight", "rank_without_tokens")
    chosen = [scenario for scenario in SCENARIOS if scenario.name in names]
    with more_backends():
        return [
            pytest.param(backend, fitted(backend, scenario, 1), id=f"{scenario.name}-{describe(backend)}")
            for scenario in chosen
            for backend in BACKENDS
            if excuse(backend, scenario, 1) is None
        ]


ALONE = alone()


@pytest.mark.parametrize(("backend", "scenario"), ALONE)
def test_one_rank_without_a_group(backend: BackendSpec, scenario: Scenario) -> None:
    run_case(backend, Case(scenario=scenario, ep_size=1, input_layout="bshd", row_counts="agree"), None)


def test_one_rank_without_a_group_is_for_most_backends() -> None:
    """All but v1 of deep_ep, and libraries that are not installed run on one rank."""
    ran = {describe(case.values[0]) for case in ALONE}
    missing = {describe(backend) for backend in BACKENDS} - ran
    assert missing == {"deepep", "hybridep", "nccl_ep", *(f"deepep emulate={name}" for name in ("v1.2.1", *LIKE_V1))}


@pytest.mark.slow
def test_the_example_tests_itself() -> None:
    command = [sys.executable, *f"-m pytest -q -p no:cacheprovider -c {os.devnull} --rootdir".split(), str(EXAMPLE)]
    chosen = ["-k", "entry_point or (balanced and ep2)", str(EXAMPLE / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    finished = subprocess.run(
        [*command, *chosen], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout
