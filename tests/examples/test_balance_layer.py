"""The comparison with and without balancing: three lines for each number of tokens, and a less busy busiest rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import balance_layer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_table(tmp_path: Path) -> None:
    sizes = "--ranks 2 --experts 8 --hidden 16 --inner 16 --tokens 64 --steps 2 --zipf 2 --min-rows 0"
    picture = tmp_path / "ratios.png"
    finished = subprocess.run(
        [sys.executable, str(balance_layer.__file__), *sizes.split(), "--picture", str(picture)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    _, *lines = finished.stdout.splitlines()
    table = (map(str.strip, line.split("|")) for line in lines[:3])
    tokens, sides, _, busiest, ratio, moved = zip(*table, strict=True)
    assert tokens == ("2.0,      32",) * 3
    assert sides == ("without", "with", "even")
    rows = [int(numbers.split(",")[1]) for numbers in busiest]
    assert rows[0] > 1.1 * max(rows[1:])
    assert float(ratio[0]) > 1.1 > max(map(float, ratio[1:]))
    assert (moved[0], moved[2]) == ("0.0", "0.0")
    clocks = [line.split("|")[1].split(":")[0].strip() for line in lines[3:]]
    assert clocks == [f"{clock} time without / {side}" for clock in ("wall", "cpu") for side in ("with", "even")]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ratio_is_that_of_the_fastest_quarters() -> None:
    assert balance_layer.ratio([9, 6, 8, 7, 100, 100, 100, 100], [3, 5, 50, 50, 50, 50, 50, 50]) == 6.5 / 4


def test_saved_bytes_are_those_that_are_still_there_after_the_forward() -> None:
    freed, kept, weight = (torch.ones(size, requires_grad=True) for size in (10, 20, 30))

    def forward() -> Tensor:
        copy = freed.clone()
        result = (copy * copy).sum() + (kept * kept).sum() + (weight * 2).sum()
        copy.untyped_storage().resize_(0)
        return result

    _, saved = balance_layer.with_saved_bytes(forward)
    assert saved == 20 * 4
