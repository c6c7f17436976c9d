"""Read the counters of a channel: tokens, padding, bytes and collectives. Calls do not need this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import InputError


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metrics:
    """Totals since the channel was opened.

    Rows and slots count once: activation checkpointing does not count them again when it recomputes a layer.
    Dispatches count again, unless the recomputation takes the route of its forward. Bytes and collectives always do.

    Replays of a CUDA graph count tokens, expert padding and masked rows, because the device counts them. Replays do not
    count dispatches, rank padding, cut rows, bytes and collectives, because the host counts them.

    ``now - before`` has what was counted between two reads of one dispatcher, or of others on its channel.

    Attributes:
        backend: Name of the backend in use.
        dry_run: Whether the group is torch's fake one, so that all numbers are those of ranks that route as this one.
        dispatches: Number of dispatches; with ``gather``, the sum over ranks.
        real_tokens_per_expert: Rows that each expert got, without padding: int64 on the CPU, (L,); with ``gather``,
            (E,). Under a placement it is (E,) in both cases, and rows of all copies of an expert count for the expert.
            Without ``gather`` these are the rows that this rank computed.
        tokens_by_layer: Rows that each expert got from each layer, by name of the dispatcher: int64 (E,) on the CPU.
            Without ``gather``, the rows that this rank computed. Layers without a call are missing. Calls
            inside torch.compile are in the totals only.
        real_tokens_per_rank: With ``gather``, rows that each rank computed, int64 (P,) on the CPU; otherwise None.
        imbalance: Rows of the busiest expert divided by the mean: 1.0 is balanced, 0.0 means no rows. The layers are
            summed first, so a layer may be less balanced.
        rank_imbalance: With ``gather``, rows of the busiest rank divided by the mean, summed over layers; otherwise
            None.
        rows_padded: Number of padding rows that were added, by cause: "rank" for equal or aligned rows per rank,
            "expert" for ``pad_multiple``.
        rows_skipped: Number of rows that hold no token in their layout: "cut" rows were not sent, "masked" rows had
            their ids set to -1.
        bytes_sent: Bytes sent to other ranks, by collective.
        collectives: Number of calls, by collective.
        expert_copies: Number of copies of experts that ``balance="exact"`` made on this rank, over all dispatches; with
            ``gather``, on all ranks.
        dispatches_left_uneven: Number of dispatches in which ``balance="exact"`` left out copies of experts that would
            have had fewer than ``balance.min_rows`` rows; with ``gather``, the sum over ranks.
        memory_held: Bytes that the backend holds between calls: buffers of its library, as far as that tells them, and
            memory that calls reuse. 0 after ``release``; with ``gather``, the sum over ranks.
        slots_replayed: Slots whose expert came from a ``RoutingTable``, by name of the dispatcher. Calls inside
            torch.compile and selective checkpointing are not counted.
        slots_drifted: Those of them in which the router would not have chosen this expert, by name of the dispatcher.
    """

    backend: str
    dry_run: bool
    dispatches: int
    real_tokens_per_expert: Tensor
    tokens_by_layer: dict[str, Tensor]
    real_tokens_per_rank: Tensor | None
    imbalance: float
    rank_imbalance: float | None
    rows_padded: dict[str, int]
    rows_skipped: dict[str, int]
    bytes_sent: dict[str, int]
    collectives: dict[str, int]
    expert_copies: int
    dispatches_left_uneven: int
    memory_held: int
    slots_replayed: dict[str, int]
    slots_drifted: dict[str, int]

    @property
    def replay_drift(self) -> dict[str, float]:
        """The share of replayed slots in which the router would have chosen otherwise, by name of the dispatcher."""
        return {name: self.slots_drifted[name] / max(count, 1) for name, count in self.slots_replayed.items()}

    def __sub__(self, before: Metrics) -> Metrics:
        """Return what was counted since ``before``. Both are of the same ranks: read with ``gather``, or without.

        Raises:
            InputError: Only one was read with ``gather``, or ``before`` has counted more.
        """
        ranks = [read.real_tokens_per_rank for read in (self, before)]
        one_is_missing = (ranks[0] is None) != (ranks[1] is None)
        if one_is_missing and any(rows is not None and len(rows) > 1 for rows in ranks):
            raise InputError("Metrics: both must be read with gather=True, or both without, got one of each.")
        if self.dispatches < before.dispatches:
            raise InputError(
                f"Metrics: subtract an earlier read from a later one, got {before.dispatches} dispatches to subtract "
                f"from {self.dispatches}. Write now - before."
            )
        plain = ("backend", "dry_run", "imbalance", "rank_imbalance", "real_tokens_per_rank")
        names = [field.name for field in fields(self) if field.name not in plain]
        found = {name: _difference(getattr(self, name), getattr(before, name)) for name in names}
        rows = None if ranks[0] is None or ranks[1] is None else ranks[0] - ranks[1]
        return replace(
            self,
            **found,
            real_tokens_per_rank=rows,
            imbalance=_busiest_over_mean(found["real_tokens_per_expert"]),
            rank_imbalance=None if rows is None else _busiest_over_mean(rows),
        )


def _difference(now: Any, before: Any) -> Any:
    """Subtract numbers and tensors, also in mappings by name, in which a new name counts from 0."""
    if isinstance(now, dict):
        return {name: value - before.get(name, 0) for name, value in now.items()}
    return now - before


def read_metrics(channel: Channel, *, gather: bool) -> Metrics:
    """Return the metrics of this rank. With ``gather``, which is collective, return the sums over all ranks."""
    meter, links = channel.meter, dict.fromkeys((channel.communicator, channel.control))  # often the same one
    real, padding, layers = meter.tokens()
    mine: dict[str, Any] = {
        "real": real,
        "padding": padding,
        "layers": layers,
        "rows": {**meter.rows, "masked": meter.masked},
        "sent": +_total(link.bytes_sent for link in links),
        "calls": _total(link.calls for link in links),
        "copies": meter.copies,
        "memory": channel.backend.memory_held() if channel.waken is None else 0,
        "observed": {field: counts for observer in channel.observers for field, counts in observer.totals().items()},
    }
    everyone = channel.control.gather_json(mine, label="metrics") if gather else [mine]
    rows, sent, calls = (_total(of[name] for of in everyone) for name in ("rows", "sent", "calls"))
    tokens = torch.tensor([of["real"] for of in everyone], dtype=torch.int64, device="cpu")
    ranks = tokens.sum(1)
    tokens = tokens.sum(0) if meter.placed else tokens.flatten()
    return Metrics(
        backend=channel.backend_name,
        dry_run=channel.communicator.dry_run,
        dispatches=rows["dispatches"],
        real_tokens_per_expert=tokens,
        tokens_by_layer={
            name: torch.tensor([of["layers"][name] for of in everyone if name in of["layers"]], device="cpu").sum(0)
            for name in dict.fromkeys(name for of in everyone for name in of["layers"])
        },
        real_tokens_per_rank=ranks if gather else None,
        imbalance=_busiest_over_mean(tokens),
        rank_imbalance=_busiest_over_mean(ranks) if gather else None,
        rows_padded={"rank": rows["rank"], "expert": sum(of["padding"] for of in everyone)},
        rows_skipped={"cut": rows["cut"], "masked": rows["masked"]},
        bytes_sent=dict(sent),
        collectives=dict(calls),
        expert_copies=sum(of["copies"] for of in everyone),
        dispatches_left_uneven=rows["uneven"],
        memory_held=sum(of["memory"] for of in everyone),
        **{
            field: dict(_total(of["observed"].get(field, {}) for of in everyone))
            for field in ("slots_replayed", "slots_drifted")
        },
    )


def _total(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # unlike +, it keeps zeros
    return total


def _busiest_over_mean(rows: Tensor) -> float:
    mean = float(rows.double().mean())
    return float(rows.max()) / mean if mean else 0.0
