"""Count the tokens, padding, needs, bytes and collectives of a channel.

Counters on the device are read only on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived
from moe_dispatch.balance.exact import ExactPlacement
from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.autograd import Departed
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
            (E,). Under a placement it is (E,) in both cases, and rows of all copies of an expert count for the expert.
            Without ``gather`` these are the rows that this rank computed.
        imbalance: Rows of the busiest expert divided by the mean: 1.0 is balanced, 0.0 means no rows.
        rank_imbalance: With ``gather``, rows of the busiest rank divided by the mean; otherwise None.
        rows_padded: Number of padding rows that were added, by cause: "rank" for equal or aligned rows per rank,
            "expert" for ``pad_multiple``.
        rows_skipped: Number of rows that hold no token in their layout: "cut" rows were not sent, "masked" rows had
            their ids set to -1.
        bytes_sent: Bytes sent to other ranks, by collective.
        collectives: Number of calls, by collective.
        expert_copies: Number of copies of experts that ``balance="exact"`` made on this rank, over all dispatches; with
            ``gather``, on all ranks.
        slots_replayed: Slots whose expert came from a ``RoutingTable``, by name of the dispatcher. Recomputation counts
            them again. Calls inside torch.compile and selective checkpointing are not counted.
        slots_drifted: Those of them in which the router would not have chosen this expert, by name of the dispatcher.
    """

    backend: str
    dispatches: int
    real_tokens_per_expert: Tensor
    imbalance: float
    rank_imbalance: float | None
    rows_padded: dict[str, int]
    rows_skipped: dict[str, int]
    bytes_sent: dict[str, int]
    collectives: dict[str, int]
    expert_copies: int
    slots_replayed: dict[str, int]
    slots_drifted: dict[str, int]

    @property
    def replay_drift(self) -> dict[str, float]:
        """The share of replayed slots in which the router would have chosen otherwise, by name of the dispatcher."""
        return {name: self.slots_drifted[name] / max(count, 1) for name, count in self.slots_replayed.items()}


_NO_TURN = nullcontext()


@final
class Meter:
    """The counters of a channel, behind ``Metrics`` and ``RequiredCapacity``. Most of them are on the device.

    All dispatches of a channel write to the same counters. Micro-batches may run on CUDA streams of their own, which do
    not wait for each other. So everything that touches a counter takes its turn: it waits for the last turn on another
    stream. The streams wait and the host does not, and what else they do stays unordered.

    Replays of a CUDA graph write to the counters that it was captured with, so counters stay where they are.

    Args:
        num_slots: Number of expert slots of this rank.
        num_experts: E.
        first_expert: The expert in the first slot of this rank where no placement is in force.

    Attributes:
        placed: Whether a dispatcher of the channel has a placement.
        rows: Counts on the host: padding rows that a rank added ("rank"), rows that were "cut" out, and "dispatches".
    """

    def __init__(self, num_slots: int, num_experts: int = 0, first_expert: int = 0) -> None:
        self._num_slots, self._num_experts, self._first = num_slots, num_experts, first_expert
        self.placed = False
        self.rows: Counter[str] = Counter({"rank": 0, "cut": 0, "dispatches": 0})
        # Real rows and padding of each slot; masked rows; needs, which are maxima, so that a dispatch may be repeated;
        # under a placement the real rows of each expert, with a last entry for empty slots, and the copies.
        self._counters: dict[torch.device, tuple[Tensor, ...]] = {}
        self._drift: dict[tuple[str, torch.device], Tensor] = {}
        self._turns: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def turn(self, device: torch.device) -> AbstractContextManager[None]:
        """Let the current stream wait for the last turn on the device. The block is the next turn.

        A captured turn runs in replays, which the caller puts in order as any work on a stream.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return nullcontext()
        return self._turn(device, torch.cuda.current_stream(device))

    @contextmanager
    def _turn(self, device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
        last, event = self._turns.get(device, (stream, None))
        if event is not None and last != stream:
            stream.wait_event(event)
        yield
        event = torch.cuda.Event() if event is None else event
        event.record(stream)
        self._turns[device] = stream, event

    def _zeros(self, what: str, device: torch.device, *shape: int) -> Tensor:
        """Make a counter, before a dispatch allocates anything else.

        Raises:
            StateError: A CUDA graph is being captured. Every replay would reset the counter.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(f"Dispatcher.dispatch: run a {what}call once before a CUDA graph captures it.")
        # Training must be able to write to a counter that an evaluation made.
        with torch.inference_mode(False), self.turn(device):
            return torch.zeros(shape, dtype=torch.int64, device=device)

    def prepare(self, device: torch.device) -> None:
        """Make the counters of a device that are still missing.

        Raises:
            StateError: The first call on the device is being captured in a CUDA graph.
        """
        if device not in self._counters:
            shapes = (self._num_slots,), (self._num_slots,), (), (3,), (self._num_experts + 1,), ()
            self._counters[device] = tuple(self._zeros("", device, *shape) for shape in shapes)

    def place(self, device: torch.device) -> None:
        """Count by expert from now on. A graph that is captured after this call counts by expert too."""
        self.placed = True
        self.prepare(device)

    def record(self, arrived: Arrived, departed: Departed) -> None:
        """Count one dispatch. No sync. In place, so that replays write to the same counters."""
        device = arrived.rows.device
        if device not in self._counters:
            self.prepare(device)
        with self.turn(device) if device.type == "cuda" else _NO_TURN:
            real, padding, masked, needs, by_expert, copies = self._counters[device]
            if departed.experts_L is None:
                real.add_(arrived.real_tokens_per_expert)
            else:
                experts_L = departed.experts_L.to(device)
                by_expert.index_add_(0, experts_L, arrived.real_tokens_per_expert)
                if isinstance(departed.placement, ExactPlacement):
                    of_spare_slots = experts_L[-departed.placement.copies_PS.shape[1] :]
                    copies.add_((of_spare_slots < self._num_experts).sum())
            if arrived.tokens_per_expert is not arrived.real_tokens_per_expert:
                padding.add_(arrived.tokens_per_expert).sub_(arrived.real_tokens_per_expert)
            if departed.valid_T is not None:
                masked.add_(len(departed.valid_T) - departed.valid_T.sum())
            if arrived.demand is not None:
                torch.maximum(needs, torch.cat([arrived.demand, departed.outcome.view(1)]), out=needs)
        self.rows["dispatches"] += 1

    def record_drift(self, name: str, drift: Tensor) -> None:
        """Count the slots of a replayed routing, ``Routing.drift``, for the dispatcher of this name. No sync.

        Raises:
            StateError: The first replay on the device is being captured in a CUDA graph.
        """
        key = (name, drift.device)
        if key not in self._drift:
            self._drift[key] = self._zeros("replayed ", drift.device, 2)
        with self.turn(drift.device):
            self._drift[key].add_(drift)

    def drift(self) -> tuple[Counter[str], Counter[str]]:
        """Return the drifted and the replayed slots by name of the dispatcher. A host sync on a GPU."""
        drifted, replayed = Counter[str](), Counter[str]()
        for (name, _), counts in self._drift.items():
            both = self._read(counts)
            drifted[name] += both[0]
            replayed[name] += both[1]
        return drifted, replayed

    @property
    def copies(self) -> int:
        """Number of copies of experts on this rank so far. A host sync on a GPU."""
        return sum(self._read(copies) for *_, copies in self._counters.values())

    @property
    def masked(self) -> int:
        """Number of rows masked so far. A host sync on a GPU."""
        return sum(self._read(masked) for _, _, masked, *_ in self._counters.values())

    def tokens(self) -> tuple[list[int], int]:
        """Return the real rows of each expert, and the padding of all experts. A host sync on a GPU.

        There are L experts, or E if there is a placement.
        """
        real = self._sums(self._num_slots, (counters[0] for counters in self._counters.values()))
        padding = sum(self._sums(self._num_slots, (counters[1] for counters in self._counters.values())))
        if not self.placed:
            return real, padding
        *by_expert, _ = self._sums(self._num_experts + 1, (by_expert for *_, by_expert, _ in self._counters.values()))
        for number, rows in enumerate(real):
            if rows:  # of a dispatch before the placement
                by_expert[self._first + number] += rows
        return by_expert, padding

    def needs(self) -> list[int]:
        """Return the largest needs of one dispatch of this rank in graph-safe mode, since the channel was opened.

        They are the rows for its experts, the rows for one rank, and the invalid ids. A host sync on a GPU.
        """
        needs = [self._read(needs) for *_, needs, _, _ in self._counters.values()]
        return [max(each) for each in zip([0, 0, 0], *needs, strict=True)]

    def forget_invalid_ids(self) -> None:
        """Reset the need of invalid ids, after they were reported."""
        for device, (*_, needs, _, _) in self._counters.items():
            with self.turn(device):
                needs[2:].zero_()

    def _sums(self, length: int, counters: Iterable[Tensor]) -> list[int]:
        return [sum(each) for each in zip([0] * length, *map(self._read, counters), strict=True)]

    def _read(self, counter: Tensor) -> Any:
        with self.turn(counter.device):
            return counter.tolist()


def read_metrics(channel: Channel, *, gather: bool) -> Metrics:
    """Return the metrics of this rank. With ``gather``, which is collective, return the sums over all ranks."""
    meter, links = channel.meter, dict.fromkeys((channel.communicator, channel.control))  # often the same one
    mine: list[Any] = [
        *meter.tokens(),
        {**meter.rows, "masked": meter.masked},
        +_total(link.bytes_sent for link in links),
        _total(link.calls for link in links),
        {"copies": meter.copies},
        *meter.drift(),
    ]
    everyone = channel.control.gather_json(mine, label="metrics") if gather else [mine]
    real, padding, *others = zip(*everyone, strict=True)
    rows, sent, calls, copies, drifted, replayed = map(_total, others)
    tokens = torch.tensor(real, dtype=torch.int64, device="cpu")
    ranks = tokens.sum(1)
    tokens = tokens.sum(0) if meter.placed else tokens.flatten()
    return Metrics(
        backend=channel.backend_name,
        dispatches=rows["dispatches"],
        real_tokens_per_expert=tokens,
        imbalance=_busiest_over_mean(tokens),
        rank_imbalance=_busiest_over_mean(ranks) if gather else None,
        rows_padded={"rank": rows["rank"], "expert": sum(padding)},
        rows_skipped={"cut": rows["cut"], "masked": rows["masked"]},
        bytes_sent=dict(sent),
        collectives=dict(calls),
        expert_copies=copies["copies"],
        slots_replayed=dict(replayed),
        slots_drifted=dict(drifted),
    )


def _total(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # unlike +, it keeps zeros
    return total


def _busiest_over_mean(rows: Tensor) -> float:
    mean = float(rows.double().mean())
    return float(rows.max()) / mean if mean else 0.0
