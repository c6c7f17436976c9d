"""All cases of a backend: which run, which its constraints excuse, and what came of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import torch

from moe_dispatch.backends import Backend, BackendOptions, Constraints, MoEShape, Rejected, load_backend
from moe_dispatch.backends.base import listed_sizes
from moe_dispatch.testing.case import BackendSpec, Case, run_case
from moe_dispatch.testing.forms import FORMS
from moe_dispatch.testing.ranks import Ranks
from moe_dispatch.testing.scenario import Scenario
from moe_dispatch.testing.scenarios import SCENARIOS

EP_SIZES = (1, 2, 4)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Excuse:
    """A scenario that a backend need not run on so many ranks, and the constraint that says so."""

    scenario: str
    ep_size: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A case that went wrong, its error in a line, and its traceback."""

    case: str
    summary: str
    error: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ``check_backend`` found.

    Attributes:
        backend: its name, and options if any.
        passed: ids of cases that ran and were right.
        excused: what its constraints rule out.
        failed: what ran and was wrong.
    """

    backend: str
    passed: tuple[str, ...]
    excused: tuple[Excuse, ...]
    failed: tuple[Failure, ...]

    @property
    def conforms(self) -> bool:
        """Something ran, and nothing failed."""
        return bool(self.passed) and not self.failed

    def __str__(self) -> str:
        """A summary, with the error of every failed case."""
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
        backend: what ``DispatcherConfig.backend`` takes: a name, or a mapping with the name and options.
        ep_sizes: sizes of the groups to run on; ranks are threads of this process.
        on_case: called after every case with how many are done, and of how many.

    Raises:
        ConfigError: no such backend, or wrong options.

    Cost: 5 ms a case on one rank to 50 ms on four; some 700 cases. In pytest, parametrize over
    ``conformance_cases``.
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
    """The kind and the text of an error, and where it was raised, in a line."""
    told = f"{type(error).__name__}: {error} {'; '.join(getattr(error, '__notes__', ()))}"
    return " ".join(told.split())


def conformance_cases(
    backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES, *, ranks: Ranks | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ids and callables of the cases that a backend must pass; a callable raises where it does not.

    Several backends may share ``ranks``, whose groups cost threads as long as they are kept.

    ::

        @pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in conformance_cases("mine")])
        def test_conforms(run):
            run()
    """
    ranks = ranks or Ranks()
    for case in backend_cases(backend, ep_sizes):
        yield case.id, partial(run_case, backend, case, ranks)


def backend_cases(backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES) -> Iterator[Case]:
    """Scenario x ep size x form x policy, as the backend can carry them, without what is excused."""
    for scenario in SCENARIOS:
        for ep_size in ep_sizes:
            if excuse(backend, scenario, ep_size) is None:
                yield from scenario_cases(fitted(backend, scenario, ep_size), ep_size)


def scenario_cases(scenario: Scenario, ep_size: int) -> Iterator[Case]:
    """Every form under every policy that the scenario names."""
    for form in FORMS if scenario.forms == "all" else scenario.forms:
        for row_counts in scenario.row_counts:
            yield Case(scenario=scenario, ep_size=ep_size, form=form, row_counts=row_counts)


def excuses(backend: BackendSpec, ep_sizes: Sequence[int] = EP_SIZES) -> Iterator[Excuse]:
    """What a backend's constraints rule out."""
    for scenario in SCENARIOS:
        for ep_size in ep_sizes:
            reason = excuse(backend, scenario, ep_size)
            if reason is not None:
                yield Excuse(scenario=scenario.name, ep_size=ep_size, reason=reason)


def excuse(backend: BackendSpec, scenario: Scenario, ep_size: int) -> str | None:
    """The rule by which a backend need not run a scenario on so many ranks; None when it must."""
    cls, options = _backend(backend)
    verdict = cls.probe(options)
    if isinstance(verdict, Rejected):
        return f"it cannot be used here: {verdict.reason}"
    scenario = fitted(backend, scenario, ep_size)
    shape = scenario.shape(ep_size)
    return _broken_rule(cls.constraints(shape, options), scenario, shape)


def fitted(backend: BackendSpec, scenario: Scenario, ep_size: int) -> Scenario:
    """The scenario as the backend can carry it on so many ranks."""
    cls, options = _backend(backend)
    return scenario.fitted(cls.constraints(scenario.shape(ep_size), options))


def _backend(backend: BackendSpec) -> tuple[type[Backend], BackendOptions]:
    name, options = (backend, {}) if isinstance(backend, str) else _without_name(backend)
    cls = load_backend(name)
    return cls, cls.Options.model_validate(options)


def describe(backend: BackendSpec) -> str:
    """A backend's name, and its options if any."""
    if isinstance(backend, str):
        return backend
    name, options = _without_name(backend)
    return " ".join([name, *(f"{option}={value}" for option, value in options.items())])


def _without_name(backend: dict[str, object]) -> tuple[str, dict[str, object]]:
    return str(backend["name"]), {option: value for option, value in backend.items() if option != "name"}


def _broken_rule(needs: Constraints, scenario: Scenario, shape: MoEShape) -> str | None:
    rules = (
        (
            needs.group_sizes is None or shape.ep_size in needs.group_sizes,
            f"group_sizes {listed_sizes(needs.group_sizes or frozenset())}",
        ),
        (needs.graph_safe or not scenario.graph_safe, "graph_safe False"),
        (needs.devices is None or "cpu" in needs.devices, f"devices {_listed(needs.devices)}"),
        (_is_carried(scenario, needs), f"dtypes {_listed(needs.dtypes)}"),
        (scenario.wire_dtype in (None, *needs.wire_dtypes), f"wire_dtypes {_listed(needs.wire_dtypes)}"),
        (needs.max_hidden is None or shape.hidden_size <= needs.max_hidden, f"max_hidden {needs.max_hidden}"),
        (shape.num_local_experts % needs.local_experts_multiple == 0, "local_experts_multiple"),
        (
            needs.max_local_experts is None or shape.num_local_experts <= needs.max_local_experts,
            f"max_local_experts {needs.max_local_experts}",
        ),
        (needs.max_top_k is None or shape.top_k <= needs.max_top_k, f"max_top_k {needs.max_top_k}"),
        (needs.idle_ranks or not _leaves_ranks_idle(scenario.drawn, shape.ep_size), "idle_ranks False"),
        (needs.max_rows is None or _most_rows(scenario, needs) <= needs.max_rows, f"max_rows {needs.max_rows}"),
    )
    return next((rule for holds, rule in rules if not holds), None)


def _is_carried(scenario: Scenario, needs: Constraints) -> bool:
    return scenario.wire_dtype is not None or needs.dtypes is None or scenario.torch_dtype in needs.dtypes


@cache
def _leaves_ranks_idle(drawn: Scenario, ep_size: int) -> bool:
    """Whether some rank receives nothing in some call."""
    num_local_experts = drawn.num_experts // ep_size
    calls = [drawn.batches(ep_size, call, turn) for call in range(3) for turn in range(len(drawn.tokens))]
    ids = [torch.cat([batch.ids_TK for batch in batches]) for batches in calls]
    owners = [of_call.div(num_local_experts, rounding_mode="floor").unique() for of_call in ids]
    return any(len(found[found >= 0]) < ep_size for found in owners)


def _most_rows(scenario: Scenario, needs: Constraints) -> int:
    """Rows that a rank may have to bring, in whatever form, padded."""
    return needs.padded(scenario.max_tokens if scenario.graph_safe else scenario.most_rows)


def _listed(values: frozenset[object] | None) -> str:
    return ", ".join(sorted(map(str, values or ()))) or "none"
