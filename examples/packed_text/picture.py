"""The picture of the runs: loss curves, differences between the curves, and the load of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from packed_text.report import MAX_DIFFERENCE, MAX_WIRE_DIFFERENCE
from packed_text.training import Run

# The widest line comes first, so that equal curves are all visible.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#fdbe85", "linewidth": 9.0},
    {"color": "#9ecae1", "linewidth": 6.0},
    {"color": "#74c476", "linewidth": 4.0},
    {"color": "#756bb1", "linewidth": 2.0},
    {"color": "black", "linewidth": 1.0, "linestyle": (0, (4, 3))},
)
# Losses are float32, so a difference is 0 or at least 3e-8. A difference of 0 is drawn at this height.
SMALLEST_DIFFERENCE = 1e-8
WIDEST_SHARE = 8.0


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the runs into a PNG file. Make its directory."""
    num_layers = len(runs[0].tokens_per_expert[0])
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}):
        figure = Figure(figsize=(11, 7), layout="constrained")
        grid = figure.add_gridspec(2, 1)
        top, bottom = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        if len(runs) > 1:
            losses, differences = top.subplots(1, 2)
            _draw_differences(differences, runs)
        else:
            losses = top.subplots()
        _draw_losses(losses, runs)
        panels = bottom.subplots(1, num_layers, sharey=True, squeeze=False)[0]
        images = [_draw_layer(panel, runs[0], layer) for layer, panel in enumerate(panels)]
        panels[0].set_ylabel("expert")
        bar = bottom.colorbar(images[-1], ax=list(panels), ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], pad=0.01)
        bar.ax.set_yticklabels(["1/8 or less", "1/4", "1/2", "1 (even)", "2", "4", "8 or more"])
        bar.ax.minorticks_off()
        bottom.suptitle(f"Tokens per expert, as a share of the mean ({runs[0].backend})", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    for run, style in zip(runs, STYLES, strict=False):
        where = f"{run.ranks} ranks" if run.ranks > 1 else "one process"
        axes.plot(_steps(run), run.losses, label=f"{run.backend}, {where}", **style)
    axes.set(title="Loss", xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, runs: Sequence[Run]) -> None:
    reference = np.array(runs[-1].losses)
    for run, style in zip(runs[:-1], STYLES, strict=False):
        difference = np.abs(np.array(run.losses) - reference) / reference
        label = f"{run.backend}, largest {difference.max():.1e}"
        axes.semilogy(_steps(run), np.maximum(difference, SMALLEST_DIFFERENCE), ".-", label=label, **style)
    for allowed, which in ((MAX_DIFFERENCE, "float32"), (MAX_WIRE_DIFFERENCE, "bfloat16 on the wire")):
        axes.axhline(allowed, color="#cb181d", linewidth=1)
        where = (len(reference), allowed)
        above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"allowed, {which}", where, color="#cb181d", **above)
    axes.set(title=f"Relative difference to {runs[-1].backend}", xlabel="step", ylim=(SMALLEST_DIFFERENCE / 2, 1.0))
    ticks = [SMALLEST_DIFFERENCE, 1e-7, 1e-6, 1e-5, MAX_DIFFERENCE, 1e-3, 1e-2, 1e-1]
    axes.set_yticks(ticks, ["equal", *(f"{tick:.0e}" for tick in ticks[1:])], minor=False)
    axes.minorticks_off()
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)  # the curves fill the axes


def _draw_layer(axes: Axes, run: Run, layer: int) -> AxesImage:
    tokens = np.array([step[layer] for step in run.tokens_per_expert], dtype=float).T
    share = tokens / tokens.mean(axis=0)
    norm = LogNorm(1 / WIDEST_SHARE, WIDEST_SHARE)
    image = axes.imshow(
        np.clip(share, 1 / WIDEST_SHARE, WIDEST_SHARE),
        norm=norm,
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, tokens.shape[1] + 0.5, len(tokens) - 0.5, -0.5),
    )
    axes.set(title=f"layer {layer}", xlabel="step")
    axes.spines[:].set_visible(False)
    axes.tick_params(left=layer == 0)
    return image


def _steps(run: Run) -> range:
    return range(1, len(run.losses) + 1)
