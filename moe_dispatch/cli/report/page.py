"""An HTML page of pictures and tables that needs no other file, no network and no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import final

from torch import Tensor

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --quiet: #59636e; --faint: #d5dae0;
  --series-0: #0b62c4; --series-1: #c2410c; --series-2: #177245; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161b; --ink: #e8ecf1; --quiet: #9aa6b2; --faint: #39424d;
  --series-0: #6cb0ff; --series-1: #ff9d5c; --series-2: #5ccf95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--faint); padding-top: 1rem; }
p { max-width: 44rem; margin: .5rem 0; }
.note { color: var(--quiet); font-size: .9rem; }
figure { margin: 1rem 0; max-width: 34rem; }
figure svg { display: block; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 2rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .3rem; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--faint); text-align: right;
  vertical-align: top; }
th { font-weight: 600; }
tbody th, td { white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
td.text { min-width: 16rem; white-space: normal; }
summary { cursor: pointer; padding: .6rem 0; }
"""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of numbers.

    Attributes:
        caption: what the table holds.
        headings: headings of the columns; the first column heads its row.
        rows: cells as text.
        text_columns: positions of columns that hold words.
        folded: whether the reader has to open the table.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()
    folded: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading, text on the pictures, the pictures (SVG), and tables of their numbers."""

    heading: str
    text: Sequence[str]
    pictures: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def render(title: str, intro: Sequence[str], settings: Table, sections: Sequence[Section]) -> str:
    """Make the page, HTML."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head>",
        f"<body><main><h1>{escape(title)}</h1>",
        *map(_paragraph, intro),
        _table(settings),
        *(_section(section) for section in sections),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _section(section: Section) -> str:
    figures = "\n".join(f"<figure>{picture}</figure>" for picture in section.pictures)
    return "\n".join(
        [
            f"<section><h2>{escape(section.heading)}</h2>",
            *map(_paragraph, section.text),
            f'<div class="pictures">{figures}</div>' if figures else "",
            *map(_table, section.tables),
            "</section>",
        ]
    )


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col"{_kind(index, table)}>{escape(heading)}</th>' for index, heading in enumerate(table.headings)
    )
    rows = "\n".join(_row(row, table) for row in table.rows)
    shown = (
        f'<div class="table" tabindex="0"><table><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )
    return f"<details><summary>{escape(table.caption)}</summary>{shown}</details>" if table.folded else shown


def _row(cells: Sequence[str], table: Table) -> str:
    head, *rest = (escape(cell) for cell in cells)
    shown = "".join(f"<td{_kind(index, table)}>{cell}</td>" for index, cell in enumerate(rest, 1))
    return f'<tr><th scope="row">{head}</th>{shown}</tr>'


def _kind(index: int, table: Table) -> str:
    return ' class="text"' if index in table.text_columns else ""


def number(value: Tensor | float) -> str:
    """Format a count in groups of three digits with narrow spaces that do not break."""
    return f"{int(value):,}".replace(",", "\u202f")


def percent(part: float, whole: float) -> str:
    """Format a part of a count, which may be 0, in percent."""
    return f"{100 * part / max(whole, 1):.1f} %"


def unit_of(nbytes: float) -> tuple[str, float]:
    """Choose the unit in which a number of bytes is read easily; its name and its bytes."""
    return next((unit for unit in _UNITS if nbytes >= unit[1]), _UNITS[-1])


def figure(value: Tensor | float) -> str:
    """Format a number with four digits, or with all its digits from 1000 on."""
    return f"{float(value):.4g}" if value < 1000 else number(value)
