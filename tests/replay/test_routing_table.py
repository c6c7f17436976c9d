"""What a table holds: inputs of engines and frameworks, parts of ranks, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import THD, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import ConfigError, InputError, PeerError
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing import run_ranks
from tests.pages import run_page
from tests.replay.samples import SAMPLES_OF_VERL, random_ids, small_table


@pytest.mark.parametrize(
    ("num_experts", "dtype", "size"),
    [
        (4, torch.uint8, 2),
        (254, torch.uint8, 2),
        (255, torch.int16, 4),
        (32_766, torch.int16, 4),
        (32_767, torch.int32, 8),
    ],
)
def test_smallest_type(num_experts: int, dtype: torch.dtype, size: int) -> None:
    ids = torch.tensor([[[num_experts - 1, -1]], [[0, 1]], [[-1, -1]]])
    table = RoutingTable({"a": ids}, num_experts=num_experts)
    assert table.stored_NLK.dtype == dtype
    assert table.bytes_per_entry == size
    assert table.nbytes == (3 + 2) * size  # two rows behind the entries
    assert table.entries("a").tolist() == [[[num_experts - 1, -1]], [[0, 1]], [[-2, -2]]]


def test_padded_batch_of_a_framework() -> None:
    ids = random_ids(8, 2, 2, 8).view(2, 4, 2, 2)
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])
    ids[0, 1] = -1  # NeMo-RL: route natively
    table = RoutingTable.from_padded(["a", "b"], ids, mask, num_experts=8)
    assert table.lengths == {"a": 3, "b": 1}
    assert (table.entries("a")[0] == -2).all()
    assert torch.equal(table.entries("a")[1:], ids[0, 2:])
    assert torch.equal(table.entries("b"), ids[1, 2:3])


def test_missing_routes_of_verl_are_unknown() -> None:
    batch = [sample.padded(4, 5) for sample in SAMPLES_OF_VERL.values()]
    ids, mask, responses = (torch.stack(part) for part in zip(*batch, strict=True))
    with pytest.raises(
        InputError, match=r"different experts, got \[0, 0\] for sequence 'one turn', position 5, layer 0"
    ):
        RoutingTable.from_padded(list(SAMPLES_OF_VERL), ids, mask, num_experts=8)
    table = run_page("replay.md")["table_of"](list(SAMPLES_OF_VERL), ids, mask, responses, num_experts=8)
    for name, sample in SAMPLES_OF_VERL.items():
        assert table.lengths[name] == sample.prompt + len(sample.generated)
        assert torch.equal(table.entries(name)[: sample.routes], sample.ids)
        assert (table.entries(name)[sample.routes :] == -2).all()


def test_an_entry_that_names_an_expert_twice_is_refused_wherever_a_table_is_made(tmp_path: Path) -> None:
    ids = random_ids(4, 3, 2, 8)
    ids[2, 1] = 5
    told = r"must name different experts, got \[5, 5\] for sequence 'a', position 2, layer 1"
    with pytest.raises(InputError, match=told):
        RoutingTable({"b": IDS, "a": ids}, num_experts=8)
    table = small_table()
    table.stored_NLK[2, 1] = 5 + 2  # as a table of an earlier version
    table.save(tmp_path / "table")
    with pytest.raises(InputError, match=told):
        RoutingTable.load(tmp_path / "table")
    assert RoutingTable.load(tmp_path / "table", sequences=["b"]).lengths == {"b": 3}
    dispatcher = build_dispatcher(CONFIG)
    with RoutingTable.record([dispatcher]) as recording:
        recording.micro_batch(["a"])
        dispatcher.dispatch(torch.zeros(3, 16), Routing(torch.tensor([[1, 0], [1, 2], [5, 5]]), torch.rand(3, 2)))
    with pytest.raises(InputError, match=told.replace("layer 1", "layer 0")):
        recording.table()
    RoutingTable({"a": torch.tensor([[[-1, -1, 3]]])}, num_experts=8)  # slots that go nowhere are no experts


def test_read_only_arrays_are_taken_without_a_warning() -> None:
    """Ray gives arrays that cannot be written to. Warnings are errors here, and torch warns once in a process."""
    ids = IDS.numpy().copy()
    ids.setflags(write=False)
    torch.set_warn_always(True)
    try:
        table = RoutingTable({"a": ids, "b": (ids[:1], ids[1:])}, num_experts=8)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(table.entries("a"), IDS)
    assert torch.equal(table.entries("b"), IDS)


IDS = random_ids(4, 3, 2, 8)


def test_layers_without_dense_ones() -> None:
    """An engine that gives all layers gives rows of zeros for dense layers: take the columns of MoE layers."""
    table = RoutingTable({"a": IDS[:, 1:]}, num_experts=8, layers=[4, 9])
    assert table.layers == (4, 9)
    assert torch.equal(table.cut(THD([0, 4]), ["a"]).routing_for(9), IDS[:, 2])


def test_parts_are_merged() -> None:
    whole = small_table()
    early = RoutingTable({"a": whole.entries("a")[:, :2], "b": whole.entries("b")[:, :2]}, num_experts=8)
    late = RoutingTable({"c": whole.entries("c")[:, 1:], "a": whole.entries("a")[:, 1:]}, num_experts=8, layers=[1, 2])
    merged = RoutingTable.merged([early, late])
    assert merged.lengths == whole.lengths
    assert merged.layers == (0, 1, 2)
    assert torch.equal(merged.entries("a"), whole.entries("a"))
    assert (merged.entries("b")[:, 2] == -2).all()
    assert torch.equal(merged.entries("c")[:, 1:], whole.entries("c")[:, 1:])


def test_parts_of_ranks_are_gathered() -> None:
    whole = small_table()

    def body(group: Any) -> RoutingTable:
        name = "abc"[group.rank()]
        ids = whole.entries(name)
        return RoutingTable({name: ids}, num_experts=8).gathered(group)

    for table in run_ranks(body, 3):
        assert table.lengths == whole.lengths
        assert torch.equal(table.stored_NLK, whole.stored_NLK)


CONFIG = DispatcherConfig(backend="local", num_experts=8, top_k=2, hidden_size=16)


def test_table_of_this_model() -> None:
    table = small_table()
    table.check(CONFIG, num_layers=3)
    part = RoutingTable({"a": IDS[:, 1:]}, num_experts=8, layers=[1, 2])
    part.check(CONFIG, num_layers=3, layers=[1, 2])


def test_table_of_another_model_on_one_rank() -> None:
    def body(group: Any) -> str:
        with pytest.raises((ConfigError, PeerError)) as caught:
            small_table(layers=3 + group.rank()).check(CONFIG, num_layers=3, group=group)
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert all("must have the MoE layers of the model (0..2), got 0..3" in text for text in texts)


def test_file(tmp_path: Path) -> None:
    table = RoutingTable({"a": IDS, 5: random_ids(6, 3, 2, 8, 1)}, num_experts=8, last_missing=True)
    table.save(tmp_path / "routing.safetensors")
    loaded = RoutingTable.load(tmp_path / "routing.safetensors")
    assert loaded.lengths == table.lengths == {"a": 5, 5: 7}
    assert (loaded.layers, loaded.top_k, loaded.num_experts) == ((0, 1, 2), 2, 8)
    assert torch.equal(loaded.stored_NLK, table.stored_NLK)
    assert torch.equal(loaded._stored, table._stored)


def test_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(layers=4)
    table.save(tmp_path / "routing.safetensors")
    part = RoutingTable.load(tmp_path / "routing.safetensors", sequences=["c", "a"], layers=[1, 3])
    assert part.lengths == {"c": 8, "a": 5}
    assert part.layers == (1, 3)
    for name in ("c", "a"):
        assert torch.equal(part.entries(name), table.entries(name)[:, [1, 3]])
    assert torch.equal(part.cut(THD([0, 5]), ["a"]).routing_for(3), table.entries("a")[:, 3])


def test_table_made_in_inference_mode() -> None:
    with torch.inference_mode():
        table = small_table()
        table.cut(THD([0, 5]), ["a"]).routing_for(0)
    table.cut(THD([0, 5]), ["a"]).routing_for(1)
    assert RoutingTable.merged([table]).lengths == table.lengths


def test_a_table_without_sequences_is_merged() -> None:
    """A rank that recorded dummy tokens only has such a table."""
    table = small_table()
    merged = RoutingTable.merged([RoutingTable.unknown({}, (0, 1, 2), 2, 8), table])
    assert merged.lengths == table.lengths
    assert torch.equal(merged.stored_NLK, table.stored_NLK)
