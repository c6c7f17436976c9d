"""Cuts of a table for the rows of one rank: what other trainers got wrong, and policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import BSHD, SBHD, THD, Masked, Rows, communication
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, InputError, PeerError, StateError
from moe_dispatch.replay import Cut, RoutingTable, replayed
from tests.ranks import run_ranks
from tests.replay.samples import random_ids, small_table

TABLE = small_table()
ONE_TOKEN = small_table({"a": 1, "b": 6})
ZIGZAG = THD([0, 1, 7], [0, 4, 12])  # of ONE_TOKEN, on two ranks of context parallelism
LEFT = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool().flatten()


def rows(name: str, start: int, stop: int) -> list[tuple[str, int] | int]:
    return [(name, position) for position in range(start, stop)]


@pytest.mark.parametrize(
    ("table", "layout", "names", "like", "wanted"),
    [
        # Each row is a token (sequence, position), padding (-1), or takes the router's choice (-2).
        # sgl-project/sglang#36404: rows of padding came back with the ids of an earlier forward.
        (TABLE, BSHD([5, 3]), ["a", "b"], (2, 6, 16), [*rows("a", 0, 5), -1, *rows("b", 0, 3), -1, -1, -1]),
        # radixark/miles#465, THUDM/slime#1052: the trainer padded a pack to a multiple, and the rows did not fit.
        (TABLE, THD([0, 5, 8], [0, 8, 12]), ["a", "b"], None, [*rows("a", 0, 5), -1, -1, -1, *rows("b", 0, 3), -1]),
        # A trainer that pads a pack with one more sequence: nobody recorded it, so the router chooses.
        (TABLE, THD([0, 5, 8]), ["a", None], None, [*rows("a", 0, 5), -2, -2, -2]),
        # verl-project/verl#7261 and #7449: a sequence of one token on the ranks of zigzag context parallelism.
        (ONE_TOKEN, ZIGZAG.shard(0, 2, "zigzag"), ["a", "b"], None, [("a", 0), -1, *rows("b", 0, 2), -1, -1]),
        (ONE_TOKEN, ZIGZAG.shard(1, 2, "zigzag"), ["a", "b"], None, [-1, -1, *rows("b", 2, 6)]),
        # Left padding of prompts.
        (TABLE, Masked(LEFT), ["a", "b"], (2, 6, 1), [-1, *rows("a", 0, 5), -1, -1, -1, *rows("b", 0, 3)]),
        # The order of the sequences is that of the micro-batch.
        (TABLE, SBHD([1, 2]), ["b", "a"], (2, 2, 16), [("b", 0), ("a", 0), -1, ("a", 1)]),
        (TABLE, Rows(), ["a"], (5, 16), rows("a", 0, 5)),
        (TABLE, THD([0, 2]), ["c"], None, rows("c", 0, 2)),  # a trainer may cut a sequence short
        (TABLE, THD([0, 0]), ["a"], None, []),
        (TABLE, THD([0]), [], None, []),
    ],
)
def test_each_row_gets_the_ids_of_its_token(
    table: RoutingTable, layout: Any, names: Any, like: Any, wanted: list[tuple[str, int] | int]
) -> None:
    for layer in table.layers:
        ids = table.routing_for(layer, layout, names, like=like).tolist()
        expected = [[row] * 2 if isinstance(row, int) else table.entries(row[0])[row[1], layer] for row in wanted]
        assert ids == [torch.as_tensor(row).tolist() for row in expected]


def test_lookups_in_any_order_are_the_same() -> None:
    """Pipelines and recomputation interleave micro-batches: a list that is read first in, first out, mixes them up."""
    table = small_table(layers=4)
    first, second = table.cut(THD([0, 5]), ["a"]), table.cut(THD([0, 3]), ["b"])
    forward = {(name, n): cut.routing_for(n) for n in range(4) for name, cut in (("a", first), ("b", second))}
    for n in reversed(range(4)):
        for name, cut in (("b", second), ("a", first)):
            assert torch.equal(cut.routing_for(n), forward[name, n])
            assert torch.equal(cut.routing_for(n), table.entries(name)[:, n])


def test_all_ranks_raise_if_one_has_to() -> None:
    def body(group: Any) -> str:
        layout = THD([0, 5 + group.rank()])
        with pytest.raises((InputError, PeerError)) as caught:
            small_table().cut(layout, ["a"], group=group)
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert all("got 6 positions of sequence 'a', which has 5 in the table" in text for text in texts)
    assert "rank 1 refused" in texts[0]


def test_new_ids_in_the_memory_of_a_graph() -> None:
    table = small_table(layers=2)
    layout = THD([0, 3], [0, 8])
    static = table.cut(layout, ["b"], layers=[1])
    pointer = static.stored_TLK.data_ptr()
    cut = table.cut(THD([0, 5], [0, 8]), ["a"], layers=[1], into=static, step=1)
    assert cut.stored_TLK.data_ptr() == pointer
    assert torch.equal(static.routing_for(1)[:5], table.entries("a")[:, 1])


def test_device_is_that_of_the_hidden_states_and_not_the_default_one() -> None:
    cut = TABLE.cut(THD([0, 5]), ["a"], like=torch.empty(5, 16, device="meta"))
    assert cut.stored_TLK.device.type == "meta"
    assert cut.stored_TLK.dtype == torch.uint8
    assert isinstance(cut, Cut)
    with torch.device("meta"):
        ids = TABLE.routing_for(0, THD([0, 5]), ["a"], like=(5, 16))
    assert torch.equal(ids, TABLE.entries("a")[:, 0])
    assert replayed(ids, torch.rand(5, 8), normalize=True).topk_weights.shape == (5, 2)


def test_unknown_entries_and_layers_of_a_later_pipeline_stage() -> None:
    """Layers of another block may share the numbers of decoder layers, so a stage names its own."""
    table = RoutingTable({"a": random_ids(4, 4, 2, 8)}, num_experts=8, last_missing=True)
    assert (table.routing_for(1, THD([0, 5]), ["a"])[4] == -2).all()
    cut = table.cut(THD([0, 4]), ["a"], layers=[1, 3], fallback="error")
    assert torch.equal(cut.routing_for(3), table.entries("a")[:4, 3])


LENGTHS = {"a": 5, "b": 3, "c": 8}


def look_up(table: RoutingTable, name: str, step: int = 0, layers: Any = None) -> None:
    cut = table.cut(THD([0, LENGTHS[name]]), [name], step=step)
    for layer in table.layers if layers is None else layers:
        cut.routing_for(layer)


def test_every_entry_once_in_its_step() -> None:
    table = small_table()
    for step, name in enumerate("abc"):
        for _ in range(3):  # recomputation looks up again
            look_up(table, name, step)
    table.check_used()
    look_up(table, "a", 5)  # a new pass
    look_up(table, "b", 5)
    table.check_used(["a", "b"])


def test_entries_that_were_never_used_or_in_two_steps() -> None:
    table = small_table()
    look_up(table, "a")
    look_up(table, "c")
    look_up(table, "b", layers=[0, 2])
    told = (
        r"each of the 48 known .*, got 3 used never and 0 used in several steps\. .* never is sequence 'b', position 0"
    )
    with pytest.raises(StateError, match=told):
        table.check_used()
    for name in "abc":
        look_up(table, name)
    look_up(table, "c", 1, layers=[1])
    look_up(table, "c", 0, layers=[1])
    with pytest.raises(StateError, match=r"got 0 used never and 8 used in several steps\. .* is sequence 'c'"):
        table.check_used()
    fresh = RoutingTable({"a": random_ids(4, 3, 2, 8)}, num_experts=8, last_missing=True)
    cut = fresh.cut(THD([0, 4]), ["a"])
    with pytest.raises(StateError, match="got 12 used never"):  # a cut without a lookup does not count
        fresh.check_used(["a"])
    for layer in fresh.layers:
        cut.routing_for(layer)
    fresh.check_used()  # unknown entries need no lookup


def test_new_ids_for_a_graph_count_without_lookups() -> None:
    table = small_table({"a": 5, "b": 5})
    static = table.cut(THD([0, 5]), ["a"])
    table.cut(THD([0, 5]), ["a"], into=static)
    table.cut(THD([0, 5]), ["b"], into=static, step=1)
    table.check_used()


@pytest.mark.parametrize("fault", [None, "never", "several"])
def test_ranks_share_a_pass(fault: str | None) -> None:
    """Two ranks of zigzag context parallelism; both pipeline stages are on both."""

    def body(group: Any) -> str:
        table, layout = small_table({"a": 8}), THD([0, 8])
        part = layout.shard(group.rank(), 2, "zigzag")
        cut = table.cut(part, ["a"], step=1 if fault == "several" and group.rank() else 0)
        for layer in table.layers[: 2 if fault == "never" else 3]:
            cut.routing_for(layer)
        if fault == "several":
            table.cut(layout, ["a"], step=0).routing_for(0)
        try:
            table.check_used(group=group)
        except StateError as error:
            return str(error)
        return "used"

    first, second = run_ranks(body, 2)
    assert first == second
    told = {
        None: "used",
        "never": "got 8 used never and 0 used in several steps. The first one used never is sequence 'a', position 0, "
        "layer 2",
        "several": "got 0 used never and 4 used in several steps. The first one used in several steps is sequence 'a', "
        "position 2, layer 0",
    }
    assert told[fault] in first


def test_ranks_that_do_not_agree_on_the_pass() -> None:
    """With different tables, and with a sequence that the table of one rank lacks."""

    def body(group: Any) -> str:
        rank = group.rank()
        with pytest.raises(ConfigError, match=r"Ranks disagree on the table: rank 0 has .*5.*, rank 1 has .*6"):
            small_table({"a": 5 + rank}).check_used(group=group)
        with pytest.raises((InputError, PeerError)) as caught:
            small_table().check_used(["az"[rank]], group=group)
        return str(caught.value)

    told = "RoutingTable.check_used: sequence 'z' is not in the table"
    first, second = run_ranks(body, 2)
    assert first.startswith(f"rank 1 refused: {told}")
    assert second.startswith(told)


def test_a_group_without_a_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are exchanged on the device of the group. The device meta stands for that device."""

    def all_gather(_: Communicator, out: Tensor, inp: Tensor, *, label: str) -> None:
        raise RuntimeError(f"{label} on {out.device} and {inp.device}")

    def body(group: Any) -> None:
        with pytest.raises(RuntimeError, match="replay on meta and meta"):
            Communicator(group).gather_tensor(torch.zeros(3), label="replay")

    monkeypatch.setattr(communication, "control_device", lambda group: torch.device("meta"))
    monkeypatch.setattr(Communicator, "all_gather", all_gather)
    run_ranks(body, 1)
