"""The routing table: where its ids come from, and how a micro-batch's part is cut out of it for one rank.

The file follows a table through its life. ``RoutingTable`` is made from ids, from a recording or from a file; tables of
several ranks are joined; ``RoutingTable.cut`` returns a ``Cut``, the ids of this rank's rows; ``check_used`` finds
entries that no rank looked up. ``Recording`` collects the ids of a forward.

Dimensions: ``N`` tokens of all sequences, ``L`` MoE layers of the table, ``K`` top_k, ``S`` positions of a sequence,
``B`` sequences of a batch, ``T`` rows of this rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.dispatchers.recorder import Note, Recorder
from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, StateError, TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay import file
from moe_dispatch.replay.entries import NOWHERE, UNKNOWN, Uses, ids_of, storage_dtype, stored

_FILE = file.Kind(
    key="moe_dispatch_routing", noun="a routing table", writer="RoutingTable.save", reader="RoutingTable.load"
)

SequenceId = int | str
"""The name of a sequence in a table: a number, or a string such as the uid of a sample."""

Entries = Any  # a tensor, an array of numpy, or a sequence of these, one behind another


@final
class RoutingTable:
    """The experts of every token: ids by sequence, position and MoE layer. The table stays on the host.

    An entry is the K ids of one position in one layer. It is unknown if nobody recorded it. Ids are logical: they name
    experts of the model, wherever these are placed.

    Args:
        sequences: Pairs of a name and the ids of the sequence, or a mapping. The ids are integers (S, L, K), as a
            tensor or an array, or several of them one behind another, such as (prompt, response). An entry whose ids
            are all -1 is unknown. Where only some ids are -1, these slots go nowhere.
        num_experts: Number of experts of a layer, E.
        layers: Numbers of the MoE layers in the L dimension, counted from 0 in the whole model, without dense layers;
            by default 0 to L-1.
        last_missing: Whether the last position of every sequence is missing, as in the output of inference engines,
            which never feed the last token to the model. The table then has one more, unknown, position.

    Attributes:
        num_experts: Number of experts of a layer, E.
        top_k: Number of slots of an entry, K.
        layers: Numbers of the MoE layers, ascending.
        lengths: Number of positions of each sequence, by name.

    Raises:
        InputError: The ids have another shape or type, a sequence has other layers or another K than the first, an id
            is not below ``num_experts``, or a sequence is given twice.

    Cost: ``top_k`` bytes for each token and layer with up to 254 experts, twice as many above. Lookups need four more
    bytes for each token and layer, to count them.
    """

    def __init__(
        self,
        sequences: Mapping[Any, Entries] | Iterable[tuple[SequenceId, Entries]],
        *,
        num_experts: int,
        layers: Sequence[int] | None = None,
        last_missing: bool = False,
    ) -> None:
        pairs = list(sequences.items() if isinstance(sequences, Mapping) else sequences)
        parts = [(name, _checked_ids(name, entries, num_experts)) for name, entries in pairs]
        if not parts:
            raise InputError("RoutingTable: there are no sequences. Record a forward.")
        for name, count in Counter(name for name, _ in parts).items():
            if count > 1:
                sizes = " and ".join(str(len(ids)) for other, ids in parts if other == name)
                raise InputError(
                    f"RoutingTable: sequence {name!r} is given {count} times, with {sizes} positions. Give each "
                    "sample a name of its own, or join the parts of one sample."
                )
        (first, ids_SLK), *_ = parts
        for name, ids in parts:
            if ids.shape[1:] != ids_SLK.shape[1:]:
                raise InputError(
                    f"RoutingTable: all sequences must have the same layers and top_k, got {tuple(ids_SLK.shape[1:])} "
                    f"for {first!r} and {tuple(ids.shape[1:])} for {name!r}. Do not mix outputs of different models."
                )
        numbers = tuple(range(ids_SLK.shape[1]) if layers is None else layers)
        if len(numbers) != ids_SLK.shape[1] or sorted({*numbers}) != list(numbers):
            raise InputError(
                f"RoutingTable: layers must name the {ids_SLK.shape[1]} layers of the ids in ascending order, got "
                f"{len(numbers)} numbers: {_span(numbers)}. Leave out the ids of dense layers."
            )
        self._hold({name: len(ids) + last_missing for name, ids in parts}, numbers, ids_SLK.shape[2], num_experts)
        for name, ids in parts:
            self._stored[self.rows_of(name)][: len(ids)] = stored(ids, num_experts)

    def _hold(self, lengths: dict[SequenceId, int], layers: tuple[int, ...], top_k: int, num_experts: int) -> None:
        """Set all attributes, for a table of unknown entries."""
        self.num_experts = num_experts
        self.top_k = top_k
        self.layers = layers
        self.lengths = lengths
        self._starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        self.unknown_row = sum(lengths.values())
        self.padding_row = self.unknown_row + 1
        shape = (self.padding_row + 1, len(layers), top_k)
        with torch.inference_mode(False):  # a table that an evaluation made may be written to in training
            self._stored = torch.zeros(shape, dtype=storage_dtype(num_experts), device="cpu")
            self._stored[self.padding_row] = NOWHERE - UNKNOWN
        self._uses = Uses(len(self._stored), len(layers))
        self._slots_checked = False  # whether the entries have passed ``Cut.check_slots``

    @classmethod
    def unknown(
        cls, lengths: dict[SequenceId, int], layers: tuple[int, ...], top_k: int, num_experts: int
    ) -> RoutingTable:
        """Make a table of unknown entries, which a reader fills through ``stored_NLK`` or ``put``."""
        table = cls.__new__(cls)
        table._hold(lengths, layers, top_k, num_experts)
        return table

    @classmethod
    def from_padded(
        cls,
        sequences: Sequence[SequenceId],
        ids: Tensor,
        mask_BS: Tensor,
        *,
        num_experts: int,
        layers: Sequence[int] | None = None,
    ) -> RoutingTable:
        """Make a table from a padded batch, as verl and NeMo-RL carry it.

        Args:
            sequences: Names of the B sequences.
            ids: The ids of the batch, (B, S, L, K). An entry whose ids are all -1 is unknown.
            mask_BS: The attention mask of the batch, (B, S), bool or integers. The tokens of a sequence may begin
                anywhere and may have padding between them.
            num_experts: Number of experts of a layer.
            layers: As in the class.

        Raises:
            InputError: The shapes differ, or what the class refuses.
        """
        if ids.dim() != 4 or ids.shape[:2] != mask_BS.shape or len(sequences) != len(ids):
            raise InputError(
                f"RoutingTable.from_padded: ids must be (B, S, L, K), the mask (B, S), with B names, got "
                f"{tuple(ids.shape)}, {tuple(mask_BS.shape)} and {len(sequences)} names. Pass the batch as the "
                "trainer holds it."
            )
        pairs = [(name, part[mask != 0]) for name, part, mask in zip(sequences, ids, mask_BS, strict=True)]
        return cls(pairs, num_experts=num_experts, layers=layers)

    @staticmethod
    @contextmanager
    def record(dispatchers: Mapping[int, Dispatcher] | Sequence[Dispatcher]) -> Iterator[Recording]:
        """Record the routing of this library's own forward, for a second pass that must choose the same experts.

        Call ``micro_batch`` of the result before each forward, and ``table`` after the block.

        Args:
            dispatchers: The dispatchers of this rank's MoE layers, by number of the MoE layer in the whole model; or
                all of them in order.

        Raises:
            StateError: A dispatcher is closed, or its channel is being recorded already.

        Cost: a copy of the ids to the host in each dispatch, without a host sync.
        """
        numbered = dict(dispatchers) if isinstance(dispatchers, Mapping) else dict(enumerate(dispatchers))
        if not numbered:
            raise InputError("RoutingTable.record: there are no dispatchers. Pass those of the MoE layers.")
        channels = list(dict.fromkeys(dispatcher._channel for dispatcher in numbered.values()))
        if any(channel.recorder is not None for channel in channels):
            raise StateError(
                "RoutingTable.record: another block that is still open records these dispatchers. Leave that block "
                "first. It records all dispatchers of this config and group."
            )
        recorders = [Recorder(steps=2**62) for _ in channels]  # as many steps as the block has
        for channel, recorder in zip(channels, recorders, strict=True):
            channel.recorder = recorder
        try:
            yield Recording(numbered, recorders)
        finally:
            for channel in channels:
                channel.recorder = None

    @classmethod
    def merged(cls, tables: Sequence[RoutingTable]) -> RoutingTable:
        """Join tables of one model: of several engines, of the ranks of a trainer, or of pipeline stages.

        The result has the sequences and the layers of all tables. An entry is known if some table knows it.

        Raises:
            InputError: The tables have different numbers of experts or top_k, or two of them hold different ids for
                one entry.
        """
        if not tables:
            raise InputError("RoutingTable.merged: there are no tables. Pass at least one.")
        first = tables[0]
        for table in tables:
            if (table.num_experts, table.top_k) != (first.num_experts, first.top_k):
                raise InputError(
                    f"RoutingTable.merged: tables must belong to one model, got num_experts {first.num_experts}, top_k "
                    f"{first.top_k} and num_experts {table.num_experts}, top_k {table.top_k}. Do not mix models."
                )
        lengths: dict[SequenceId, int] = {}
        for table in tables:
            for name, length in table.lengths.items():
                lengths[name] = max(length, lengths.get(name, 0))
        layers = tuple(sorted({layer for table in tables for layer in table.layers}))
        result = cls.unknown(lengths, layers, first.top_k, first.num_experts)
        for table in tables:
            slices = [result.rows_of(name) for name in table.lengths]
            ends = [part.start + size for part, size in zip(slices, table.lengths.values(), strict=True)]
            rows = [torch.arange(part.start, end, device="cpu") for part, end in zip(slices, ends, strict=True)]
            # A table may have no sequence, such as that of a rank with dummy tokens only.
            result.put(torch.cat([torch.arange(0, device="cpu"), *rows]), table.layers, table.stored_NLK)
        return result

    def gathered(self, group: dist.ProcessGroup | None) -> RoutingTable:
        """Merge the tables of all ranks of a group; every rank gets the result. Collective.

        Raises:
            InputError: See ``merged``. Raised on every rank.

        Cost: an exchange of the names and an all-gather of the ids. Every rank holds P times the largest table.
        """
        everyone = Communicator(group)
        heads = everyone.gather_json(
            [list(self.lengths.items()), self.layers, self.top_k, self.num_experts], label="replay"
        )
        tables = [self.unknown(dict(map(tuple, head[0])), tuple(head[1]), head[2], head[3]) for head in heads]
        longest = max(table._stored.nbytes for table in tables)
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        mine[: self._stored.nbytes] = self._stored.view(torch.uint8).flatten()
        for table, part in zip(tables, everyone.gather_tensor(mine, label="replay"), strict=True):
            table._stored.view(torch.uint8).copy_(part[: table._stored.nbytes].view_as(table._stored.view(torch.uint8)))
        return self.merged(tables)

    def put(self, rows_N: Tensor, layers: Sequence[int], values_NLK: Tensor) -> None:
        """Write stored values. Unknown values are left out.

        Raises:
            InputError: An entry is known already, with other ids.
        """
        self._slots_checked = False
        columns = torch.tensor([self.layers.index(layer) for layer in layers], device="cpu")
        entries_NL = rows_N.unsqueeze(1), columns.unsqueeze(0)
        here = self._stored[entries_NL]
        clash_NL = ((here != 0) & (values_NLK != 0) & (here != values_NLK)).any(2)
        for row, column in clash_NL.nonzero()[:1].tolist():
            name, position = self.key_of(int(rows_N[row]))
            raise InputError(
                f"RoutingTable: two entries have the same key: {ids_of(here[row, column]).tolist()} and "
                f"{ids_of(values_NLK[row, column]).tolist()} for sequence {name!r}, position {position}, layer "
                f"{layers[column]}. Give each sample a name of its own."
            )
        self._stored[entries_NL] = torch.where(values_NLK != 0, values_NLK, here)

    def key_of(self, row: int) -> tuple[SequenceId, int]:
        """Return the name and the position of a row of the table."""
        name = next(name for name, start in self._starts.items() if start <= row < start + self.lengths[name])
        return name, row - self._starts[name]

    def rows_of(self, sequence: SequenceId) -> slice:
        """Return the rows of the table that hold a sequence."""
        start = self._starts[sequence]
        return slice(start, start + self.lengths[sequence])

    def _starts_of(self, sequences: Sequence[SequenceId | None]) -> Tensor:
        """Return the first row of each sequence, -1 for None. The last one, -1, is for padding: its sequence is -1."""
        starts = [-1 if name is None else self._starts[name] for name in sequences]
        return torch.tensor([*starts, -1], device="cpu")

    @property
    def stored_NLK(self) -> Tensor:
        """The entries as they are stored, without the two rows behind them."""
        return self._stored[: self.unknown_row]

    def known_NL(self) -> Tensor:
        """Return whether each entry is known, with the two rows behind the entries."""
        return self._stored[:, :, 0] != 0

    def entries(self, sequence: SequenceId) -> Tensor:
        """Return the ids of a sequence, int64 (S, L, K): -1 where a slot goes nowhere, -2 where an entry is unknown.

        Raises:
            InputError: The table does not have the sequence.
        """
        if sequence not in self.lengths:
            raise InputError(
                f"RoutingTable.entries: sequence {sequence!r} is not in the table of {len(self.lengths)} sequences. "
                "Use one of table.lengths."
            )
        return ids_of(self._stored[self.rows_of(sequence)])

    @property
    def nbytes(self) -> int:
        """The bytes of the ids, without the counts of ``check_used``."""
        return self._stored.nbytes

    @property
    def bytes_per_entry(self) -> int:
        """The bytes of the ids of one token in one layer."""
        return self.top_k * self._stored.element_size()

    def check(
        self,
        config: DispatcherConfig,
        *,
        num_layers: int,
        layers: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Raise an error if the table does not fit the model. Call this once, before training. Collective with a group.

        Args:
            config: The config of the model's dispatchers.
            num_layers: Number of MoE layers of the whole model.
            layers: Numbers of the MoE layers that this rank runs; by default all.
            group: The ranks that call together. All of them raise if one table is wrong.

        Raises:
            ConfigError: The number of experts, top_k or the layers differ.
            PeerError: The table of another rank is wrong.
        """
        wanted = range(num_layers) if layers is None else layers
        has_layers = {*wanted} <= {*self.layers} <= {*range(num_layers)}
        pairs = {
            "num_experts": (str(config.num_experts), str(self.num_experts)),
            "top_k": (str(config.top_k), str(self.top_k)),
            "MoE layers": (_span(wanted), _span(wanted) if has_layers else _span(self.layers)),
        }
        differing = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
        problem = None
        if differing:
            name, asked, found = differing[0]
            problem = ConfigError(
                f"RoutingTable.check: the table must have the {name} of the model ({asked}), got {found}. Record the "
                "routing of this model."
            )
        _raise(problem, group)

    def cut(
        self,
        layout: Layout,
        sequences: Sequence[SequenceId | None],
        *,
        like: Tensor | Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        fallback: Literal["router", "error"] = "router",
        step: int = 0,
        into: Cut | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Cut:
        """Cut out the ids of one micro-batch, in the order of this rank's rows. Make one cut for all layers.

        Args:
            layout: The layout of this rank's tensor, with lengths on the host. If this rank has a part of the
                sequences, pass its layout: ``layout.shard(cp_rank, cp_size, "zigzag").shard(tp_rank, tp_size)``.
            sequences: The names of all sequences of the layout, also if it is sharded, in its order. None stands for a
                sequence without recorded tokens, such as dummy tokens behind the last one. The router chooses there.
            like: A tensor in the shape of this rank's hidden states, or that shape. It is needed if the layout does not
                know its rows, as in BSHD and SBHD.
            layers: Numbers of the MoE layers that this rank runs; by default all layers of the table.
            device: Device of the ids; by default that of ``like``, else the CPU.
            fallback: What happens to an unknown entry: the router chooses, or an error.
            step: Number of the training step, for ``check_used``. Recomputation belongs to the step of its forward.
            into: An earlier cut whose device memory takes the ids. A CUDA graph that read that cut then reads the new
                ids in its next replay. Rows and layers must be the same.
            group: Ranks that make their cuts together. If one of them has to raise, all of them raise. Collective.

        Raises:
            LayoutError: The layout does not fit ``like``.
            InputError: The sequences do not fit the layout, the table does not have a sequence, a position or a layer,
                or an entry is unknown under ``fallback="error"``.
            PeerError: Another rank of ``group`` raised one of these errors.

        Cost: a gather on the host and one copy to the device; to a GPU the copy starts from pinned memory and does not
        wait. With a group also an all-reduce of four integers.
        """
        problem, wanted = None, tuple(self.layers if layers is None else layers)
        try:
            columns = self._columns(wanted)
            rows_T = self._rows_of_rank(layout, sequences, like)
            if fallback == "error":
                self._check_known(rows_T, columns)
            if fallback not in ("router", "error") or step < 0:
                raise InputError(
                    f'RoutingTable.cut: fallback must be "router" or "error" and step 0 or more, got {fallback!r} and '
                    f"{step}. Count training steps from 0."
                )
            if into is not None and (len(into.stored_TLK), into.layers) != (len(rows_T), wanted):
                raise InputError(
                    f"RoutingTable.cut: into must have the same rows and layers, got {len(into.stored_TLK)} rows and "
                    f"layers {_span(into.layers)} for {len(rows_T)} rows and layers {_span(wanted)}. Pad every "
                    "micro-batch of a graph to the same number of rows."
                )
        except MoEDispatchError as error:
            problem = error
        _raise(problem, group)
        if device is None and isinstance(like, Tensor):
            device = like.device
        target = into.stored_TLK.device if into is not None else torch.device(device or "cpu")
        first = columns[0] if columns else 0
        if columns == list(range(first, first + len(columns))):
            part = self._stored[:, first : first + len(columns)]
        else:
            part = self._stored.index_select(1, torch.tensor(columns, device="cpu"))
        buffer = torch.empty(
            (len(rows_T), *part.shape[1:]), dtype=part.dtype, device="cpu", pin_memory=target.type == "cuda"
        )
        torch.index_select(part, 0, rows_T, out=buffer)
        if into is None:
            return Cut(self, buffer.to(target, non_blocking=True), wanted, rows_T, step)
        into.stored_TLK.copy_(buffer, non_blocking=True)
        self._uses.count(rows_T, columns, step)  # the replay of a graph does not call routing_for
        return Cut(self, into.stored_TLK, wanted, rows_T, step)

    def _rows_of_rank(
        self, layout: Layout, sequences: Sequence[SequenceId | None], like: Tensor | Sequence[int] | None
    ) -> Tensor:
        """Return the row of the table for each row of this rank, int64 (T,) on the CPU.

        Context parallelism and sequence parallelism are part of the layout: ``positions`` of a sharded layout tells
        which token of which sequence each row of this rank is, in the order of the shard. For example, zigzag context
        parallelism of 8 tokens gives rank 0 of 2 the positions 0, 1, 6 and 7.

        The table has two rows behind its entries: ``unknown_row``, for rows of a sequence named None, and
        ``padding_row``, for rows that hold no token.
        """
        shape = like.shape if isinstance(like, Tensor) else like
        if shape is None:
            rows = layout.num_rows()
            if rows is None:
                raise InputError(
                    f"RoutingTable.cut: {layout} does not know its number of rows. Pass the hidden states as like=, or "
                    "their shape."
                )
            shape = (rows, 1)
        layout.check(layout.rows_of(shape))
        if len(sequences) != layout.num_sequences(shape):
            raise InputError(
                f"RoutingTable.cut: sequences must name each sequence of the layout, got {len(sequences)} names and "
                f"{layout.num_sequences(shape)} sequences. Pass one name per sequence, None for one that was not "
                "recorded."
            )
        for name, count in Counter(name for name in sequences if name is not None).items():
            if name not in self.lengths:
                raise InputError(
                    f"RoutingTable.cut: sequence {name!r} is not in the table of {len(self.lengths)} sequences. Add it "
                    "to the table, or pass None to let the router choose."
                )
            if count > 1:
                raise InputError(
                    f"RoutingTable.cut: the micro-batch names sequence {name!r} {count} times. Give each sample a name "
                    "of its own."
                )
        sequence_T, position_T = layout.positions(shape).cpu().unbind()
        start_T = self._starts_of(sequences)[sequence_T]
        lengths = [0 if name is None else self.lengths[name] for name in sequences]
        length_T = torch.tensor([*lengths, 0], device="cpu")[sequence_T]  # the last one is for padding, sequence -1
        is_known = start_T >= 0
        for row in (is_known & (position_T >= length_T)).nonzero()[:1, 0].tolist():
            sequence = int(sequence_T[row])
            longest = int(position_T[sequence_T == sequence].max()) + 1
            raise InputError(
                f"RoutingTable.cut: a sequence must not be longer than in the table, got {longest} positions of "
                f"sequence {sequences[sequence]!r}, which has {int(length_T[row])} in the table. Record the whole "
                "sequence; engines leave out the last position, for which the table has last_missing=True."
            )
        elsewhere = torch.where(sequence_T < 0, self.padding_row, self.unknown_row)
        return torch.where(is_known, start_T + position_T, elsewhere)

    def routing_for(self, layer: int, layout: Layout, sequences: Sequence[SequenceId | None], **options: Any) -> Tensor:
        """Return the ids of this rank's rows in one MoE layer, int64 (T, K): a ``cut`` of this layer, looked up.

        Arguments, errors and cost are those of ``cut``. If several layers run, one cut for all of them is cheaper.
        """
        return self.cut(layout, sequences, layers=(layer,), **options).routing_for(layer)

    def _columns(self, layers: Sequence[int]) -> list[int]:
        """Return the columns of the table that hold MoE layers."""
        absent = [layer for layer in layers if layer not in self.layers]
        if absent:
            raise InputError(
                f"RoutingTable.cut: layers {_span(absent)} are not in the table, which has {_span(self.layers)}. "
                "Count the MoE layers of the whole model from 0, without dense layers."
            )
        return [self.layers.index(layer) for layer in layers]

    def _check_known(self, rows_T: Tensor, columns: list[int]) -> None:
        unknown_TL = self._stored[rows_T.unsqueeze(1), torch.tensor(columns, device="cpu"), 0] == 0
        for row, column in unknown_TL.nonzero()[:1].tolist():
            found = int(rows_T[row])
            first = "a sequence named None"
            if found != self.unknown_row:
                name, position = self.key_of(found)
                first = f"sequence {name!r}, position {position}"
            raise InputError(
                f'RoutingTable.cut: under fallback="error" every entry must be known, got {int(unknown_TL.sum())} of '
                f"{unknown_TL.numel()} unknown. The first is {first}, layer {self.layers[columns[column]]}. "
                'Use fallback="router", or record these tokens.'
            )

    def check_used(
        self, sequences: Iterable[SequenceId] | None = None, *, group: dist.ProcessGroup | None = None
    ) -> None:
        """Raise an error unless every known entry was looked up in exactly one step. Then start to count anew.

        Several lookups in one step, as in recomputation, count once. Call this at the end of each pass over the table.

        Args:
            sequences: Names of the sequences of the pass; by default all sequences of the table.
            group: All ranks that share the pass: of context, sequence, pipeline and data parallelism. They hold the
                same table, and their lookups count together. Collective.

        Raises:
            StateError: Entries were never used, or used in several steps. The error has both numbers and the first
                such key. With a group, all ranks raise the same error.
            InputError: A sequence is not in the table.
            ConfigError: The tables of the ranks differ.
            PeerError: Another rank named a sequence that is not in its table.

        Cost: nothing on a device. With a group, all-gathers of four bytes for each token and layer of the table.
        """
        names = list(self.lengths if sequences is None else sequences)
        absent = [name for name in names if name not in self.lengths]
        problem = None
        if absent:
            problem = InputError(
                f"RoutingTable.check_used: sequence {absent[0]!r} is not in the table of {len(self.lengths)} "
                "sequences. Use names of table.lengths."
            )
        _raise(problem, group, {"the table": [list(self.lengths.items()), self.layers], "sequences": names})
        steps_NL = self._uses.take(None if group is None else Communicator(group))
        is_counted_N = torch.zeros(len(steps_NL), dtype=torch.bool, device="cpu")
        for name in names:
            is_counted_N[self.rows_of(name)] = True
        known_NL = self.known_NL() & is_counted_N.unsqueeze(1)
        wrong = {"never": known_NL & (steps_NL == 0), "in several steps": known_NL & (steps_NL == Uses.SEVERAL)}
        told = " and ".join(f"{int(at_NL.sum())} used {how}" for how, at_NL in wrong.items())
        for how, at_NL in wrong.items():
            for row, column in at_NL.nonzero()[:1].tolist():
                name, position = self.key_of(row)
                raise StateError(
                    f"RoutingTable.check_used: each of the {int(known_NL.sum())} known entries must be used in one "
                    f"step, got {told}. The first one used {how} is sequence {name!r}, position {position}, layer "
                    f"{self.layers[column]}. Check which micro-batches, ranks and layers looked it up."
                )

    def save(self, path: str | Path) -> None:
        """Write the table to a safetensors file. Needs the extra ``trace``.

        The file has one tensor, ``stored``: (positions of all sequences, layers, top_k), in the form of the module
        ``entries``. Its metadata ``table`` is JSON: ``num_experts``, ``layers``, and ``sequences``, which are pairs of
        a name and a number of positions, in the order of the tensor.

        Raises:
            TraceError: The file cannot be written, or safetensors is not installed.
        """
        head = {
            "num_experts": self.num_experts,
            "layers": self.layers,
            "sequences": [list(pair) for pair in self.lengths.items()],
        }
        file.write(Path(path), {"stored": self.stored_NLK.contiguous()}, {"table": json.dumps(head)}, _FILE)

    @classmethod
    def load(
        cls, path: str | Path, *, sequences: Iterable[SequenceId] | None = None, layers: Sequence[int] | None = None
    ) -> RoutingTable:
        """Read a table, or a part of it, from a file that ``save`` wrote. Other parts of the file are not read.

        Args:
            path: The file.
            sequences: Names of the sequences to read; by default all.
            layers: Numbers of the MoE layers to read, such as those of this pipeline stage; by default all.

        Raises:
            TraceError: The file is missing, damaged or of another format, lacks a sequence or a layer, or safetensors
                is not installed.
        """
        with file.opened(Path(path), _FILE) as (opened, metadata):
            head = json.loads(metadata["table"])
            lengths: dict[SequenceId, int] = dict(map(tuple, head["sequences"]))
            names = list(lengths if sequences is None else sequences)
            numbers = head["layers"] if layers is None else sorted(layers)
            for noun, wanted, there in (("sequence", names, list(lengths)), ("layer", numbers, head["layers"])):
                absent = [item for item in wanted if item not in there]
                if absent or not wanted:
                    raise TraceError(
                        f"RoutingTable.load: every {noun} to read must be one of the {len(there)} in {path}, got "
                        f"{repr(absent[0]) if absent else 'none'}. Read a part that was recorded."
                    )
            values = opened.get_slice("stored")
            starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
            sizes = {name: lengths[name] for name in names}
            table = cls.unknown(sizes, tuple(numbers), values.get_shape()[2], head["num_experts"])
            columns = torch.tensor([head["layers"].index(number) for number in numbers], device="cpu")
            low, high = int(columns[0]), int(columns[-1]) + 1
            for name in names:
                part = values[starts[name] : starts[name] + lengths[name], low:high]
                table.stored_NLK[table.rows_of(name)] = part[:, columns - low]
        return table


@final
class Cut:
    """The ids of the rows of one micro-batch on one rank. ``RoutingTable.cut`` makes it.

    A lookup names the layer. It changes nothing and may be repeated, so a recomputed forward gets the same ids, in any
    order of layers and micro-batches.

    Attributes:
        stored_TLK: The ids as the table stores them, on the device of the cut.
        layers: Numbers of the MoE layers of the cut, L of them.
        step: Number of the training step, for ``RoutingTable.check_used``.
        table: The table that it was cut out of.
    """

    def __init__(
        self, table: RoutingTable, stored_TLK: Tensor, layers: tuple[int, ...], rows_T: Tensor, step: int
    ) -> None:
        self.stored_TLK = stored_TLK
        self.layers = layers
        self.step = step
        self.table = table
        self._rows_T = rows_T
        self._counted: set[int] = set()

    def routing_for(self, layer: int) -> Tensor:
        """Return the expert ids of this rank's rows in one MoE layer, int64 (T, K), for ``replayed``.

        An id is -1 for a slot that goes nowhere, such as in a row of padding, and -2 for an unknown slot.

        Raises:
            InputError: The cut does not have this layer.

        Cost: one conversion of (T, K) on the device; no host sync. The first lookup counts the entries as used.
        """
        if layer not in self.layers:
            raise InputError(
                f"Cut.routing_for: layer {layer} is not in the cut, which has {_span(self.layers)}. "
                "Count the MoE layers of the whole model from 0, without dense layers."
            )
        if layer not in self._counted and not torch.compiler.is_compiling():
            self._counted.add(layer)
            self.table._uses.count(self._rows_T, self.table._columns((layer,)), self.step)
        return ids_of(self.stored_TLK[:, self.layers.index(layer)])

    def check_slots(self) -> None:
        """Refuse a table in which some entry names experts in some slots only. A model's router needs one for each.

        Raises:
            InputError: The table has such an entry.

        The error is raised on this rank alone. Cost: one pass over the table, whenever it has changed.
        """
        table = self.table
        if table._slots_checked:
            return
        partial_NL = (table.stored_NLK == NOWHERE - UNKNOWN).any(2)
        for row, column in partial_NL.nonzero()[:1].tolist():
            name, position = table.key_of(row)
            raise InputError(
                f"RoutingReplay: a known entry must name an expert in each of {table.top_k} slots, got "
                f"{ids_of(table.stored_NLK[row, column]).tolist()} for sequence {name!r}, position {position}, layer "
                f"{table.layers[column]}, and {int(partial_NL.sum())} entries of this kind. Leave these entries "
                "unknown: -1 in all slots."
            )
        table._slots_checked = True


@final
class Recording:
    """The dispatches of the ``with`` block of ``RoutingTable.record``, each with the names of its sequences."""

    def __init__(self, dispatchers: Mapping[int, Dispatcher], recorders: Sequence[Recorder]) -> None:
        self._layers: dict[Any, int] = {dispatcher._lease: number for number, dispatcher in dispatchers.items()}
        self._config = next(iter(dispatchers.values())).config
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
        parts = list(self._named())
        if not parts:
            raise StateError(
                "Recording.table: no dispatch ran in the block. Run the forward there, outside of torch.compile."
            )
        for device in {note.device for note, _ in parts if note.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        lengths: dict[SequenceId, int] = {}
        positions = []
        for note, names in parts:
            layout = note.layout()
            if len(names) != layout.num_sequences(note.shape):
                raise InputError(
                    f"Recording.table: micro_batch must name each sequence of the layout, got {len(names)} names and "
                    f"{layout.num_sequences(note.shape)} sequences of {layout}. Pass one name per sequence."
                )
            sequence_T, position_T = layout.positions(note.shape)
            positions.append((sequence_T, position_T))
            for index, name in enumerate(names):
                if name is not None:
                    longest = int(torch.where(sequence_T == index, position_T + 1, 0).amax()) if len(sequence_T) else 0
                    lengths[name] = max(longest, lengths.get(name, 0))
        layers = tuple(sorted({*self._layers.values()}))
        table = RoutingTable.unknown(lengths, layers, self._config.top_k, self._config.num_experts)
        for (note, names), (sequence_T, position_T) in zip(parts, positions, strict=True):
            start_T = table._starts_of(names)[sequence_T]
            kept = start_T >= 0
            values_TK = stored(note.ids_TK[kept], self._config.num_experts)
            table.put((start_T + position_T)[kept], (self._layers[note.owner],), values_TK.unsqueeze(1))
        return table

    def _named(self) -> Iterator[tuple[Note, tuple[SequenceId | None, ...]]]:
        """Yield each dispatch of the model with the names of its sequences."""
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
                yield note, self._batches[batch][0]


def _checked_ids(name: SequenceId, entries: Entries, num_experts: int) -> Tensor:
    """Return the ids of one sequence, (S, L, K), with -2 for unknown entries, after all checks."""
    several = isinstance(entries, list | tuple)
    ids = torch.cat([torch.as_tensor(part) for part in entries]) if several else torch.as_tensor(entries)
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool or 0 in ids.shape[1:]:
        raise InputError(
            f"RoutingTable: the ids of a sequence must be integers (positions, layers, top_k), got {ids.dtype} "
            f"{tuple(ids.shape)} for {name!r}. Reshape them."
        )
    # Check before narrowing: an out-of-range id could wrap around in int32 and look valid.
    ids = ids.detach().to("cpu", torch.int64)
    if len(ids):
        low, high = map(int, torch.aminmax(ids))
        if low < -1 or high >= num_experts:
            raise InputError(
                f"RoutingTable: ids must lie in -1..{num_experts - 1}, got {low if low < -1 else high} in sequence "
                f"{name!r}. Pass logical ids of this model, and the right num_experts."
            )
    return ids.masked_fill((ids < 0).all(2, keepdim=True), UNKNOWN)


def _raise(problem: Exception | None, group: dist.ProcessGroup | None, facts: Mapping[str, Any] | None = None) -> None:
    """Raise a problem. With a group, all ranks raise if one of them has a problem, or if the facts differ."""
    if group is not None:
        raise_alike(Communicator(group), problem, facts=facts, label="replay")
    elif problem is not None:
        raise problem


def _span(numbers: Sequence[int]) -> str:
    """Write numbers for an error message: "0..3" if they follow each other."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
