"""Count tokens, padding, bytes and collectives of a channel. Counters on the device are read only on request."""

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

    Replays of a CUDA graph count tokens, expert padding and masked rows, because the device counts them. Replays do not
    count dispatches, rank padding, cut rows, bytes and collectives, because the host counts them.

    Attributes:
        backend: Name of the backend in use.
        dispatches: Number of dispatches; with ``gather``, the sum over ranks.
        real_tokens_per_expert: Rows that each expert got, without padding: int64 on the CPU, (L,); with ``gather``,
            (E,).
        imbalance: Rows of the busiest expert divided by the mean: 1.0 is balanced, 0.0 means no rows.
        rows_padded: Number of padding rows that were added, by cause: "rank" for equal or aligned rows per rank,
            "expert" for ``pad_multiple``.
        rows_skipped: Number of rows that hold no token in their layout: "cut" rows were not sent, "masked" rows had
            their ids set to -1.
        bytes_sent: Bytes sent to other ranks, by collective.
        collectives: Number of calls, by collective.
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
        """Make the counters of a device if there are none yet. A graph that is captured later writes to them."""
        if device not in self._tokens:
            with torch.inference_mode(False):  # training must be able to write to counters that an evaluation made
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
        """Number of rows masked so far. A host sync on a GPU."""
        return sum(int(masked) for masked in self._masked.values())

    def tokens(self) -> Tensor:
        """Return the real rows and the padding of each expert, int64 (2, L) on the CPU. A host sync on a GPU."""
        total = torch.zeros(2, self._num_local_experts, dtype=torch.int64, device="cpu")
        for tokens in self._tokens.values():
            total += torch.stack(tokens).cpu()
        return total


def read_metrics(channel: Channel, *, gather: bool) -> Metrics:
    """Return the metrics of this rank. With ``gather``, which is collective, return the sums over all ranks."""
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
