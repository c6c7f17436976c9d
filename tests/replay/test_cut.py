"""Cuts of a table for the rows of one rank: what other trainers got wrong, policies, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch import BSHD, SBHD, THD, Masked, Rows
from moe_dispatch.errors import InputError, PeerError
from moe_dispatch.replay import Cut, RoutingTable, replayed
from moe_dispatch_testing import run_ranks
from tests.replay.samples import random_ids, small_table


def test_rows_of_padding_get_no_stale_ids() -> None:
    """sgl-project/sglang#36404: rows of padding came back with the ids of an earlier forward."""
    table = small_table()
    ids = table.routing_for(1, BSHD([5, 3]), ["a", "b"], like=(2, 6, 16)).view(2, 6, 2)
    assert (ids[0, 5:] == -1).all()
    assert (ids[1, 3:] == -1).all()
    assert torch.equal(ids[0, :5], table.entries("a")[:, 1])


def test_padding_of_the_trainer_need_not_be_recorded() -> None:
    """radixark/miles#465, THUDM/slime#1052: the trainer padded a pack to a multiple, and the rows did not fit."""
    table = small_table()
    layout = THD([0, 5, 8], [0, 8, 16])
    ids = table.routing_for(0, layout, ["a", "b"])
    assert ids.shape == (16, 2)
    assert (ids[[5, 6, 7, 11, 15]] == -1).all()


def test_dummy_sequence_behind_a_pack() -> None:
    """A trainer that pads a pack with one more sequence: nobody recorded it, so the router chooses."""
    ids = small_table().routing_for(0, THD([0, 5, 8]), ["a", None])
    assert (ids[5:] == -2).all()


def test_sequence_shorter_than_the_chunks_of_context_parallelism() -> None:
    """verl-project/verl#7261 and #7449: a sequence of one token on the ranks of zigzag context parallelism."""
    table = small_table({"a": 1, "b": 6})
    layout = THD([0, 1, 7], [0, 4, 12])
    first = table.routing_for(2, layout.shard(0, 2, "zigzag"), ["a", "b"])
    second = table.routing_for(2, layout.shard(1, 2, "zigzag"), ["a", "b"])
    a, b = table.entries("a")[:, 2], table.entries("b")[:, 2]
    nothing = torch.full((1, 2), -1)
    assert torch.equal(first, torch.cat([a, nothing, b[:2], nothing, nothing]))
    assert torch.equal(second, torch.cat([nothing, nothing, b[2:6]]))


def test_gaps_between_packed_sequences_do_not_shift_later_ones() -> None:
    table = small_table()
    ids = table.routing_for(0, THD([0, 5, 8, 16], [0, 6, 10, 20]), ["a", "b", "c"])
    assert torch.equal(ids[10:18], table.entries("c")[:, 0])


def test_left_padding_of_prompts() -> None:
    table = small_table()
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
    ids = table.routing_for(0, Masked(mask.flatten()), ["a", "b"], like=(2, 6, 1)).view(2, 6, 2)
    assert torch.equal(ids[0, 1:], table.entries("a")[:, 0])
    assert torch.equal(ids[1, 3:], table.entries("b")[:, 0])


def test_order_of_sequences_is_that_of_the_micro_batch() -> None:
    table = small_table()
    ids = table.routing_for(0, SBHD([3, 5]), ["b", "a"], like=torch.zeros(5, 2, 16)).view(5, 2, 2)
    assert torch.equal(ids[:3, 0], table.entries("b")[:, 0])
    assert torch.equal(ids[:, 1], table.entries("a")[:, 0])


def test_layers_of_a_later_pipeline_stage() -> None:
    """NVIDIA-NeMo/RL#3903: layers of another block shared the numbers of decoder layers, and took their ids."""
    table = small_table(layers=4)
    cut = table.cut(THD([0, 5]), ["a"], layers=[1, 3])
    assert torch.equal(cut.routing_for(3), table.entries("a")[:, 3])


def test_lookups_in_any_order_are_the_same() -> None:
    """Pipelines and recomputation interleave micro-batches: a list that is read first in, first out, mixes them up."""
    table = small_table(layers=4)
    first, second = table.cut(THD([0, 5]), ["a"]), table.cut(THD([0, 3]), ["b"])
    forward = {(name, n): cut.routing_for(n) for n in range(4) for name, cut in (("a", first), ("b", second))}
    for n in reversed(range(4)):
        for name, cut in (("b", second), ("a", first)):
            assert torch.equal(cut.routing_for(n), forward[name, n])
            assert torch.equal(cut.routing_for(n), table.entries(name)[:, n])


def test_rows_without_a_layout() -> None:
    table = small_table()
    assert torch.equal(table.routing_for(0, Rows(), ["a"], like=(5, 16)), table.entries("a")[:, 0])


def test_shorter_than_recorded() -> None:
    """A trainer may cut a sequence short."""
    table = small_table()
    assert torch.equal(table.routing_for(0, THD([0, 2]), ["c"]), table.entries("c")[:2, 0])


def test_batch_without_rows() -> None:
    assert small_table().routing_for(0, THD([0, 0]), ["a"]).shape == (0, 2)
    assert small_table().routing_for(0, THD([0]), []).shape == (0, 2)


TABLE = small_table()


def test_all_ranks_raise_if_one_has_to() -> None:
    def body(group: Any) -> str:
        layout = THD([0, 5 + group.rank()])
        with pytest.raises((InputError, PeerError)) as caught:
            small_table().cut(layout, ["a"], group=group)
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert all("got 6 positions of sequence 'a', which has 5 in the table" in text for text in texts)
    assert "rank 1 refused" in texts[0]


def test_unknown_entries_under_both_policies() -> None:
    ids = random_ids(4, 3, 2, 8)
    table = RoutingTable({"a": ids}, num_experts=8, last_missing=True)
    assert (table.routing_for(1, THD([0, 5]), ["a"])[4] == -2).all()
    assert table.cut(THD([0, 4]), ["a"], fallback="error").routing_for(0).shape == (4, 2)


def test_new_ids_in_the_memory_of_a_graph() -> None:
    table = small_table(layers=2)
    layout = THD([0, 3], [0, 8])
    static = table.cut(layout, ["b"], layers=[1])
    pointer = static.stored_TLK.data_ptr()
    cut = table.cut(THD([0, 5], [0, 8]), ["a"], layers=[1], into=static, step=1)
    assert cut.stored_TLK.data_ptr() == pointer
    assert torch.equal(static.routing_for(1)[:5], table.entries("a")[:, 1])


def test_copy_goes_to_the_device_of_the_hidden_states() -> None:
    cut = TABLE.cut(THD([0, 5]), ["a"], like=torch.empty(5, 16, device="meta"))
    assert cut.stored_TLK.device.type == "meta"
    assert cut.stored_TLK.dtype == torch.uint8
    assert isinstance(cut, Cut)


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        ids = TABLE.routing_for(0, THD([0, 5]), ["a"], like=(5, 16))
    assert torch.equal(ids, TABLE.entries("a")[:, 0])
    assert replayed(ids, torch.rand(5, 8), normalize=True).topk_weights.shape == (5, 2)
