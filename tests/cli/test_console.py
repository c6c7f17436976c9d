"""Tables and lines as a terminal shows them."""

from __future__ import annotations

import sys

import pytest

from moe_dispatch_tools import console

HEADINGS = ["ms", "dispatch", "combine", "backward", "total", "min..max", "cpu", "cold", "ratio", "cold\nratio"]
NUMBERS = ["1111.1", "2222.2", "3333.3", "4444.4", "16.5..24.7", "5555.5", "6666.6", "7777.7", "8888.8"]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", ["alltoall", "alltoall+reduction=exact", "deepep+emulate=v2-2.1.0+expand=true"])
@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_cells_of_a_table_are_never_broken(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    console.table(HEADINGS, [[name, *NUMBERS]] * 2, caption="Medians of the rank that took longest.")
    lines = printed(capsys)
    rows = [line.split() for line in lines if line.startswith(f" {name}")]
    assert [cell for row in rows[::2] for cell in row[1:]] == NUMBERS
    assert rows[::2] == rows[1::2]
    assert max(map(len, lines)) <= max(columns, 1 + len(name) + 1 + len("16.5..24.7"))
    assert lines[-1].endswith("longest.")


def test_table_that_fits_is_in_one_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """First with gaps of two columns, then of one."""
    for columns, heading in ((83, " a         bbbbbbbbbb  b"), (76, " a        bbbbbbbbbb b")):
        monkeypatch.setenv("COLUMNS", str(columns))
        console.table(["a", *["bbbbbbbbbb"] * 6], [["alltoall", *["1"] * 6]])
        lines = printed(capsys)
        assert lines[1].startswith(heading)
        assert sum(line.startswith(" alltoall") for line in lines) == 1


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
