"""The table: expert ids by sequence, position and MoE layer.

Dimensions: ``N`` tokens of all sequences, ``L`` MoE layers of the table, ``K`` top_k, ``S`` positions of a sequence,
``B`` sequences of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError
from moe_dispatch.layouts import Layout
from moe_dispatch.replay import table_file
from moe_dispatch.replay.cut import Cut, gathered, span, table_rows
from moe_dispatch.replay.encoding import NOWHERE, UNKNOWN, ids_of, storage_dtype, stored
from moe_dispatch.replay.uses import Uses

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher
    from moe_dispatch.replay.recording import Recording

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
        parts = [(name, _checked(name, entries, num_experts)) for name, entries in pairs]
        if not parts:
            raise InputError("RoutingTable: sequences must hold at least one sequence, got none. Record a forward.")
        for name, count in Counter(name for name, _ in parts).items():
            if count > 1:
                sizes = " and ".join(str(len(ids)) for other, ids in parts if other == name)
                raise InputError(
                    f"RoutingTable: a sequence must be given once, got {name!r} {count} times, with {sizes} positions. "
                    "Give each sample a name of its own, or join the parts of one sample."
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
                f"{len(numbers)} numbers: {span(numbers)}. Leave out the ids of dense layers."
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
        self._uses = Uses()
        self.slots_checked = False  # whether the entries have passed ``Cut.check_slots``

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
        from moe_dispatch.replay.recording import recording  # noqa: PLC0415 - it makes a RoutingTable

        with recording(dispatchers) as made:
            yield made

    @classmethod
    def merged(cls, tables: Sequence[RoutingTable]) -> RoutingTable:
        """Join tables of one model: of several engines, of the ranks of a trainer, or of pipeline stages.

        The result has the sequences and the layers of all tables. An entry is known if some table knows it.

        Raises:
            InputError: The tables have different numbers of experts or top_k, or two of them hold different ids for
                one entry.
        """
        if not tables:
            raise InputError("RoutingTable.merged: tables must hold at least one table, got none. Pass the tables.")
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
        self.slots_checked = False
        columns = torch.tensor([self.layers.index(layer) for layer in layers], device="cpu")
        place = rows_N.unsqueeze(1), columns.unsqueeze(0)
        here = self._stored[place]
        clash_NL = ((here != 0) & (values_NLK != 0) & (here != values_NLK)).any(2)
        for row, column in clash_NL.nonzero()[:1].tolist():
            name, position = self.key_of(int(rows_N[row]))
            raise InputError(
                f"RoutingTable: two entries must not have the same key, got {ids_of(here[row, column]).tolist()} and "
                f"{ids_of(values_NLK[row, column]).tolist()} for sequence {name!r}, position {position}, layer "
                f"{layers[column]}. Give each sample a name of its own."
            )
        self._stored[place] = torch.where(values_NLK != 0, values_NLK, here)

    def key_of(self, row: int) -> tuple[SequenceId, int]:
        """Return the name and the position of a row of the table."""
        name = next(name for name, start in self._starts.items() if start <= row < start + self.lengths[name])
        return name, row - self._starts[name]

    def rows_of(self, sequence: SequenceId) -> slice:
        """Return the rows of the table that hold a sequence."""
        start = self._starts[sequence]
        return slice(start, start + self.lengths[sequence])

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
                f"RoutingTable.entries: the sequence must be in the table, got {sequence!r}, and a table of "
                f"{len(self.lengths)} sequences. Use one of table.lengths."
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
            "MoE layers": (span(wanted), span(wanted) if has_layers else span(self.layers)),
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
            rows_T = table_rows(self, layout, sequences, like)
            if fallback == "error":
                self._check_known(rows_T, wanted)
            _check_options(fallback, step, into, rows_T, wanted)
        except MoEDispatchError as error:
            problem = error
        _raise(problem, group)
        if device is None and isinstance(like, Tensor):
            device = like.device
        target = into.stored_TLK.device if into is not None else torch.device(device or "cpu")
        buffer = gathered(self._stored, rows_T, columns, target)
        if into is None:
            return Cut(self, buffer.to(target, non_blocking=True), wanted, rows_T, step)
        into.stored_TLK.copy_(buffer, non_blocking=True)
        self._uses.count(self, rows_T, wanted, step)  # the replay of a graph does not call routing_for
        return Cut(self, into.stored_TLK, wanted, rows_T, step)

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
                f"RoutingTable.cut: layers must be in the table, which has {span(self.layers)}, got {span(absent)}. "
                "Count the MoE layers of the whole model from 0, without dense layers."
            )
        return [self.layers.index(layer) for layer in layers]

    def _check_known(self, rows_T: Tensor, layers: Sequence[int]) -> None:
        columns = torch.tensor(self._columns(layers), device="cpu")
        unknown_TL = self._stored[rows_T.unsqueeze(1), columns, 0] == 0
        for row, column in unknown_TL.nonzero()[:1].tolist():
            found = int(rows_T[row])
            first = "a sequence named None"
            if found != self.unknown_row:
                name, position = self.key_of(found)
                first = f"sequence {name!r}, position {position}"
            raise InputError(
                f'RoutingTable.cut: under fallback="error" every entry must be known, got {int(unknown_TL.sum())} of '
                f"{unknown_TL.numel()} unknown. The first is {first}, layer {layers[column]}. "
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
        wanted = list(self.lengths if sequences is None else sequences)
        self._uses.check(self, wanted, group)

    def save(self, path: str | Path) -> None:
        """Write the table to a safetensors file. Needs the extra ``trace``.

        Raises:
            TraceError: The file cannot be written, or safetensors is not installed.
        """
        table_file.save(self, Path(path))

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
        return table_file.load(cls, Path(path), None if sequences is None else list(sequences), layers)


def _checked(name: SequenceId, entries: Entries, num_experts: int) -> Tensor:
    """Return the ids of one sequence, (S, L, K), with -2 for unknown entries, after all checks."""
    several = isinstance(entries, list | tuple)
    ids = torch.cat([torch.as_tensor(part) for part in entries]) if several else torch.as_tensor(entries)
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool or 0 in ids.shape[1:]:
        raise InputError(
            f"RoutingTable: the ids of a sequence must be integers (positions, layers, top_k), got {ids.dtype} "
            f"{tuple(ids.shape)} for {name!r}. Reshape them."
        )
    ids = ids.detach().to("cpu", torch.int64)  # int32 could make an expert of an id that is too large
    if len(ids):
        low, high = map(int, torch.aminmax(ids))
        if low < -1 or high >= num_experts:
            raise InputError(
                f"RoutingTable: ids must lie in -1..{num_experts - 1}, got {low if low < -1 else high} in sequence "
                f"{name!r}. Pass logical ids of this model, and the right num_experts."
            )
    return ids.masked_fill((ids < 0).all(2, keepdim=True), UNKNOWN)


def _raise(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise a problem, on all ranks if there is a group."""
    if group is not None:
        raise_alike(Communicator(group), problem, label="replay")
    elif problem is not None:
        raise problem


def _check_options(fallback: str, step: int, into: Cut | None, rows_T: Tensor, layers: tuple[int, ...]) -> None:
    if fallback not in ("router", "error") or step < 0:
        raise InputError(
            f'RoutingTable.cut: fallback must be "router" or "error" and step 0 or more, got {fallback!r} and {step}. '
            "Count training steps from 0."
        )
    if into is not None and (len(into.stored_TLK), into.layers) != (len(rows_T), layers):
        raise InputError(
            f"RoutingTable.cut: into must have the same rows and layers, got {len(into.stored_TLK)} rows and layers "
            f"{span(into.layers)} for {len(rows_T)} rows and layers {span(layers)}. Pad every micro-batch of a graph "
            "to the same number of rows."
        )
