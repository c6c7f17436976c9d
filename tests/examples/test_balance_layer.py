"""The comparison with and without balancing: two lines for each number of tokens, and a less busy busiest rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import balance_layer


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = "--ranks 2 --experts 8 --hidden 16 --inner 16 --tokens 64 --steps 2 --zipf 2 --min-rows 0"
    picture = tmp_path / "ratios.png"
    monkeypatch.setattr(sys, "argv", ["balance_layer.py", *sizes.split(), "--picture", str(picture)])
    balance_layer.main()
    _, *lines = capsys.readouterr().out.splitlines()
    tokens, sides, _, busiest, ratio, moved = zip(*(map(str.strip, line.split("|")) for line in lines), strict=True)
    assert tokens == ("2.0,      32",) * 2
    assert sides == ("without", "with")
    rows = [int(numbers.split(",")[1]) for numbers in busiest]
    assert rows[0] > 1.1 * rows[1]
    assert float(ratio[0]) > 1.1 > float(ratio[1])
    assert moved[0] == "0.0"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_saved_bytes_are_those_that_are_still_there_after_the_forward() -> None:
    freed, kept, weight = (torch.ones(size, requires_grad=True) for size in (10, 20, 30))

    def forward() -> Tensor:
        copy = freed.clone()
        result = (copy * copy).sum() + (kept * kept).sum() + (weight * 2).sum()
        copy.untyped_storage().resize_(0)
        return result

    _, saved = balance_layer.with_saved_bytes(forward)
    assert saved == 20 * 4
