"""The vendor backends without a host sync: the same numbers, whatever stands where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, Routing, build_dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.emulation import memory
from tests.deep_ep_backends.conftest import Wrap
from tests.deep_ep_backends.static_layer import one_layer
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25, buffer_class, config, rank_of
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing

MOST = 12
OLD = {**HYBRID, "emulate": "hybridep-34152ae"}
VARIANTS: dict[str, dict[str, Any]] = {
    "v1": V1,
    "v2": V2,
    "v2.5": V25,
    "expanding": {**V25, "expand": True, "deterministic": False},
    "hybrid": HYBRID,
    "ragged": RAGGED,
    "old": OLD,
    "fused": {**HYBRID, "fuse_permute": True},
    "old fused": {**OLD, "fuse_permute": True},
}
# Rows by rank: unequal, up to the maximum; none on one rank; none at all.
ROWS = [(3, 12, 1, 8), (0, 9, 4, 0), (0, 0, 0, 0)]


def rows_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))


def routing_of(rows: int, seed: int) -> Routing:
    """Random, with slots that go nowhere, and weights of 0."""
    routing = random_routing(rows, seed)
    ids, weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    ids[2::5, 0], weights[1::4, 1] = -1, 0
    return Routing(ids, weights)


def pair(backend: dict[str, Any], group: Group, **fields: Any) -> tuple[Dispatcher, Dispatcher]:
    """The eager and the graph-safe dispatcher."""
    fields = {"max_tokens_per_rank": MOST, **fields}
    return (
        build_dispatcher(config(backend, **fields), group),
        build_dispatcher(config(backend, graph_safe=True, **fields), group),
    )


@pytest.mark.parametrize(
    ("variant", "size", "pad_multiple"),
    [
        *((variant, 2, 16) for variant in VARIANTS if variant not in ("v2", "old", "fused")),
        ("v2", 1, 16),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in [*((variant, 2, 1) for variant in VARIANTS), ("v1", 4, 1), ("hybrid", 4, 16)]
        ),
    ],
)
def test_outputs_and_gradients_are_those_of_eager_mode(variant: str, size: int, pad_multiple: int) -> None:
    def body(group: Group) -> None:
        eager, static = pair(VARIANTS[variant], group, pad_multiple=pad_multiple)
        # The cases of make slow have no rows at all, too, as those of the conformance kit have.
        for case, counts in enumerate(ROWS if pad_multiple == 1 or size == 4 else ROWS[:2]):
            seed = 10 * case + rank_of(group)
            rows = counts[rank_of(group)]
            x, routing = rows_of(rows, seed), routing_of(rows, seed)
            expected, found = one_layer(eager, x, routing), one_layer(static, x, routing)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (counts, name, (found[name] - value).abs().max())
        assert not static.check().overflowed
        eager.close()
        static.close()

    on_ranks(body, size)


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_what_stands_in_fresh_memory_may_look_like_ids(backend: dict[str, Any], wrap: Wrap) -> None:
    """The library writes no ids behind the rows that arrived; the emulation's own fill would be told from ids."""

    def stale(original: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made: Tensor = original(shape, dtype)
        return made.zero_() if dtype == torch.int64 else made

    wrap(memory, "uninitialised", stale)

    def body(group: Group) -> None:
        eager, static = pair(backend, group)
        x, routing = rows_of(5 * rank_of(group), rank_of(group)), routing_of(5 * rank_of(group), rank_of(group))
        expected, found = one_layer(eager, x, routing), one_layer(static, x, routing)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        sent = static.dispatch(x, routing, async_op=True).wait()  # sorted only where it is waited for
        assert torch.equal(sent.real_tokens_per_expert, expected["real counts of the first call"])
        eager.close()
        static.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", VARIANTS.values(), ids=VARIANTS)
def test_shapes_are_fixed_and_the_library_is_told_not_to_wait(backend: dict[str, Any], wrap: Wrap) -> None:
    """Whether it waits is seen in no result: so this looks at what it is called with, also in backwards and repeats."""
    calls: list[dict[str, Any]] = []

    def spied(original: Any, *args: Any, **given: Any) -> Any:
        calls.append(given)
        return original(*args, **given)

    wrap(buffer_class(backend), "dispatch_with_permute" if backend["name"] == "hybridep" else "dispatch", spied)

    def body(group: Group) -> None:
        fields: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": MOST, "pad_multiple": 16}
        static = build_dispatcher(config(backend, **fields), group)
        capacity = static.plan(like=rows_of(1, 0)).sizes.capacity
        assert capacity is not None
        assert capacity.rows == 2 * MOST * 2
        for rows in (0, 5, 12):
            sent = static.dispatch(rows_of(rows, 0), routing_of(rows, 0))
            assert sent.rows.shape == (capacity.buffer_rows, 256)
            assert sent.weights.shape == (capacity.buffer_rows,)
            assert sent.tokens_per_expert_list is None
            real, padded = sent.real_tokens_per_expert, sent.tokens_per_expert
            assert real.dtype == padded.dtype == torch.int64
            assert torch.equal(padded, -(-real // 16) * 16)
            starts = padded.cumsum(0) - padded
            for start, count, end in zip(starts.tolist(), real.tolist(), (starts + padded).tolist(), strict=True):
                assert (sent.rows[start + count : end] == 0).all()
                assert (sent.weights[start + count : end] == 0).all()
        needed = static.required_capacity()
        assert (needed.pair_rows, needed.overflowed) == (0, False)
        ids = routing_of(12, 0).topk_ids  # of both ranks, in the fullest call
        assert needed.rows == 2 * max(int((ids[ids >= 0] // 4 == rank).sum()) for rank in range(2))
        one_layer(static, rows_of(5, 0), routing_of(5, 0))
        for given in calls:
            is_new = given.get("handle") is None
            if backend["name"] == "hybridep":
                assert given["non_blocking"]
                assert given["num_permuted_tokens"] == capacity.buffer_rows
            elif backend is V1:
                assert given.get("num_worst_tokens", 0) == (2 * MOST if is_new else 0)
            else:
                assert not is_new or given["do_cpu_sync"] is False
        static.close()

    on_ranks(body, 2)
    assert len(calls) == 2 * (3 + 7)


FINITE: dict[str, Any] = {"capacity_factor": 1.0, "on_overflow": "raise"}


@pytest.mark.parametrize(
    ("backend", "fields", "text"),
    [
        ({**V2, "expand": True}, {}, "it sorts expanded rows; the option deterministic=False turns this sort off"),
        ({**V2, "ranks_per_node": 1}, {}, "it sorts rows across nodes; the option deterministic=False turns this"),
        (V1, {"on_overflow": "raise"}, "its library cannot drop rows. Leave out capacity_factor"),
        (V2, FINITE, "its library cannot drop rows. Leave out capacity_factor"),
        (HYBRID, {**FINITE, "on_overflow": "drop"}, "it drops rows by position. Use"),
        (VARIANTS["fused"], FINITE, "the fused combine hangs if all rows of a token were dropped, got 1.0. Leave"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(
    backend: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    settings = {"max_tokens_per_rank": MOST, "graph_safe": True, **fields}
    results = outcomes(lambda group: build_dispatcher(config(backend, **settings), group), 2)
    raises_everywhere(results, ConfigError, text)
