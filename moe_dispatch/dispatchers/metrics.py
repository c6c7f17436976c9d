"""Counts of what passed through a channel: kept on the device, read only when asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metrics:
    """Totals since the channel was opened.

    What the device counts (tokens, padding of experts, masked rows) goes on in replays of a CUDA graph; what the host
    counts (dispatches, rows padded for ranks or cut, bytes, collectives) stays as the capture left it.

    Attributes:
        backend: name of the backend in use.
        dispatches: calls of dispatch, counted per rank.
        real_tokens_per_expert: int64 on the CPU, (L,), or (E,) when gathered.
        imbalance: the busiest expert's tokens over the mean; 1.0 is balanced, 0.0 when nothing was dispatched.
        rows_padded: rows that hold no token, by cause: "rank" (equal or aligned rows per rank), "expert"
            (``pad_multiple``).
        rows_skipped: rows that are no tokens in their layout, by how: "cut" (never sent), "masked" (their ids became
            -1).
        bytes_sent: bytes to other ranks, by collective.
        collectives: calls, by collective.
    """

    backend: str
    dispatches: int
    real_tokens_per_expert: Tensor
    imbalance: float
    rows_padded: dict[str, int]
    rows_skipped: dict[str, int]
    bytes_sent: dict[str, int]
    collectives: dict[str, int]


@final
class Meter:
    """The counters behind ``Metrics``."""

    def __init__(self, num_local_experts: int) -> None:
        self._num_local_experts = num_local_experts
        self._tokens: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._masked: dict[torch.device, Tensor] = {}
        self.rows: Counter[str] = Counter({"rank": 0, "cut": 0, "dispatches": 0})

    def prepare(self, device: torch.device) -> None:
        """Make the counters of a device, where there are none yet. A captured graph then counts in the same ones."""
        if device not in self._tokens:
            with torch.inference_mode(False):  # counters made in an evaluation are written in training too
                zeros = torch.zeros(self._num_local_experts, dtype=torch.int64, device=device)
                self._tokens[device] = zeros, zeros.clone()
                self._masked[device] = torch.zeros((), dtype=torch.int64, device=device)

    def record(self, arrived: Arrived, *, padded: int, cut: int) -> None:
        """Count one dispatch. No sync."""
        device = arrived.rows.device
        if device not in self._tokens:
            self.prepare(device)
        real, padding = self._tokens[device]
        real.add_(arrived.real_tokens_per_expert)
        if arrived.tokens_per_expert is not arrived.real_tokens_per_expert:
            padding.add_(arrived.tokens_per_expert).sub_(arrived.real_tokens_per_expert)
        self.rows["rank"] += padded
        self.rows["cut"] += cut
        self.rows["dispatches"] += 1

    def record_masked(self, valid_T: Tensor) -> None:
        """Count rows whose ids became -1. No sync."""
        self.prepare(valid_T.device)
        self._masked[valid_T.device].add_(len(valid_T) - valid_T.sum())

    @property
    def masked(self) -> int:
        """Rows masked so far. A host sync on a GPU."""
        return sum(int(masked) for masked in self._masked.values())

    def tokens(self) -> Tensor:
        """int64 (2, L) on the CPU: real rows and padding, per expert. A host sync on a GPU."""
        total = torch.zeros(2, self._num_local_experts, dtype=torch.int64, device="cpu")
        for tokens in self._tokens.values():
            total += torch.stack(tokens).cpu()
        return total


def read_metrics(channel: Channel, *, gather: bool) -> Metrics:
    """This rank's metrics, or with ``gather`` (collective) those of the group: sums, and tokens of all experts."""
    real, padding = channel.meter.tokens().tolist()
    links = {id(link): link for link in (channel.communicator, channel.control)}.values()
    sent: Counter[str] = sum((link.bytes_sent for link in links), Counter())
    calls: Counter[str] = sum((link.calls for link in links), Counter())
    mine = [
        real,
        sum(padding),
        {**channel.meter.rows, "masked": channel.meter.masked},
        sent,
        calls,
    ]
    everyone = channel.control.gather_json(mine, label="metrics") if gather else [mine]
    tokens = torch.tensor([count for part in everyone for count in part[0]], dtype=torch.int64, device="cpu")
    rows: Counter[str] = sum((Counter(part[2]) for part in everyone), Counter())
    mean = float(tokens.double().mean())
    return Metrics(
        backend=channel.backend_name,
        dispatches=rows["dispatches"],
        real_tokens_per_expert=tokens,
        imbalance=float(tokens.max()) / mean if mean else 0.0,
        rows_padded={"rank": rows["rank"], "expert": sum(part[1] for part in everyone)},
        rows_skipped={"cut": rows["cut"], "masked": rows["masked"]},
        bytes_sent=dict(sum((Counter(part[3]) for part in everyone), Counter())),
        collectives=dict(sum((Counter(part[4]) for part in everyone), Counter())),
    )
