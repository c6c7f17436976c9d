"""Scenario x backend x ep size x input layout x policy, forward and backward, against a dense float64 reference."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from moe_dispatch.backends import known_backends
from moe_dispatch_testing import SCENARIOS, Excuse, conformance_cases, excuses
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS
from moe_dispatch_testing.kit import EP_SIZES, describe
from moe_dispatch_testing.scenario import ROUTINGS
from moe_dispatch_testing.schedules import SCHEDULES
from tests.conformance.backends import BACKENDS
from tests.conformance.cases import chosen_cases

EVERY = {
    frozenset(scenario.name for scenario in SCENARIOS): "every scenario",
    frozenset(scenario.name for scenario in SCENARIOS if scenario.graph_safe): "every graph-safe scenario",
}
EXCUSED = Path(__file__).with_name("excused.txt")


@pytest.mark.parametrize("run", list(chosen_cases(short=True)))
def test_conforms(run: Callable[[], None]) -> None:
    run()


def summary(backend: str, found: Iterable[Excuse]) -> Iterator[str]:
    """Yield a line for each reason and its group sizes, with the scenarios that it excuses."""
    sizes: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for excuse in found:
        sizes[excuse.scenario, excuse.reason].append(excuse.ep_size)
    scenarios: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for (scenario, reason), ep_sizes in sizes.items():
        scenarios[", ".join(map(str, ep_sizes)), reason].append(scenario)
    for (ep_sizes_text, reason), names in sorted(scenarios.items()):
        which = EVERY.get(frozenset(names)) or listed(names)
        yield f"{backend} | ep_size {ep_sizes_text} | {reason} | {which}"


def listed(names: list[str]) -> str:
    """Name scenarios; if the graph-safe variant of each is excused too, name each once and say so."""
    eager = {name for name in names if not name.endswith("_graph_safe")}
    if eager == {name.removesuffix("_graph_safe") for name in {*names} - eager}:
        return f"{', '.join(sorted(eager))}; graph-safe too"
    return ", ".join(sorted(names))


def test_excused_list_is_reviewed() -> None:
    """A change of constraints or scenarios shows here which cases no longer run. Review them, then update the file."""
    computed = [line for backend in BACKENDS for line in summary(describe(backend), excuses(backend))]
    reviewed = [line for line in EXCUSED.read_text().splitlines() if line and not line.startswith("#")]
    assert computed == reviewed, "\n".join(["excused.txt must hold:", *computed])


def test_every_backend_runs_or_is_listed() -> None:
    listed = {line.partition(" ")[0] for line in EXCUSED.read_text().splitlines()}
    runs = {
        describe(backend).partition(" ")[0] for backend in BACKENDS if any(True for _ in conformance_cases(backend))
    }
    assert set(known_backends()) <= runs | listed
    assert {"allgather", "alltoall", "local", "ring", "strict"} <= runs


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_every_scenario_runs_somewhere(ep_size: int) -> None:
    ran = {name.partition("-ep")[0] for backend in BACKENDS for name, _ in conformance_cases(backend, (ep_size,))}
    assert ran - {"ranks_differ"} == {scenario.name for scenario in SCENARIOS}
    assert ("ranks_differ" in ran) == (ep_size == 2)


def test_nothing_in_the_kit_lies_idle() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    assert {scenario.routing for scenario in SCENARIOS} == set(ROUTINGS)
    assert {scenario.schedule for scenario in SCENARIOS} == set(SCHEDULES)
    assert any(scenario.input_layouts == "all" for scenario in SCENARIOS)
    assert {policy for scenario in SCENARIOS for policy in scenario.row_counts} == {
        "agree",
        "assume",
        "check",
        "static",
    }
    assert {"rows", "bshd", "thd_with_gaps_on_device"} <= set(INPUT_LAYOUTS)
