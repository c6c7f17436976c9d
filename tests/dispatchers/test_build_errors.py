"""Building a dispatcher that cannot work: every rank raises, and says which rule, which field, which ranks."""

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
from moe_dispatch.permutation import TorchPermutation
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import Group, identity_round, outcomes, outcomes_on, raises_everywhere, small_config

NO_CONFIGS: dict[str, tuple[Any, str]] = {
    "dict": ({"num_experts": 8}, r"got dict\. Pass DispatcherConfig\(\*\*your_dict\)"),
    "path": ("moe.yaml", r"got str\. Pass DispatcherConfig\.load\(path\)"),
}


@pytest.mark.parametrize("kind", NO_CONFIGS)
def test_what_is_no_config_is_not_taken_for_one(kind: str) -> None:
    config, text = NO_CONFIGS[kind]
    with pytest.raises(ConfigError, match=rf"Dispatcher: config must be a DispatcherConfig, {text}"):
        build_dispatcher(config)


RULES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "experts over ranks": (
        {"num_experts": 9},
        2,
        ("num_experts (9) must be divisible by ep_size (2)", "Use 10 experts or ep_size 1"),
    ),
    "local on two ranks": (
        {"backend": "local"},
        2,
        ("Backend 'local': ep_size must be one of 1, got 2", 'Use "alltoall", or pass group=None'),
    ),
    "experts per rank": (
        {"constraints": {"local_experts_multiple": 3}},
        2,
        ("experts per rank must be a multiple of 3, got 4 (8 experts over 2 ranks)",),
    ),
    "hidden size": (
        {"constraints": {"hidden_multiple": 64}},
        1,
        ("Backend 'alltoall': hidden_size must be a multiple of 64, got 16",),
    ),
    "top_k": ({"constraints": {"max_top_k": 1}}, 1, ("top_k must be at most 1, got 2. Lower top_k",)),
    "wire on allgather": (
        {"backend": "allgather", "wire_dtype": "bfloat16"},
        2,
        ("Backend 'allgather': wire_dtype must be one of None, got 'bfloat16'",),
    ),
    "graph-safe": (
        {"graph_safe": True, "max_tokens_per_rank": 8, "backend": {"name": "alltoall", "reduction": "exact"}},
        2,
        ("Backend 'alltoall': graph_safe is not possible: ", 'reduction="fast" would work', "Set graph_safe=False"),
    ),
    "rows": (
        {"max_tokens_per_rank": 80, "constraints": {"max_rows": 100, "row_multiple": 64}},
        2,
        ("Backend 'alltoall': at most 64 rows per rank fit, got 80", "micro-batches of at most 64 tokens"),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_that_needs_the_group(name: str) -> None:
    fields, size, texts = RULES[name]
    raises_everywhere(
        outcomes_on(lambda group: build_dispatcher(small_config(**fields), group), size), ValueError, *texts
    )


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("top_k", 1, "rank 0 has 2, rank 3 has 1"),
        ("pad_multiple", "fp8", "rank 0 has 1, rank 3 has 16"),
        (
            "backend",
            "allgather",
            "rank 0 has {'name': 'alltoall', 'reduction': 'fast', 'pair_rows': 'worst', 'levels': 1, "
            "'ranks_per_node': None}, rank 3 has {'name': 'allgather'}",
        ),
        ("debug", True, "rank 0 has False, rank 3 has True"),
    ],
)
def test_ranks_that_disagree(field: str, value: Any, told: str) -> None:
    def body(group: Group) -> None:
        assert group is not None
        build_dispatcher(small_config(**({field: value} if group.rank() == 3 else {})), group)

    raises_everywhere(outcomes(body, 4), ConfigError, f"Ranks disagree on {field}: {told}", "the same config")


def test_a_group_whose_ranks_disagreed_can_still_be_used() -> None:
    def body(group: Group) -> None:
        assert group is not None
        with pytest.raises(ConfigError):
            build_dispatcher(small_config(top_k=1 + group.rank()), group)
        identity_round(build_dispatcher(small_config(), group))

    assert outcomes(body, 2) == [None, None]


class Fragile(BackendOptions):
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
    register_backend(Fragile)
    yield Fragile
    Fragile.fails_in = ""


def test_backend_that_cannot_run_on_one_rank(fragile: type[Fragile]) -> None:
    fragile.fails_in = "probe"
    results = outcomes(lambda group: build_dispatcher(small_config("fragile", num_experts=9), group), 3)
    told = "Backend 'fragile' cannot be used here: no GPU is in sight"
    raises_everywhere([results[1]], BackendUnavailableError, told, "choose one of: allgather, alltoall, local")
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
    config = small_config(permutation="te")
    results = outcomes(lambda group: build_dispatcher(config, group), 2)
    told = ("Permutation 'te' cannot be used here: ", "choose one of: auto, torch")
    raises_everywhere(results, BackendUnavailableError, *told)


def test_a_permutation_that_can_be_used_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    original = TorchPermutation.reduce

    def reduce(*args: Any) -> None:
        taken.append("torch")
        original(*args)

    monkeypatch.setattr(TorchPermutation, "reduce", reduce)
    identity_round(build_dispatcher(small_config("local", permutation="torch")))
    assert taken == ["torch"]
    with pytest.raises(
        ConfigError, match="permutation: Input should be 'auto', 'torch', 'triton' or 'te', got 'numpy'"
    ):
        small_config(permutation="numpy")


def test_control_group_of_other_ranks() -> None:
    reverse, store = HashStore(), HashStore()
    groups: dict[str, Any] = {
        "reversed": lambda rank: thread_group(reverse, 1 - rank, 2),
        "smaller": lambda rank: thread_group(HashStore(), 0, 1),
        "right": lambda rank: thread_group(store, rank, 2),
    }

    def body(group: Group) -> list[Exception | None]:
        assert group is not None
        told: list[Exception | None] = []
        for make in groups.values():
            try:
                dispatcher = build_dispatcher(small_config(), group, control_group=make(group.rank()))
                identity_round(dispatcher)
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
