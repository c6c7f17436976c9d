"""Record the routing of this library's own forward into a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.recorder import Note, Recorder
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.replay.encoding import stored
from moe_dispatch.replay.table import RoutingTable, SequenceId

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher

_ALL_STEPS = 2**62


@final
class Recording:
    """The dispatches of the ``with`` block of ``RoutingTable.record``, each with the names of its sequences."""

    def __init__(self, dispatchers: Mapping[int, Dispatcher], recorders: Sequence[Recorder]) -> None:
        self._layers = {dispatcher._lease: number for number, dispatcher in dispatchers.items()}
        self._sizes = next(iter(dispatchers.values())).config
        self._recorders = recorders
        self._batches: list[tuple[tuple[SequenceId | None, ...], list[int]]] = []

    def micro_batch(self, sequences: Sequence[SequenceId | None]) -> None:
        """Name the sequences of the micro-batch whose forward comes next, in the order of its layout.

        None stands for a sequence that is not recorded, such as dummy tokens.
        """
        self._batches.append((tuple(sequences), [len(recorder.notes) for recorder in self._recorders]))

    def table(self) -> RoutingTable:
        """Return the table of this rank's rows and layers. ``gathered`` joins those of several ranks.

        Raises:
            StateError: Nothing was recorded, or a forward ran before its sequences were named.
            InputError: The sequences do not fit a layout, or a token was routed differently in two forwards.

        Cost: waits for the copies to the host.
        """
        for device in {note.device for note in self._notes() if note.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        parts = [self._part(note, names) for note, names in self._named()]
        if not parts:
            raise StateError(
                "Recording.table: at least one dispatch must have run in the block, got none. Run the forward there, "
                "outside of torch.compile."
            )
        lengths: dict[SequenceId, int] = {}
        for _, names, (sequence_T, position_T), _ in parts:
            for index, name in enumerate(names):
                if name is not None:
                    longest = int(torch.where(sequence_T == index, position_T + 1, 0).amax()) if len(sequence_T) else 0
                    lengths[name] = max(longest, lengths.get(name, 0))
        layers = tuple(sorted({*self._layers.values()}))
        table = RoutingTable.unknown(lengths, layers, self._sizes.top_k, self._sizes.num_experts)
        for layer, names, (sequence_T, position_T), ids_TK in parts:
            starts = torch.tensor(
                [-1 if name is None else table.rows_of(name).start for name in names] + [-1], device="cpu"
            )
            rows = starts[sequence_T] + position_T
            kept = starts[sequence_T] >= 0
            table.put(rows[kept], (layer,), stored(ids_TK[kept], self._sizes.num_experts).unsqueeze(1))
        return table

    def _notes(self) -> Iterator[Note]:
        for recorder in self._recorders:
            yield from (note for note in recorder.notes if note.owner in self._layers)

    def _named(self) -> Iterator[tuple[Note, tuple[SequenceId | None, ...]]]:
        """Yield each dispatch with the names of its sequences."""
        for index, recorder in enumerate(self._recorders):
            begins = [counts[index] for _, counts in self._batches]
            for number, note in enumerate(recorder.notes):
                if note.owner not in self._layers:
                    continue
                batch = sum(begin <= number for begin in begins) - 1
                if batch < 0:
                    raise StateError(
                        "Recording.table: micro_batch(sequences) must be called before each forward, got a forward "
                        f"before the first of {len(begins)} calls. Name the sequences first."
                    )
                yield note, self._batches[batch][0]

    def _part(
        self, note: Note, names: tuple[SequenceId | None, ...]
    ) -> tuple[int, tuple[SequenceId | None, ...], Tensor, Tensor]:
        layout = note.layout()
        if len(names) != layout.num_sequences(note.shape):
            raise InputError(
                f"Recording.table: micro_batch must name each sequence of the layout, got {len(names)} names and "
                f"{layout.num_sequences(note.shape)} sequences of {layout}. Pass one name per sequence."
            )
        return self._layers[note.owner], names, layout.positions(note.shape), note.ids_TK  # type: ignore[index]


@contextmanager
def recording(dispatchers: Mapping[int, Dispatcher] | Sequence[Dispatcher]) -> Iterator[Recording]:
    """Do the work of ``RoutingTable.record``."""
    numbered = dict(dispatchers) if isinstance(dispatchers, Mapping) else dict(enumerate(dispatchers))
    if not numbered:
        raise InputError("RoutingTable.record: dispatchers must hold at least one, got none. Pass the MoE layers.")
    channels: list[Channel] = list({id(d._channel): d._channel for d in numbered.values()}.values())
    for channel in channels:
        if channel.recorder is not None:
            raise StateError(
                "RoutingTable.record: only one block must record a channel at a time, got another block that is still "
                "open. Leave that block first. It records all dispatchers of this config and group."
            )
    recorders = [Recorder(_ALL_STEPS) for _ in channels]
    for channel, recorder in zip(channels, recorders, strict=True):
        channel.recorder = recorder
    try:
        yield Recording(numbered, recorders)
    finally:
        for channel in channels:
            channel.recorder = None
