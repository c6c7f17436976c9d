"""Draw pictures: as inline SVG, which takes its colours from the page around it, and as files.

The one module that imports matplotlib.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Placeholders for colours of the page: text, faint lines and series. The page defines them as custom properties.
_INK, _FAINT = "#0a0b0c", "#0a0b0d"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13")
_PAGE_COLOURS = {
    _INK: "currentColor",
    _FAINT: "var(--faint)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text, in the font of the page
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": _FAINT,
}
# The style of files, which have a white background. Colour-blind readers can distinguish the colours.
_FILE_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "grid.color": "#dddddd",
    "savefig.facecolor": "white",
}
_FILE_SERIES = ("#4477aa", "#66ccee", "#ddaa33", "#994455")
_WIDTH = 4.7  # inches, so that text on a phone has about this size
_WIDEST_SHARE = 8.0
_NUMBERED_RANKS = 4


def load_map(tokens_SE: Sequence[Sequence[float]], *, name: str, title: str, alt: str, stride: int = 1) -> str:
    """Draw a heat map of the rows of each expert in each step, divided by the mean of the step.

    Args:
        tokens_SE: Rows as [step][expert].
        name: Name, unique on the page.
        title: Title above the map.
        alt: Description for readers who cannot see the picture.
        stride: Number of steps in a column.
    """

    def draw(axes: Axes) -> None:
        means = [sum(row) / max(len(row), 1) or 1.0 for row in tokens_SE]
        low, high = 1 / _WIDEST_SHARE, _WIDEST_SHARE
        shares = [
            [min(max(count / mean, low), high) for count in row] for row, mean in zip(tokens_SE, means, strict=True)
        ]
        experts, steps = len(tokens_SE[0]), len(tokens_SE)
        image = axes.imshow(
            [list(column) for column in zip(*shares, strict=True)],
            norm=LogNorm(low, high),
            cmap="RdBu_r",
            aspect="auto",
            interpolation="none",
            extent=(-0.5, steps * stride - 0.5, experts - 0.5, -0.5),
        )
        axes.set(title=title, xlabel="step", ylabel="expert")
        axes.spines[:].set_visible(False)
        _count_in_whole_numbers(axes.xaxis, axes.yaxis)
        bar = axes.figure.colorbar(image, ax=axes, ticks=[1 / 8, 1 / 2, 1, 2, 8], pad=0.02)
        bar.ax.set_yticklabels(["≤ 1/8", "1/2", "even", "2", "≥ 8"])
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)

    return _svg(draw, name=name, alt=alt, height=3.0)


def curves(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[float]]],
    *,
    name: str,
    alt: str,
    stride: int = 1,
    bottom: float = 1.0,
    **labels: Any,
) -> str:
    """Draw lines over steps, each with a band around it.

    Args:
        lines: For each line: label, values, lower edge and upper edge of the band.
        name: Name, unique on the page.
        alt: Description for readers who cannot see the picture.
        stride: Number of steps between two points.
        bottom: Lower end of the axis, unless a line goes below it.
        **labels: Labels of the axes: title, ylabel.
    """

    def draw(axes: Axes) -> None:
        for (label, middle, low, high), colour in zip(lines, SERIES, strict=False):
            steps = range(0, len(middle) * stride, stride)
            axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
            axes.plot(steps, middle, color=colour, label=label, marker="o" if len(middle) == 1 else "", linewidth=1.6)
        axes.set(xlabel="step", **labels)
        axes.set_ylim(bottom=min(bottom, *(min(low, default=bottom) for _, _, low, _ in lines)))
        _count_in_whole_numbers(axes.xaxis)
        axes.grid(visible=True)
        axes.figure.legend(loc="outside upper center", ncols=len(lines))  # inside it would hide what is drawn

    return _svg(draw, name=name, alt=alt, height=2.9)


def stacked_bars(
    bars: Sequence[tuple[str, Sequence[float]]], causes: Sequence[str], *, name: str, alt: str, xlabel: str
) -> str:
    """Draw a horizontal bar for each label, with one part per cause."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(bars)
        for index, cause in enumerate(causes):
            parts = [values[index] for _, values in bars]
            axes.barh(range(len(bars)), parts, left=left, color=SERIES[index], label=cause, height=0.6)
            left = [start + part for start, part in zip(left, parts, strict=True)]
        axes.set_yticks(range(len(bars)), [label for label, _ in bars])
        axes.invert_yaxis()
        axes.set(xlabel=xlabel, xlim=(0, max(left) * 1.05 or 1))
        axes.grid(visible=True, axis="x")
        axes.figure.legend(loc="outside upper center", ncols=len(causes))

    return _svg(draw, name=name, alt=alt, height=1.3 + 0.32 * len(bars))


def rank_matrix(values_PP: Sequence[Sequence[float]], *, name: str, unit: str, alt: str) -> str:
    """Draw a matrix of the bytes from each rank (row) to each rank (column)."""

    def draw(axes: Axes) -> None:
        size = len(values_PP)
        largest = max(max(row) for row in values_PP) or 1.0
        image = axes.imshow(values_PP, cmap="viridis", interpolation="none", vmin=0, vmax=largest)
        axes.set(xlabel="to rank", ylabel="from rank")
        axes.spines[:].set_visible(False)
        _count_in_whole_numbers(axes.xaxis, axes.yaxis)
        if size <= _NUMBERED_RANKS:
            for row, values in enumerate(values_PP):
                for column, value in enumerate(values):
                    colour = "black" if value > 0.6 * largest else "white"
                    text = "-" if row == column else f"{value:.3g}"
                    axes.text(column, row, text, ha="center", va="center", color=colour)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02, label=unit)
        bar.outline.set_visible(False)

    return _svg(draw, name=name, alt=alt, height=3.4)


def shares_over(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, mark: float, name: str, alt: str, xlabel: str
) -> str:
    """Draw shares from 0 to 100 % over a factor, with a vertical line at ``mark``."""

    def draw(axes: Axes) -> None:
        for (label, x, y), colour in zip(lines, SERIES, strict=False):
            axes.plot(x, [100 * value for value in y], color=colour, label=label, linewidth=1.8)
        axes.axvline(mark, color=_INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.annotate(
            f"enough: {mark:.2f}", (mark, 60), xytext=(4, 0), textcoords="offset points", ha="left", va="center"
        )
        axes.set(xlabel=xlabel, ylabel="%", ylim=(-2, 102))
        axes.margins(x=0.12)
        axes.grid(visible=True)
        axes.figure.legend(loc="outside upper center", ncols=len(lines))

    return _svg(draw, name=name, alt=alt, height=2.7)


def save_bars(
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[float]]]]],
    parts: Sequence[str],
    path: Path,
    *,
    xlabel: str,
) -> None:
    """Write panels of stacked bars to a file.

    Args:
        panels: Title of each panel, and its bars: a label, and the length of each part.
        parts: Names of the parts.
        path: Path that ends in ".png" or ".svg".
        xlabel: Unit of the lengths.
    """
    tallest = max(len(bars) for _, bars in panels)
    with mpl.rc_context(_FILE_STYLE):
        figure = Figure(figsize=(9, 1.0 + len(panels) * (0.9 + 0.3 * tallest)), dpi=120, layout="constrained")
        for axes, (title, bars) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            left = [0.0] * len(bars)
            for index, part in enumerate(parts):
                widths = [lengths[index] for _, lengths in bars]
                drawn = axes.barh(
                    range(len(bars)), widths, left=left, color=_FILE_SERIES[index], label=part, height=0.6
                )
                left = [start + width for start, width in zip(left, widths, strict=True)]
            axes.bar_label(drawn, [f"{total:.1f}" for total in left], padding=4)
            axes.set_yticks(range(len(bars)), [label for label, _ in bars])
            axes.invert_yaxis()
            axes.margins(x=0.1)
            axes.set(title=title, xlabel=xlabel)
            axes.grid(visible=True, axis="x")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.savefig(path)


def _count_in_whole_numbers(*axes: Axis) -> None:
    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _svg(draw: Callable[[Axes], None], *, name: str, alt: str, height: float) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inline(text.getvalue(), name, alt)


def _inline(svg: str, name: str, alt: str) -> str:
    """Make an SVG part of a page: its size and colours follow the page, and its ids are unique on the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for colour, own in _PAGE_COLOURS.items():
        svg = svg.replace(colour, own)
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" \1 role="img" '
        rf'aria-label="{escape(alt)}">',
        svg,
        count=1,
    )
