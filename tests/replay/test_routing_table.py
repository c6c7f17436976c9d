"""What a table holds, and what it refuses: inputs of engines and frameworks, parts of ranks, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig
from moe_dispatch.errors import ConfigError, InputError, PeerError, TraceError
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing import run_ranks
from tests.replay.samples import random_ids, small_table


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


def test_last_position_of_an_engine_is_unknown() -> None:
    ids = random_ids(4, 3, 2, 8)
    table = RoutingTable({7: ids}, num_experts=8, last_missing=True)
    assert table.lengths == {7: 5}
    assert torch.equal(table.entries(7)[:4], ids)
    assert (table.entries(7)[4] == -2).all()


def test_prompt_and_response_of_an_engine() -> None:
    ids = random_ids(6, 3, 2, 8)
    table = RoutingTable({"a": (ids[:2].numpy(), ids[2:])}, num_experts=8)
    assert torch.equal(table.entries("a"), ids)


def test_int16_sent_as_bytes() -> None:
    """verl sends int16 as a view of bytes: https://github.com/volcengine/verl, router_replay_utils."""
    ids = random_ids(4, 3, 2, 300)
    sent = ids.to(torch.int16).view(torch.uint8)
    table = RoutingTable({"a": sent.view(torch.int16)}, num_experts=300)
    assert torch.equal(table.entries("a"), ids)


def test_padded_batch_of_a_framework() -> None:
    ids = random_ids(8, 2, 2, 8).view(2, 4, 2, 2)
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])
    ids[0, 1] = -1  # NeMo-RL: route natively
    table = RoutingTable.from_padded(["a", "b"], ids, mask, num_experts=8)
    assert table.lengths == {"a": 3, "b": 1}
    assert (table.entries("a")[0] == -2).all()
    assert torch.equal(table.entries("a")[1:], ids[0, 2:])
    assert torch.equal(table.entries("b"), ids[1, 2:3])


IDS = random_ids(4, 3, 2, 8)


@pytest.mark.parametrize(
    ("sequences", "options", "told"),
    [
        ({}, {}, r"there are no sequences"),
        ({"a": IDS[0]}, {}, r"must be integers \(positions, layers, top_k\), got torch.int64 \(3, 2\) for 'a'"),
        ({"a": IDS.float()}, {}, r"must be integers .*, got torch.float32"),
        ({"a": IDS[:, :0]}, {}, r"got torch.int64 \(4, 0, 2\) for 'a'"),
        ({"a": IDS + 1}, {}, r"ids must lie in -1\.\.7, got 8 in sequence 'a'"),
        ({"a": IDS - 3}, {}, r"ids must lie in -1\.\.7, got -3 in sequence 'a'"),
        ([("a", IDS), ("a", IDS[:2])], {}, r"sequence 'a' is given 2 times, with 4 and 2 positions"),
        ({"a": IDS, "b": IDS[:, :2]}, {}, r"same layers and top_k, got \(3, 2\) for 'a' and \(2, 2\) for 'b'"),
        ({"a": IDS}, {"layers": [0, 1]}, r"layers must name the 3 layers of the ids .*, got 2 numbers: 0\.\.1"),
        ({"a": IDS}, {"layers": [2, 1, 0]}, r"in ascending order, got 3 numbers: 2, 1, 0"),
    ],
)
def test_refused_ids(sequences: Any, options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        RoutingTable(sequences, num_experts=8, **options)


def test_refused_padded_batch() -> None:
    with pytest.raises(InputError, match=r"got \(4, 3, 2\), \(4, 3\) and 1 names"):
        RoutingTable.from_padded(["a"], IDS, torch.ones(4, 3), num_experts=8)


def test_layers_without_dense_ones() -> None:
    """An engine that gives all layers gives rows of zeros for dense layers: take the columns of MoE layers."""
    table = RoutingTable({"a": IDS[:, 1:]}, num_experts=8, layers=[4, 9])
    assert table.layers == (4, 9)
    assert torch.equal(table.cut(_thd(4), ["a"]).routing_for(9), IDS[:, 2])


def _thd(*lengths: int) -> Any:
    from moe_dispatch import THD

    return THD([sum(lengths[:i]) for i in range(len(lengths) + 1)])


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


def test_two_entries_for_one_key() -> None:
    other = IDS.clone()
    other[2, 1] = torch.tensor([0, 7])
    told = rf"the same key: \[{IDS[2, 1, 0]}, {IDS[2, 1, 1]}\] and \[0, 7\] for sequence 'a', position 2, layer 1"
    with pytest.raises(InputError, match=told):
        RoutingTable.merged([RoutingTable({"a": IDS}, num_experts=8), RoutingTable({"a": other}, num_experts=8)])


def test_tables_of_two_models_are_not_merged() -> None:
    with pytest.raises(InputError, match=r"got num_experts 8, top_k 2 and num_experts 9, top_k 2"):
        RoutingTable.merged([RoutingTable({"a": IDS}, num_experts=8), RoutingTable({"a": IDS}, num_experts=9)])
    with pytest.raises(InputError, match=r"there are no tables"):
        RoutingTable.merged([])


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


@pytest.mark.parametrize(
    ("fields", "layers", "told"),
    [
        ({"num_experts": 16}, 3, r"num_experts of the model \(16\), got 8"),
        ({"top_k": 4}, 3, r"top_k of the model \(4\), got 2"),
        ({}, 4, r"MoE layers of the model \(0\.\.3\), got 0\.\.2"),
        ({}, 2, r"MoE layers of the model \(0\.\.1\), got 0\.\.2"),
    ],
)
def test_table_of_another_model(fields: Any, layers: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small_table().check(CONFIG.replace(**fields), num_layers=layers)


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
    assert torch.equal(part.cut(_thd(5), ["a"]).routing_for(3), table.entries("a")[:, 3])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sequences": ["a", "z"]}, r"every sequence to read must be one of the 3 in .*, got 'z'"),
        ({"layers": [3]}, r"every layer to read must be one of the 3 in .*, got 3"),
        ({"sequences": []}, r"every sequence to read must be one of the 3 in .*, got none"),
    ],
)
def test_part_that_a_file_lacks(tmp_path: Path, options: Any, told: str) -> None:
    small_table().save(tmp_path / "routing.safetensors")
    with pytest.raises(TraceError, match=told):
        RoutingTable.load(tmp_path / "routing.safetensors", **options)


def test_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "routing.safetensors"
    with pytest.raises(TraceError, match=r"RoutingTable.load: .* must be an existing file, got no file"):
        RoutingTable.load(path)
    small_table().save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceError, match=r"RoutingTable.load: .* must be a complete safetensors file"):
        RoutingTable.load(path)
    _save_plain(path, {"x": torch.zeros(1)})
    with pytest.raises(TraceError, match=r"must be a routing table of format 1, got another safetensors file"):
        RoutingTable.load(path)
    with pytest.raises(TraceError, match=r"RoutingTable.save: .* cannot be written"):
        small_table().save(tmp_path / "nowhere" / "routing.safetensors")


def _save_plain(path: Path, tensors: dict[str, Tensor]) -> None:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)


def test_sequence_that_the_table_lacks() -> None:
    with pytest.raises(InputError, match=r"sequence 'z' is not in the table of 3 sequences"):
        small_table().entries("z")


def test_table_made_in_inference_mode() -> None:
    with torch.inference_mode():
        table = small_table()
        table.cut(_thd(5), ["a"]).routing_for(0)
    table.cut(_thd(5), ["a"]).routing_for(1)
    assert RoutingTable.merged([table]).lengths == table.lengths


def test_a_table_without_sequences_is_merged() -> None:
    """A rank that recorded dummy tokens only has such a table."""
    table = small_table()
    merged = RoutingTable.merged([RoutingTable.unknown({}, (0, 1, 2), 2, 8), table])
    assert merged.lengths == table.lengths
    assert torch.equal(merged.stored_NLK, table.stored_NLK)


def test_an_id_that_needs_64_bits_is_refused() -> None:
    with pytest.raises(InputError, match=rf"ids must lie in -1\.\.7, got {2**32 + 1} in sequence 'a'"):
        RoutingTable({"a": torch.full((1, 1, 2), 2**32 + 1)}, num_experts=8)
