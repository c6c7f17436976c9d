"""What tests of plans share: routings that leave nothing out, a run of them, and a plan of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.backends import MoEShape, capacity
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import Metrics
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch_testing import Ranks, allow_host_syncs, count_collectives
from moe_dispatch_testing.scenario import ROUTINGS
from moe_dispatch_tools.loads import count_loads
from moe_dispatch_tools.names import parse_backend
from moe_dispatch_tools.placements import count_copies
from moe_dispatch_tools.plan.forecast import forecast
from moe_dispatch_tools.plan.models import GroupLimit, Model
from moe_dispatch_tools.plan.routing import (
    RoutingSource,
    choose_experts,
    draw_experts,
    popularity,
    random_routing,
    recorded_routing,
)
from moe_dispatch_tools.traces import Trace
from tests.cli.conftest import Command
from tests.cli.plan.test_models import QWEN3, written
from tests.ranks import run_ranks

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 4, 128, 24
RANKS = Ranks()
# What a plan tells of, of all that is counted.
LABELS = ("counts", "dispatch", "combine", "combine.backward", "dispatch.backward", "balance")


def config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, **fields})


def mixed_ids(size: int, seed: int = 0) -> list[Tensor]:
    """Of each rank: another number of rows, skewed, with slots that go nowhere and experts named twice."""
    found = []
    for rank in range(size):
        kind = ("skewed", "partly_nowhere", "duplicates", "uniform")[rank % 4]
        generator = torch.Generator().manual_seed(100 * seed + rank)
        found.append(ROUTINGS[kind](TOKENS - 2 * rank, TOP_K, EXPERTS, generator))
    return found


def run(
    given: DispatcherConfig, ids: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16
) -> list[tuple[Metrics, int]]:
    """One dispatch, combine and their backwards: each rank's metrics, and the bytes of its collectives as seen."""

    def body(group: dist.ProcessGroup) -> tuple[Metrics, int]:
        mine = ids[group.rank()]
        with allow_host_syncs():
            dispatcher = build_dispatcher(given, group)
            x = torch.randn(len(mine), given.hidden_size).to(dtype).requires_grad_()
            weights = torch.rand(mine.shape).requires_grad_()
        with count_collectives() as seen:
            sent = dispatcher.dispatch(x, Routing(mine, weights))
            dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics(), seen.nbytes

    return RANKS.run(body, len(ids))


def plan_of(
    given: DispatcherConfig,
    size: int,
    source: RoutingSource,
    backend: str,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Any:
    """Plan backends. Other names are of ``forecast`` and of its model."""
    return forecast(
        Model(name="test", config=given.replace(backend="auto"), layers=more.pop("layers", 1), dtype=dtype),
        source,
        ep_size=size,
        nodes=more.pop("nodes", 1),
        backends=[parse_backend(name) for name in backend.split(",")],
        **more,
    )


def recorded(*dispatches: Sequence[Tensor]) -> RoutingSource:
    return recorded_routing(dispatches, "a test")


STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS + 3}
# A backend as a command line names it, dtype, fields of the config, and number of ranks.
VARIANTS: list[tuple[str, torch.dtype, dict[str, Any], int]] = [
    ("alltoall", torch.bfloat16, {}, 8),
    ("alltoall", torch.float32, {"pad_multiple": 16, "wire": "bfloat16"}, 2),
    ("alltoall", torch.bfloat16, {"wire": "float8_e4m3fn", "weights": "experts"}, 4),
    ("alltoall", torch.bfloat16, {"wire": {"dtype": "mxfp8", "gradients": True}, "pad_multiple": 32}, 4),
    ("alltoall", torch.bfloat16, {**STATIC, "wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}, 4),
    ("alltoall+reduction=exact", torch.float32, {"wire": "bfloat16"}, 2),
    (
        "alltoall+pair_rows=0.7",
        torch.float32,
        {**STATIC, "graph_safe": {"on_overflow": "drop"}, "wire": "float8_e4m3fn"},
        4,
    ),
    ("alltoall", torch.bfloat16, {**STATIC, "balance": "manual", "pad_multiple": 16}, 4),
    (
        "alltoall",
        torch.bfloat16,
        {"balance": {"name": "least_loaded", "spare_experts_per_rank": 2}, "pad_multiple": 16},
        4,
    ),
    ("alltoall", torch.bfloat16, {"balance": {"name": "exact", "min_rows": 0}}, 4),
    ("allgather", torch.bfloat16, {"pad_multiple": 16}, 8),
    ("allgather", torch.float32, {"wire": {"dtype": "mxfp8", "gradients": True}}, 4),
    ("allgather", torch.float32, {"constraints": {"row_multiple": 16}}, 4),
    ("allgather", torch.bfloat16, {**STATIC, "graph_safe": {"capacity_factor": 1.5, "on_overflow": "drop"}}, 4),
    ("allgather", torch.bfloat16, {"balance": {"name": "eplb", "spare_experts_per_rank": 1}}, 4),
]


def summed(values: list[int]) -> dict[str, float]:
    return {"expected": sum(values) / len(values), "low": min(values), "high": max(values)}


@pytest.mark.parametrize(("name", "dtype", "fields", "size"), VARIANTS)
def test_bytes_and_rows_are_those_of_a_run(name: str, dtype: torch.dtype, fields: dict[str, Any], size: int) -> None:
    ids = mixed_ids(size)
    given = config(backend=parse_backend(name).spec(), **fields)
    measured = run(given, ids, dtype)
    (plan,) = (found := plan_of(given, size, recorded(ids), name, dtype))["backends"]
    assert plan["refused"] is None
    sent = [metrics.bytes_sent for metrics, _ in measured]
    assert plan["sent"] == {label: summed([of[label] for of in sent]) for label in LABELS if label in sent[0]}
    assert (plan["forward"]["expected"] + plan["backward"]["expected"]) * size == sum(seen for _, seen in measured)
    if given.graph_safe_options not in (None, capacity.GraphSafeOptions()) or "pair_rows" in name:
        return  # rows that were dropped are no padding
    padded = [metrics.rows_padded for metrics, _ in measured]
    assert plan["rank_padding"]["expected"] * size == sum(of["rank"] for of in padded)
    assert found["expert_padding"] == summed([of["expert"] for of in padded])
    received = [int(metrics.real_tokens_per_expert.sum()) for metrics, _ in measured]
    assert (found["received"], found["busiest_rank"]["expected"]) == (summed(received), max(received))
    by_expert = torch.stack([metrics.real_tokens_per_expert for metrics, _ in measured])
    if given.spare_slots(size):  # several ranks may have computed the rows of an expert
        by_expert = by_expert.sum(0)
    assert found["busiest_expert"]["expected"] == int(by_expert.max())


@pytest.mark.parametrize(("device", "copies"), [("cpu", 1), ("cuda", 0), (None, 0)])
def test_a_copy_is_planned_for_the_fewest_rows_of_a_gpu_or_as_the_config_says(device: str | None, copies: int) -> None:
    ids = [torch.zeros(1800, 1).long(), torch.zeros(0, 1).long()]  # a copy takes 900 rows over
    found = plan_of(config(top_k=1, balance="exact", device=device), 2, recorded(ids), "allgather")
    assert found["copies"]["expected"] == copies
    assert "fewer than balance.min_rows" in found["model"]["balance_promise"]


BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}


@pytest.mark.parametrize(
    ("reduction", "size", "nodes", "fields"),
    [
        ("fast", 4, 2, {}),
        ("exact", 8, 2, {}),
        ("exact", 4, 1, {}),
        ("fast", 4, 4, {}),
        ("fast", 8, 2, BALANCED),
        ("exact", 4, 2, BALANCED),
    ],
)
def test_bytes_of_two_legs_are_those_of_a_run(reduction: str, size: int, nodes: int, fields: dict[str, Any]) -> None:
    """With ``balance`` the plan has one node: the option of the backend says otherwise."""
    ids, per_node = mixed_ids(size), size // nodes
    name = f"alltoall_by_node+ranks_per_node={per_node}+reduction={reduction}"
    measured = run(config(backend=parse_backend(name).spec(), **fields), ids)
    (plan,) = plan_of(config(**fields), size, recorded(ids), name, nodes=1 if fields else nodes)["backends"]
    assert any("within_node" in label for label in plan["sent"]) == (1 < nodes < size)
    sent = {label: [metrics.bytes_sent.get(label, 0) for metrics, _ in measured] for label in plan["sent"]}
    assert plan["sent"] == {label: summed(of_ranks) for label, of_ranks in sent.items()}
    assert (plan["forward"]["expected"] + plan["backward"]["expected"]) * size == sum(seen for _, seen in measured)
    if nodes in (1, size) or fields:
        return
    rows = sum(sum(of_ranks) for label, of_ranks in sent.items() if label in LABELS[1:])
    counts = sum(sent["counts"]) * (size - per_node) / (size - 1)
    assert plan["between_nodes"] == pytest.approx((rows + counts) / size)
    (one_level,) = plan_of(config(), size, recorded(ids), f"alltoall+reduction={reduction}", nodes=nodes)["backends"]
    assert plan["between_nodes"] < one_level["between_nodes"]


@pytest.mark.parametrize(("name", "without"), [("alltoall", (1,)), ("allgather", (0, 1)), ("allgather", (1,))])
def test_several_dispatches_and_ranks_without_a_token(name: str, without: tuple[int, ...]) -> None:
    """In a second dispatch, after one in which all have some: the mean and the extremes of both."""
    whole, empty = mixed_ids(2), mixed_ids(2, seed=1)
    for rank in without:
        empty[rank] = empty[rank][:0]
    given = config(backend=name, pad_multiple=16)
    measured = [metrics for ids in (whole, empty) for metrics, _ in run(given, ids)]
    found = plan_of(given, 2, recorded(whole, empty), name, layers=3)
    (plan,) = found["backends"]
    for label in ("dispatch", "combine", "combine.backward", "dispatch.backward"):
        assert plan["sent"][label] == summed([metrics.bytes_sent.get(label, 0) for metrics in measured]), label
    backward = ("combine.backward", "dispatch.backward")
    assert plan["backward"]["expected"] == 3 * sum(plan["sent"][label]["expected"] for label in backward)
    assert found["expert_padding"] == summed([metrics.rows_padded["expert"] for metrics in measured])
    assert found["received"] == summed([int(metrics.real_tokens_per_expert.sum()) for metrics in measured])


@pytest.mark.parametrize("backend", ["alltoall", "allgather", "local"])
def test_buffers_are_those_a_plan_of_the_dispatcher_tells(backend: str) -> None:
    size = 1 if backend == "local" else 4
    given = config(backend=backend, pad_multiple=16, **STATIC)
    told = run_ranks(
        lambda group: build_dispatcher(given, group).plan(Rows(), like=torch.empty(TOKENS, 128)).bytes(torch.bfloat16),
        size,
    )
    (plan,) = plan_of(given, size, recorded(mixed_ids(size)), backend)["backends"]
    assert {purpose: of["expected"] for purpose, of in plan["buffers"].items()} == told[0]


def planned(backend: str, size: int = 4, *, fields: dict[str, Any] | None = None, **more: Any) -> Any:
    source = more.pop("source", None) or random_routing("uniform")
    return plan_of(config(**(fields or {})), size, source, backend, **{"tokens": TOKENS, **more})


def by_name(found: Any) -> dict[str, Any]:
    return {backend["name"]: backend for backend in found["backends"]}


def test_rows_cross_once_for_each_rank_or_each_node() -> None:
    """Two nodes: DeepEP sends a row over once, alltoall to each of the ranks there that need it."""
    found = by_name(planned('alltoall,deepep+emulate="v1.2.1",allgather', 16, nodes=2, fields={"hidden_size": 256}))
    alltoall, deepep, allgather = found["alltoall"], found['deepep+emulate="v1.2.1"'], found["allgather"]
    assert (deepep["payload_only"], alltoall["payload_only"]) == (True, False)
    # 16 experts, one to a rank: 4 of a token's experts, of which each is on the other node as likely as not.
    other = 1 - (8 * 7 * 6 * 5) / (16 * 15 * 14 * 13)
    assert deepep["between_nodes"] == pytest.approx(4 * TOKENS * other * 512, rel=4e-3)
    assert alltoall["between_nodes"] == pytest.approx(TOKENS * 2 * (544 + 512 + 512 + 544) + 8 * 8 * 2, rel=4e-3)
    assert allgather["between_nodes"] == pytest.approx(sum(of["expected"] for of in allgather["sent"].values()) / 15)
    assert [plan["between_nodes"] for plan in planned("alltoall,allgather")["backends"]] == [0, 0], "on one node"


def test_forward_counts_the_agreement_once() -> None:
    """An all-reduce of 9 integers of each of 4 ranks, of 16 counts, and of the number of invalid ids: 53 integers."""
    (plan,) = planned("allgather", layers=7)["backends"]
    forward = plan["sent"]["dispatch"]["expected"] + plan["sent"]["combine"]["expected"]
    assert plan["forward"]["expected"] == 7 * forward + 636
    (assumed,) = planned("allgather", fields={"row_counts": "assume"}, layers=7)["backends"]
    assert assumed["forward"]["expected"] == 7 * forward


def test_rows_are_padded_for_the_backend() -> None:
    hybridep = 'hybridep+emulate="hybridep-94a9f8f"+ranks_per_domain=1'
    given = {"hidden_size": 512, "pad_multiple": "fp8"}
    (plan,) = planned(hybridep, fields=given, tokens=2009)["backends"]
    assert (plan["rows_per_rank"]["expected"], plan["rank_padding"]["expected"], plan["row_multiple"]) == (2012, 3, 4)
    assert planned(hybridep, fields=given, tokens=2048)["backends"][0]["rank_padding"]["high"] == 0


def test_capacities_are_those_of_graph_safe_mode() -> None:
    room = {"capacity_factor": 1.3, "on_overflow": "raise"}
    given: dict[str, Any] = {"graph_safe": room, "max_tokens_per_rank": 40, "pad_multiple": 16}
    found = planned("alltoall,allgather", fields=given)
    by_factor = {one["factor"]: one for one in found["capacities"]}
    assert list(by_factor) == [1.0, 1.1, 1.25, 1.3, 1.5, 2.0, "worst"]
    needed, own = capacity.capacity_of(shape_of(config(**given), 4), pair_factor="worst"), by_factor[1.3]
    assert (own["rows"], own["buffer_rows"]) == (needed.rows, needed.buffer_rows)
    assert own["buffer_bytes"] == needed.buffer_rows * 128 * 2
    assert by_factor["worst"]["overflow"] == by_factor["worst"]["dropped"] == by_factor["worst"]["pair_overflow"] == 0
    assert found["needed_factor"] == found["busiest_rank"]["high"] / (40 * 4)
    assert by_name(found)["allgather"]["rows_per_rank"]["expected"] == 40
    verbs = {"combine", "combine.backward", "dispatch.backward"}
    assert set(by_name(found)["alltoall"]["buffers"]) == {"rows", "weights", "index", "wire"} | verbs


def test_a_recorded_overflow_is_counted() -> None:
    ids = mixed_ids(4)
    nothing = [torch.full_like(of_rank, -1) for of_rank in ids]
    given = {"graph_safe": {"capacity_factor": 0.001, "on_overflow": "drop"}, "max_tokens_per_rank": TOKENS}
    found = planned("alltoall", source=recorded(ids, nothing), tokens=None, fields=given)
    (least, *_) = found["capacities"]
    assert (least["overflow"], least["pair_overflow"]) == (0.5, 0.5)
    assert least["dropped"] > 0.9


REFUSED = [
    ("local", {}, 4, r"ep_size must be one of 1, got 4"),
    ("deepep", {"hidden_size": 7168}, 12, r"a group of 12 ranks must have 8 ranks per node, got 4"),
    ("hybridep", {"hidden_size": 100}, 4, r"hidden_size must be a multiple of 16, got 100"),
    ("allgather", {"wire": "bfloat16"}, 4, r"wire must be one of None, .*, got 'bfloat16'"),
    ("alltoall+reduction=exact", {"graph_safe": True, "max_tokens_per_rank": 99}, 4, "graph_safe is not possible"),
    ("deepep", {"hidden_size": 256, "device": "cpu"}, 4, r"device must be one of cuda, got 'cpu'"),
    ("alltoall+pair_rows=1.5", {}, 4, r"pair_rows=1.5 needs graph_safe=True\."),
    ("allgather", {"constraints": {"max_rows": 16}}, 4, r"at most 16 rows per rank fit, got 24"),
    ("alltoall", {"graph_safe": True, "max_tokens_per_rank": 2**28}, 16, "must have at most 2147483647 rows"),
]


@pytest.mark.parametrize(("backend", "fields", "size", "reason"), REFUSED)
def test_refusals_are_those_of_building(backend: str, fields: dict[str, Any], size: int, reason: str) -> None:
    given = {"num_experts": 48 if size == 12 else 16, **fields}
    plan = planned(backend, size, fields=given, nodes=3 if size == 12 else 1)["backends"][0]
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(plan["refused"])
    assert (plan["sent"], plan["rows_per_rank"], plan["buffers"]) == (None, None, None)


@pytest.mark.usefixtures("third_party")
def test_what_is_not_installed_or_does_not_tell() -> None:
    plans = by_name(planned("deepep,hybridep", 8, fields={"hidden_size": 256}))
    assert list(plans) == ["deepep v1.2.1", "deepep v2.5.0", "hybridep 746"]
    for plan in plans.values():
        assert plan["refused"] is None
        assert "not usable here: no module named 'deep_ep' is installed" in plan["rules"]
    assert "its import raised ModuleNotFoundError" in planned("reef")["backends"][0]["refused"]
    (plan,) = planned("tests.cli.planted:Planted")["backends"]
    assert (plan["refused"], plan["sent"], plan["forward"]) == (None, None, None)
    assert plan["rows_per_rank"] is not None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"size": 8, "nodes": 3}, r"ep \(8\) must be divisible by nodes \(3\)"),
    ({"source": recorded(mixed_ids(4))}, r"a recorded routing decides the rows of a rank"),
    ({"size": 2**10, "fields": {"num_experts": 2**13}}, r"ep \(1024\) times num_experts \(8192\) must be at most"),
    ({"size": 4, "tokens": 2**29}, r"tokens x ep x top_k must be at most 268435456, got \d+"),
    ({"size": 4, "tokens": 2**24, "fields": {"num_experts": 2**10}}, r"tokens x ep x num_experts must be at most"),
    ({"fields": {"max_tokens_per_rank": 5}}, r"a rank must bring at most max_tokens_per_rank \(5\) rows, got 24\."),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned("alltoall", **changes)


@pytest.mark.parametrize("name", ["zip", "uniform:1", "zipf:x", "zipf:nan", "zipf:9"])
def test_unknown_routings_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"routing must be .* 0 to 8, .*, got '{name}'"):
        random_routing(name)


ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path, {**QWEN3, "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256}))


def asked(command: Command, *arguments: str, status: int = 0) -> Any:
    answer = command("plan", *arguments, "--json")
    assert answer.status == status, answer.error
    return json.loads(answer.out)


def test_options_reach_the_plan(command: Command, model: str) -> None:
    shape = ["--ep", "4", "--nodes", "2", "--tokens", "504", "--layers", "3", "--dtype", "float32"]
    more = ["--set", "pad_multiple=fp8", "--set", "wire=bfloat16"]
    found = asked(command, model, *shape, *more, "-b", "alltoall", "--routing", "zipf:0.5")
    described = {name: found["model"][name] for name in ("layers", "dtype", "pad_multiple")}
    assert described == {"layers": 3, "dtype": "float32", "pad_multiple": 16}
    assert found["model"]["wire"]["dtype"] == "bfloat16"
    assert found["cluster"] == {"ep_size": 4, "nodes": 2, "ranks_per_node": 2}
    assert found["rows_per_rank"] == 504
    assert found["routing"].startswith("zipf with exponent 0.5")
    assert [backend["name"] for backend in found["backends"]] == ["alltoall"]
    seeds = [["--seed", "1"], ["--seed", "1"], []]
    drawn = ["--tokens", "16", "--routing", "zipf", "-b", "alltoall"]
    first, same, other = (asked(command, model, *drawn, *seed) for seed in seeds)
    assert first == same
    assert first["cluster"]["ep_size"] == 8
    assert first["received"] != other["received"]


def test_graph_safe_mode_is_set(command: Command, model: str) -> None:
    room = ["--set", "max_tokens_per_rank=64", "--set", 'graph_safe={"on_overflow": "drop"}']
    room += ["--set", "graph_safe.capacity_factor=1.4"]
    found = asked(command, model, "-b", "alltoall,hybridep", *room)
    assert found["model"]["graph_safe"] == {"capacity_factor": 1.4, "on_overflow": "drop"}
    assert found["rows_per_rank"] == 64
    assert 1.4 in [one["factor"] for one in found["capacities"]]
    assert "it drops rows by position" in found["backends"][1]["refused"]
    assert "size of wire" in command("plan", model, "-b", "alltoall", *room).out
    nothing = asked(command, model, "-b", "local", *room, status=1)
    assert nothing["backends"][0]["refused"]


def test_options_of_the_config_belong_to_its_backend(command: Command, tmp_path: Path) -> None:
    text = '{"backend": {"name": "alltoall", "reduction": "exact"}, "num_experts": 16, "top_k": 4, "hidden_size": 64}'
    own = written(tmp_path, text, "own.yaml")
    found = asked(command, str(own), "--tokens", "64", "--ep", "2")
    plans = {backend["name"]: backend for backend in found["backends"]}
    fast = asked(command, str(own), "--tokens", "64", "--ep", "2", "-b", "alltoall")["backends"][0]
    assert plans["alltoall"]["sent"]["combine"]["expected"] > 1.5 * fast["sent"]["combine"]["expected"]


def test_a_trace_is_planned_as_it_ran(command: Command, model: str, tmp_path: Path) -> None:
    ids, path = mixed_ids(4), tmp_path / "run.safetensors"
    given = config(backend="alltoall", hidden_size=256)

    def body(group: dist.ProcessGroup) -> int:
        dispatcher = build_dispatcher(given, group)
        mine = ids[group.rank()]
        with Trace.record(dispatcher, path):
            x = torch.randn(len(mine), 256, dtype=torch.bfloat16).requires_grad_()
            sent = dispatcher.dispatch(x, Routing(mine, torch.rand(mine.shape)), Rows(num_real=len(mine) - 3))
            dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics().bytes_sent["dispatch"]

    measured = run_ranks(body, 4)
    found = asked(command, model, "--routing", str(path), "-b", "alltoall,allgather")
    assert found["cluster"]["ep_size"] == 4
    assert found["routing"] == "run.safetensors: 1 dispatch of 1 layer in 1 step"
    sent = found["backends"][0]["sent"]["dispatch"]
    assert (sent["low"], sent["high"], 4 * sent["expected"]) == (min(measured), max(measured), sum(measured))
    own = asked(command, str(path), "-b", "alltoall,allgather")  # with the config of the trace
    assert (own["routing"], own["received"], own["model"]["name"]) == (found["routing"], found["received"], path.name)
    assert (own["model"]["layers"], own["model"]["dtype"]) == (1, "bfloat16")
    answer = command("plan", model, "--routing", str(path), "--ep", "8")
    assert answer.status == 2
    assert answer.error.startswith("Error: Trace.check: ep_size must be 4, as in the trace, got 8.")


@pytest.mark.slow
def test_the_page_shows_what_is_printed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what ``[...]`` stands for. To write it anew: paste what this test prints where it fails."""
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    written(tmp_path, re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    asked_for, shown = re.findall(r"```console\n\$ moe-dispatch (.*?)\n(.*?)```", page, re.DOTALL)[0]
    with contextlib.chdir(tmp_path):
        printed = "\n".join(line.rstrip() for line in command(*asked_for.split()).out.splitlines())
    parts = shown.rstrip("\n").split("[...]")
    assert re.fullmatch(".*".join(map(re.escape, parts)), printed, re.DOTALL), printed


def test_traces_that_are_refused(command: Command, model: str, tmp_path: Path) -> None:
    dispatcher = build_dispatcher(config(backend="local", hidden_size=256))
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), contextlib.suppress(InputError):
        dispatcher.dispatch(torch.zeros(1, 256), Routing(torch.tensor([[0, 1, 2, 16]]), torch.ones(1, 4)))
    answer = command("plan", model, "--routing", str(tmp_path / "run.safetensors"))
    assert (answer.status, answer.out) == (2, "")
    assert "Error: plan: topk_ids must lie in -1..15, got 0..16 on rank 0 in step 0" in answer.error
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        pass
    answer = command("plan", model, "--ep", "1", "--routing", str(tmp_path / "empty.safetensors"))
    assert re.match(r"Error: plan: \S+ must hold a dispatch, got none\. Record at least one step\.", answer.error)


def test_copies_by_hand() -> None:
    """Experts 0 and 1 are at home on rank 0. Rank 1 has a copy of expert 0; a slot of rank 0 is empty."""
    assert count_copies(ExpertPlacement(4, ((0, 1, -1), (2, 3, 0)))) == 1
    assert count_copies(ExpertPlacement(4, ((2, 3), (1, 0)))) == 4


def test_the_placement_of_the_config_is_planned(command: Command, tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256, "moe_intermediate_size": 64}
    model = str(written(tmp_path, {**QWEN3, **sizes}))
    arguments = ["plan", model, "--ep", "4", "--tokens", "512", "--routing", "zipf", "-b", "alltoall"]
    several = ["--set", "balance.spare_experts_per_rank=2"]
    slots, balanced = ([*arguments, "--set", f"balance={name}", *several] for name in ("manual", "least_loaded"))
    exact = [*arguments, "--set", "balance=exact"]
    shown = command(*balanced).out
    assert "expert parallelism over 4 ranks, 1 node of 4; eager" in shown
    assert "a rank has 6 expert slots, 2 of them spare, filled by least_loaded in each dispatch" in shown
    assert re.search(r"^weights of \d experts, [\d.]+ kB, travel in a forward of a layer", shown, re.MULTILINE)
    without, found, other = (json.loads(command(*asked, "--json").out) for asked in (slots, balanced, exact))
    assert (without["copies"]["high"], found["expert_bytes"], found["capacities"]) == (0, 3 * 256 * 64 * 2, [])
    assert 0 < found["copies"]["expected"] <= found["copies"]["high"] <= 8
    assert found["busiest_rank"]["expected"] < 0.8 * without["busiest_rank"]["expected"]
    assert found["busiest_expert"] == without["busiest_expert"]
    assert found["backends"][0]["sent"]["balance"]["expected"] == 8 * 17 * 3
    assert other["model"]["spare_experts_per_rank"] == 4


LIMIT = GroupLimit(num_groups=8, topk_groups=4, scored_experts=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_known_loads_by_hand() -> None:
    """Two nodes of two ranks with two experts each; rank 0 sends a row to ranks 2 and 3, and one to itself."""
    of = MoEShape(num_experts=8, top_k=3, hidden_size=8, ep_size=4, pad_multiple=4, ranks_per_node=2)
    nowhere = torch.full((1, 3), -1)
    found = count_loads([[torch.tensor([[6, 4, 5], [0, 0, -1]]), nowhere, nowhere, nowhere]], of)
    assert found.rows_CP.tolist() == [[2, 1, 1, 1]]
    assert found.tokens_CE.tolist() == [[1, 0, 0, 0, 1, 1, 1, 0]]
    assert found.received_CP.tolist() == [[1, 0, 2, 1]]
    assert found.expert_padding_CP(4).tolist() == [[3, 0, 6, 3]]
    assert found.slots_CPP[0].tolist() == [[1, 0, 2, 1], [0] * 4, [0] * 4, [0] * 4]
    assert found.pairs_CPP[0].tolist() == [[1, 0, 1, 1], [0] * 4, [0] * 4, [0] * 4]
    assert found.nodes_CPN[0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 8.0])
def test_odds_by_hand(exponent: float) -> None:
    """First a, then b, has odds a * b / (1 - a)."""
    odds, tokens = popularity(4, exponent, generator()), 40_000
    ids = draw_experts(odds, 3, tokens, generator(1))
    assert all(len(set(row)) == 3 for row in ids[:1000].tolist())
    for a, b in itertools.permutations(range(4), 2):
        wanted = float(odds[a] * odds[b] / (1 - odds[a]))
        found = float(((ids[:, 0] == a) & (ids[:, 1] == b)).double().mean())
        assert found == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / tokens) + 1e-4)


def test_large_groups_are_simulated_in_few_dispatches() -> None:
    large = MoEShape(num_experts=8, top_k=1, hidden_size=8, ep_size=8, pad_multiple=1)
    assert len(list(random_routing("uniform").dispatches(large, 2**16))) == 2
    of = MoEShape(num_experts=64, top_k=2, hidden_size=8, ep_size=64, pad_multiple=1)
    (first, *_), (again, *_) = (random_routing("uniform", seed=3).dispatches(of, 64) for _ in range(2))
    assert torch.equal(first[5], again[5])
    assert first[5].shape == (64, 2)


def by_hand(scores: list[float], top_k: int, groups: GroupLimit) -> set[int]:
    """Return the experts of one token, by loops."""
    size = len(scores) // groups.num_groups
    members = [range(group * size, (group + 1) * size) for group in range(groups.num_groups)]

    def score(group: range) -> float:
        return sum(sorted((scores[expert] for expert in group), reverse=True)[: groups.scored_experts])

    best = sorted(members, key=score, reverse=True)[: groups.topk_groups]
    allowed = [expert for group in best for expert in group]
    return set(sorted(allowed, key=lambda expert: scores[expert], reverse=True)[:top_k])


@pytest.mark.parametrize("limit", [LIMIT, GroupLimit(num_groups=4, topk_groups=1, scored_experts=1)])
def test_experts_are_chosen_as_by_loops(limit: GroupLimit) -> None:
    scores_TE = torch.randn(200, 32, generator=generator())
    ids_TK = choose_experts(scores_TE, 6, limit)
    for scores, ids in zip(scores_TE.tolist(), ids_TK.tolist(), strict=True):
        assert len(ids) == 6
        assert set(ids) == by_hand(scores, 6, limit)
