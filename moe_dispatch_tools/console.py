"""Terminal output: lines, tables, JSON, progress bars and errors. The one module that imports Rich."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_COLOURS = {"ok": "green", "failed": "red", "-": "yellow"}
_MARK_WIDTH = max(map(len, _COLOURS)) + 1


def line(text: str = "", *, mark: str = "", indent: int = 0) -> None:
    """Print a line. A terminal gets lines that are broken at words; a file gets one line, however long.

    Args:
        text: Line to print. It may have line breaks of its own.
        mark: "ok", "failed" or "-", printed in front in a colour.
        indent: Spaces before the mark.
    """
    console = _stdout()
    margin = indent + (_MARK_WIDTH if mark else 0)
    if sys.stdout.isatty():
        text = "\n".join(_wrapped(part, console.width - margin, " " * margin) for part in text.split("\n"))
    shown = f"[{_COLOURS[mark]}]{mark}[/]{' ' * (_MARK_WIDTH - len(mark))}" if mark else ""
    console.print(" " * indent + shown + escape(text), highlight=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", text_columns: int = 1) -> None:
    """Print a table without breaking its cells.

    A table that is too wide for the terminal gets smaller gaps between its columns. One that is still too wide is
    printed in parts, one below the other. Each part repeats the text columns.

    Args:
        headings: Heading of each column.
        rows: Cells of each row.
        caption: Text below the table.
        text_columns: Number of leading columns with text, aligned to the left. The others are numbers.
    """
    console = _stdout()
    columns = zip(headings, *rows, strict=True)
    widths = [max(cell_len(part) for cell in column for part in cell.split("\n")) for column in columns]
    texts = range(text_columns)
    gap = 2 if 1 + sum(width + 2 for width in widths) <= console.width else 1
    parts: list[list[int]] = [[*texts]]
    for index in range(text_columns, len(headings)):
        if len(parts[-1]) > text_columns and 1 + sum(widths[i] + gap for i in (*parts[-1], index)) > console.width:
            parts.append([*texts])
        parts[-1].append(index)
    widest = max(1 + sum(widths[index] + gap for index in part) for part in parts)
    console.width = max(console.width, widest)  # Rich would shorten the cells of a table that does not fit
    for part in parts:
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0))
        for index in part:
            shown.add_column(headings[index], justify="left" if index in texts else "right", no_wrap=True)
        for row in rows:
            shown.add_row(*(escape(row[index]) for index in part))
        console.print(shown, highlight=False, soft_wrap=True)
    if caption:
        console.print(Text(caption, style="table.caption"), width=widest)


def document(value: Mapping[str, Any]) -> None:
    """Print JSON and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def error(text: str) -> None:
    """Print an error to stderr, as one line."""
    Console(stderr=True).print(f"[red]Error:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def progress(label: str, *, visible: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal, while the block runs; yield ``show(done, of)``.

    Leave the block before you print, or the lines mix with the bar.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _stdout() -> Console:
    """Make a console for the present ``sys.stdout``; the width is 120 if it is a file and COLUMNS is not set."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def _wrapped(text: str, width: int, margin: str) -> str:
    """Break a line at words; ``margin`` stands before each line but the first."""
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return f"\n{margin}".join(lines)
