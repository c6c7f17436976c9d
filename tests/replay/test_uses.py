"""Every entry is used in exactly one step: what check_used sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import THD, communication
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, InputError, PeerError, StateError
from moe_dispatch.replay import RoutingTable
from tests.ranks import run_ranks
from tests.replay.samples import random_ids, small_table

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
