"""What a table refuses: ids, names, layers, parts, cuts and files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from moe_dispatch import BSHD, THD, DispatcherConfig
from moe_dispatch.errors import ConfigError, InputError, LayoutError, TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay import RoutingTable
from tests.replay.samples import random_ids, small_table

IDS = random_ids(4, 3, 2, 8)
TABLE = small_table()
MISSING: dict[str, Any] = {
    "table": RoutingTable({"a": IDS}, num_experts=8, last_missing=True),
    "fallback": "error",
}
CLASH = torch.where(torch.arange(4).view(4, 1, 1) == 2, torch.tensor([0, 7]), IDS)  # other ids at position 2
CONFIG = DispatcherConfig(backend="local", num_experts=8, top_k=2, hidden_size=16)


def make(sequences: Any, num_experts: int = 8, **options: Any) -> RoutingTable:
    return RoutingTable(sequences, num_experts=num_experts, **options)


def cut(layout: Layout, names: list[str | int | None], table: RoutingTable = TABLE, **options: Any) -> Any:
    return table.cut(layout, names, **options)


# What is refused with an InputError.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: make({}), r"there are no sequences"),
    (lambda: make({"a": IDS[0]}), r"integers \(positions, layers, top_k\), got torch.int64 \(3, 2\)"),
    (lambda: make({"a": IDS.float()}), r"must be integers .*, got torch.float32"),
    (lambda: make({"a": IDS[:, :0]}), r"got torch.int64 \(4, 0, 2\) for 'a'"),
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
    (
        lambda: RoutingTable.merged([make({"a": IDS}), make({"a": IDS}, 9)]),
        r"got num_experts 8, .* and num_experts 9, ",
    ),
    (
        lambda: RoutingTable.merged([make({"a": IDS}), make({"a": CLASH})]),
        rf"same key: \[{IDS[2, 0, 0]}, {IDS[2, 0, 1]}\] and \[0, 7\] for sequence 'a', position 2, layer 0",
    ),
    (lambda: TABLE.entries("z"), r"sequence 'z' is not in the table of 3 sequences"),
    (lambda: TABLE.check_used(["a", "z"]), r"check_used: sequence 'z' is not in the table of 3 sequ"),
    (lambda: cut(THD([0, 6]), ["a"]), r"got 6 positions of sequence 'a', which has 5 in the table"),
    (lambda: cut(BSHD(), ["a"], like=(1, 7, 4)), r"got 7 positions of sequence 'a', which has 5"),
    (lambda: cut(THD([0, 5]), ["z"]), r"cut: sequence 'z' is not in the table of 3 sequences"),
    (lambda: cut(THD([0, 5]), ["a", "b"]), r"of the layout, got 2 names and 1 sequences"),
    (lambda: cut(THD([0, 1, 2]), ["a", "a"]), r"the micro-batch names sequence 'a' 2 times"),
    (lambda: cut(BSHD([5]), ["a"]), r"BSHD.* does not know its number of rows"),
    (lambda: cut(THD([0, 5]), ["a"], layers=[0, 3]), r"layers 3 are not in the table, .* 0\.\.2"),
    (lambda: cut(THD([0, 5]), ["a"], fallback="topk"), r'"router" or "error" .*, got \'topk\' and 0'),
    (lambda: cut(THD([0, 5]), ["a"], step=-1), r"step 0 or more, got 'router' and -1"),
    (
        lambda: cut(THD([0, 5]), ["a"], into=TABLE.cut(THD([0, 3], [0, 8]), ["b"])),
        r"got 8 rows and layers 0\.\.2 for 5 rows and layers 0\.\.2",
    ),
    (lambda: cut(THD([0, 5]), ["a"], **MISSING), r"known, got 3 of 15 unknown\. .* 'a', position 4, layer 0"),
    (lambda: cut(THD([0, 5]), ["a"], **MISSING, layers=[2]), r"got 1 of 5 unknown\. .* 'a', position 4, layer 2"),
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
        (lambda: TABLE.check(CONFIG, num_layers=2), ConfigError, r"MoE layers .* \(0\.\.1\), got 0\.\.2"),
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
