"""Count the tokens of each layer, and the padding and needs of a channel.

Counters on the device are read only on request. A recomputed call is a dispatch that moves bytes, but its rows were
counted in the forward. What a training step routes is counted a second time, by the ``Tally`` of a dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived
from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.autograd import Departed
    from moe_dispatch.dispatchers.channel import Lease

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
        # Rows of each slot, with padding; masked rows; needs, which are maxima, as a dispatch may be repeated; copies.
        self._counters: dict[torch.device, tuple[Tensor, ...]] = {}
        # The real rows of each expert, by layer, with a last entry for empty slots: of all calls, and of those with a
        # backward. Then the parts of this rank's own experts.
        self._layers: dict[tuple[int, torch.device], tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._called = set[int]()
        self._reports: dict[tuple[str, torch.device], Tensor] = {}
        self._turns: dict[torch.device, tuple[int, torch.cuda.Stream, torch.cuda.Event]] = {}

    def like(self) -> Meter:
        """Return a meter of the same layers that has counted nothing."""
        meter = Meter(self._num_slots, self._num_experts, self._own.start)
        meter.names, meter.placed = self.names, self.placed
        return meter

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
        return self._turn(device, torch._C._cuda_getCurrentRawStream(device.index))

    @contextmanager
    def _turn(self, device: torch.device, number: int) -> Iterator[None]:
        last, stream, event = self._turns.get(device, (None, None, None))
        if stream is None or last != number:
            stream = torch.cuda.current_stream(device)
            if event is not None:
                stream.wait_event(event)
        yield
        event = torch.cuda.Event() if event is None else event
        event.record(stream)
        self._turns[device] = number, stream, event

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
            by_expert = self.zeros("", device, 2, self._num_experts + 1)
            if device not in self._counters:
                shapes = (self._num_slots,), (), (3,), ()
                self._counters[device] = tuple(self.zeros("", device, *shape) for shape in shapes)
            with torch.inference_mode(False):
                self._layers[layer, device] = by_expert, by_expert[:, self._own].unbind()

    def record(self, arrived: Arrived, departed: Departed) -> None:
        """Count one dispatch. No sync. In place, so that replays write to the same counters."""
        device = arrived.weights.device
        if (departed.layer, device) not in self._layers:
            self.prepare(device, departed.layer)
        if departed.layer != _COMPILED:
            self._called.add(departed.layer)
        with self.turn(device) if device.type == "cuda" else _NO_TURN:
            padded, masked, needs, copies = self._counters[device]
            if not departed.recomputed:
                real_L, (by_expert, own) = arrived.real_tokens_per_expert, self._layers[departed.layer, device]
                if departed.assigned is None:
                    torch._foreach_add_((own[0], padded), (real_L, arrived.tokens_per_expert))  # one launch
                else:
                    by_expert[0].index_add_(0, departed.assigned.experts_L.to(device), real_L)
                    padded.add_(arrived.tokens_per_expert)
                    if departed.assigned.num_copies is not None:
                        copies.add_(departed.assigned.num_copies)
                if departed.valid_T is not None:
                    masked.add_(len(departed.valid_T) - departed.valid_T.sum())
            if arrived.demand is not None:
                torch.maximum(needs, torch.cat([arrived.demand, departed.outcome.view(1)]), out=needs)
        self.rows["dispatches"] += 1

    def record_trained(self, layer: int, real_L: Tensor, experts_L: Tensor | None = None) -> None:
        """Count the rows of a dispatch as those of a training step. No sync. In place, for replays.

        Args:
            layer: Number of the layer.
            real_L: Rows of each slot of this rank.
            experts_L: The expert in each slot; None if every rank holds its own experts only.
        """
        device = real_L.device
        by_expert, own = self._layers[layer, device]
        with self.turn(device) if device.type == "cuda" else _NO_TURN:
            if experts_L is None:
                own[1].add_(real_L)
            else:
                by_expert[1].index_add_(0, experts_L.to(device), real_L)

    def watch_trained(self) -> Callable[[], None]:
        """Return a function that takes back what is counted as trained from now on, for runs that are no steps.

        Neither waits for the device.
        """
        before = dict[torch.device, tuple[Sequence[int], Tensor]]()
        for device in self._counters:
            layers, counts = self._trained_on(device)
            with self.turn(device):
                before[device] = layers, torch.stack(counts)

        def take_back() -> None:
            for device in self._counters:
                layers, counts = self._trained_on(device)
                known, values = before.get(device, ((), None))
                kept = dict(zip(known, () if values is None else values.unbind(), strict=True))
                with torch.no_grad(), self.turn(device):
                    torch._foreach_copy_(counts, [kept.get(layer, torch.zeros_like(counts[0])) for layer in layers])

        return take_back

    def _trained_on(self, device: torch.device) -> tuple[list[int], list[Tensor]]:
        """Return the numbers of the layers on a device, and their counts of training."""
        found = {layer: by_expert[1] for (layer, its), (by_expert, _) in self._layers.items() if its == device}
        return [*found], [*found.values()]

    def count_rows(self, **by_cause: int) -> None:
        """Count what the host knows, by name in ``rows``, unless a call is recomputed."""
        if not is_recomputation():
            self.rows.update(by_cause)

    def tokens_of(self, layer: int, default: torch.device, *, every_call: bool) -> Tensor:
        """Return a copy of the rows that each expert got from a layer, int64 (E,), on their device. No sync.

        Args:
            layer: Number of the layer.
            every_call: Whether to count calls that were not trained too.
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
                    found.append(by_expert[0 if every_call else 1, :-1].clone())
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
            here = {layer: rows[0] for (layer, its), (rows, _) in self._layers.items() if its == device}
            with self.turn(device):
                found = torch.stack([*here.values()]).tolist()  # one host sync, however many layers there are
            for layer, (*rows, _) in zip(here, found, strict=True):
                total = [*map(sum, zip(total, rows, strict=True))]
                if layer in self._called:
                    name = self.names[layer]
                    by_layer[name] = [*map(sum, zip(by_layer.get(name, [0] * len(rows)), rows, strict=True))]
        padding = sum(sum(self.read(padded)) for padded, *_ in self._counters.values()) - sum(total)
        return total if self.placed else total[self._own], padding, by_layer

    def needs(self) -> list[int]:
        """Return the largest needs of one dispatch of this rank in graph-safe mode, since the channel was opened.

        They are the rows for its experts, the rows for one rank, and the invalid ids. A host sync on a GPU.
        """
        needs = [self.read(needs) for _, _, needs, _ in self._counters.values()]
        return [max(each) for each in zip([0, 0, 0], *needs, strict=True)]

    def forget_needs(self) -> None:
        """Reset all needs, after calls that were wrong."""
        for device, (_, _, needs, _) in self._counters.items():
            with self.turn(device):
                needs.zero_()

    def forget_invalid_ids(self) -> None:
        """Reset the need of invalid ids, after they were reported."""
        for device, (_, _, needs, _) in self._counters.items():
            with self.turn(device):
                needs[2:].zero_()

    def read(self, counter: Tensor) -> Any:
        """Return the value of a counter. A host sync on a GPU."""
        with self.turn(counter.device):
            return counter.tolist()


@final
class Tally:
    """The rows of one dispatch, which are counted as trained when the first gradient comes back to it.

    So a forward without a backward counts nothing, whatever the grad mode. One dispatch may have several backwards, and
    share its route with recomputations and with ``dispatch(again=...)``. All of them have the same tally. It also says
    whether something of the call is still to come.

    Args:
        lease: Lease of the dispatcher.
        real_L: Rows of each slot of this rank, in memory that nobody writes to before the backward.
        experts_L: The expert in each slot; None if every rank holds its own experts only.
        trains: Whether a backward is part of a training step.

    Attributes:
        lease: Lease of the dispatcher.
        is_kept: Whether a recomputation is to take the route.
        is_pending: Whether a combine, a backward or a recomputation may still come.
    """

    __slots__ = ("_experts_L", "_trains", "is_kept", "is_pending", "lease", "real_L")

    def __init__(self, lease: Lease, real_L: Tensor, experts_L: Tensor | None, *, trains: bool = True) -> None:
        self.lease, self.real_L, self._experts_L, self._trains = lease, real_L, experts_L, trains
        self.is_kept, self.is_pending = False, True

    def end(self) -> None:
        """Note a combine whose backward will not come."""
        self.is_pending = self.is_kept and self.is_pending

    def count(self) -> None:
        """Count the rows, unless they have been counted."""
        self.is_pending = False
        if self._trains:
            self._trains, lease = False, self.lease
            lease.channel.meter.record_trained(lease.layer, self.real_L, self._experts_L)
