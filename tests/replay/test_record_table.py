"""Record this library's own forward into a table, and replay it in a second pass that is cut differently."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import BSHD, SBHD, THD, Dispatcher, Routing, build_dispatcher
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay import RoutingTable, replayed
from moe_dispatch_tools.report.sections import run_content
from moe_dispatch_tools.traces import RunLog, Trace
from tests.dispatchers.layer import HIDDEN, small_config
from tests.pages import run_page
from tests.ranks import run_ranks

NAMES, LAYERS, LENGTHS = ("a", "b", "c"), 2, {"a": 6, "b": 3, "c": 5}
LOCAL = small_config("local")


def router(tokens_T: Tensor, layer: int) -> Routing:
    """The ids follow from the number of the token, so a row without a token has others."""
    first = (tokens_T * 3 + layer) % 8
    ids = torch.stack([first, (first + 1 + tokens_T % 5) % 8], 1).long()
    return Routing(ids, torch.rand(len(ids), 2))


def number(name: str, position: int) -> int:
    return 100 * NAMES.index(name) + position


def wanted(name: str) -> Tensor:
    tokens = torch.tensor([number(name, position) for position in range(LENGTHS[name])])
    return torch.stack([router(tokens, layer).topk_ids for layer in range(LAYERS)], 1)


def forward(layers: list[Dispatcher], layout: Layout, names: list[str], shape: tuple[int, ...]) -> None:
    sequence_T, position_T = layout.positions(shape)
    numbers = [number(names[s], p) if s >= 0 else 999 for s, p in zip(sequence_T, position_T.tolist(), strict=True)]
    x = torch.zeros(*shape[:-1], HIDDEN)
    for layer, dispatcher in enumerate(layers):
        sent = dispatcher.dispatch(x, router(torch.tensor(numbers), layer), layout)
        dispatcher.combine(sent.rows, sent)


def test_own_forward_of_two_micro_batches() -> None:
    layers = [build_dispatcher(LOCAL) for _ in range(LAYERS)]
    other = build_dispatcher(LOCAL)  # of the same channel, but not one of the model
    with RoutingTable.record(layers) as recording:
        recording.micro_batch(["b", "a"])
        forward(layers, BSHD([3, 6]), ["b", "a"], (2, 7, 1))
        forward([other], BSHD([3, 6]), ["b", "a"], (2, 7, 1))
        recording.micro_batch([None, "c"])
        forward(layers, THD([0, 2, 7], [0, 4, 12]), ["a", "c"], (12, 1))
    forward(layers, THD([0, 6]), ["b"], (6, 1))  # outside of the block
    table = recording.table()
    assert table.lengths == {"b": 3, "a": 6, "c": 5}
    for name in NAMES:
        assert torch.equal(table.entries(name), wanted(name))


def test_parts_of_ranks_and_stages_are_gathered_and_replayed_elsewhere() -> None:
    """Zigzag context parallelism when recorded, one stage a rank; sequence parallelism of one batch when replayed."""

    def body(group: Any) -> RoutingTable:
        rank = group.rank()
        dispatcher = build_dispatcher(small_config(), group)
        names = ["a", "b", "c"]
        layout = THD([0, 6, 9, 14], [0, 8, 12, 20])
        with RoutingTable.record({1: dispatcher}) as recording:
            recording.micro_batch(names)
            part = layout.shard(rank, 2, "zigzag")
            sequence_T, position_T = part.positions((10, 1))
            pairs = zip(sequence_T.tolist(), position_T.tolist(), strict=True)
            tokens = torch.tensor([number(names[s], p) if s >= 0 else 999 for s, p in pairs])
            sent = dispatcher.dispatch(torch.zeros(10, HIDDEN), router(tokens, 1), part)
            dispatcher.combine(sent.rows, sent)
        return recording.table().gathered(group)

    for table in run_ranks(body, 2):
        assert table.layers == (1,)
        rows = [table.routing_for(1, SBHD([5, 6]).shard(r, 2), ["c", "a"], like=(3, 2, HIDDEN)) for r in range(2)]
        ids = torch.cat(rows).view(6, 2, 2)
        assert torch.equal(ids[:5, 0], wanted("c")[:, 1])
        assert torch.equal(ids[:, 1], wanted("a")[:, 1])


def test_recomputed_forward_is_recorded_once() -> None:
    dispatcher = build_dispatcher(LOCAL)
    calls = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        sent = dispatcher.dispatch(x, router(torch.arange(6), len(calls) - 1), THD([0, 6]))
        return dispatcher.combine(sent.rows, sent)

    with RoutingTable.record([dispatcher]) as recording:
        recording.micro_batch(["a"])
        y = checkpoint(once, torch.zeros(6, HIDDEN, requires_grad=True), use_reentrant=False)
        y.sum().backward()
    assert len(calls) == 2
    assert torch.equal(recording.table().entries("a")[:, 0], wanted("a")[:, 0])


def test_refused_recordings(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(LOCAL)
    with pytest.raises(InputError, match=r"there are no dispatchers"), RoutingTable.record([]):
        pass
    with RoutingTable.record([dispatcher]) as recording:
        with pytest.raises(StateError, match=r"another block that is still open"), RoutingTable.record([dispatcher]):
            pass
        with pytest.raises(StateError, match="another block"), Trace.record(dispatcher, tmp_path / "run.safetensors"):
            pass
        with pytest.raises(StateError, match=r"no dispatch ran in the block"):
            recording.table()
        dispatcher.dispatch(torch.zeros(6, HIDDEN), router(torch.arange(6), 0), THD([0, 6]))
        with pytest.raises(StateError, match=r"a forward ran before the first of 0 calls"):
            recording.table()
    with RoutingTable.record([dispatcher]) as recording:
        recording.micro_batch(["a", "b"])
        dispatcher.dispatch(torch.zeros(6, HIDDEN), router(torch.arange(6), 0), THD([0, 6]))
    with pytest.raises(InputError, match=r"got 2 names and 1 sequences of THD"):
        recording.table()
    with RoutingTable.record([dispatcher]) as recording:
        for layer in range(2):
            recording.micro_batch(["a"])
            dispatcher.dispatch(torch.zeros(6, HIDDEN), router(torch.arange(6), layer), THD([0, 6]))
    with pytest.raises(InputError, match=r"the same key: \[0, 1\] and \[1, 2\] for sequence 'a', position 0, layer 0"):
        recording.table()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, four steps, two layers. The first layer drifts in ``step`` of 10 rows. The last step has no replay."""
    directory = tmp_path_factory.mktemp("logged") / "run"

    def body(group: Any) -> None:
        layers = [build_dispatcher(small_config(), group, name=name) for name in ("layers.0", "")]
        scores, own = torch.arange(8).expand(10, 8) / 10, torch.tensor([[7, 6]]).expand(10, 2)
        with RunLog.record(layers[0], directory) as log:
            for step in range(4):
                ids = own.clone()
                ids[:step, 0] = 1
                for layer, given in zip(layers, (ids, own), strict=True):
                    routing = replayed(given, scores, normalize=True) if step < 3 else Routing(own, torch.rand(10, 2))
                    sent = layer.dispatch(torch.zeros(10, HIDDEN), routing)
                    layer.combine(sent.rows, sent)
                log.step()

    run_ranks(body, 2)
    return directory


def test_log_has_the_slots_of_each_step(logged: Path) -> None:
    run = RunLog.load(logged)
    assert {name: counts.tolist() for name, counts in run.slots_replayed.items()} == {
        "layers.0": [[20, 20], [20, 20], [20, 20], [0, 0]],
        "": [[20, 20], [20, 20], [20, 20], [0, 0]],
    }
    assert run.slots_drifted["layers.0"].tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert not run.slots_drifted[""].any()


def test_report_shows_the_drift(logged: Path) -> None:
    section = run_content("run", RunLog.load(logged))["sections"][-1]
    assert section["heading"] == "Routing replay"
    (table,) = section["tables"]
    assert table["rows"] == [("layers.0", 120, 6, 5, 10), ("without a name", 120, 0, 0, 0)]
    assert "at most 10" in section["pictures"][-1]


def test_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    names = run_page("replay.md")
    assert names["metrics"].slots_replayed["layers.0"] == 9 * 2  # the tokens of both sequences but the last ones


def test_entries_have_the_hash_of_a_trace_of_nemo_rl() -> None:
    """Its r3_trace_*.jsonl has the sha256 of the ids of a sequence, with -1 for its last position."""
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(9)]).view(3, 3, 2)
    table = RoutingTable({"uid-1": ids}, num_experts=8, last_missing=True)
    sent = torch.cat([ids, torch.full((1, 3, 2), -1)]).int()
    entries = table.entries("uid-1").clamp(min=-1).int().contiguous()
    assert hashlib.sha256(entries.numpy().tobytes()).digest() == hashlib.sha256(sent.numpy().tobytes()).digest()
