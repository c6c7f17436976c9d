"""The comparison with and without balancing: two lines for each number of tokens, and a less busy busiest rank."""

from __future__ import annotations

import sys

import pytest

import balance_layer


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--ranks 2 --experts 8 --hidden 16 --inner 16 --tokens 64 --steps 2 --zipf 2"
    monkeypatch.setattr(sys, "argv", ["balance_layer.py", *sizes.split()])
    balance_layer.main()
    _, *lines = capsys.readouterr().out.splitlines()
    tokens, sides, _, busiest, ratio, moved = zip(*(map(str.strip, line.split("|")) for line in lines), strict=True)
    assert tokens == ("32", "32")
    assert sides == ("without", "with")
    rows = [int(numbers.split(",")[1]) for numbers in busiest]
    assert rows[0] > 1.1 * rows[1]
    assert float(ratio[0]) > 1.1 > float(ratio[1])
    assert moved[0] == "0.0"
