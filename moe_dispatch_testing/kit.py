"""The conformance kit: the cases that a backend must pass, the scenarios that it need not run, and a report."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

from moe_dispatch.backends import BackendOptions, Constraints, MoEShape, Rejected, parse_backend
from moe_dispatch.backends.base import listed_sizes
from moe_dispatch_testing.case import BackendSpec, Case, run_case
from moe_dispatch_testing.differences import run_each_manner, settings_of
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS
from moe_dispatch_testing.ranks import Ranks
from moe_dispatch_testing.reference import served_rows, slots_of_rank
from moe_dispatch_testing.scenario import Batch, Scenario
from moe_dispatch_testing.scenarios import SCENARIOS

EP_SIZES = (1, 2, 4)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Excuse:
    """A scenario that a backend need not run on groups of one size, and the constraint that excuses it."""

    scenario: str
    ep_size: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A case that failed: its name, its error in one line, and the traceback."""

    case: str
    summary: str
    error: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Result of ``check_backend``.

    Attributes:
        backend: Name of the backend, with its options if any.
        passed: Ids of the cases that passed.
        excused: Scenarios that the backend's constraints rule out.
        failed: Cases that failed.
    """

    backend: str
    passed: tuple[str, ...]
    excused: tuple[Excuse, ...]
    failed: tuple[Failure, ...]

    @property
    def conforms(self) -> bool:
        """Return whether at least one case passed and none failed."""
        return bool(self.passed) and not self.failed

    def __str__(self) -> str:
        """Summarise the cases, and append the error of each failed case."""
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.excused)} scenarios excused"
        return "\n".join(
            [f"backend {self.backend}: {counts}"]
            + [f"  excused: {e.scenario} on {e.ep_size} ranks: {e.reason}" for e in self.excused]
            + [f"  failed: {failure.case}\n{failure.error}" for failure in self.failed]
        )


def check_backend(
    backend: BackendSpec,
    ep_sizes: Sequence[int] = EP_SIZES,
    *,
    on_case: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Run the conformance kit on a backend, on the CPU.

    Args:
        backend: Name of the backend, or a mapping with its name and options, as in ``DispatcherConfig.backend``.
        ep_sizes: Sizes of the groups to run on. Ranks are threads of this process.
        on_case: Function that is called after every case with the number of cases done and the number of all cases.

    Raises:
        ConfigError: The backend is unknown or its options are wrong.

    Cost: about 700 cases. A case takes about 5 ms on one rank and 50 ms on four ranks. In pytest, parametrize over
    ``conformance_cases`` instead.
    """
    passed, failed = [], []
    cases = list(conformance_cases(backend, ep_sizes))
    for done, (name, run) in enumerate(cases, start=1):
        try:
            run()
            passed.append(name)
        except Exception as error:
            failed.append(Failure(case=name, summary=_summary(error), error=traceback.format_exc()))
        on_case(done, len(cases))
    return Report(
        backend=describe(backend), passed=tuple(passed), excused=tuple(excuses(backend, ep_sizes)), failed=tuple(failed)
    )


def _summary(error: Exception) -> str:
    """Describe an error in one line: its class, message and notes, which name the rank."""
    text = f"{type(error).__name__}: {error} {'; '.join(getattr(error, '__notes__', ()))}"
    return " ".join(text.split())


def conformance_cases(
    backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES, *, ranks: Ranks | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the id of each case that a backend must pass, and a callable that raises if the backend fails it.

    Several backends may share ``ranks``. Its groups keep their threads as long as it exists.

    ::

        @pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in conformance_cases("mine")])
        def test_conforms(run):
            run()
    """
    ranks = ranks or Ranks()
    for case in backend_cases(backend, ep_sizes):
        yield case.id, partial(run_case, backend, case, ranks)
    if 2 in ep_sizes:
        for setting in difference_settings(backend):
            yield f"ranks_differ-ep2-{setting}", partial(run_each_manner, backend, setting, ranks)


def difference_settings(backend: BackendSpec) -> list[str]:
    """Return the settings in which the backend must run ranks that differ; none if it cannot train on two ranks."""
    plain = Scenario(name="plain")
    trains = options_of(backend).constraints(plain.shape(2)).differentiable
    return settings_of(backend) if trains and excuse(backend, plain, 2) is None else []


def backend_cases(backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES, *, device: str = "cpu") -> Iterator[Case]:
    """Yield the cases of all scenarios that the backend must pass on this kind of device, adapted to the backend."""
    for scenario in SCENARIOS:
        for ep_size in ep_sizes:
            if excuse(backend, scenario, ep_size, device) is None:
                for case in scenario_cases(fitted(backend, scenario, ep_size), ep_size):
                    yield dataclasses.replace(case, device=device)


def scenario_cases(scenario: Scenario, ep_size: int) -> Iterator[Case]:
    """Yield the cases of one scenario: every input layout under every policy that the scenario names."""
    for name in INPUT_LAYOUTS if scenario.input_layouts == "all" else scenario.input_layouts:
        for row_counts in scenario.row_counts:
            yield Case(scenario=scenario, ep_size=ep_size, input_layout=name, row_counts=row_counts)


def excuses(backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES) -> Iterator[Excuse]:
    """Yield the scenarios that a backend's constraints rule out."""
    for scenario in SCENARIOS:
        for ep_size in ep_sizes:
            reason = excuse(backend, scenario, ep_size)
            if reason is not None:
                yield Excuse(scenario=scenario.name, ep_size=ep_size, reason=reason)


def excuse(backend: BackendSpec, scenario: Scenario, ep_size: int, device: str = "cpu") -> str | None:
    """Return the rule that excuses a backend from a scenario on ``ep_size`` ranks, or None if it must run there."""
    options = options_of(backend)
    verdict = options.probe()
    if isinstance(verdict, Rejected):
        return f"it cannot be used here: {verdict.reason}"
    scenario = fitted(backend, scenario, ep_size)
    shape = scenario.shape(ep_size)
    return _broken_rule(options.constraints(shape), scenario, shape, device)


def fitted(backend: BackendSpec, scenario: Scenario, ep_size: int) -> Scenario:
    """Return the scenario, adapted to the constraints of the backend on ``ep_size`` ranks."""
    return scenario.fitted(options_of(backend).constraints(scenario.shape(ep_size)))


def options_of(backend: BackendSpec) -> BackendOptions:
    """Return the options of a backend under test, which must not be "auto"."""
    options = parse_backend(backend)
    assert options is not None
    return options


def describe(backend: BackendSpec) -> str:
    """Return the name of a backend, with its options if any."""
    if isinstance(backend, str):
        return backend
    options = {**backend}
    name = str(options.pop("name"))
    return " ".join([name, *(f"{option}={value}" for option, value in options.items())])


def _broken_rule(needs: Constraints, scenario: Scenario, shape: MoEShape, device: str) -> str | None:
    rules = (
        (scenario.num_experts % shape.ep_size == 0, f"num_experts {scenario.num_experts}"),
        (
            needs.group_sizes is None or shape.ep_size in needs.group_sizes,
            f"group_sizes {listed_sizes(needs.group_sizes or frozenset())}",
        ),
        (needs.graph_safe or not scenario.graph_safe, "graph_safe False"),
        (needs.devices is None or device in needs.devices, f"devices {_listed(needs.devices)}"),
        (_is_carried(scenario, needs), f"dtypes {_listed(needs.dtypes)}"),
        (needs.wire.carries(scenario.wire_dtype), f"wire.dtypes {_listed(needs.wire.dtypes)}"),
        (
            needs.wire.gradients == "can"
            or scenario.wire_dtype in (None, "bfloat16")
            or (needs.wire.gradients == "must") == (scenario.grad_wire_dtype is not None),
            f"wire.gradients {needs.wire.gradients}",
        ),
        (needs.wire.delivers or not shape.quantised, "wire.delivers False"),
        (needs.max_hidden is None or shape.hidden_size <= needs.max_hidden, f"max_hidden {needs.max_hidden}"),
        (shape.num_local_experts % needs.local_experts_multiple == 0, "local_experts_multiple"),
        (
            needs.max_local_experts is None or shape.num_local_experts <= needs.max_local_experts,
            f"max_local_experts {needs.max_local_experts}",
        ),
        (needs.max_top_k is None or shape.top_k <= needs.max_top_k, f"max_top_k {needs.max_top_k}"),
        (needs.idle_ranks or not _leaves_ranks_idle(_placed(scenario), shape.ep_size), "idle_ranks False"),
        (needs.max_rows is None or _most_rows(scenario, needs) <= needs.max_rows, f"max_rows {needs.max_rows}"),
    )
    return next((rule for holds, rule in rules if not holds), None)


def _is_carried(scenario: Scenario, needs: Constraints) -> bool:
    return scenario.wire_dtype is not None or needs.dtypes is None or scenario.torch_dtype in needs.dtypes


def _placed(scenario: Scenario) -> Scenario:
    """Return the drawn scenario with the placement of the scenario."""
    return dataclasses.replace(scenario.drawn, spare=scenario.spare)


@cache
def _leaves_ranks_idle(drawn: Scenario, ep_size: int) -> bool:
    """Return whether some rank receives no row in some call."""
    calls = [drawn.batches(ep_size, call, turn) for call in range(3) for turn in range(len(drawn.tokens))]
    return any(_is_idle(drawn, batches, rank) for batches in calls for rank in range(ep_size))


def _is_idle(drawn: Scenario, batches: Sequence[Batch], rank: int) -> bool:
    served = [(expert, rank) for expert in slots_of_rank(drawn, rank, len(batches))]
    sources = range(len(batches))
    return not any(
        bool(served_rows(drawn, batches, source, one, len(batches)).any()) for one in served for source in sources
    )


def _most_rows(scenario: Scenario, needs: Constraints) -> int:
    """Return the largest number of rows on any rank in any input layout, padded."""
    return needs.padded(scenario.max_tokens if scenario.graph_safe else scenario.most_rows)


def _listed(values: frozenset[object] | None) -> str:
    return ", ".join(sorted(map(str, values or ()))) or "none"
