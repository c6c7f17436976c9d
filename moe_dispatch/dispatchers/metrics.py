"""Count the tokens of each layer, and the padding, needs, bytes and collectives of a channel.

Counters on the device are read only on request. A recomputed call is a dispatch that moves bytes, but its rows were
counted in the forward.
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
from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.autograd import Departed
    from moe_dispatch.dispatchers.channel import Channel


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metrics:
    """Totals since the channel was opened.

    Rows and slots count once: activation checkpointing does not count them again when it recomputes a layer.
    Dispatches count again, unless the recomputation takes the route of its forward. Bytes and collectives always do.

    Replays of a CUDA graph count tokens, expert padding and masked rows, because the device counts them. Replays do not
    count dispatches, rank padding, cut rows, bytes and collectives, because the host counts them.

    Attributes:
        backend: Name of the backend in use.
        dispatches: Number of dispatches; with ``gather``, the sum over ranks.
        real_tokens_per_expert: Rows that each expert got, without padding: int64 on the CPU, (L,); with ``gather``,
            (E,). Under a placement it is (E,) in both cases, and rows of all copies of an expert count for the expert.
            Without ``gather`` these are the rows that this rank computed.
        tokens_by_layer: Rows that each expert got from each layer, by name of the dispatcher: int64 (E,) on the CPU.
            Without ``gather``, the rows that this rank computed. Layers without a call are missing. Calls
            inside torch.compile are in the totals only.
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
        slots_replayed: Slots whose expert came from a ``RoutingTable``, by name of the dispatcher. Calls inside
            torch.compile and selective checkpointing are not counted.
        slots_drifted: Those of them in which the router would not have chosen this expert, by name of the dispatcher.
    """

    backend: str
    dispatches: int
    real_tokens_per_expert: Tensor
    tokens_by_layer: dict[str, Tensor]
    imbalance: float
    rank_imbalance: float | None
    rows_padded: dict[str, int]
    rows_skipped: dict[str, int]
    bytes_sent: dict[str, int]
    collectives: dict[str, int]
    expert_copies: int
    dispatches_left_uneven: int
    slots_replayed: dict[str, int]
    slots_drifted: dict[str, int]

    @property
    def replay_drift(self) -> dict[str, float]:
        """The share of replayed slots in which the router would have chosen otherwise, by name of the dispatcher."""
        return {name: self.slots_drifted[name] / max(count, 1) for name, count in self.slots_replayed.items()}


_NO_TURN = nullcontext()
_COMPILED = -1


def is_recomputation() -> bool:
    """Return whether the call runs inside a backward, where activation checkpointing repeats a forward."""
    return torch._C._current_graph_task_id() != -1


@final
class Meter:
    """The counters of a channel, behind ``Metrics`` and ``RequiredCapacity``. Most of them are on the device.

    Rows of experts have a counter for each layer, and the rest has one for the channel. Micro-batches may run on CUDA
    streams of their own, which do not wait for each other. So everything that touches a counter takes its turn: it
    waits for the last turn on another stream. The streams wait and the host does not, and what else they do stays
    unordered.

    Replays of a CUDA graph write to the counters that it was captured with, so counters stay where they are.

    Args:
        num_slots: Number of expert slots of this rank.
        num_experts: E.
        first_expert: The expert in the first slot of this rank where no placement is in force.

    Attributes:
        names: The name of each layer.
        placed: Whether a dispatcher of the channel has a placement.
        rows: Counts on the host: padding rows that a rank added ("rank"), rows that were "cut" out, "dispatches", and
            dispatches that balancing left "uneven".
    """

    def __init__(self, num_slots: int, num_experts: int, first_expert: int = 0) -> None:
        self._num_slots, self._num_experts = num_slots, num_experts
        self._own = slice(first_expert, first_expert + num_slots)
        self.names: list[str] = []
        self.placed = False
        self.rows: Counter[str] = Counter({"rank": 0, "cut": 0, "dispatches": 0, "uneven": 0})
        # Padding of each slot; masked rows; needs, which are maxima, so that a dispatch may be repeated; copies.
        self._counters: dict[torch.device, tuple[Tensor, ...]] = {}
        # The real rows of each expert, by layer, with a last entry for empty slots; and the part of this rank's own.
        self._layers: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._called = set[int]()
        self._reports: dict[tuple[str, torch.device], Tensor] = {}
        self._turns: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def add(self, name: str) -> int:
        """Return the number of a new layer."""
        self.names.append(name)
        return len(self.names) - 1

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

    def zeros(self, what: str, device: torch.device, *shape: int) -> Tensor:
        """Make a counter, before a dispatch allocates anything else.

        Raises:
            StateError: A CUDA graph is being captured. Every replay would reset the counter.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                f"Dispatcher.dispatch: run a {what}call of each layer once before a CUDA graph captures it."
            )
        # Training must be able to write to a counter that an evaluation made.
        with torch.inference_mode(False), self.turn(device):
            return torch.zeros(shape, dtype=torch.int64, device=device)

    def prepare(self, device: torch.device, layer: int = _COMPILED) -> None:
        """Make the counters of a device and a layer that are still missing.

        Raises:
            StateError: The first call of the layer on the device is being captured in a CUDA graph.
        """
        if (layer, device) not in self._layers:
            by_expert = self.zeros("", device, self._num_experts + 1)
            if device not in self._counters:
                shapes = (self._num_slots,), (), (3,), ()
                self._counters[device] = tuple(self.zeros("", device, *shape) for shape in shapes)
            with torch.inference_mode(False):
                self._layers[layer, device] = by_expert, by_expert[self._own]

    def record(self, arrived: Arrived, departed: Departed) -> None:
        """Count one dispatch. No sync. In place, so that replays write to the same counters."""
        device = arrived.weights.device
        if (departed.layer, device) not in self._layers:
            self.prepare(device, departed.layer)
        if departed.layer != _COMPILED:
            self._called.add(departed.layer)
        with self.turn(device) if device.type == "cuda" else _NO_TURN:
            padding, masked, needs, copies = self._counters[device]
            if not departed.recomputed:
                by_expert, own = self._layers[departed.layer, device]
                if departed.assigned is None:
                    own.add_(arrived.real_tokens_per_expert)
                else:
                    by_expert.index_add_(0, departed.assigned.experts_L.to(device), arrived.real_tokens_per_expert)
                    if departed.assigned.num_copies is not None:
                        copies.add_(departed.assigned.num_copies)
                if arrived.tokens_per_expert is not arrived.real_tokens_per_expert:
                    padding.add_(arrived.tokens_per_expert).sub_(arrived.real_tokens_per_expert)
                if departed.valid_T is not None:
                    masked.add_(len(departed.valid_T) - departed.valid_T.sum())
            if arrived.demand is not None:
                torch.maximum(needs, torch.cat([arrived.demand, departed.outcome.view(1)]), out=needs)
        self.rows["dispatches"] += 1

    def count_rows(self, **by_cause: int) -> None:
        """Count what the host knows, by name in ``rows``, unless a call is recomputed."""
        if not is_recomputation():
            self.rows.update(by_cause)

    def tokens_of(self, layer: int, default: torch.device) -> Tensor:
        """Return a copy of the rows that each expert got from a layer, int64 (E,), on their device. No sync.

        Args:
            layer: Number of the layer.
            default: Device of the zeros that are returned before the first dispatch.

        Raises:
            StateError: A call in torch.compile was counted, and its layer is not known.
        """
        if any(number == _COMPILED for number, _ in self._layers):
            raise StateError(
                "Dispatcher.expert_counts: a layer of this config and group ran in torch.compile, where calls do not "
                "tell their layer. Add up sent.real_tokens_per_expert in the layer, or read the totals of metrics()."
            )
        found = []
        for (number, device), (by_expert, _) in self._layers.items():
            if number == layer:
                with self.turn(device):
                    found.append(by_expert[:-1].clone())
        if not found:
            return torch.zeros(self._num_experts, dtype=torch.int64, device=default)
        return found[0] if len(found) == 1 else torch.stack([tokens.to(found[0].device) for tokens in found]).sum(0)

    def report(self, problem: str, count: Tensor) -> None:
        """Add to a count of a problem, int64 (), that ``Dispatcher.check`` raises once it is not 0. No sync.

        Raises:
            StateError: The first call with this problem on the device is being captured in a CUDA graph.
        """
        key = (problem, count.device)
        if key not in self._reports:
            self._reports[key] = self.zeros("", count.device)
        with self.turn(count.device):
            self._reports[key].add_(count)

    def reports(self) -> dict[str, int]:
        """Return the count of each problem that was reported and is not 0. A host sync on a GPU."""
        counts, of_device = Counter[str](), dict[torch.device, list[tuple[str, Tensor]]]()
        for (problem, device), count in self._reports.items():
            of_device.setdefault(device, []).append((problem, count))
        for device, found in of_device.items():
            with self.turn(device):
                values = torch.stack([count for _, count in found]).tolist()
            for (problem, _), value in zip(found, values, strict=True):
                counts[problem] += value
        return {problem: count for problem, count in counts.items() if count}

    def forget_reports(self) -> None:
        """Reset the counts of problems, after they were raised."""
        for (_, device), count in self._reports.items():
            with self.turn(device):
                count.zero_()

    @property
    def copies(self) -> int:
        """Number of copies of experts on this rank so far. A host sync on a GPU."""
        return sum(self.read(copies) for *_, copies in self._counters.values())

    @property
    def masked(self) -> int:
        """Number of rows masked so far. A host sync on a GPU."""
        return sum(self.read(masked) for _, masked, *_ in self._counters.values())

    def tokens(self) -> tuple[list[int], int, dict[str, list[int]]]:
        """Return the real rows of each expert, the padding of all experts, and the real rows by layer.

        There are L experts, or E if there is a placement, and E in each layer. A host sync on a GPU.
        """
        total, by_layer = [0] * self._num_experts, dict[str, list[int]]()
        for device in self._counters:
            here = {layer: rows for (layer, its), (rows, _) in self._layers.items() if its == device}
            with self.turn(device):
                found = torch.stack([*here.values()]).tolist()  # one host sync, however many layers there are
            for layer, (*rows, _) in zip(here, found, strict=True):
                total = [*map(sum, zip(total, rows, strict=True))]
                if layer in self._called:
                    name = self.names[layer]
                    by_layer[name] = [*map(sum, zip(by_layer.get(name, [0] * len(rows)), rows, strict=True))]
        padding = sum(sum(self.read(padding)) for padding, *_ in self._counters.values())
        return total if self.placed else total[self._own], padding, by_layer

    def needs(self) -> list[int]:
        """Return the largest needs of one dispatch of this rank in graph-safe mode, since the channel was opened.

        They are the rows for its experts, the rows for one rank, and the invalid ids. A host sync on a GPU.
        """
        needs = [self.read(needs) for _, _, needs, _ in self._counters.values()]
        return [max(each) for each in zip([0, 0, 0], *needs, strict=True)]

    def forget_invalid_ids(self) -> None:
        """Reset the need of invalid ids, after they were reported."""
        for device, (_, _, needs, _) in self._counters.items():
            with self.turn(device):
                needs[2:].zero_()

    def read(self, counter: Tensor) -> Any:
        """Return the value of a counter. A host sync on a GPU."""
        with self.turn(counter.device):
            return counter.tolist()


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
        "observed": {field: counts for observer in channel.observers for field, counts in observer.totals().items()},
    }
    everyone = channel.control.gather_json(mine, label="metrics") if gather else [mine]
    rows, sent, calls = (_total(of[name] for of in everyone) for name in ("rows", "sent", "calls"))
    tokens = torch.tensor([of["real"] for of in everyone], dtype=torch.int64, device="cpu")
    ranks = tokens.sum(1)
    tokens = tokens.sum(0) if meter.placed else tokens.flatten()
    return Metrics(
        backend=channel.backend_name,
        dispatches=rows["dispatches"],
        real_tokens_per_expert=tokens,
        tokens_by_layer={
            name: torch.tensor([of["layers"][name] for of in everyone if name in of["layers"]], device="cpu").sum(0)
            for name in dict.fromkeys(name for of in everyone for name in of["layers"])
        },
        imbalance=_busiest_over_mean(tokens),
        rank_imbalance=_busiest_over_mean(ranks) if gather else None,
        rows_padded={"rank": rows["rank"], "expert": sum(of["padding"] for of in everyone)},
        rows_skipped={"cut": rows["cut"], "masked": rows["masked"]},
        bytes_sent=dict(sent),
        collectives=dict(calls),
        expert_copies=sum(of["copies"] for of in everyone),
        dispatches_left_uneven=rows["uneven"],
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
