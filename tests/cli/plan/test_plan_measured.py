"""A plan of a known routing is what a run of it sends, byte by byte and row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch.backends import Volume
from moe_dispatch.backends.allgather import AllGatherOptions
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch_tools.plan.routing import popularity, random_routing
from tests.cli.plan.planned import LABELS, TOKENS, config, mixed_ids, plan_of, recorded, run

STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS + 3}
# A backend as a command line names it, dtype, and fields of the config.
VARIANTS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("alltoall", torch.bfloat16, {}),
    ("alltoall", torch.float32, {"pad_multiple": 16}),
    ("alltoall", torch.float32, {"wire_dtype": "bfloat16"}),
    ("alltoall", torch.bfloat16, {"wire_dtype": "float8_e4m3fn", "weights": "experts"}),
    ("alltoall+reduction=exact", torch.bfloat16, {"pad_multiple": 16}),
    ("alltoall+reduction=exact", torch.float32, {"wire_dtype": "bfloat16"}),
    ("alltoall", torch.bfloat16, {**STATIC, "pad_multiple": 16}),
    ("alltoall+pair_rows=0.7", torch.float32, {**STATIC, "on_overflow": "drop", "wire_dtype": "float8_e4m3fn"}),
    ("allgather", torch.bfloat16, {"pad_multiple": 16}),
    ("allgather", torch.float32, {"constraints": {"row_multiple": 16}}),
    ("allgather", torch.bfloat16, {**STATIC, "capacity_factor": 1.5, "on_overflow": "drop"}),
    ("alltoall", torch.bfloat16, {**STATIC, "spare_experts_per_rank": 1, "pad_multiple": 16}),
    ("alltoall", torch.bfloat16, {"spare_experts_per_rank": 2, "balance": "least_loaded", "pad_multiple": 16}),
    ("allgather", torch.bfloat16, {"spare_experts_per_rank": 1, "balance": "eplb"}),
]
IDS = [f"{name}-{str(dtype)[6:]}-{'-'.join(fields) or 'plain'}" for name, dtype, fields in VARIANTS]


def options(name: str) -> Any:
    where, _, pair = name.partition("+")
    option, _, value = pair.partition("=")
    if not pair:
        return where
    return {"name": where, option: float(value) if value[0].isdigit() else value}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("name", "dtype", "fields"), VARIANTS, ids=IDS)
def test_bytes_and_rows_are_those_of_a_run(name: str, dtype: torch.dtype, fields: dict[str, Any], size: int) -> None:
    ids = mixed_ids(size)
    given = config(backend=options(name), **fields)
    measured = run(given, ids, dtype)
    (plan,) = (found := plan_of(given, size, recorded(ids), name, dtype)).backends
    assert plan.refused is None
    assert plan.sent is not None
    sent = [
        {label: metrics.bytes_sent[label] for label in LABELS if label in metrics.bytes_sent} for metrics, _ in measured
    ]
    assert {label: (of.low, of.high, of.expected * size) for label, of in plan.sent.items()} == {
        label: (min(one[label] for one in sent), max(one[label] for one in sent), sum(one[label] for one in sent))
        for label in sent[0]
    }
    assert plan.forward is not None
    assert plan.backward is not None
    assert (plan.forward.expected + plan.backward.expected) * size == sum(seen for _, seen in measured)
    if given.capacity_factor != "worst" or "pair_rows" in name:
        return  # rows that were dropped are no padding
    padded = [metrics.rows_padded for metrics, _ in measured]
    assert plan.rank_padding is not None
    assert plan.rank_padding.expected * size == sum(of["rank"] for of in padded)
    assert (found.expert_padding.low, found.expert_padding.high) == (
        min(of["expert"] for of in padded),
        max(of["expert"] for of in padded),
    )
    received = [int(metrics.real_tokens_per_expert.sum()) for metrics, _ in measured]
    assert (found.received.low, found.received.high, found.busiest_rank.expected) == (
        min(received),
        max(received),
        max(received),
    )
    by_expert = torch.stack([metrics.real_tokens_per_expert for metrics, _ in measured])
    if given.spare_experts_per_rank:  # several ranks may have computed the rows of an expert
        by_expert = by_expert.sum(0)
    assert found.busiest_expert.expected == int(by_expert.max())


@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (8, 2), (8, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_bytes_of_two_levels_are_those_of_a_run(reduction: str, size: int, nodes: int) -> None:
    ids, per_node = mixed_ids(size), size // nodes
    name = f"alltoall+levels=2+ranks_per_node={per_node}+reduction={reduction}"
    options = {"name": "alltoall", "levels": 2, "ranks_per_node": per_node, "reduction": reduction}
    measured = run(config(backend=options), ids)
    (plan,) = plan_of(config(), size, recorded(ids), name, nodes=nodes).backends
    assert plan.sent is not None
    assert plan.forward is not None
    assert plan.backward is not None
    assert any("within_node" in label for label in plan.sent) == (1 < nodes < size)
    sent = {label: [metrics.bytes_sent.get(label, 0) for metrics, _ in measured] for label in plan.sent}
    assert {label: (of.low, of.high, of.expected * size) for label, of in plan.sent.items()} == {
        label: (min(of_ranks), max(of_ranks), sum(of_ranks)) for label, of_ranks in sent.items()
    }
    assert (plan.forward.expected + plan.backward.expected) * size == sum(seen for _, seen in measured)
    if nodes in (1, size):
        return
    rows = sum(sum(of_ranks) for label, of_ranks in sent.items() if label in LABELS[1:])
    counts = sum(sent["counts"]) * (size - per_node) / (size - 1)
    assert plan.between_nodes == pytest.approx((rows + counts) / size)
    (one_level,) = plan_of(config(), size, recorded(ids), f"alltoall+reduction={reduction}", nodes=nodes).backends
    assert plan.between_nodes is not None
    assert one_level.between_nodes is not None
    assert plan.between_nodes < one_level.between_nodes


def test_bytes_of_two_levels_are_unknown_for_other_nodes() -> None:
    """The plan counts rows for the nodes of the cluster, and the backend was told of nodes of 4 ranks."""
    (plan,) = plan_of(config(), 8, recorded(mixed_ids(8)), "alltoall+levels=2+ranks_per_node=4", nodes=4).backends
    assert (plan.refused, plan.sent) == (None, None)


def test_several_dispatches_are_their_mean_and_their_extremes() -> None:
    first, second = mixed_ids(4), mixed_ids(4, seed=1)
    given = config(backend="alltoall")
    sent = [[metrics.bytes_sent["combine"] for metrics, _ in run(given, ids)] for ids in (first, second)]
    (plan,) = plan_of(given, 4, recorded(first, second), "alltoall", layers=3).backends
    assert plan.sent is not None
    assert plan.forward is not None
    of = plan.sent["combine"]
    assert (of.low, of.high) == (min(map(min, sent)), max(map(max, sent)))
    assert of.expected == sum(map(sum, sent)) / 8
    assert plan.forward.expected == 3 * sum(plan.sent[label].expected for label in ("counts", "dispatch", "combine"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_runs_of_random_routings_keep_to_the_ranges(size: int) -> None:
    given = config(backend="alltoall", pad_multiple=16)
    odds = popularity(given.num_experts, 0.8, torch.Generator().manual_seed(0))
    tokens = 200
    generator = torch.Generator().manual_seed(size)
    ids = [torch.multinomial(odds.expand(tokens, -1), given.top_k, generator=generator) for _ in range(size)]
    found = plan_of(given.replace(max_tokens_per_rank=tokens), size, random_routing("zipf:0.8"), "alltoall")
    (plan,) = found.backends
    assert plan.sent is not None
    for metrics, _ in run(given, ids):
        for label, of in plan.sent.items():
            assert of.low <= metrics.bytes_sent[label] <= of.high
        assert found.expert_padding.low <= metrics.rows_padded["expert"] <= found.expert_padding.high
        assert found.received.low <= int(metrics.real_tokens_per_expert.sum()) <= found.received.high


@pytest.mark.parametrize("field", ["pairs_out", "pairs_in"])
def test_a_wrong_volume_is_seen(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: rows that stay on their rank are counted as well."""
    original = AllToAllOptions.wire_bytes
    changed: list[float] = []

    def wire_bytes(options: AllToAllOptions, shape: Any, volume: Volume, dtype: torch.dtype) -> Any:
        fields = {name: getattr(volume, name) for name in Volume.__dataclass_fields__}
        changed.append(float(fields[field].sum()))
        return original(options, shape, Volume(**{**fields, field: fields[field] + 1}), dtype)

    monkeypatch.setattr(AllToAllOptions, "wire_bytes", wire_bytes)
    with pytest.raises(AssertionError):
        test_bytes_and_rows_are_those_of_a_run("alltoall", torch.bfloat16, {}, 2)
    assert changed


@pytest.mark.parametrize("backend", ["alltoall", "allgather", "local"])
@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_buffers_are_those_a_plan_of_the_dispatcher_tells(backend: str, pad_multiple: int) -> None:
    from moe_dispatch import Rows, build_dispatcher
    from moe_dispatch_testing import run_ranks

    size = 1 if backend == "local" else 4
    given = config(backend=backend, pad_multiple=pad_multiple, **STATIC)
    ids = mixed_ids(size)
    told = run_ranks(
        lambda group: build_dispatcher(given, group).plan(Rows(), like=torch.empty(TOKENS, 128)).bytes(torch.bfloat16),
        size,
    )
    (plan,) = plan_of(given, size, recorded(ids), backend).backends
    assert plan.buffers is not None
    assert {purpose: of.expected for purpose, of in plan.buffers.items()} == told[0]


def test_backends_that_do_not_tell_are_planned_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllGatherOptions, "wire_bytes", lambda *_: None)
    (plan,) = plan_of(config(), 4, recorded(mixed_ids(4)), "allgather").backends
    assert (plan.refused, plan.sent, plan.forward) == (None, None, None)
    assert plan.rows_per_rank is not None


@pytest.mark.parametrize("without", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_ranks_without_a_token_are_planned_as_they_ran(name: str, without: tuple[int, ...]) -> None:
    """In a second dispatch, after one in which all have some."""
    whole, empty = mixed_ids(2), mixed_ids(2, seed=1)
    for rank in without:
        empty[rank] = empty[rank][:0]
    given = config(backend=name, pad_multiple=16)
    measured = [metrics for ids in (whole, empty) for metrics, _ in run(given, ids)]
    found = plan_of(given, 2, recorded(whole, empty), name)
    (plan,) = found.backends
    assert plan.sent is not None
    for label in ("dispatch", "combine", "combine.backward", "dispatch.backward"):
        assert plan.sent[label].expected * 4 == sum(metrics.bytes_sent.get(label, 0) for metrics in measured), label
    assert found.expert_padding.expected * 4 == sum(metrics.rows_padded["expert"] for metrics in measured)
    received = [int(metrics.real_tokens_per_expert.sum()) for metrics in measured]
    assert (found.received.expected * 4, found.received.low) == (sum(received), min(received))
