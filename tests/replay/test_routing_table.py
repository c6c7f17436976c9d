"""What a table holds: inputs of engines and frameworks, parts of ranks, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dispatch import BSHD, THD, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.capabilities.replay.entries import stored
from moe_dispatch.errors import ConfigError, InputError, LayoutError, PeerError, TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay import RoutingTable
from tests.pages import run_page
from tests.ranks import run_ranks
from tests.replay.samples import SAMPLES_OF_VERL, draw_case, random_ids, small_table


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


def test_parts_are_merged_and_gathered_from_ranks() -> None:
    whole = small_table()
    early = RoutingTable({"a": whole.entries("a")[:, :2], "b": whole.entries("b")[:, :2]}, num_experts=8)
    late = RoutingTable({"c": whole.entries("c")[:, 1:], "a": whole.entries("a")[:, 1:]}, num_experts=8, layers=[1, 2])
    empty = RoutingTable.unknown({}, (0, 1, 2), 2, 8)  # of a rank that recorded dummy tokens only
    merged = RoutingTable.merged([empty, early, late])
    assert merged.lengths == whole.lengths
    assert merged.layers == (0, 1, 2)
    assert torch.equal(merged.entries("a"), whole.entries("a"))
    assert (merged.entries("b")[:, 2] == -2).all()
    assert torch.equal(merged.entries("c")[:, 1:], whole.entries("c")[:, 1:])

    def body(group: Any) -> RoutingTable:
        name = "abc"[group.rank()]
        return RoutingTable({name: whole.entries(name)}, num_experts=8).gathered(group)

    for table in run_ranks(body, 3):
        assert table.lengths == whole.lengths
        assert torch.equal(table.stored_NLK, whole.stored_NLK)


CONFIG = DispatcherConfig(backend="local", num_experts=8, top_k=2, hidden_size=16)


def test_table_of_this_model_and_of_another_one_on_one_rank() -> None:
    small_table().check(CONFIG, num_layers=3)
    part = RoutingTable({"a": IDS[:, 1:]}, num_experts=8, layers=[4, 9])  # an engine gives dense layers too: left out
    assert part.layers == (4, 9)
    assert torch.equal(part.cut(THD([0, 4]), ["a"]).routing_for(9), IDS[:, 2])
    part.check(CONFIG, num_layers=10, layers=[4, 9])

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
    padded = THD([0, 3], [0, 6])
    assert torch.equal(loaded.routing_for(1, padded, ["a"]), table.routing_for(1, padded, ["a"]))


def test_part_of_a_file(tmp_path: Path) -> None:
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


TABLE = small_table()
MISSING: dict[str, Any] = {
    "table": RoutingTable({"a": IDS}, num_experts=8, last_missing=True),
    "fallback": "error",
}
CLASH = torch.where(torch.arange(4).view(4, 1, 1) == 2, torch.tensor([0, 7]), IDS)  # other ids at position 2


def make(sequences: Any, num_experts: int = 8, **options: Any) -> RoutingTable:
    return RoutingTable(sequences, num_experts=num_experts, **options)


def cut(layout: Layout, names: list[str | int | None], table: RoutingTable = TABLE, **options: Any) -> Any:
    return table.cut(layout, names, **options)


# What is refused with an InputError.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: make({}), r"there are no sequences"),
    (lambda: make({"a": IDS[0]}), r"integers \(positions, layers, top_k\), got torch.int64 \(3, 2\)"),
    (lambda: make({"a": IDS.float()}), r"must be integers .*, got torch.float32"),
    (lambda: make({"a": IDS + 1}), r"ids must lie in -1\.\.7, got 8 in sequence 'a'"),
    (lambda: make({"a": IDS - 3}), r"ids must lie in -1\.\.7, got -3 in sequence 'a'"),
    # In int32 this id is 1.
    (lambda: make({"a": torch.full((1, 1, 2), 2**32 + 1)}), rf"-1\.\.7, got {2**32 + 1} in sequence"),
    (lambda: make([("a", IDS), ("a", IDS[:2])]), r"'a' is given 2 times, with 4 and 2 positions"),
    (lambda: make({"a": IDS, "b": IDS[:, :2]}), r"top_k, got \(3, 2\) for 'a' and \(2, 2\) for 'b'"),
    (lambda: make({"a": IDS}, layers=[0, 1]), r"name the 3 layers of the ids .*, got 2 numbers:"),
    (lambda: make({"a": IDS}, layers=[2, 1, 0]), r"in ascending order, got 3 numbers: 2, 1, 0"),
    (lambda: RoutingTable.from_padded(["a"], IDS, torch.ones(4, 3), num_experts=8), r"\(4, 3\) and 1 names"),
    (lambda: RoutingTable.merged([]), r"there are no tables"),
    (lambda: RoutingTable.merged([make({"a": IDS}), make({"a": IDS}, 9)]), r"num_experts 8, .* and num_experts 9, "),
    (
        lambda: RoutingTable.merged([make({"a": IDS}), make({"a": CLASH})]),
        rf"same key: \[{IDS[2, 0, 0]}, {IDS[2, 0, 1]}\] and \[0, 7\] for sequence 'a', position 2, layer 0",
    ),
    (lambda: TABLE.entries("z"), r"sequence 'z' is not in the table of 3 sequences"),
    (lambda: TABLE.check_used(["a", "z"]), r"check_used: sequence 'z' is not in the table of 3 sequ"),
    (lambda: cut(THD([0, 6]), ["a"]), r"got 6 positions of sequence 'a', which has 5 in the table"),
    (lambda: cut(THD([0, 5]), ["z"]), r"cut: sequence 'z' is not in the table of 3 sequences"),
    (lambda: cut(THD([0, 5]), ["a", "b"]), r"of the layout, got 2 names and 1 sequences"),
    (lambda: cut(THD([0, 1, 2]), ["a", "a"]), r"the micro-batch names sequence 'a' 2 times"),
    (lambda: cut(BSHD([5]), ["a"]), r"BSHD.* does not know its number of rows"),
    (lambda: cut(THD([0, 5]), ["a"], layers=[0, 3]), r"layers 3 are not in the table, .* 0\.\.2"),
    (lambda: cut(THD([0, 5]), ["a"], fallback="topk"), r'"router" or "error" .*, got \'topk\' and 0'),
    (lambda: cut(THD([0, 5]), ["a"], step=-1), r"step 0 or more, got 'router' and -1"),
    (lambda: cut(THD([0, 5]), ["a"], into=TABLE.cut(THD([0, 3], [0, 8]), ["b"])), "got 8 rows .* for 5 rows"),
    (lambda: cut(THD([0, 5]), ["a"], **MISSING), r"known, got 3 of 15 unknown\. .* 'a', position 4, layer 0"),
    (lambda: cut(THD([0, 4, 5]), ["a", None], **MISSING), r"got 3 of 15 .* is a sequence named None"),
    (lambda: cut(THD([0, 5]), ["a"], layers=[0, 2]).routing_for(1), r"layer 1 is not in the cut"),
]


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        *((call, InputError, told) for call, told in REFUSED),
        (lambda: TABLE.check(CONFIG.replace(num_experts=16), num_layers=3), ConfigError, r"_experts .*\(16\), got 8"),
        (lambda: TABLE.check(CONFIG.replace(top_k=4), num_layers=3), ConfigError, r"top_k of the model \(4\), got 2"),
        (lambda: TABLE.check(CONFIG, num_layers=4), ConfigError, r"MoE layers .* \(0\.\.3\), got 0\.\.2"),
        (lambda: cut(THD([0, 4, 8]).shard(0, 2, "zigzag"), ["a", "b"], like=(6, 16)), LayoutError, "got 8 and 12 rows"),
        (lambda: cut(THD([0, 5, 8]).shard(0, 2, "zigzag"), ["a", "b"]), LayoutError, r"the rows of sequence 0 \(5\)"),
    ],
)
def test_refused(call: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda path: RoutingTable.load(path / "z"), r"RoutingTable.load: .* must be an existing file, got no file"),
        (lambda path: RoutingTable.load(path / "short"), r"RoutingTable.load: .* must be a complete safetensors file"),
        (lambda path: RoutingTable.load(path / "plain"), r"routing table of format 1, got another safetensors file"),
        (lambda path: TABLE.save(path / "nowhere" / "a"), r"RoutingTable.save: .* cannot be written"),
        (lambda path: RoutingTable.load(path / "a", sequences=["a", "z"]), r"sequence to read .* the 3 in .*, got 'z'"),
        (lambda path: RoutingTable.load(path / "a", layers=[3]), r"every layer to read .* the 3 in .*, got 3"),
        (lambda path: RoutingTable.load(path / "a", sequences=[]), r"sequence to read .* the 3 in .*, got none"),
    ],
)
def test_refused_files(tmp_path: Path, call: Callable[[Path], Any], told: str) -> None:
    TABLE.save(tmp_path / "a")
    (tmp_path / "short").write_bytes((tmp_path / "a").read_bytes()[:-9])
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "plain")
    with pytest.raises(TraceError, match=told):
        call(tmp_path)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32))
def test_every_cut_and_back(seed: int) -> None:
    drawn = draw_case(seed)
    table = drawn.table()
    back = RoutingTable.unknown(table.lengths, table.layers, table.top_k, table.num_experts)
    met_NL = torch.zeros(len(back.stored_NLK), len(table.layers), dtype=torch.int64)
    expected = [drawn.expected(i) for i in range(len(drawn.ids))]
    first_rows = [table.rows_of(name).start for name in drawn.names]
    numbers = [torch.arange(len(ids)).view(-1, 1) + first for ids, first in zip(drawn.ids, first_rows, strict=True)]
    for micro_batch in drawn.micro_batches:
        names = [drawn.names[i] for i in micro_batch]
        for cp_rank, tp_rank in ((cp_rank, tp_rank) for cp_rank in range(drawn.cp) for tp_rank in range(drawn.tp)):
            layout = drawn.layout(micro_batch).shard(cp_rank, drawn.cp, drawn.kind).shard(tp_rank, drawn.tp)
            wanted = drawn.rows(micro_batch, expected, cp_rank, tp_rank)
            row_T = drawn.rows(micro_batch, numbers, cp_rank, tp_rank).reshape(-1)
            shape, wanted_TLK = (*wanted.shape[:-2], 1), wanted.reshape(-1, *wanted.shape[-2:])
            real = row_T >= 0
            for stage in drawn.stages:
                cut = table.cut(layout, names, like=shape, layers=stage, step=3)
                ids_TLK = torch.stack([cut.routing_for(layer) for layer in stage], 1)
                assert torch.equal(ids_TLK, wanted_TLK[:, stage])
                assert torch.equal(cut.routing_for(stage[0]), ids_TLK[:, 0])  # as a recomputed forward looks it up
                back.put(row_T[real], stage, stored(ids_TLK[real], table.num_experts))
                met_NL[row_T[real].unsqueeze(1), torch.tensor(stage)] += 1
    assert torch.equal(back.stored_NLK, table.stored_NLK)
    assert torch.equal(met_NL, torch.ones_like(met_NL))
    table.check_used()
