"""Record the routing of this library's own forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.replay.cut import SequenceId
from moe_dispatch.capabilities.replay.entries import stored
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.seams.plug_ins import require_plug_in

if TYPE_CHECKING:
    from moe_dispatch.capabilities.observers.recorder import Note
    from moe_dispatch.capabilities.replay.table import RoutingTable


@final
class Recording:
    """The dispatches of a ``with`` block, each with the names of its sequences. ``RoutingTable.record`` makes it."""

    def __init__(self, dispatchers: Mapping[int, Dispatcher], unknown: Callable[..., RoutingTable]) -> None:
        require_plug_in(
            "moe_dispatch.capabilities.observers", "RoutingTable.record needs it. Make a table of arrays instead"
        )
        from moe_dispatch.capabilities.observers.recorder import Recorder  # noqa: PLC0415 - other tables do not need it

        if not dispatchers:
            raise InputError("RoutingTable.record: there are no dispatchers. Pass those of the MoE layers.")
        self._layers: dict[Any, int] = {dispatcher._lease: number for number, dispatcher in dispatchers.items()}
        self._config = next(iter(dispatchers.values())).config
        self._unknown = unknown  # makes the table
        self._channels = list(dict.fromkeys(dispatcher._channel for dispatcher in dispatchers.values()))
        steps = 2**62  # as many as the block has
        self._recorders = [Recorder(steps, by_position=True) for _ in self._channels]
        self._batches: list[tuple[tuple[SequenceId | None, ...], list[int]]] = []
        self._cached: list[bool] = []  # of each batch, whether its forwards continue one another

    def __enter__(self) -> Recording:
        if any(map(self._recorders[0].records, self._channels)):
            raise StateError(
                "RoutingTable.record: another block that is still open records these dispatchers. Leave that block "
                "first. It records all dispatchers of this config and group."
            )
        for channel, recorder in zip(self._channels, self._recorders, strict=True):
            channel.observers.append(recorder)
        return self

    def __exit__(self, *error: object) -> None:
        for channel, recorder in zip(self._channels, self._recorders, strict=True):
            channel.observers.remove(recorder)

    def micro_batch(self, sequences: Sequence[SequenceId | None], *, cached: bool = False) -> None:
        """Name the sequences of the micro-batch whose forward comes next, in the order of its layout.

        Args:
            sequences: Their names. None stands for a sequence that is not recorded, such as dummy tokens.
            cached: Whether several forwards follow, each of which continues the sequences where the last one ended, as
                those of ``generate`` with a cache do. A beam search cannot be recorded, because it moves sequences
                between rows: ``generate`` with ``num_beams`` above 1 raises an InputError. No dispatch shows it, so a
                search of your own would give a wrong table. Record a forward over the finished sequences instead.
        """
        self._cached.append(cached)
        self._batches.append((tuple(sequences), [len(recorder.notes) for recorder in self._recorders]))

    def table(self) -> RoutingTable:
        """Return the table of this rank's rows and layers. ``gathered`` joins those of several ranks.

        Raises:
            StateError: Nothing was recorded, or a forward ran before its sequences were named.
            InputError: The sequences do not fit a layout, or a token was routed differently in two forwards, or in two
                runs of a layer in one forward.

        Cost: waits for the copies to the host.
        """
        parts = list(self._named())
        if not parts:
            raise StateError(
                "Recording.table: no dispatch ran in the block. Run the forward there, outside of torch.compile."
            )
        for device in {note.device for note, *_ in parts if note.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        lengths: dict[SequenceId, int] = {}
        positions = []
        ends: dict[Any, Tensor] = {}  # by layer and batch, how many tokens of each sequence earlier forwards had
        for note, names, batch in parts:
            layout = note.layout()
            if len(names) != layout.num_sequences(note.shape):
                raise InputError(
                    f"Recording.table: micro_batch must name each sequence of the layout, got {len(names)} names and "
                    f"{layout.num_sequences(note.shape)} sequences of {layout}. Pass one name per sequence."
                )
            sequence_T, position_T = layout.positions(note.shape)
            if self._cached[batch]:
                ended_B = ends.setdefault((note.owner, batch), torch.zeros(len(names), dtype=torch.int64, device="cpu"))
                real = sequence_T >= 0
                position_T = torch.where(real, position_T + ended_B[sequence_T.clamp(min=0)], position_T)
                ended_B += torch.bincount(sequence_T[real], minlength=len(names))
            positions.append((sequence_T, position_T))
            for index, name in enumerate(names):
                if name is not None:
                    longest = int(torch.where(sequence_T == index, position_T + 1, 0).amax()) if len(sequence_T) else 0
                    lengths[name] = max(longest, lengths.get(name, 0))
        layers = tuple(sorted({*self._layers.values()}))
        table = self._unknown(lengths, layers, self._config.top_k, self._config.num_experts)
        runs = Counter((note.owner, batch) for note, _, batch in parts)
        for (note, names, batch), (sequence_T, position_T) in zip(parts, positions, strict=True):
            start_T = table._starts_of(names)[sequence_T]
            kept = start_T >= 0
            values_TK = stored(note.ids_TK[kept], self._config.num_experts)
            layer = self._layers[note.owner]
            try:
                table.put((start_T + position_T)[kept], (layer,), values_TK.unsqueeze(1))
            except InputError as error:
                if (count := runs[note.owner, batch]) == 1:
                    raise
                raise InputError(
                    f"Recording.table: layer {layer} ({note.name!r}) must run once after each call of micro_batch, got "
                    f"{count} runs that chose other experts. Call micro_batch before each forward, or once with "
                    "cached=True before a generate() with a cache. A model that repeats its layers within a forward "
                    "cannot be recorded: a table has one entry for each of them."
                ) from error
        table.check_distinct()
        return table

    def _named(self) -> Iterator[tuple[Note, tuple[SequenceId | None, ...], int]]:
        """Yield each dispatch of the model with the names of its sequences, and the number of its micro-batch."""
        for index, recorder in enumerate(self._recorders):
            begins = [counts[index] for _, counts in self._batches]
            for number, note in enumerate(recorder.notes):
                if note.owner not in self._layers:  # of another model with the same config and group
                    continue
                batch = sum(begin <= number for begin in begins) - 1
                if batch < 0:
                    raise StateError(
                        f"Recording.table: a forward ran before the first of {len(begins)} calls of micro_batch. Call "
                        "micro_batch(sequences) before each forward."
                    )
                yield note, self._batches[batch][0], batch
