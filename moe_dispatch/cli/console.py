"""What a terminal shows: lines, tables, progress, errors. The one module that imports Rich."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_COLOURS = {"ok": "green", "failed": "red", "-": "yellow"}
_MARK_WIDTH = max(map(len, _COLOURS)) + 1


def line(text: str = "", *, mark: str = "", indent: int = 0) -> None:
    """Print one line, unbroken however long; ``mark`` is "ok", "failed" or "-", in front."""
    margin = " " * indent + (f"[{_COLOURS[mark]}]{mark}[/]{' ' * (_MARK_WIDTH - len(mark))}" if mark else "")
    _stdout().print(margin + escape(text), highlight=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", text_columns: int = 1) -> None:
    """Print a table; the first ``text_columns`` columns are aligned to the left, the others are numbers."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption or None, caption_justify="left")
    for index, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if index < text_columns else "right"
        shown.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    _stdout().print(shown, highlight=False)


def document(value: Mapping[str, Any]) -> None:
    """Print JSON, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def error(text: str) -> None:
    """Print what went wrong to stderr."""
    Console(stderr=True).print(f"[red]Error:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def progress(label: str, *, visible: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs, on terminals only; gives ``show(done, of)``."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _stdout() -> Console:
    """A new one each time: it keeps the stdout it is made with. A file is as wide as the longest table needs."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
