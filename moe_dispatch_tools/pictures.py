"""Draw pictures: as images inside a page, and as files. The one module that imports matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

# Pictures have a white background. Colour-blind readers can distinguish the colours.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "text.parse_math": False,  # a name may contain dollar signs
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "grid.color": "#dddddd",
    "savefig.facecolor": "white",
}
_SERIES = ("#4477aa", "#66ccee", "#ddaa33", "#994455")
_WIDTH = 4.7  # inches, so that text on a phone has about this size
_WIDEST_SHARE = 8.0


@mpl.rc_context(_STYLE)
def load_map(tokens_SE: Tensor, *, title: str, alt: str, stride: int = 1) -> str:
    """Draw a heat map of the rows of each expert in each step, divided by the mean of the step.

    Args:
        tokens_SE: Rows.
        title: Title above the map.
        alt: Description for readers who cannot see the picture.
        stride: Number of steps in a column.
    """
    figure, axes = _figure(3.0)
    steps, experts = tokens_SE.shape
    shares_SE = tokens_SE / tokens_SE.double().mean(1, keepdim=True).clamp(min=1e-9)
    image = axes.imshow(
        shares_SE.clamp(1 / _WIDEST_SHARE, _WIDEST_SHARE).t().numpy(),
        norm=LogNorm(1 / _WIDEST_SHARE, _WIDEST_SHARE),
        cmap="RdBu_r",
        aspect="auto",
        interpolation="none",
        extent=(-0.5, steps * stride - 0.5, experts - 0.5, -0.5),
    )
    axes.set(title=title, xlabel="step", ylabel="expert")
    _count_in_whole_numbers(axes.xaxis, axes.yaxis)
    bar = figure.colorbar(image, ax=axes, ticks=[1 / 8, 1 / 2, 1, 2, 8], pad=0.02)
    bar.ax.set_yticklabels(["≤ 1/8", "1/2", "even", "2", "≥ 8"])
    bar.ax.minorticks_off()
    return _image(figure, alt)


@mpl.rc_context(_STYLE)
def curves(
    lines: Mapping[str, Sequence[Tensor]], *, alt: str, stride: int = 1, bottom: float = 0.0, ylabel: str
) -> str:
    """Draw lines over steps: the mean of the values at each point, with a band from the smallest to the largest.

    Args:
        lines: Values at each point, by label.
        alt: Description for readers who cannot see the picture.
        stride: Number of steps between two points.
        bottom: Lower end of the axis, unless a line goes below it.
        ylabel: Label of the axis.
    """
    figure, axes = _figure(2.9)
    for (label, points), colour in zip(lines.items(), _SERIES, strict=False):
        steps = range(0, len(points) * stride, stride)
        low, high = [float(values.min()) for values in points], [float(values.max()) for values in points]
        middle, marker = [float(values.double().mean()) for values in points], "o" if len(points) == 1 else ""
        axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(steps, middle, color=colour, label=label, marker=marker, linewidth=1.6)
        bottom = min(bottom, *low)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.set_ylim(bottom=bottom)
    _count_in_whole_numbers(axes.xaxis)
    axes.grid(visible=True, axis="y")
    figure.legend(loc="outside upper center", ncols=len(lines))  # inside it would hide what is drawn
    return _image(figure, alt)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _image(figure: Figure, alt: str) -> str:
    """Return a picture as an HTML element that holds its data."""
    with io.BytesIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        data = base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}">'


def _count_in_whole_numbers(*axes: Axis) -> None:
    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


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
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 1.0 + len(panels) * (0.9 + 0.3 * tallest)), dpi=120, layout="constrained")
        for axes, (title, bars) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            left = [0.0] * len(bars)
            for index, part in enumerate(parts):
                widths = [lengths[index] for _, lengths in bars]
                drawn = axes.barh(range(len(bars)), widths, left=left, color=_SERIES[index], label=part, height=0.6)
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
