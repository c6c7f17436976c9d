"""A recorded routing for ``compare``: ids, weights and layouts of a trace, around rows drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import TraceError
from moe_dispatch.testing.forms import DeviceKnown, Form
from moe_dispatch.testing.scenario import Batch, Scenario
from moe_dispatch.traces import Call, Part, Trace

# Unless asked for more: every backend computes each in float64, in every mode.
MOST_STEPS = 16


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """The first dispatches of a trace that fits a config."""

    calls: tuple[Call, ...]

    @classmethod
    def load(cls, path: Path, config: DispatcherConfig, *, ranks: int, steps: int) -> Replay:
        """Read the trace.

        Args:
            path: of the trace.
            config: that is to run it; may have another backend, hidden size, padding or mode.
            ranks: that are to run it.
            steps: how many dispatches.

        Raises:
            TraceError: it cannot be read, lacks ranks or so many dispatches, or is of other sizes; or row counts
                differ that the config promises to be equal.
        """
        trace = Trace.load(path)
        trace.require_whole("compare")
        trace.check_ids("compare")
        if trace.ep_size != ranks:
            raise TraceError(
                f"compare: --ranks must be that of the trace {path.name}, {trace.ep_size}, got {ranks}. Leave --ranks "
                "out, or have torchrun start as many."
            )
        trace.check(_without_room(config), ep_size=ranks)
        if not trace.calls:
            raise TraceError(f"compare: {path.name} must hold a dispatch, got none. Record at least one step.")
        if steps > len(trace.calls):
            raise TraceError(
                f"compare: --steps must be at most the {len(trace.calls)} dispatches of {path.name}, got {steps}. "
                "Leave --steps out, or record more."
            )
        calls = trace.calls[:steps]
        if config.row_counts in ("assume", "check"):
            _check_equal(calls, config.row_counts)
        return cls(calls=calls)

    @property
    def most_tokens(self) -> tuple[int, ...]:
        """Of each rank, in the dispatch where it has most."""
        return tuple(
            max(len(real_rows(part)) for part in of_rank)
            for of_rank in zip(*(call.parts for call in self.calls), strict=True)
        )

    @property
    def most_rows(self) -> int:
        """That any rank brings to any dispatch."""
        return max(part.num_rows for call in self.calls for part in call.parts)

    def form(self, step: int, rank: int) -> Form:
        """Where the tokens of a rank stand; what only the device knew, only a device shall know again."""
        part = self.calls[step].parts[rank]
        return Form(
            layout=part.layout if part.on_host else DeviceKnown(part.layout),
            leading=tuple(part.shape[:-1]),
            real_T=real_rows(part),
        )

    def batch(self, scenario: Scenario, step: int, rank: int) -> Batch:
        """Rows and upstream gradients at random, for the ids and weights of the tokens of a rank."""
        part = self.calls[step].parts[rank]
        generator = torch.Generator().manual_seed(scenario.seed * 10_000_019 + step * 10_007 + rank)
        real_T = real_rows(part)
        ids_TK, weights_TK = part.routing.topk_ids[real_T], part.routing.topk_weights[real_T].double()

        def normal() -> Tensor:
            values = torch.randn(len(real_T), scenario.hidden, generator=generator, dtype=torch.float64)
            return values.to(scenario.torch_dtype).double()

        return Batch(
            x_TD=normal(),
            ids_TK=ids_TK,
            weights_TK=torch.where(ids_TK < 0, float("nan"), weights_TK),
            upstream_TD=normal(),
        )


def real_rows(part: Part) -> Tensor:
    """Int64, the rows that are tokens."""
    valid_T = part.layout.valid_T(part.num_rows)
    return torch.arange(part.num_rows) if valid_T is None else valid_T.nonzero().flatten()


def _without_room(config: DispatcherConfig) -> DispatcherConfig:
    """Free of the number of rows that it was made for: a comparison makes room for those of the trace."""
    return config.replace(
        backend="auto",
        row_counts=None,
        max_tokens_per_rank=None,
        graph_safe=False,
        capacity_factor="worst",
        on_overflow=None,
    )


def _check_equal(calls: tuple[Call, ...], row_counts: str) -> None:
    for step, call in enumerate(calls):
        counts = [len(real_rows(part)) if part.on_host else part.num_rows for part in call.parts]
        if len(set(counts)) > 1:
            raise TraceError(
                f'compare: row_counts "{row_counts}" promises that all ranks bring as many rows, got '
                f'{", ".join(map(str, counts))} in dispatch {step} of the trace. Set row_counts to "agree".'
            )
