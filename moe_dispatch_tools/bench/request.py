"""The request of ``bench``: a suite, its cases, and the contenders from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, final, get_args

import torch.distributed as dist

from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.probing import how_to_install
from moe_dispatch_tools.bench.contenders import ByHand, Contender, Ours
from moe_dispatch_tools.bench.floor import Floor
from moe_dispatch_tools.bench.peers import PEERS, missing_packages
from moe_dispatch_tools.bench.workload import Case, Dtype, Shape, Skew
from moe_dispatch_tools.names import PLACEMENT_FIELDS, NamedBackend, parse_backend
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import num_ranks, under_torchrun

OURS = "alltoall"
# Contenders besides the backends of this package.
CONTENDERS: dict[str, Callable[[Shape, dist.ProcessGroup], Contender]] = {"by-hand": ByHand, "floor": Floor, **PEERS}
# Capacity factors of suite graph-safe. They limit the rows of a rank, and on "alltoall" also the rows of a pair.
CAPACITY_FACTORS = (1.25, 2.0, "worst")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NamedContender:
    """A contender from the command line: by-hand, floor, a peer, or a backend of this package with options.

    Attributes:
        label: Text from the command line, with the capacity factor in graph-safe mode.
        backend: Backend of this package; None for a name in ``CONTENDERS``.
        capacity_factor: Capacity factor of graph-safe mode; None in eager mode.
    """

    label: str
    backend: NamedBackend | None = None
    capacity_factor: float | str | None = None

    def open(self, shape: Shape, place: Place) -> Contender:
        """Open a new contender. Collective.

        Raises:
            MoEDispatchError: A backend of this package cannot be used on this group or for this shape.
        """
        assert place.group is not None
        if self.backend is None:
            return CONTENDERS[self.label](shape, place.group)
        spec = self.backend.spec()
        alone = spec["name"] == "local" and place.size == 1
        fields = {"backend": spec} if self.capacity_factor is None else self._graph_safe(shape, spec)
        fields |= self.backend.fields
        return Ours(shape, None if alone else place.group, None if alone else place.control, **fields)

    @property
    def bytes_are_seen(self) -> bool:
        """Whether the contender sends through torch.distributed. The bench cannot count bytes of other libraries."""
        return self.backend is None or "emulate" not in self.backend.load().model_fields

    def _graph_safe(self, shape: Shape, spec: dict[str, Any]) -> dict[str, Any]:
        assert self.backend is not None
        pairs = "pair_rows" in self.backend.load().model_fields
        return {
            "backend": {**spec, **({"pair_rows": self.capacity_factor} if pairs else {})},
            "graph_safe": True,
            "max_tokens_per_rank": shape.tokens,
            "capacity_factor": self.capacity_factor,
            "on_overflow": None if self.capacity_factor == "worst" else "drop",
        }


def absent_peers() -> list[str]:
    """Describe the peers that are not installed."""
    return [
        f"{name} is left out, not installed: {', '.join(packages)}. {how_to_install('bench')}"
        for name in PEERS
        if (packages := missing_packages(name))
    ]


def parse_contenders(names: str | None) -> tuple[NamedContender, ...]:
    """Parse ``--contenders``. The default is alltoall, by-hand, floor, and the installed peers.

    Raises:
        ConfigError: A contender or an option does not exist, or a contender is an emulation.
        BackendUnavailableError: A peer is not installed, or a class cannot be imported.
    """
    here = [name for name in PEERS if not missing_packages(name)]
    texts = [OURS, "by-hand", "floor", *here] if names is None else names.split(",")
    return tuple(map(_named, dict.fromkeys(texts)))


def _named(text: str) -> NamedContender:
    if missing := missing_packages(text):
        raise BackendUnavailableError(
            f"--contenders: the packages of {text!r} must be installed, got no {', '.join(missing)}. "
            f"{how_to_install('bench')}"
        )
    if text in CONTENDERS:
        return NamedContender(label=text)
    backend = parse_backend(text, fields=PLACEMENT_FIELDS)
    try:
        backend.spec()
    except ConfigError as error:
        raise ConfigError(f"--contenders: {error} Besides backends there are {', '.join(CONTENDERS)}.") from error
    if backend.options.get("emulate"):
        raise ConfigError(
            f"--contenders must not be emulated, got {text!r}: the times of an emulation say nothing about its "
            "library. Check it with moe-dispatch compare."
        )
    return NamedContender(label=text, backend=backend)


def graph_safe_modes(contenders: tuple[NamedContender, ...]) -> tuple[NamedContender, ...]:
    """Return each contender in eager mode, then in graph-safe mode with several capacities.

    Raises:
        ConfigError: A contender is not a backend of moe-dispatch.
    """
    peers = [one.label for one in contenders if one.backend is None]
    if peers:
        raise ConfigError(
            f"--contenders of graph-safe must be backends of moe-dispatch, got {', '.join(peers)}. "
            f"Use, for example, {OURS}."
        )
    return tuple(
        mode
        for one in contenders
        for mode in (
            one,
            *(
                replace(one, label=f"{one.label}, capacity {factor}", capacity_factor=factor)
                for factor in CAPACITY_FACTORS
            ),
        )
    )


_LAYER = {
    "tokens": "4096",
    "hidden": "1024",
    "experts": "64",
    "top-k": "8",
    "dtype": "bfloat16,float32",
    "routing": "balanced,skewed",
}
_ONE_KIND = {"dtype": "bfloat16", "routing": "balanced"}
# Default values of the axes, by suite.
SUITES = {
    "layer": _LAYER,
    "overhead": {**_LAYER, **_ONE_KIND, "tokens": "16"},
    "growth": {**_LAYER, **_ONE_KIND, "tokens": "1024"},
    "graph-safe": _LAYER,
}
_WORDS: dict[str, tuple[str, ...]] = {"dtype": get_args(Dtype), "routing": get_args(Skew)}
# Values of the axes in suite growth, which varies one axis at a time.
GROWTH: dict[str, tuple[int, ...]] = {
    "tokens": (256, 512, 1024, 2048, 4096),
    "hidden": (256, 512, 1024, 2048, 4096),
    "experts": (16, 32, 64, 128, 256),
    "top_k": (1, 2, 4, 8, 16),
}
GROWTH_RANKS = (1, 2, 4, 8)
# More shapes of suite layer, in bfloat16 and balanced, if the command line gives no axis.
LAYER_SHAPES: tuple[dict[str, int], ...] = (
    {"tokens": 64},
    {"tokens": 16384},
    {"top_k": 2},
    {"experts": 8},
    {"experts": 256},
)
QUICK_TOKENS, QUICK_ITERATIONS = 256, 2
_CHECKS = 3  # agreement, bytes and memory: one part each


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Cases of one suite that run on the same number of ranks."""

    suite: str
    cases: tuple[Case, ...]
    contenders: tuple[NamedContender, ...]
    iterations: int

    @property
    def parts(self) -> int:
        """Number of parts that ``measure`` reports."""
        rounds = 1 + self.iterations
        return len(self.cases) * {"overhead": 1, "growth": rounds}.get(self.suite, rounds + _CHECKS)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The cases and contenders of one run of the command.

    Attributes:
        tasks: Pairs of a number of ranks and a task.
        left_out: Sentences about peers that are not installed, and about impossible combinations of values.
    """

    suite: str
    iterations: int
    tasks: tuple[tuple[int, Task], ...]
    left_out: tuple[str, ...]

    @property
    def keys(self) -> set[tuple[Case, str]]:
        """Pairs of a case and the label of a contender."""
        return {(case, one.label) for _, task in self.tasks for case in task.cases for one in task.contenders}


def make_request(
    suite: str,
    axes: Mapping[str, str | None],
    contenders: str | None,
    *,
    ranks: int,
    iterations: int,
    quick: bool,
) -> Request:
    """Make a request from the command line.

    Args:
        suite: Name in ``SUITES``.
        axes: Values by axis, separated by commas; None for the default values of the suite.
        contenders: Names separated by commas; None for the default.
        ranks: Number of processes to start. Under torchrun, the number of its ranks is used instead.
        iterations: Warm runs of each contender.
        quick: Whether to use at most 256 tokens and 2 iterations.

    Raises:
        ConfigError: The suite, a value or a contender is wrong, or no combination of values is possible.
        BackendUnavailableError: A contender is not installed.
    """
    if suite not in SUITES:
        raise ConfigError(f"SUITE must be one of {', '.join(SUITES)}, got {suite!r}. Use one of them.")
    given = {name: text for name, text in axes.items() if text is not None}
    values = {name: _values(name, text) for name, text in {**SUITES[suite], **given}.items()}
    if quick:
        values["tokens"] = tuple(dict.fromkeys(min(tokens, QUICK_TOKENS) for tokens in values["tokens"]))
        iterations = min(iterations, QUICK_ITERATIONS)
    graph_safe = suite == "graph-safe"
    named = parse_contenders(OURS if graph_safe and contenders is None else contenders)
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
        contenders=graph_safe_modes(named) if graph_safe else named,
        iterations=iterations,
    )
    absent = absent_peers() if contenders is None and not graph_safe else []
    impossible = [f"{case} is left out: {fault}" for case, fault in faults.items()]
    return Request(
        suite=suite,
        iterations=iterations,
        tasks=tuple(_by_ranks(task)),
        left_out=(*absent, *impossible),
    )


def _values(axis: str, text: str) -> tuple[Any, ...]:
    """Parse the values of an axis, without repetitions."""
    words = tuple(dict.fromkeys(text.split(",")))
    if axis in _WORDS:
        if wrong := [word for word in words if word not in _WORDS[axis]]:
            raise ConfigError(
                f"--{axis} must be one of {', '.join(_WORDS[axis])}, got {wrong[0]!r}. Use one of them, or several."
            )
        return words
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--{axis} must be whole numbers above 0, separated by commas, got {text!r}. "
            f"Write, for example, --{axis} {SUITES['layer'][axis]}."
        )
    return tuple(map(int, words))


def _cases(suite: str, values: Mapping[str, tuple[Any, ...]], ranks: int, *, quick: bool) -> list[Case]:
    """Return all cases of the suite without repetitions, including impossible cases."""
    combined = [
        Case(shape=Shape(tokens=T, hidden=D, experts=E, top_k=K), dtype=dtype, routing=routing, ranks=ranks)
        for T, D, E, K in product(values["tokens"], values["hidden"], values["experts"], values["top-k"])
        for dtype in values["dtype"]
        for routing in values["routing"]
    ]
    if suite == "growth":
        combined = list(_grown(_base(combined, values), quick=quick))
    elif suite == "overhead":  # also on one rank, which shares its core with no other rank
        combined = [replace(case, ranks=size) for size in (1, ranks) for case in combined]
    return list(dict.fromkeys(combined))


def _base(cases: list[Case], values: Mapping[str, tuple[Any, ...]]) -> Case:
    several = [f"--{axis} {','.join(map(str, found))}" for axis, found in values.items() if len(found) > 1]
    if several:
        raise ConfigError(
            f"growth must start from one value of each axis, got {' '.join(several)}. Give one value; the suite "
            "varies it."
        )
    return cases[0]


def _grown(base: Case, *, quick: bool) -> Iterator[Case]:
    """Vary one axis at a time. ``quick`` takes two values of each axis."""
    points = 2 if quick else None
    for axis, sizes in GROWTH.items():
        for size in sizes[:points]:
            yield replace(base, shape=replace(base.shape, **{axis: size}))
    for ranks in GROWTH_RANKS[:points]:
        yield replace(base, ranks=ranks)


def _fault(case: Case) -> str | None:
    """Return why a case cannot run; None if it can."""
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
