"""The load of experts and ranks over steps: two sections of a report about a trace or a run.

Dimensions: ``C`` dispatches or steps, ``E`` experts in the whole group, ``P`` its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch_tools.pictures import curves, load_map
from moe_dispatch_tools.report.page import Section, Table, number

_MOST_COLUMNS = 400
_BANDS = "A line is the mean of all dispatchers. The band around it goes from the smallest to the largest value."


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Loads in the order of the recording.

    Attributes:
        names: Names of the dispatchers, or one name for all of them together.
        ep_size: Number of ranks, P.
        layer_C: Index of the name, int64.
        step_C: Number of earlier dispatches or steps with the same name, int64.
        tokens_CE: Rows that went to each expert, int64.
        received_CP: Rows that the experts on each rank got, int64; None if every rank computed its own experts.
    """

    names: Sequence[str]
    ep_size: int
    layer_C: Tensor
    step_C: Tensor
    tokens_CE: Tensor
    received_CP: Tensor | None = None

    @property
    def steps(self) -> int:
        """The largest number of steps of any name."""
        return int(self.step_C.max()) + 1 if len(self.step_C) else 0

    @property
    def stride(self) -> int:
        """Number of steps that one column of a picture shows, so that it has no more columns than pixels."""
        return max(-(-self.steps // _MOST_COLUMNS), 1)

    @property
    def imbalance_C(self) -> Tensor:
        """Rows of the busiest expert, divided by the mean of all experts, float64; 1 without rows."""
        return _over_mean(self.tokens_CE)

    @property
    def rank_imbalance_C(self) -> Tensor:
        """Rows of the busiest rank, divided by the mean of all ranks, float64. The other ranks wait for this rank."""
        return self.unplaced_imbalance_C if self.received_CP is None else _over_mean(self.received_CP)

    @property
    def unplaced_imbalance_C(self) -> Tensor:
        """The same number, if every rank had computed its own experts."""
        return _over_mean(self.tokens_CE.unflatten(1, (self.ep_size, -1)).sum(2))

    @property
    def placed(self) -> bool:
        """Whether ranks computed experts of other ranks."""
        return self.received_CP is not None and not self.rank_imbalance_C.equal(self.unplaced_imbalance_C)

    def blocks(self, values_C: Tensor) -> list[Tensor]:
        """Split the values of all names into blocks of ``stride`` steps."""
        block_C = self.step_C // self.stride
        return [values_C[block_C == block] for block in range(-(-self.steps // self.stride))]


def _over_mean(counts: Tensor) -> Tensor:
    mean = counts.double().mean(1)
    return torch.where(mean > 0, counts.amax(1) / mean.clamp(min=1e-9), 1.0)


_MAPPED_LAYERS = 8


def load_section(timeline: Timeline) -> Section:
    """Show the rows per expert: a map for each of the first dispatchers, and a table for each dispatcher."""
    layers = timeline.names
    text = [
        "Rows that went to each expert, divided by the mean of all experts in the step. Red experts got more than the "
        "mean, blue experts got less."
    ]
    if len(layers) > _MAPPED_LAYERS:
        text.append(
            f"The pictures show the first {_MAPPED_LAYERS} of {len(layers)} dispatchers. The tables show all of them."
        )
    if timeline.stride > 1:
        text.append(f"A column of a picture is the sum of {timeline.stride} steps. The tables count single steps.")
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
        f"Heat map of {label}: rows per expert over {len(tokens_SE)} steps. In all steps together, expert "
        f"{int(total_E.argmax())} got the most rows, and {int((total_E == 0).sum())} experts got no rows."
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
        headings=("expert", "rows", "of the mean", "per step", "min", "max"),
        rows=rows,
        folded=True,
    )


def imbalance_section(timeline: Timeline) -> Section:
    """Show the load of the busiest expert and of the busiest rank, relative to the mean."""
    kinds = {"busiest expert": timeline.imbalance_C}
    if timeline.ep_size > 1:
        kinds["busiest rank"] = timeline.rank_imbalance_C
    if timeline.placed:
        kinds["busiest rank without placements"] = timeline.unplaced_imbalance_C
    alt = "Lines over steps: " + "; ".join(
        f"{label}, {float(values.mean()):.2f} times the mean on average, at most {float(values.max()):.2f} times"
        for label, values in kinds.items()
    )
    several = len(timeline.names) > 1 or timeline.stride > 1
    lines = [(label, *_over_layers(timeline, values_C)) for label, values_C in kinds.items()]
    return Section(
        heading="Imbalance over steps",
        text=[
            "Rows of the busiest expert and of the busiest rank, divided by the mean of all. 1 is balanced. The "
            "busiest rank decides the time of a step, because the other ranks wait for it in combine.",
            *([_saved(timeline)] * timeline.placed),
            *([_BANDS] * several),
        ],
        pictures=[curves(lines, name="imbalance", alt=alt, stride=timeline.stride, ylabel="of the mean")],
        tables=[_imbalance_table(timeline, kinds)],
    )


def _saved(timeline: Timeline) -> str:
    with_C, without_C = timeline.rank_imbalance_C, timeline.unplaced_imbalance_C
    return (
        f"Experts were placed on other ranks. The busiest rank got {float(with_C.mean()):.2f} times the mean on "
        "average. If every rank had computed its own experts, it would have got "
        f"{float(without_C.mean()):.2f} times the mean."
    )


def _over_layers(timeline: Timeline, values_C: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Return the mean, the smallest and the largest value of all dispatchers, by step."""
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
    heads = [f"{label}, {what}" for label in kinds for what in ("mean", "max", "max in step")]
    return Table(caption="Largest load, divided by the mean load", headings=("dispatcher", *heads), rows=rows)
