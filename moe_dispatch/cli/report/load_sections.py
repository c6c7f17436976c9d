"""The load of experts and ranks over steps, of a trace or of a run: two sections of a report.

Dimensions: ``C`` dispatches or steps, ``E`` experts in the whole group, ``P`` its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.cli.pictures import curves, load_map
from moe_dispatch.cli.report.page import Section, Table, number

_MOST_COLUMNS = 400


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Loads in the order in which they were recorded.

    Attributes:
        names: names of the dispatchers, or one name for all of them together.
        ep_size: P.
        layer_C: index of the name, int64.
        step_C: number of dispatches or steps that the name had before, int64.
        tokens_CE: rows that went to each expert, int64.
    """

    names: Sequence[str]
    ep_size: int
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor

    @property
    def steps(self) -> int:
        """Most steps of any name."""
        return int(self.step_C.max()) + 1 if len(self.step_C) else 0

    @property
    def stride(self) -> int:
        """Number of steps that a picture shows as one: more columns than pixels would only make it heavy."""
        return max(-(-self.steps // _MOST_COLUMNS), 1)

    @property
    def imbalance_C(self) -> Tensor:
        """Rows of the busiest expert over the mean, float64; 1 if nothing was dispatched."""
        return _over_mean(self.tokens_CE)

    @property
    def rank_imbalance_C(self) -> Tensor:
        """Rows of the busiest rank over the mean, float64: the other ranks wait for it."""
        return _over_mean(self.tokens_CE.unflatten(1, (self.ep_size, -1)).sum(2))

    def blocks(self, values_C: Tensor) -> list[Tensor]:
        """Split values of all names into the blocks that a picture shows as one step."""
        block_C = self.step_C // self.stride
        return [values_C[block_C == block] for block in range(-(-self.steps // self.stride))]


def _over_mean(counts: Tensor) -> Tensor:
    mean = counts.double().mean(1)
    return torch.where(mean > 0, counts.amax(1) / mean.clamp(min=1e-9), 1.0)


_MAPPED_LAYERS = 8


def load_section(timeline: Timeline) -> Section:
    """Show rows per expert: a map for each of the first dispatchers, a table for every dispatcher."""
    layers = timeline.names
    text = ["Rows that went to each expert, over the mean of the step: red is more than even, blue is less."]
    if len(layers) > _MAPPED_LAYERS:
        text.append(f"Pictures are of the first {_MAPPED_LAYERS} of {len(layers)} dispatchers; the tables have all.")
    if timeline.stride > 1:
        text.append(f"Pictures show {timeline.stride} steps as one, added up; the tables are of single steps.")
    return Section(
        heading="Expert load over steps",
        text=text,
        pictures=[_load_map(timeline, layer) for layer in range(len(layers))[:_MAPPED_LAYERS]],
        tables=[_expert_table(timeline, layer) for layer in range(len(layers))],
    )


def _load_map(timeline: Timeline, layer: int) -> str:
    tokens_SE, label = timeline.tokens_CE[timeline.layer_C == layer], timeline.names[layer]
    total_E = tokens_SE.sum(0)
    alt = (
        f"Heat map of {label}: rows per expert over {len(tokens_SE)} steps. Over all of them expert "
        f"{int(total_E.argmax())} got most; {int((total_E == 0).sum())} experts got nothing."
    )
    blocks = [block.sum(0).tolist() for block in tokens_SE.split(timeline.stride)]
    return load_map(blocks, name=f"load-{layer}", title=label, alt=alt, stride=timeline.stride)


def _expert_table(timeline: Timeline, layer: int) -> Table:
    tokens_SE = timeline.tokens_CE[timeline.layer_C == layer]
    total_E = tokens_SE.sum(0)
    share_E = total_E / max(float(total_E.double().mean()), 1e-9)
    columns = (total_E, tokens_SE.double().mean(0), *tokens_SE.aminmax(dim=0))
    rows = [
        (str(expert), number(total), f"{float(share):.2f}", f"{float(mean):.1f}", number(least), number(most))
        for expert, (share, total, mean, least, most) in enumerate(zip(share_E, *columns, strict=True))
    ]
    return Table(
        caption=f"Rows per expert, {timeline.names[layer]}",
        headings=("expert", "rows", "over the mean", "per step", "least", "most"),
        rows=rows,
        folded=True,
    )


def imbalance_section(timeline: Timeline) -> Section:
    """Show the busiest expert and the busiest rank over the mean."""
    kinds = {"busiest expert": timeline.imbalance_C}
    if timeline.ep_size > 1:
        kinds["busiest rank"] = timeline.rank_imbalance_C
    alt = "Lines over steps: " + "; ".join(
        f"{label} over the mean, {float(values.mean()):.2f} on average, at most {float(values.max()):.2f}"
        for label, values in kinds.items()
    )
    several = len(timeline.names) > 1 or timeline.stride > 1
    lines = [(label, *_over_layers(timeline, values_C)) for label, values_C in kinds.items()]
    return Section(
        heading="Imbalance over steps",
        text=[
            "1 is balanced. Time goes by the busiest rank: the others wait for it in combine.",
            *(["Lines are means of all dispatchers, bands reach from the least to the most of any."] * several),
        ],
        pictures=[curves(lines, name="imbalance", alt=alt, stride=timeline.stride, ylabel="over the mean")],
        tables=[_imbalance_table(timeline, kinds)],
    )


def _over_layers(timeline: Timeline, values_C: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Return mean, least and most of all dispatchers, by step."""
    blocks = timeline.blocks(values_C)
    return (
        [float(values.mean()) for values in blocks],
        [float(values.min()) for values in blocks],
        [float(values.max()) for values in blocks],
    )


def _imbalance_table(timeline: Timeline, kinds: dict[str, Tensor]) -> Table:
    rows = []
    for layer, name in enumerate(timeline.names):
        cells = [name]
        for values_C in kinds.values():
            values = values_C[timeline.layer_C == layer]
            cells += [f"{float(values.mean()):.2f}", f"{float(values.max()):.2f}", str(int(values.argmax()))]
        rows.append(cells)
    heads = [f"{label}, {what}" for label in kinds for what in ("mean", "most", "in step")]
    return Table(caption="Most rows over the mean", headings=("dispatcher", *heads), rows=rows)
