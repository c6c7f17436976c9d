"""Terminal output: lines, tables, JSON, progress bars and errors. The one module that imports Rich."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

_COLOURS = {"ok": "green", "failed": "red", "-": "yellow"}
_MARK_WIDTH = max(map(len, _COLOURS)) + 1
_UNLIMITED = 10_000  # columns


def line(text: str = "", *, mark: str = "", indent: int = 0, wrap: bool = False) -> None:
    """Print a line, which breaks at words on a terminal and goes on below its text. A file gets it whole.

    Args:
        text: Line to print. It may have line breaks of its own.
        mark: "ok", "failed" or "-", printed in front in a colour.
        indent: Spaces before the mark.
        wrap: Whether a file gets lines of 80 columns.
    """
    shown = f"[{_COLOURS[mark]}]{mark}[/]{' ' * (_MARK_WIDTH - len(mark))}" if mark else ""
    console, lead = Console(), indent + (_MARK_WIDTH if mark else 0)
    if wrap or sys.stdout.isatty():
        text = "\n".join(_wrapped(each, console.width, lead) for each in text.splitlines())
    console.print(" " * indent + shown + escape(text), highlight=False, soft_wrap=True)


def _wrapped(text: str, width: int, lead: int) -> str:
    """Break a line that stands ``lead`` columns from the left. What follows stands below its first word."""
    own = len(text) - len(text.lstrip())
    room = max(width - lead, 20)
    lines = textwrap.wrap(
        text, room, subsequent_indent=" " * own, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return ("\n" + " " * lead).join(lines)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``one``, or ``many``, which is ``one`` with an s unless it is given."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str = "", text_columns: int = 1) -> None:
    """Print a table without breaking its cells. Columns for which a line has no room follow in a second table.

    A terminal has its width, and a file 80 columns.

    Args:
        headings: Heading of each column, in one line or more.
        rows: Cells of each row. None is shown as "-".
        caption: Text below the table.
        text_columns: Number of leading columns with text, aligned to the left. The others are numbers. Text columns
            begin the second table too.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [
        max(map(len, (*heading.splitlines(), *(row[index] for row in cells)))) + 2
        for index, heading in enumerate(headings)
    ]
    named = list(range(text_columns))
    parts = [[*named]]
    for index in range(text_columns, len(headings)):
        if len(parts[-1]) > text_columns and sum(widths[column] for column in (*parts[-1], index)) >= Console().width:
            parts.append([*named])
        parts[-1].append(index)
    for part in parts:
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
        for index in part:
            shown.add_column(headings[index], justify="left" if index < text_columns else "right", no_wrap=True)
        for row in cells:
            shown.add_row(*(escape(row[index]) for index in part))
        Console(width=_UNLIMITED).print(shown, highlight=False, soft_wrap=True)
    if caption:
        line(caption, wrap=True)


def size(nbytes: float | None) -> str | None:
    """Format a number of bytes, for example "24.3 GB", of 1e9 bytes each."""
    return None if nbytes is None else decimal(round(nbytes))


def document(value: Mapping[str, Any]) -> None:
    """Print JSON and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def error(text: str) -> None:
    """Print an error to stderr, as one line."""
    Console(stderr=True).print(f"[red]Error:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def progress(label: str, *, visible: bool = True, told: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal, while the block runs; yield ``show(done, of)``.

    Leave the block before you print, or the lines mix with the bar. With ``told``, a stderr that is no terminal gets
    the label as one line.
    """
    console = Console(stderr=True)
    if told and not console.is_terminal:
        sys.stderr.write(f"{label} ...\n")
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
