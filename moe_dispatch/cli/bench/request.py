"""What ``bench`` is asked: a suite, and the cases it is run on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, final, get_args

from moe_dispatch.cli.bench.case import Case, Dtype
from moe_dispatch.cli.bench.entrants import OURS, absent_peers, graph_safe_modes, parse_entrants
from moe_dispatch.cli.bench.measurement import Task
from moe_dispatch.cli.bench.workload import Shape, Skew
from moe_dispatch.cli.ranks import num_ranks, under_torchrun
from moe_dispatch.errors import ConfigError

_LAYER = {
    "tokens": "4096",
    "hidden": "1024",
    "experts": "64",
    "top-k": "8",
    "dtype": "bfloat16,float32",
    "routing": "balanced,skewed",
}
_ONE_KIND = {"dtype": "bfloat16", "routing": "balanced"}
# Values of the axes that are not given, by suite.
SUITES = {
    "layer": _LAYER,
    "overhead": {**_LAYER, **_ONE_KIND, "tokens": "16"},
    "growth": {**_LAYER, **_ONE_KIND, "tokens": "1024"},
    "graph-safe": _LAYER,
}
_WORDS: dict[str, tuple[str, ...]] = {"dtype": get_args(Dtype), "routing": get_args(Skew)}
# Where growth goes from its base, one axis at a time.
GROWTH: dict[str, tuple[int, ...]] = {
    "tokens": (256, 512, 1024, 2048, 4096),
    "hidden": (256, 512, 1024, 2048, 4096),
    "experts": (16, 32, 64, 128, 256),
    "top_k": (1, 2, 4, 8, 16),
}
GROWTH_RANKS = (1, 2, 4, 8)
# Where the suite "layer" looks besides, if no axis is given: from its shape, in bfloat16 and balanced.
LAYER_SHAPES: tuple[dict[str, int], ...] = (
    {"tokens": 64},
    {"tokens": 16384},
    {"top_k": 2},
    {"experts": 8},
    {"experts": 256},
)
QUICK_TOKENS, QUICK_ITERATIONS = 256, 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """All that is measured.

    Attributes:
        tasks: each with its number of ranks.
        left_out: peers that are not here and combinations of values that cannot be, and why.
    """

    suite: str
    iterations: int
    tasks: tuple[tuple[int, Task], ...]
    left_out: tuple[str, ...]

    @property
    def keys(self) -> set[tuple[Case, str]]:
        """Every case with every contender."""
        return {(case, entrant.label) for _, task in self.tasks for case in task.cases for entrant in task.entrants}


def make_request(
    suite: str,
    axes: Mapping[str, str | None],
    contenders: str | None,
    *,
    ranks: int,
    iterations: int,
    quick: bool,
) -> Request:
    """What the command line asks for.

    Args:
        suite: of ``SUITES``.
        axes: by name, values with commas between; None for the suite's own.
        contenders: names, with commas between.
        ranks: processes to start; torchrun knows its own.
        iterations: warm runs of each contender.
        quick: no more than 256 tokens and 2 iterations.

    Raises:
        ConfigError: the suite, a value, a contender or all combinations of values are wrong.
        BackendUnavailableError: a contender that is not here.
    """
    if suite not in SUITES:
        raise ConfigError(f"SUITE must be one of {', '.join(SUITES)}, got {suite!r}. Use one of these.")
    given = {name: text for name, text in axes.items() if text is not None}
    values = {name: _values(name, text) for name, text in {**SUITES[suite], **given}.items()}
    if quick:
        values["tokens"] = tuple(dict.fromkeys(min(tokens, QUICK_TOKENS) for tokens in values["tokens"]))
        iterations = min(iterations, QUICK_ITERATIONS)
    own = suite == "graph-safe"
    entrants = parse_entrants(OURS if own and contenders is None else contenders)
    cases = _cases(suite, values, num_ranks(ranks), quick=quick)
    if suite == "layer" and not given and not quick:
        cases += [replace(cases[0], shape=replace(cases[0].shape, **axis)) for axis in LAYER_SHAPES]
    faults = {case: fault for case in cases if (fault := _fault(case)) is not None}
    if len(faults) == len(cases):
        raise ConfigError(
            f"bench: at least one combination of values must be possible, got {next(iter(faults.values()))}. "
            "Change --experts, --top-k or --ranks."
        )
    task = Task(
        suite=suite,
        cases=tuple(case for case in cases if case not in faults),
        entrants=graph_safe_modes(entrants) if own else entrants,
        iterations=iterations,
    )
    absent = absent_peers() if contenders is None and not own else []
    impossible = [f"{case} is left out: {fault}" for case, fault in faults.items()]
    return Request(
        suite=suite,
        iterations=iterations,
        tasks=tuple(_by_ranks(task)),
        left_out=(*absent, *impossible),
    )


def _values(axis: str, text: str) -> tuple[Any, ...]:
    """The values of an axis, once each.

    Raises:
        ConfigError: one that cannot be.
    """
    words = tuple(dict.fromkeys(text.split(",")))
    if axis in _WORDS:
        if wrong := [word for word in words if word not in _WORDS[axis]]:
            raise ConfigError(f"--{axis} must be of {', '.join(_WORDS[axis])}, got {wrong[0]!r}. Use these.")
        return words
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--{axis} must be whole numbers from 1 on with commas between, got {text!r}. "
            f"Write for example --{axis} {SUITES['layer'][axis]}."
        )
    return tuple(map(int, words))


def _cases(suite: str, values: Mapping[str, tuple[Any, ...]], ranks: int, *, quick: bool) -> list[Case]:
    """All that the suite looks at, possible or not, once each."""
    combined = [
        Case(shape=Shape(tokens=T, hidden=D, experts=E, top_k=K), dtype=dtype, routing=routing, ranks=ranks)
        for T, D, E, K in product(values["tokens"], values["hidden"], values["experts"], values["top-k"])
        for dtype in values["dtype"]
        for routing in values["routing"]
    ]
    if suite == "growth":
        combined = list(_grown(_base(combined, values), quick=quick))
    elif suite == "overhead":  # a rank that is alone has its core to itself
        combined = [replace(case, ranks=size) for size in (1, ranks) for case in combined]
    return list(dict.fromkeys(combined))


def _base(cases: list[Case], values: Mapping[str, tuple[Any, ...]]) -> Case:
    several = [f"--{axis} {','.join(map(str, found))}" for axis, found in values.items() if len(found) > 1]
    if several:
        raise ConfigError(
            f"growth starts from one value of each axis, got {' '.join(several)}. Give one; the suite varies it itself."
        )
    return cases[0]


def _grown(base: Case, *, quick: bool) -> Iterator[Case]:
    """One axis at a time; ``quick`` takes two points of each."""
    points = 2 if quick else None
    for axis, sizes in GROWTH.items():
        for size in sizes[:points]:
            yield replace(base, shape=replace(base.shape, **{axis: size}))
    for ranks in GROWTH_RANKS[:points]:
        yield replace(base, ranks=ranks)


def _fault(case: Case) -> str | None:
    """Why a case cannot be run."""
    shape = case.shape
    if shape.experts % case.ranks:
        return f"{shape.experts} experts cannot be divided among {case.ranks} ranks"
    if shape.top_k > shape.experts:
        return f"top-{shape.top_k} of {shape.experts} experts"
    if under_torchrun() and case.ranks != num_ranks(case.ranks):
        return f"torchrun started {num_ranks(case.ranks)} ranks"
    return None


def _by_ranks(task: Task) -> Iterator[tuple[int, Task]]:
    for ranks in dict.fromkeys(case.ranks for case in task.cases):
        yield ranks, replace(task, cases=tuple(case for case in task.cases if case.ranks == ranks))
