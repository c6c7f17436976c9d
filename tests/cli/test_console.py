"""Tables and lines as a terminal shows them."""

from __future__ import annotations

import sys

import pytest

from moe_dispatch_tools import console

HEADINGS = ["ms", "dispatch", "combine", "backward", "total", "min..max", "cpu", "cold", "ratio", "cold\nratio"]
NUMBERS = ["1111.1", "2222.2", "3333.3", "4444.4", "16.5..24.7", "5555.5", "6666.6", "7777.7", "8888.8"]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_cells_of_a_table_are_never_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "deepep+emulate=v2-2.1.0+expand=true"
    console.table(HEADINGS, [[name, *NUMBERS]] * 2, caption="Medians of the rank that took longest.")
    lines = printed(capsys)
    assert [line.split() for line in lines if line.startswith(f" {name}")] == [[name, *NUMBERS]] * 2
    assert lines[-1].endswith("longest.")


def test_terminal_breaks_lines_at_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "graph_safe; wire_dtypes bfloat16, float8_e4m3fn; compilable\n  a second line"
    monkeypatch.setenv("COLUMNS", "40")
    console.line(text, mark="ok", indent=2)
    assert printed(capsys) == [
        "  ok     graph_safe; wire_dtypes bfloat16, float8_e4m3fn; compilable",
        "  a second line",
    ]
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.line(text, mark="ok", indent=2)
    assert printed(capsys) == [
        "  ok     graph_safe; wire_dtypes",
        "         bfloat16, float8_e4m3fn;",
        "         compilable",
        "  a second line",
    ]
