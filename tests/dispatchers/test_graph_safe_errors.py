"""What bad input gets in graph-safe mode: refused when it is built, or before anything travels."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_dispatch import Rows, build_dispatcher
from moe_dispatch.backends import (
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    register_backend,
    registry,
)
from moe_dispatch.errors import ConfigError, InputError, PeerError
from moe_dispatch_testing import count_collectives
from tests.dispatchers.layer import (
    Group,
    identity_round,
    outcomes,
    outcomes_on,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 4}
ON_OVERFLOW = r"on_overflow must be chosen with a finite capacity, got None with {}\. Set on_overflow to \"raise\" or"
NOT_SAFE = r"{} must come with graph_safe=True, got graph_safe=False, where every buffer .* or leave (it|them) out"

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no maximum": (
        {"graph_safe": True},
        r"graph_safe needs max_tokens_per_rank, got None\. Set it to the largest row count",
    ),
    "agree": (
        {**SAFE, "row_counts": "agree"},
        r"graph_safe needs row_counts \"static\", got 'agree', which syncs with the host\. Leave row_counts out",
    ),
    "check": ({**SAFE, "row_counts": "check"}, r"graph_safe needs row_counts \"static\", got 'check'"),
    "assume": ({**SAFE, "row_counts": "assume"}, r"graph_safe needs row_counts \"static\", got 'assume'"),
    "finite, not chosen": ({**SAFE, "capacity_factor": 1.25}, ON_OVERFLOW.format("capacity_factor=1.25")),
    "finite pairs, not chosen": (
        {**SAFE, "backend": {"name": "alltoall", "pair_rows": 2}},
        ON_OVERFLOW.format(r"pair_rows=2\.0"),
    ),
    "both, not chosen": (
        {**SAFE, "backend": {"name": "alltoall", "pair_rows": 2}, "capacity_factor": 2},
        ON_OVERFLOW.format(r"capacity_factor=2\.0, pair_rows=2\.0"),
    ),
    "capacity, not graph-safe": ({"capacity_factor": 1.5}, NOT_SAFE.format("capacity_factor=1.5")),
    "pairs, not graph-safe": (
        {"backend": {"name": "alltoall", "pair_rows": 1.5}},
        NOT_SAFE.format("pair_rows=1.5"),
    ),
    "on_overflow, not graph-safe": ({"on_overflow": "drop"}, NOT_SAFE.format("on_overflow='drop'")),
    "unknown on_overflow": ({**SAFE, "on_overflow": "ignore"}, r"on_overflow: Input should be 'raise', 'drop' or "),
    "pairs of another backend": (
        {**SAFE, "backend": {"name": "allgather", "pair_rows": 1.5}, "on_overflow": "drop"},
        r"pair_rows: Extra inputs are not permitted",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_do_not_fit(name: str) -> None:
    fields, text = FIELDS[name]
    with pytest.raises(ConfigError, match=text):
        small_config(**fields)


ABSURD: list[tuple[Any, str]] = [
    (0, "greater than 0, got 0"),
    (-1.0, "greater than 0, got -1.0"),
    (float("nan"), "a finite number, got nan"),
    (float("inf"), "a finite number, got inf"),
    (1e6, "less than or equal to 1024, got 1000000.0"),
    (True, "a valid number, got True"),
    ("best", "a valid number, got 'best'"),
    ("1.25", "a valid number, got '1.25'"),
    (None, "a valid number, got None"),
]


@pytest.mark.parametrize(("value", "text"), ABSURD)
def test_absurd_capacities(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"capacity_factor: Input should be 'worst'; or Input should be {text}"):
        small_config(**SAFE, capacity_factor=value, on_overflow="drop")
    with pytest.raises(ConfigError, match=rf"pair_rows: Input should be 'worst'; or Input should be {text}"):
        small_config({"name": "alltoall", "pair_rows": value}, **SAFE, on_overflow="drop")


class Eager(BackendOptions):
    """A backend without a static path."""

    name = "eager"

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints()

    def open(self, context: BackendContext) -> Backend:
        raise AssertionError("refused before")


@pytest.fixture
def _eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_backend(Eager)


HUGE = 1 << 30
EXACT = {"name": "alltoall", "reduction": "exact"}
BUILDING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no static path": (
        {**SAFE, "backend": "eager"},
        ("Backend 'eager': graph_safe is not possible: it has no static path. Set graph_safe=False",),
    ),
    "exact sums": (
        {**SAFE, "backend": EXACT},
        ("Backend 'alltoall': graph_safe is not possible: reduction=\"exact\" brings back", '"fast" would work'),
    ),
    **{
        f"by position on {backend}": (
            {**SAFE, "backend": backend, "capacity_factor": 1.5, "on_overflow": "drop_by_position"},
            (f"Backend {backend!r}: it drops rows by weight, got on_overflow='drop_by_position'", '"drop" or "raise"'),
        )
        for backend in ("local", "allgather", "alltoall")
    },
    "transformer-engine": (
        {**SAFE, "permutation": "te"},
        ('permutation must be "auto", "torch" or "triton" with graph_safe=True', "not yet used", "got 'te'. Leave"),
    ),
    "more rows than offs counts": (
        {**SAFE, "backend": "allgather", "max_tokens_per_rank": HUGE},
        ("a graph-safe buffer must have at most 2147483647 rows, because offs is int32, got ", "Lower max_tokens_per"),
    ),
}


@pytest.mark.usefixtures("_eager_backend")
@pytest.mark.parametrize("name", BUILDING)
def test_refused_when_built(name: str) -> None:
    fields, texts = BUILDING[name]
    size = 1 if fields.get("backend") == "local" else 2
    config = small_config(**fields)
    raises_everywhere(outcomes_on(lambda group: build_dispatcher(config, group), size), ConfigError, *texts)


@pytest.mark.parametrize(("tokens", "pad_multiple", "fits"), [(1 << 30, 1, False), ((1 << 30) - 1, 1, True)])
def test_the_most_rows_that_offs_counts(tokens: int, pad_multiple: int, fits: bool) -> None:
    """2 * 2**30 rows are one too many; nothing is allocated when a dispatcher is built."""
    config = small_config("local", graph_safe=True, max_tokens_per_rank=tokens, pad_multiple=pad_multiple)
    if fits:
        build_dispatcher(config)
        return
    with pytest.raises(ConfigError, match=r"got 2147483648\. Lower max_tokens_per_rank or capacity_factor"):
        build_dispatcher(config)


def test_padding_counts_too() -> None:
    config = small_config("local", graph_safe=True, max_tokens_per_rank=(1 << 30) - 1, pad_multiple=16)
    with pytest.raises(ConfigError, match="at most 2147483647 rows"):
        build_dispatcher(config)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("allgather", 2), ("alltoall", 2)])
def test_more_tokens_than_the_maximum_are_refused_before_anything_travels(
    backend: str, size: int, planned: bool
) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        plan = dispatcher.plan(Rows()) if planned else None
        with count_collectives() as seen, pytest.raises(InputError) as caught:
            dispatcher.dispatch(random_rows(5), random_routing(5), plan)
        assert seen.calls == []
        identity_round(dispatcher)
        raise caught.value

    texts = ("at most max_tokens_per_rank (4) rows per rank, got 5", "Raise max_tokens_per_rank")
    raises_everywhere(outcomes_on(body, size), InputError, *texts)


WRONG = 1


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("backend", ["allgather", "alltoall"])
def test_peers_are_told_under_debug(backend: str, planned: bool) -> None:
    def body(group: Group) -> Exception:
        assert group is not None
        dispatcher = build_dispatcher(small_config(backend, debug=True, **SAFE), group)
        plan = dispatcher.plan(Rows()) if planned else None
        count = 5 if group.rank() == WRONG else 4
        with pytest.raises((InputError, PeerError)) as caught:
            dispatcher.dispatch(random_rows(count), random_routing(count), plan)
        identity_round(dispatcher)
        return caught.value

    results = outcomes(body, 4)
    raises_everywhere(results[WRONG : WRONG + 1], InputError, "at most max_tokens_per_rank (4) rows per rank, got 5")
    raises_everywhere([results[0], *results[2:]], PeerError, f"rank 1 refused: {results[WRONG]}")


@pytest.mark.parametrize("backend", ["allgather", "alltoall"])
def test_peers_wait_no_longer_than_the_group_without_debug(backend: str) -> None:
    """Nothing is exchanged but rows of fixed size, so nobody can tell them: that would be a host sync."""
    seconds = 1.0

    def body(group: Group) -> float:
        assert group is not None
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        count = 5 if group.rank() == WRONG else 4
        begin = time.monotonic()
        with pytest.raises(InputError if group.rank() == WRONG else RuntimeError):
            dispatcher.dispatch(random_rows(count), random_routing(count))
        return time.monotonic() - begin

    waited = outcomes(body, 4, seconds=seconds)
    assert waited[WRONG] < seconds / 2
    assert all(isinstance(one, float) and one < 4 * seconds for one in waited), waited


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("allgather", 2), ("alltoall", 2)])
def test_the_maximum_itself_is_fine(backend: str, size: int, count: int) -> None:
    def body(group: Group) -> int:
        dispatcher = build_dispatcher(small_config(backend, **SAFE), group)
        sent = dispatcher.dispatch(random_rows(count), random_routing(count))
        assert torch.equal(sent.offs, sent.tokens_per_expert.cumsum(0))
        return dispatcher.combine(sent.rows, sent).shape[0]

    assert outcomes_on(body, size) == [count] * size
