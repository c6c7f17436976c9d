"""Configs and dispatchers that cannot work: every rank raises, and says which rule, which field, which ranks.

Configs that mean the same do work: they share a channel, and ranks need not write them alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from moe_dispatch import build_dispatcher
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
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport
from moe_dispatch.errors import BackendUnavailableError, ConfigError, InputError, PeerError, StateError
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import (
    HIDDEN,
    SAFE,
    Group,
    identity_round,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    refused,
    small_config,
)

PAIRS = {"name": "alltoall", "pair_rows": 2}
ALLGATHER = {"name": "allgather", "pair_rows": 1.5}
ON_OVERFLOW = r"graph_safe\.on_overflow must be \"raise\", \"drop\" or \"drop_by_position\" with {}\."
NOT_SAFE = "{} needs graph_safe=True. Otherwise buffers follow the routing"
STATIC = r"graph_safe needs row_counts \"static\", got {}"
ABSURD: list[tuple[Any, str]] = [
    (0, "greater than 0, got 0"),
    (float("nan"), "a finite number, got nan"),
    (1e6, "less than or equal to 1024, got 1000000.0"),
    (True, "a valid number, got True"),
    ("1.25", "a valid number, got '1.25'"),
]
ABSURD_FACTOR = "capacity_factor: Input should be 'worst'; or Input should be {}"
ABSURD_PAIRS = "pair_rows: Input should be 'worst'; or Input should be {}"
DROP: dict[str, Any] = {**SAFE, "graph_safe": {"on_overflow": "drop"}}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"graph_safe": True}, r"graph_safe and row_counts=\"static\" need max_tokens_per_rank"),
    ({**SAFE, "row_counts": "agree"}, STATIC.format("'agree'")),
    ({**SAFE, "row_counts": "check"}, STATIC.format("'check'")),
    ({**SAFE, "row_counts": "assume"}, STATIC.format("'assume'")),
    ({**SAFE, "graph_safe": {"capacity_factor": 1.25}}, ON_OVERFLOW.format(r"graph_safe\.capacity_factor=1\.25")),
    ({**SAFE, "backend": PAIRS}, ON_OVERFLOW.format(r"backend\.pair_rows=2\.0")),
    (
        {**SAFE, "backend": PAIRS, "graph_safe": {"capacity_factor": 2}},
        ON_OVERFLOW.format(r"graph_safe\.capacity_factor=2\.0 and backend\.pair_rows=2\.0"),
    ),
    ({"backend": PAIRS}, NOT_SAFE.format("backend.pair_rows=2.0")),
    ({**SAFE, "graph_safe": {"on_overflow": "ignore"}}, r"on_overflow: Input should be 'raise', 'drop' or "),
    ({**DROP, "backend": ALLGATHER}, r"pair_rows: Extra inputs are not permitted"),
    (
        {"backend": {"name": "alltoall", "levels": 2}},
        r"levels must be left out, got 2\. levels=2 is the backend 'alltoall_by_",
    ),
    ({"permutation": "numpy"}, "permutation: Input should be 'auto', 'torch' or 'triton', got 'numpy'"),
    *(
        ({**SAFE, "graph_safe": {**DROP["graph_safe"], "capacity_factor": value}}, ABSURD_FACTOR.format(text))
        for value, text in ABSURD
    ),
    *(({**DROP, "backend": {**PAIRS, "pair_rows": value}}, ABSURD_PAIRS.format(text)) for value, text in ABSURD),
]


@pytest.mark.parametrize(("fields", "text"), FIELDS)
def test_fields_that_do_not_fit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        small_config(**fields)


def test_what_is_no_config_is_not_taken_for_one() -> None:
    wrong: dict[str, Any] = {
        r"pass DispatcherConfig\(\*\*your_dict\), not a dict": {"num_experts": 8},
        r"pass DispatcherConfig\.load\(path\), not a str": "moe.yaml",
        "pass a DispatcherConfig, not a NoneType": None,
    }
    for text, config in wrong.items():
        with pytest.raises(ConfigError, match=rf"Dispatcher: {text}"):
            build_dispatcher(config)


class Odd(BackendOptions):
    """``local`` with other needs. It may fail in a method on rank 1, as a missing library or too small a GPU would."""

    name = "odd"
    needs: ClassVar[dict[str, Any]] = {}
    fails_in: ClassVar[str] = ""

    def probe(self) -> Usable | Rejected:
        return Rejected(reason="no GPU is in sight") if self._fails("probe") else Usable(version="1")

    def constraints(self, shape: MoEShape) -> Constraints:
        if self._fails("constraints"):
            raise RuntimeError("no luck in constraints")
        return replace(LocalOptions().constraints(shape), group_sizes=None, **self.needs)

    def open(self, context: BackendContext) -> Backend:
        if self._fails("open"):
            raise RuntimeError("no luck in open")
        return LocalOptions().open(context)

    def _fails(self, method: str) -> bool:
        return method == self.fails_in and threading.current_thread().name == "rank-1"


@pytest.fixture(autouse=True)
def odd_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the backend of this file; what a test sets on its class is taken back."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_backend(Odd)
    monkeypatch.setattr(Odd, "needs", {"graph_safe": None})
    monkeypatch.setattr(Odd, "fails_in", "")


BY_NODE = {"name": "alltoall_by_node", "ranks_per_node": 2}
EXACT = {"name": "alltoall", "reduction": "exact"}
BY_POSITION: dict[str, Any] = {**SAFE, "graph_safe": {"capacity_factor": 1.5, "on_overflow": "drop_by_position"}}
NO_POSITION = 'it drops rows by weight. Use "drop" or "raise" for graph_safe.on_overflow'
MANY: dict[str, Any] = {**SAFE, "max_tokens_per_rank": 1 << 30}
MAX_ROWS: dict[str, Any] = {"max_tokens_per_rank": 80, "constraints": {"max_rows": 100, "row_multiple": 64}}
# Ranks, fields, and what is said.
RULES: list[tuple[int, dict[str, Any], str]] = [
    (2, {"num_experts": 9}, "num_experts (9) must be divisible by ep_size (2). Use 10 experts or ep_size 1"),
    (2, {"constraints": {"local_experts_multiple": 3}}, "must be a multiple of 3, got 4 (8 experts over 2 ranks)"),
    (1, {"constraints": {"hidden_multiple": 64}}, "'alltoall': hidden_size must be a multiple of 64, got 16"),
    (1, {"constraints": {"max_top_k": 1}}, "top_k must be at most 1, got 2. Lower top_k"),
    (2, {**SAFE, "backend": BY_NODE}, "it has no exchange of fixed size; backend='alltoall' would work."),
    (
        2,
        {"backend": "allgather", "wire": "bfloat16"},
        "'float8_e4m3fn', 'mxfp8' or the format of another package, got 'bfloat16'",
    ),
    (1, MAX_ROWS, "Backend 'alltoall': at most 64 rows per rank fit, got 80"),
    (2, {**SAFE, "backend": "odd"}, "graph_safe is not possible: it has no static path. Set graph_safe=False"),
    (2, {**SAFE, "backend": EXACT}, 'graph_safe is not possible: reduction="exact" brings back'),
    (1, {**BY_POSITION, "backend": "local"}, f"Backend 'local': {NO_POSITION}"),
    (2, {**BY_POSITION, "backend": "allgather"}, f"Backend 'allgather': {NO_POSITION}"),
    (2, {**BY_POSITION, "backend": "alltoall"}, f"Backend 'alltoall': {NO_POSITION}"),
    (2, {**MANY, "backend": "allgather"}, "buffer must have at most 2147483647 rows, because offs is int32, got"),
    (1, {**MANY, "backend": "local"}, "got 2147483648. Lower max_tokens_per_rank or graph_safe.capacity_factor"),
    (1, {**MANY, "backend": "local", "max_tokens_per_rank": (1 << 30) - 1, "pad_multiple": 16}, "2147483647 rows"),
    (2, {"backend": "local"}, "'local': ep_size must be one of 1, got 2. Use \"alltoall\", or pass group=None"),
    (3, {"backend": BY_NODE, "num_experts": 12}, "a multiple of ranks_per_node, got 3 ranks and ranks_per_node=2"),
]


@pytest.mark.parametrize(("size", "fields", "text"), RULES)
def test_rule_that_needs_the_group(size: int, fields: dict[str, Any], text: str) -> None:
    config = small_config(**fields)
    refused(lambda group: build_dispatcher(config, group), size, ConfigError, text)


def test_the_most_rows_that_offs_counts() -> None:
    """Nothing is allocated when a dispatcher is built."""
    build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=(1 << 30) - 1))


def test_a_group_whose_ranks_disagreed_can_still_be_used() -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError):
            build_dispatcher(small_config(top_k=1 + group.rank()), group)
        identity_round(build_dispatcher(small_config(), group))

    on_ranks(body, 2)


def test_backend_that_cannot_run_on_one_rank() -> None:
    Odd.fails_in = "probe"
    results = outcomes(lambda group: build_dispatcher(small_config("odd", num_experts=9), group), 3)
    told = "Backend 'odd' cannot be used here: no GPU is in sight"
    raises_everywhere([results[1]], BackendUnavailableError, told, "choose one of: allgather, alltoall, ")
    raises_everywhere([results[0], results[2]], PeerError, f"rank 1 refused: {told}")


@pytest.mark.parametrize("method", ["constraints", "open"])
def test_backend_that_fails_to_open_on_one_rank(method: str) -> None:
    Odd.fails_in = method
    results = outcomes(lambda group: build_dispatcher(small_config("odd", num_experts=9), group), 3)
    assert f"no luck in {method}" in str(results[1])
    raises_everywhere([results[0], results[2]], PeerError, "rank 1 refused: ", f"no luck in {method}")


def test_a_broken_plug_in_does_not_hinder_auto(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an installed distribution, of which no more than the metadata are needed."""
    (tmp_path / "absent-1.dist-info").mkdir()
    (tmp_path / "absent-1.dist-info/entry_points.txt").write_text(
        "[moe_dispatch.backends]\nabsent = no_such_package.at_all:Backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="moe_dispatch")
    on_ranks(lambda group: identity_round(build_dispatcher(small_config("auto"), group)), 2)
    assert "absent: Backend 'absent' cannot be used here: its import raised ModuleNotFoundError" in caplog.text


def test_a_permutation_that_cannot_be_used_is_refused_when_built() -> None:
    told = ("Permutation 'triton' cannot be used here: ", "choose one of: auto, torch")
    config = small_config(permutation="triton", device="cpu")
    refused(lambda group: build_dispatcher(config, group), 2, BackendUnavailableError, *told)


def test_control_group_of_other_ranks() -> None:
    reverse, store = HashStore(), HashStore()

    def body(group: Group) -> None:
        rank = group.rank()
        for control in (thread_group(reverse, 1 - rank, 2), thread_group(HashStore(), 0, 1)):
            with pytest.raises(ConfigError, match="control_group must hold the ranks of group in the same order"):
                build_dispatcher(small_config(), group, control_group=control)
        identity_round(build_dispatcher(small_config(), group, control_group=thread_group(store, rank, 2)))

    on_ranks(body, 2)


def test_unfit_dtype_and_device_of_a_backend_are_refused() -> None:
    only = {"dtypes": frozenset({torch.bfloat16}), "devices": frozenset({"cuda"})}
    Odd.needs = {**only, "wire": WireSupport()}
    with pytest.raises(ConfigError, match="device must be one of cuda, got 'cpu'"):
        build_dispatcher(small_config("odd", device="cpu"))
    dispatcher = build_dispatcher(small_config("odd", pad_multiple=3))
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16, got torch.float32. Convert x"):
        dispatcher.dispatch(random_rows(2), random_routing(2))
    with pytest.raises(ValueError, match="x must be on cuda, got cpu"):
        dispatcher.dispatch(random_rows(2, dtype=torch.bfloat16), random_routing(2))
    configured = build_dispatcher(small_config("local", device="cuda"))
    with pytest.raises(ValueError, match=r"x must be on cuda, got cpu\..*change config\.device"):
        configured.dispatch(random_rows(2), random_routing(2))


def test_a_backend_without_a_backward_is_for_inference() -> None:
    Odd.needs = {"differentiable": False}
    dispatcher, x, way = build_dispatcher(small_config("odd")), random_rows(5), random_routing(5)
    sent = dispatcher.dispatch(x, way)
    calls: dict[str, Callable[[], object]] = {
        "dispatch": lambda: dispatcher.dispatch(x.clone().requires_grad_(), way),
        "again": lambda: dispatcher.dispatch(x.clone().requires_grad_(), again=sent),
        "combine": lambda: dispatcher.combine(sent.rows.clone().requires_grad_(), sent),
    }
    for verb, call in calls.items():
        told = f"Dispatcher.{verb.replace('again', 'dispatch')}: backend 'odd' has no backward as configured, and"
        with pytest.raises(InputError, match=f"{told} tensors require grad. Call it under torch.no_grad"):
            call()


@pytest.mark.parametrize(
    ("needs", "option", "told"),
    [
        ({"delivers": False}, "deliver", "it cannot deliver quantised rows. Leave wire.deliver out"),
        ({"gradients": "no"}, "gradients", "it cannot send gradients in 8 bits. Leave wire.gradients out"),
    ],
)
def test_a_backend_that_only_widens_is_refused(needs: dict[str, Any], option: str, told: str) -> None:
    """No backend of this package takes a quantised wire without the rest; one of another package may."""
    Odd.needs = {"wire": WireSupport(**{"dtypes": ALL_WIRES, "gradients": "can", "delivers": True, **needs})}
    sizes: dict[str, Any] = {"hidden_size": 32, "pad_multiple": 32}
    wire = {"dtype": "mxfp8", "gradients": True, "deliver": "quantised"}
    config = small_config("odd", wire=wire, **sizes)
    with pytest.raises(ConfigError, match=f"Backend 'odd': {told}"):
        build_dispatcher(config)
    del wire[option]
    build_dispatcher(config.replace(wire=wire))


ALLTOALL = {"name": "alltoall", "reduction": "fast", "pair_rows": "worst"}
FINITE: dict[str, Any] = {**SAFE, "graph_safe": {"on_overflow": "raise"}}


@pytest.mark.parametrize(
    ("way", "other_way"),
    [
        ({"backend": "alltoall"}, {"backend": {**ALLTOALL, "pair_rows": "worst"}}),
        ({**FINITE, "backend": {**ALLTOALL, "pair_rows": 1}}, {**FINITE, "backend": {**ALLTOALL, "pair_rows": 1.0}}),
    ],
)
def test_configs_that_mean_the_same(way: dict[str, Any], other_way: dict[str, Any]) -> None:
    """Ranks may write one config in two ways. Dispatchers of both share a channel and accept each other's plans.

    ``tests/config/test_meaning.py`` has all ways to write one config.
    """

    def body(group: Group) -> None:
        one, other = small_config(**way), small_config(**other_way)
        dispatcher, x = build_dispatcher([one, other][group.rank()], group), random_rows(4)
        sent = dispatcher.dispatch(x, random_routing(4))
        assert dispatcher.combine(sent.rows, sent).shape == (4, HIDDEN)
        first, second = build_dispatcher(one, group), build_dispatcher(other, group)
        second.dispatch(x, random_routing(4), first.plan(like=x))
        first.dispatch(x, random_routing(4), second.plan(like=x))
        assert first.metrics().dispatches == second.metrics().dispatches == 3  # counters are the channel's

    on_ranks(body, 2)


# Fields of two configs that mean different things, and what ranks that have one each are told. The kit has more.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"backend": {**ALLTOALL, "reduction": "exact"}}, "Ranks disagree on backend: "),
    ({"backend": "alltoall"}, {"backend": "auto"}, "Ranks disagree on backend: "),
    ({"pad_multiple": "fp8"}, {"pad_multiple": 32}, "Ranks disagree on pad_multiple: rank 0 has 16"),
    ({}, {"backend": "allgather"}, "Ranks disagree on backend: rank 0 has {'name': 'alltoall', 'reduction': 'fast', "),
]


@pytest.mark.parametrize(("way", "other_way", "told"), DIFFERENT)
def test_configs_that_differ_still_differ(way: dict[str, Any], other_way: dict[str, Any], told: str) -> None:
    configs = [small_config(**{"backend": "alltoall", **fields}) for fields in (way, other_way)]

    one, other = (build_dispatcher(config) for config in configs)
    x = random_rows(4)
    with pytest.raises(StateError, match="the plan is of another config or group"):
        other.dispatch(x, random_routing(4), one.plan(like=x))
    refused(lambda group: build_dispatcher(configs[group.rank()], group), 2, ConfigError, told)
