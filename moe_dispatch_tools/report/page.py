"""Render an HTML page with pictures and tables. The page is one file that loads no other file and has no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

PADDING_CAUSES = (
    "Masked rows are padding rows of a layout that are kept, but go to no expert. Rows for ranks make the row counts "
    "of ranks equal or aligned. Rows for experts round the rows of each expert up to pad_multiple."
)
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of numbers.

    Attributes:
        caption: Title of the table.
        headings: Headings of the columns. The first cell of a row is the heading of the row.
        rows: Cells as text.
        text_columns: Indices of the columns with words.
        folded: Whether the reader must open the table.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()
    folded: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section: a heading, paragraphs, pictures (SVG), and tables with the numbers of the pictures."""

    heading: str
    text: Sequence[str]
    pictures: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def render(title: str, intro: Sequence[str], settings: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Render the page as HTML.

    Args:
        title: Title of the page.
        intro: Paragraphs below the title.
        settings: Pairs of a name and a value, below the paragraphs.
        sections: Sections, of which two share a row on a wide screen.
    """
    environment = Environment(
        loader=PackageLoader("moe_dispatch_tools", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html")
    return page.render(title=title, intro=intro, settings=settings, sections=sections).lstrip() + "\n"


def number(value: Tensor | float) -> str:
    """Format a count, with narrow no-break spaces between groups of three digits."""
    return f"{int(value):,}".replace(",", "\u202f")


def percent(part: float, whole: float) -> str:
    """Format a part of a count in percent. The count may be 0."""
    return f"{100 * part / max(whole, 1):.1f} %"


def unit_of(nbytes: float) -> tuple[str, float]:
    """Choose a unit for a number of bytes. Return the name of the unit and its size in bytes."""
    return next((unit for unit in _UNITS if nbytes >= unit[1]), _UNITS[-1])


def figure(value: Tensor | float) -> str:
    """Format a number with four digits, or as a whole number from 1000 on."""
    return f"{float(value):.4g}" if value < 1000 else number(value)
