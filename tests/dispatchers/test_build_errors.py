"""Configs and dispatchers that cannot work: every rank raises, and says which rule, which field, which ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends import (
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Rejected,
    Usable,
    register_backend,
    registry,
)
from moe_dispatch.backends.local import LocalOptions
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError, PeerError
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import SAFE, Group, identity_round, outcomes, outcomes_on, raises_everywhere, small_config

PAIRS = {"name": "alltoall", "pair_rows": 2}
ALLGATHER = {"name": "allgather", "pair_rows": 1.5}
ON_OVERFLOW = r"Set on_overflow to \"raise\" or \"drop\" with {}\."
NOT_SAFE = "{} needs graph_safe=True. Otherwise buffers follow the routing"
STATIC = r"graph_safe needs row_counts \"static\", got {}"
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"graph_safe": True}, r"graph_safe and row_counts=\"static\" need max_tokens_per_rank"),
    ({**SAFE, "row_counts": "agree"}, STATIC.format("'agree'")),
    ({**SAFE, "row_counts": "check"}, STATIC.format("'check'")),
    ({**SAFE, "row_counts": "assume"}, STATIC.format("'assume'")),
    ({**SAFE, "capacity_factor": 1.25}, ON_OVERFLOW.format("capacity_factor=1.25")),
    ({**SAFE, "backend": PAIRS}, ON_OVERFLOW.format(r"pair_rows=2\.0")),
    ({**SAFE, "backend": PAIRS, "capacity_factor": 2}, ON_OVERFLOW.format(r"capacity_factor=2\.0, pair_rows=2\.0")),
    ({"capacity_factor": 1.5}, NOT_SAFE.format("capacity_factor=1.5")),
    ({"backend": PAIRS}, NOT_SAFE.format("pair_rows=2.0")),
    ({"on_overflow": "drop"}, NOT_SAFE.format("on_overflow='drop'")),
    ({**SAFE, "on_overflow": "ignore"}, r"on_overflow: Input should be 'raise', 'drop' or "),
    ({**SAFE, "backend": ALLGATHER, "on_overflow": "drop"}, r"pair_rows: Extra inputs are not permitted"),
    ({"backend": {"name": "alltoall", "ranks_per_node": 2}}, r"ranks_per_node is for levels=2, got ranks_per_node=2"),
    ({"permutation": "numpy"}, "permutation: Input should be 'auto', 'torch', 'triton' or 'te', got 'numpy'"),
]


@pytest.mark.parametrize(("fields", "text"), FIELDS)
def test_fields_that_do_not_fit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        small_config(**fields)


ABSURD: list[tuple[Any, str]] = [
    (0, "greater than 0, got 0"),
    (float("nan"), "a finite number, got nan"),
    (1e6, "less than or equal to 1024, got 1000000.0"),
    (True, "a valid number, got True"),
    ("1.25", "a valid number, got '1.25'"),
]


@pytest.mark.parametrize(("value", "text"), ABSURD)
def test_absurd_capacities(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"capacity_factor: Input should be 'worst'; or Input should be {text}"):
        small_config(**SAFE, capacity_factor=value, on_overflow="drop")
    with pytest.raises(ConfigError, match=rf"pair_rows: Input should be 'worst'; or Input should be {text}"):
        small_config({"name": "alltoall", "pair_rows": value}, **SAFE, on_overflow="drop")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_experts": 8}, r"pass DispatcherConfig\(\*\*your_dict\), not a dict"),
        ("moe.yaml", r"pass DispatcherConfig\.load\(path\), not a str"),
        (None, "pass a DispatcherConfig, not a NoneType"),
    ],
)
def test_what_is_no_config_is_not_taken_for_one(config: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"Dispatcher: {text}"):
        build_dispatcher(config)


class Eager(BackendOptions):
    """A backend without a static path."""

    name = "eager"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints()

    def open(self, context: BackendContext) -> Backend:
        raise AssertionError("refused before")


class Fragile(Eager):
    """Fails in one of its methods, on rank 1, as a missing library or too small a GPU would."""

    name = "fragile"
    fails_in: ClassVar[str] = ""

    def probe(self) -> Usable | Rejected:
        if self.fails_in == "probe" and _rank() == 1:
            return Rejected(reason="no GPU is in sight")
        return Usable(version="1")

    def constraints(self, shape: MoEShape) -> Constraints:
        _fail("constraints")
        return Constraints()

    def open(self, context: BackendContext) -> Backend:
        _fail("open")
        return FragileBackend(context)


class FragileBackend(Backend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        _fail("__init__")

    dispatch = None  # type: ignore[assignment]


FragileBackend.__abstractmethods__ = frozenset()


def _fail(method: str) -> None:
    if method == Fragile.fails_in and _rank() == 1:
        raise RuntimeError(f"no luck in {method}")


def _rank() -> int:
    return int(threading.current_thread().name.removeprefix("rank-"))


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fragile]]:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_backend(Eager)
    register_backend(Fragile)
    yield Fragile
    Fragile.fails_in = ""


TWO_LEVELS = {"name": "alltoall", "levels": 2, "ranks_per_node": 2}
EXACT = {"name": "alltoall", "reduction": "exact"}
BY_POSITION: dict[str, Any] = {**SAFE, "capacity_factor": 1.5, "on_overflow": "drop_by_position"}
NO_POSITION = ("it drops rows by weight. Use on_overflow", '"drop" or "raise"')
WIRE: dict[str, Any] = {"backend": "allgather", "wire_dtype": "bfloat16"}
MAX_ROWS: dict[str, Any] = {"max_tokens_per_rank": 80, "constraints": {"max_rows": 100, "row_multiple": 64}}
# Fields, and what is said; on one rank if the backend is local or none is named, else on two.
RULES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"backend": "alltoall", "num_experts": 9},
        ("num_experts (9) must be divisible by ep_size (2)", "Use 10 experts or ep_size 1"),
    ),
    (
        {"backend": "alltoall", "constraints": {"local_experts_multiple": 3}},
        ("experts per rank must be a multiple of 3, got 4 (8 experts over 2 ranks)",),
    ),
    ({"constraints": {"hidden_multiple": 64}}, ("'alltoall': hidden_size must be a multiple of 64, got 16",)),
    ({"constraints": {"max_top_k": 1}}, ("top_k must be at most 1, got 2. Lower top_k",)),
    ({**SAFE, "backend": TWO_LEVELS}, ("levels=2 has no exchange of fixed size; levels=1 would work.",)),
    (WIRE, ("Backend 'allgather': wire_dtype must be one of None, 'float8_e4m3fn', 'mxfp8', got 'bfloat16'",)),
    (MAX_ROWS, ("Backend 'alltoall': at most 64 rows per rank fit, got 80", "at most 64 rows per rank fit")),
    (
        {**SAFE, "backend": "eager"},
        ("Backend 'eager': graph_safe is not possible: it has no static path. Set graph_safe=False",),
    ),
    (
        {**SAFE, "backend": EXACT},
        ('graph_safe is not possible: reduction="exact" brings back', '"fast" would work', "Set graph_safe=False"),
    ),
    ({**BY_POSITION, "backend": "local"}, ("Backend 'local': ", *NO_POSITION)),
    ({**BY_POSITION, "backend": "allgather"}, ("Backend 'allgather': ", *NO_POSITION)),
    ({**BY_POSITION, "backend": "alltoall"}, ("Backend 'alltoall': ", *NO_POSITION)),
    (
        {**SAFE, "backend": "alltoall", "permutation": "te"},
        (
            'permutation must be "auto", "torch" or "triton" with graph_safe=True',
            "not used on fixed buffers",
            "not used on fixed buffers",
        ),
    ),
    (
        {**SAFE, "backend": "allgather", "max_tokens_per_rank": 1 << 30},
        ("a graph-safe buffer must have at most 2147483647 rows, because offs is int32, got ", "Lower max_tokens_per"),
    ),
    (
        {**SAFE, "backend": "local", "max_tokens_per_rank": 1 << 30},
        ("got 2147483648. Lower max_tokens_per_rank or capacity_factor",),
    ),
    ({**SAFE, "backend": "local", "max_tokens_per_rank": (1 << 30) - 1, "pad_multiple": 16}, ("2147483647 rows",)),
]


@pytest.mark.usefixtures("fragile")
@pytest.mark.parametrize(("fields", "texts"), RULES)
def test_rule_that_needs_the_group(fields: dict[str, Any], texts: tuple[str, ...]) -> None:
    size = 1 if fields.get("backend", "local") == "local" else 2
    config = small_config(**fields)
    raises_everywhere(outcomes_on(lambda group: build_dispatcher(config, group), size), ConfigError, *texts)


@pytest.mark.parametrize(
    ("backend", "size", "texts"),
    [
        ("local", 2, ("'local': ep_size must be one of 1, got 2", 'Use "alltoall", or pass group=None')),
        (TWO_LEVELS, 3, ("ep_size must be a multiple of ranks_per_node, got 3 ranks and ranks_per_node=2.",)),
    ],
)
def test_backend_of_another_number_of_ranks(backend: Any, size: int, texts: tuple[str, ...]) -> None:
    config = small_config(backend, num_experts=12)
    raises_everywhere(outcomes(lambda group: build_dispatcher(config, group), size), ValueError, *texts)


def test_the_most_rows_that_offs_counts() -> None:
    """Nothing is allocated when a dispatcher is built."""
    build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=(1 << 30) - 1))


def test_a_group_whose_ranks_disagreed_can_still_be_used() -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError):
            build_dispatcher(small_config(top_k=1 + group.rank()), group)
        identity_round(build_dispatcher(small_config(), group))

    assert outcomes(body, 2) == [None, None]


def test_backend_that_cannot_run_on_one_rank(fragile: type[Fragile]) -> None:
    fragile.fails_in = "probe"
    results = outcomes(lambda group: build_dispatcher(small_config("fragile", num_experts=9), group), 3)
    told = "Backend 'fragile' cannot be used here: no GPU is in sight"
    raises_everywhere([results[1]], BackendUnavailableError, told, "choose one of: allgather, alltoall, ")
    raises_everywhere([results[0], results[2]], PeerError, f"rank 1 refused: {told}")


@pytest.mark.parametrize("method", ["constraints", "__init__", "open"])
def test_backend_that_fails_to_open_on_one_rank(fragile: type[Fragile], method: str) -> None:
    fragile.fails_in = method
    results = outcomes(lambda group: build_dispatcher(small_config("fragile", num_experts=9), group), 3)
    assert f"no luck in {method}" in str(results[1])
    raises_everywhere([results[0], results[2]], PeerError, "rank 1 refused: ", f"no luck in {method}")


def test_a_broken_plug_in_does_not_hinder_auto(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    points = [EntryPoint("absent", "no_such_package.at_all:Backend", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)
    caplog.set_level(logging.INFO, logger="moe_dispatch")
    results = outcomes(lambda group: identity_round(build_dispatcher(small_config("auto"), group)), 2)
    assert results == [None, None]
    assert "absent: Backend 'absent' cannot be used here: its import raised ModuleNotFoundError" in caplog.text


def test_a_permutation_that_cannot_be_used_is_refused_when_built() -> None:
    results = outcomes(lambda group: build_dispatcher(small_config(permutation="te"), group), 2)
    told = ("Permutation 'te' cannot be used here: ", "choose one of: auto, torch")
    raises_everywhere(results, BackendUnavailableError, *told)


def test_control_group_of_other_ranks() -> None:
    reverse, store = HashStore(), HashStore()

    def body(group: Group) -> list[Exception | None]:
        rank, told = group.rank(), list[Exception | None]()
        reversed_, smaller = thread_group(reverse, 1 - rank, 2), thread_group(HashStore(), 0, 1)
        for control in (reversed_, smaller, thread_group(store, rank, 2)):
            try:
                identity_round(build_dispatcher(small_config(), group, control_group=control))
                told.append(None)
            except MoEDispatchError as error:
                told.append(error)
        return told

    for told in outcomes(body, 2):
        raises_everywhere(told[:2], ConfigError, "control_group must hold the ranks of group in the same order")
        assert told[2] is None


def test_unfit_dtype_and_device_of_a_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Constraints(dtypes=frozenset({torch.bfloat16}), devices=frozenset({"cuda"}), group_sizes=frozenset({1}))
    monkeypatch.setattr(LocalOptions, "constraints", lambda options, shape: needs)
    with pytest.raises(ConfigError, match="device must be one of cuda, got 'cpu'"):
        build_dispatcher(small_config("local", device="cpu"))
    dispatcher = build_dispatcher(small_config("local", pad_multiple=3))
    routing = Routing(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16, got torch.float32. Convert x"):
        dispatcher.dispatch(torch.zeros(2, 16), routing)
    with pytest.raises(ValueError, match="x must be on cuda, got cpu"):
        dispatcher.dispatch(torch.zeros(2, 16, dtype=torch.bfloat16), routing)
