"""The routing table: where its ids come from, and how a micro-batch's part is cut out of it for one rank.

The file follows a table through its life. It is made from ids or from a recording. Tables of several ranks are joined
and checked. ``cut`` returns the ids of one rank's rows, and ``check_used`` finds entries that no rank looked up.
``save`` and ``load`` keep a table in a file.

Dimensions: ``N`` tokens of all sequences, ``L`` MoE layers of the table, ``K`` top_k, ``S`` positions of a sequence,
``B`` sequences of a batch, ``T`` rows of this rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.capabilities.replay import file
from moe_dispatch.capabilities.replay.cut import Cut, SequenceId, check_known, rows_of_rank, span
from moe_dispatch.capabilities.replay.entries import (
    NOWHERE,
    UNKNOWN,
    Entries,
    Uses,
    has_repeats,
    ids_of,
    storage_dtype,
    stored_entries,
)
from moe_dispatch.capabilities.replay.recording import Recording
from moe_dispatch.capabilities.replay.turns import Tokens, Turn, joined
from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, StateError, TraceError, shown
from moe_dispatch.layouts import Layout

_FILE = file.Kind(
    key="moe_dispatch_routing", noun="a routing table", writer="RoutingTable.save", reader="RoutingTable.load"
)


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
        pairs = sequences.items() if isinstance(sequences, Mapping) else sequences
        parts = [(name, stored_entries(name, entries, num_experts)) for name, entries in pairs]
        if not parts:
            raise InputError("RoutingTable: there are no sequences. Record a forward.")
        for name, count in Counter(name for name, _ in parts).items():
            if count > 1:
                sizes = " and ".join(str(len(values)) for other, values in parts if other == name)
                raise InputError(
                    f"RoutingTable: sequence {name!r} is given {count} times, with {sizes} positions. Give each "
                    "sample a name of its own, or join the parts of one sample."
                )
        (first, values_SLK), *_ = parts
        for name, values in parts:
            if values.shape[1:] != values_SLK.shape[1:]:
                raise InputError(
                    "RoutingTable: all sequences must have the same layers and top_k, got "
                    f"{tuple(values_SLK.shape[1:])} for {first!r} and {tuple(values.shape[1:])} for {name!r}. Do not "
                    "mix outputs of different models."
                )
        num_layers, top_k = values_SLK.shape[1:]
        numbers = tuple(range(num_layers) if layers is None else layers)
        if len(numbers) != num_layers or sorted({*numbers}) != list(numbers):
            raise InputError(
                f"RoutingTable: layers must name the {num_layers} layers of the ids in ascending order, got "
                f"{len(numbers)} numbers: {span(numbers)}. Leave out the ids of dense layers."
            )
        self._hold({name: len(values) + last_missing for name, values in parts}, numbers, top_k, num_experts)
        for name, values in parts:
            self._stored[self.rows_of(name)][: len(values)] = values
        self.check_distinct()

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
        self._slots_checked = False  # whether the entries have passed ``check_slots``

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
        routed_BS: Tensor | None = None,
    ) -> RoutingTable:
        """Make a table from a padded batch, as verl and NeMo-RL carry it.

        Args:
            sequences: Names of the B sequences.
            ids: The ids of the batch, (B, S, L, K). An entry whose ids are all -1 is unknown.
            mask_BS: The attention mask of the batch, (B, S), bool or integers. The tokens of a sequence may begin
                anywhere and may have padding between them.
            num_experts: Number of experts of a layer.
            layers: As in the class.
            routed_BS: Where the batch has routes, (B, S), bool or integers. Other entries are unknown, whatever their
                ids are: verl fills them with zeros. By default each token has a route.

        Raises:
            InputError: The shapes differ, or what the class refuses.
        """
        routed_BS = torch.ones_like(mask_BS) if routed_BS is None else routed_BS
        fits = ids.dim() == 4 and ids.shape[:2] == mask_BS.shape == routed_BS.shape
        if not fits or len(sequences) != len(ids):
            raise InputError(
                "RoutingTable.from_padded: ids must be (B, S, L, K), the mask and routed_BS (B, S), with B names, got "
                f"{tuple(ids.shape)}, {tuple(mask_BS.shape)}, {tuple(routed_BS.shape)} and {len(sequences)} names. "
                "Pass the batch as the trainer holds it."
            )
        missing = ids.new_full((1,), -1, dtype=torch.int64)
        batch = zip(sequences, ids, mask_BS != 0, routed_BS != 0, strict=True)
        pairs = ((name, torch.where(routed[:, None, None], part, missing)[mask]) for name, part, mask, routed in batch)
        return cls(pairs, num_experts=num_experts, layers=layers)

    @classmethod
    def from_turns(
        cls,
        sequences: Mapping[Any, tuple[Tokens, Sequence[Turn]]],
        *,
        num_experts: int,
        layers: Sequence[int] | None = None,
    ) -> RoutingTable:
        """Make a table of rollouts of several turns, each with routes of its own, as SGLang and vLLM return them.

        Args:
            sequences: By name, the token ids of the whole sequence, integers (S,), and its turns in order; no turns if
                the engine returned none. A position that no turn has computed, such as a last token or the output of
                a tool behind the last turn, is unknown. A turn may belong to another branch from some token on, or be
                longer than the sequence: its routes count up to the first token that differs.
            num_experts: Number of experts of a layer.
            layers: As in the class.

        Raises:
            InputError: The routes of a turn do not reach from ``start`` to its last token but one; two turns have
                different routes for one position; a turn has none for this sequence; or what the class refuses.
        """
        return cls(joined(sequences), num_experts=num_experts, layers=layers)

    @classmethod
    def record(cls, dispatchers: Mapping[int, Dispatcher] | Sequence[Dispatcher]) -> Recording:
        """Record the routing of this library's own forward, for a second pass that must choose the same experts.

        Use the result in a ``with`` block. Call its ``micro_batch`` before each forward, and its ``table`` after the
        block.

        Args:
            dispatchers: The dispatchers of this rank's MoE layers, by number of the MoE layer in the whole model; or
                all of them in order.

        Raises:
            InputError: There are no dispatchers, or a mapping has other keys than numbers.
            StateError: A dispatcher is closed, or its channel is being recorded already.

        Cost: a copy of the ids to the host in each dispatch, without a host sync.
        """
        numbered = dispatchers if isinstance(dispatchers, Mapping) else dict(enumerate(dispatchers))
        if names := [key for key in numbered if not isinstance(key, int)]:
            raise InputError(
                f"RoutingTable.record: dispatchers must have the numbers of their MoE layers, got {shown(names[0])}. "
                "Pass [*dispatchers.values()] if these are all MoE layers, in order."
            )
        return Recording(numbered, cls.unknown)

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
            rows = [torch.arange(size, device="cpu") + result._starts[name] for name, size in table.lengths.items()]
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
            raise InputError(
                f"RoutingTable: two entries have the same key: {ids_of(here[row, column]).tolist()} and "
                f"{ids_of(values_NLK[row, column]).tolist()} for {self.key_of(rows_N[row], columns[column])}. "
                "Give each sample a name of its own."
            )
        self._stored[entries_NL] = torch.where(values_NLK != 0, values_NLK, here)

    def key_of(self, row: int | Tensor, column: int | Tensor) -> str:
        """Return the sequence, the position and the layer of an entry, for an error."""
        name = next(name for name, start in self._starts.items() if start <= row < start + self.lengths[name])
        return f"sequence {name!r}, position {int(row) - self._starts[name]}, layer {self.layers[int(column)]}"

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

    def check_distinct(self) -> None:
        """Raise InputError if an entry names an expert twice, which no router does."""
        for name in self.lengths:
            values_SLK = self._stored[self.rows_of(name)]
            for position, column in has_repeats(values_SLK).nonzero()[:1].tolist():
                raise InputError(
                    "RoutingTable: an entry must name different experts, got "
                    f"{ids_of(values_SLK[position, column]).tolist()} for "
                    f"{self.key_of(self._starts[name] + position, column)}. Set the ids of missing routes to -1. For "
                    "verl, which fills them with zeros, pass routed_BS to from_padded."
                )

    def check_slots(self) -> None:
        """Refuse a table in which some entry names experts in some slots only. A model's router needs one for each.

        Raises:
            InputError: The table has such an entry.

        The error is raised on this rank alone. Cost: one pass over the table, whenever it has changed.
        """
        if self._slots_checked:
            return
        partial_NL = (self.stored_NLK == NOWHERE - UNKNOWN).any(2)
        for row, column in partial_NL.nonzero()[:1].tolist():
            raise InputError(
                f"RoutingReplay: a known entry must name an expert in each of {self.top_k} slots, got "
                f"{ids_of(self.stored_NLK[row, column]).tolist()} for {self.key_of(row, column)}, and "
                f"{int(partial_NL.sum())} entries of this kind. Leave these entries unknown: -1 in all slots."
            )
        self._slots_checked = True

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
            rows_T = rows_of_rank(self, layout, sequences, like)
            if fallback == "error":
                check_known(self, rows_T, columns)
            if fallback not in ("router", "error") or step < 0:
                raise InputError(
                    f'RoutingTable.cut: fallback must be "router" or "error" and step 0 or more, got {fallback!r} and '
                    f"{step}. Count training steps from 0."
                )
            if into is not None and (len(into.stored_TLK), into.layers) != (len(rows_T), wanted):
                raise InputError(
                    f"RoutingTable.cut: into must have the same rows and layers, got {len(into.stored_TLK)} rows and "
                    f"layers {span(into.layers)} for {len(rows_T)} rows and layers {span(wanted)}. Pad every "
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
                f"RoutingTable.cut: layers {span(absent)} are not in the table, which has {span(self.layers)}. "
                "Count the MoE layers of the whole model from 0, without dense layers."
            )
        return [self.layers.index(layer) for layer in layers]

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
                raise StateError(
                    f"RoutingTable.check_used: each of the {int(known_NL.sum())} known entries must be used in one "
                    f"step, got {told}. The first one used {how} is {self.key_of(row, column)}. Check which "
                    "micro-batches, ranks and layers looked it up."
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
        table.check_distinct()
        return table


def _raise(problem: Exception | None, group: dist.ProcessGroup | None, facts: Mapping[str, Any] | None = None) -> None:
    """Raise a problem. With a group, all ranks raise if one of them has a problem, or if the facts differ."""
    if group is not None:
        raise_alike(Communicator(group), problem, facts=facts, label="replay")
    elif problem is not None:
        raise problem
