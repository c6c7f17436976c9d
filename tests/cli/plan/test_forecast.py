"""Plans: what they are composed of, of shapes beyond any machine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch.backends import capacity, registry
from moe_dispatch.backends.requirements import shape_of
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.plan.figures import BackendPlan
from moe_dispatch_tools.plan.forecast import Forecast
from moe_dispatch_tools.plan.routing import random_routing
from moe_dispatch_tools.plan.sequences import Batch, Parallelism
from tests.cli.plan.planned import TOKENS, config, mixed_ids, plan_of, recorded

UNIFORM = random_routing("uniform")
DEEPSEEK: dict[str, Any] = {"num_experts": 256, "top_k": 8, "hidden_size": 7168}


def planned(backend: str, size: int = 4, *, fields: dict[str, Any] | None = None, **more: Any) -> Forecast:
    given = config(**(fields or {}))
    return plan_of(given, size, more.pop("source", UNIFORM), backend, **{"batch": Batch(tokens=TOKENS), **more})


def by_name(found: Forecast) -> dict[str, BackendPlan]:
    return {backend.name: backend for backend in found.backends}


@pytest.mark.slow
def test_512_ranks_on_64_nodes() -> None:
    found = planned(
        "alltoall,allgather,deepep,hybridep",
        512,
        fields={"num_experts": 512, "top_k": 8, "hidden_size": 4096, "pad_multiple": "fp8"},
        nodes=64,
        layers=60,
        source=random_routing("zipf:0.5"),
        batch=Batch(tokens=4096),
    )
    plans = by_name(found)
    # v1 has kernels for 160 ranks at most.
    assert [name for name, plan in plans.items() if plan.refused is not None] == ["deepep v1.2.1"]
    alltoall = plans["alltoall"]
    assert alltoall.forward is not None
    assert alltoall.sent is not None
    # Nearly every one of 8 experts is on another rank of its own.
    assert alltoall.sent["dispatch"].expected == pytest.approx(4096 * 8 * 8240, rel=0.02)
    assert found.received.expected == pytest.approx(4096 * 8)


def test_rows_cross_once_for_each_rank_or_each_node() -> None:
    """Two nodes: DeepEP sends a row over once, alltoall to each of the ranks there that need it."""
    found = by_name(planned('alltoall,deepep+emulate="v1.2.1",allgather', 16, nodes=2, fields={"hidden_size": 256}))
    alltoall, deepep, allgather = found["alltoall"], found['deepep+emulate="v1.2.1"'], found["allgather"]
    assert deepep.payload_only
    assert not alltoall.payload_only
    assert deepep.between_nodes is not None
    # 16 experts, one to a rank: 4 of a token's experts, of which each is on the other node as likely as not.
    other = 1 - (8 * 7 * 6 * 5) / (16 * 15 * 14 * 13)
    assert deepep.between_nodes == pytest.approx(4 * TOKENS * other * 512, rel=1e-3)
    assert alltoall.between_nodes == pytest.approx(TOKENS * 2 * (512 + 24 + 512 + 512 + 528) + 8 * 8 * 2, rel=1e-3)
    assert allgather.sent is not None
    assert allgather.between_nodes == pytest.approx(sum(of.expected for of in allgather.sent.values()) / 15)


def test_on_one_node_nothing_crosses() -> None:
    for plan in planned("alltoall,allgather").backends:
        assert plan.between_nodes == 0


def test_forward_counts_the_agreement_once() -> None:
    """An all-reduce of 7 integers of each of 4 ranks, of 16 counts, and of the number of invalid ids: 45 integers."""
    (plan,) = planned("allgather", layers=7).backends
    assert plan.forward is not None
    assert plan.sent is not None
    assert plan.forward.expected == 7 * (plan.sent["dispatch"].expected + plan.sent["combine"].expected) + 540
    (assumed,) = planned("allgather", fields={"row_counts": "assume"}, layers=7).backends
    assert assumed.forward is not None
    assert plan.forward.expected - assumed.forward.expected == 540


def test_sequences_are_padded_for_the_loader_and_for_the_backend() -> None:
    found = planned(
        'hybridep+emulate="hybridep-34152ae"',
        fields={"hidden_size": 512, "pad_multiple": "fp8"},
        batch=Batch(batch_size=2, seq_length=4001),
        parallelism=Parallelism(tp=2, cp=2, sequence_parallel=True),
    )
    sequences, (plan,) = found.sequences, found.backends
    assert (sequences.multiple, sequences.padded_length, sequences.padding) == (16, 4016, 15)
    assert sequences.rows_per_rank == 2 * 4016 // 4
    assert plan.rows_per_rank is not None
    assert plan.rank_padding is not None
    assert (plan.rows_per_rank.expected, plan.rank_padding.expected) == (2048, 40)
    assert plan.sequence_multiple == 128  # 64 rows to a rank, of 4, of which a micro-batch has 2 sequences
    again = planned(
        'hybridep+emulate="hybridep-34152ae"',
        fields={"hidden_size": 512, "pad_multiple": "fp8"},
        batch=Batch(batch_size=2, seq_length=16 * 256),
        parallelism=Parallelism(tp=2, cp=2, sequence_parallel=True),
    ).backends[0]
    assert again.rank_padding is not None
    assert again.rank_padding.high == 0


def test_capacities_are_those_of_graph_safe_mode() -> None:
    given: dict[str, Any] = {
        "graph_safe": True,
        "max_tokens_per_rank": 40,
        "capacity_factor": 1.3,
        "on_overflow": "raise",
        "pad_multiple": 16,
    }
    found = planned("alltoall,allgather", fields=given, layers=3, factors=[0.7, 1.25])
    by_factor = {one.factor: one for one in found.capacities}
    assert list(by_factor) == [0.7, 1.25, 1.3, "worst"]
    room = capacity.capacity_of(shape_of(config(**given), 4), pair_factor="worst")
    own = by_factor[1.3]
    assert (own.rows, own.buffer_rows) == (room.rows, room.buffer_rows)
    assert own.buffer_bytes == room.buffer_rows * 128 * 2
    assert by_factor["worst"].step_overflow == (0.0, 0.0)
    low, high = by_factor[0.7].overflow
    assert 0.01 < low <= high < 0.5  # 24 tokens in room for 28 of 40
    assert by_factor[0.7].step_overflow[0] == pytest.approx(1 - (1 - low) ** 3)
    plan = by_name(found)["allgather"]
    assert plan.rows_per_rank is not None
    assert plan.rows_per_rank.expected == 40


def test_graph_safe_mode_is_planned_for_a_config_that_is_not() -> None:
    found = planned("alltoall", graph_safe={"capacity_factor": 1.5, "on_overflow": "drop"})
    assert found.model["graph_safe"]
    assert found.model["max_tokens_per_rank"] == TOKENS
    assert found.backends[0].buffers is not None
    assert set(found.backends[0].buffers) == {"rows", "weights", "index", "wire"}


def test_a_recorded_overflow_is_certain() -> None:
    ids = mixed_ids(4)
    nothing = [torch.full_like(of_rank, -1) for of_rank in ids]
    found = planned("alltoall", source=recorded(ids, nothing), batch=Batch(), factors=[0.001])
    assert found.capacities[0].overflow == (0.5, 0.5)
    assert found.capacities[0].pair_overflow == (0.5, 0.5)


@pytest.mark.slow
def test_the_standard_error_is_how_much_other_seeds_differ() -> None:
    found = [planned("alltoall", source=random_routing("uniform", seed=seed)) for seed in range(16)]
    for name in ("busiest_rank", "busiest_expert", "expert_padding"):
        figures = [getattr(one, name) for one in found]
        spread = torch.tensor([of.expected for of in figures]).std()
        assert 0.5 * spread <= sum(of.error for of in figures) / len(figures) <= 2 * spread, name
    assert found[0].received.error == 0, "all ranks together get the same number of rows in every dispatch"
    assert planned("alltoall", source=recorded(mixed_ids(4)), batch=Batch()).busiest_rank.error == 0


def test_everything_is_plain_data() -> None:
    import json

    assert json.loads(json.dumps(planned("alltoall,local").as_json()))["backends"][1]["refused"]


REFUSED = [
    ("local", {}, 4, r"Backend 'local': ep_size must be one of 1, got 4\."),
    ("deepep", {"hidden_size": 7168}, 12, r"Backend 'deepep': a group of 12 ranks must have 8 ranks per node, got 4"),
    ("hybridep", {"hidden_size": 100}, 4, r"Backend 'hybridep': hidden_size must be a multiple of 16, got 100\."),
    (
        "allgather",
        {"wire_dtype": "bfloat16"},
        4,
        r"Backend 'allgather': wire_dtype must be one of None, got 'bfloat16'",
    ),
    ("alltoall+reduction=exact", {"graph_safe": True, "max_tokens_per_rank": 99}, 4, "graph_safe is not possible"),
    ("deepep", {"hidden_size": 256, "device": "cpu"}, 4, r"Backend 'deepep': device must be one of cuda, got 'cpu'"),
    ("alltoall+pair_rows=1.5", {}, 4, r"pair_rows=1.5 must come with graph_safe=True"),
    ("allgather", {"constraints": {"max_rows": 16}}, 4, r"Backend 'allgather': at most 16 rows per rank fit, got 24\."),
    (
        "alltoall",
        {"graph_safe": True, "max_tokens_per_rank": 2**28},
        16,
        r"Backend 'alltoall': a graph-safe buffer must have at most 2147483647 rows",
    ),
]


@pytest.mark.parametrize(("backend", "fields", "size", "reason"), REFUSED)
def test_refusals_are_those_of_building(backend: str, fields: dict[str, Any], size: int, reason: str) -> None:
    given = {"num_experts": 48 if size == 12 else 16, **fields}
    plan = planned(backend, size, fields=given, nodes=3 if size == 12 else 1).backends[0]
    assert plan.refused is not None
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(plan.refused)
    assert (plan.sent, plan.rows_per_rank, plan.buffers) == (None, None, None)


def test_what_is_not_installed_is_planned_by_its_releases() -> None:
    plans = by_name(planned("deepep,hybridep", 8, fields={"hidden_size": 256}))
    assert list(plans) == ["deepep v1.2.1", "deepep v2.5.0", "hybridep 746"]
    for plan in plans.values():
        assert plan.refused is None
        assert "not usable here: no module named 'deep_ep' is installed" in plan.rules


def test_a_package_that_does_not_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint(name="broken", value="no_such_module:Backend", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_third_party", lambda: {"broken": point})
    (plan,) = planned("broken").backends
    assert plan.refused is not None
    assert "its import raised ModuleNotFoundError" in plan.refused


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"size": 0}, r"plan: ep must be 1 or more, got 0\. Give the number of ranks"),
    ({"size": 8, "nodes": 3}, r"plan: ep \(8\) must be divisible by nodes \(3\)\. Give the number of nodes"),
    ({"size": 5}, r"num_experts \(16\) must be divisible by ep_size \(5\)"),
    ({"batch": Batch()}, r"plan: the rows of a rank must be 1 or more, got none\. Give --tokens, or --batch and"),
    (
        {"batch": Batch(tokens=3, seq_length=4)},
        r"plan: only one of .* must give the number of rows, got --tokens and --seq\. Leave",
    ),
    ({"batch": Batch(seq_length=0)}, r"plan: --seq must be 1 or more, got 0\. Give the tokens of a sequence"),
    ({"parallelism": Parallelism(tp=0)}, r"sequence_multiple: tp must be 1 or more, got 0\."),
    (
        {"fields": {"max_tokens_per_rank": 5}},
        r"plan: a rank must bring at most max_tokens_per_rank \(5\) rows, got 24\.",
    ),
    (
        {"flop_per_byte": -1.0},
        r"plan: flop-per-byte must be a number above 0, got -1\. Divide the FLOP per second of a device",
    ),
    ({"factors": [0.0]}, r"plan: a capacity factor must be above 0 and at most 1024, got 0.0\. Try 1.25"),
    ({"backend": "alltoal"}, r"Unknown backend 'alltoal'"),
    ({"backend": "alltoall+reductio=exact"}, r"backend 'alltoall\+reductio=exact': reductio: Extra inputs"),
    ({"source": recorded(mixed_ids(2)), "batch": Batch()}, r"plan: ep must be 2, as in a test, got 4\. Give --ep 2"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    changes = {"backend": "alltoall", **changes}
    with pytest.raises(ConfigError, match=message):
        planned(changes.pop("backend"), **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zip", r'plan: routing must be "uniform", "zipf" or "zipf:EXPONENT", got \'zip\'\. Use one of them'),
        ("uniform:1", r"plan: routing must be"),
        ("zipf:x", r"plan: the exponent of zipf must be a number from 0 to 8, got 'x'\. Use a number near 1"),
        ("zipf:9", r"got '9'"),
        ("zipf:nan", r"got 'nan'"),
    ],
)
def test_unknown_routings_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        random_routing(name)


def test_a_routing_without_a_dispatch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan: a test must hold a dispatch, got none\. Record at least one step\."):
        recorded()
