"""The frozen values that a model, a Dispatcher and a backend pass to each other.

Names of tensors end in their dimensions, everywhere in the package:

    T   rows of this rank, as the model passed them   Tp  rows of this rank after padding
    D   hidden size                                   K   top_k
    E   experts in the whole expert-parallel group    L   experts on this rank
    P   ranks in the group                            R   rows that this rank's experts work on, padding included
    S   rows that arrived at this rank, before they are copied to its experts
    N   pairs of a row and a slot that go to an expert
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.plug_ins import imported_on_use

if TYPE_CHECKING:
    from moe_dispatch.capabilities.carry.columns import CarriedColumns
    from moe_dispatch.dispatched import InFlight as InFlight
else:  # a public name, which users also import from here
    __getattr__, __dir__ = imported_on_use(globals(), InFlight="moe_dispatch.dispatched")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The number of rows that a graph-safe dispatch has room for. It is the same on all ranks.

    Attributes:
        rows: Largest number of real rows that the experts of one rank take, without expert padding.
        buffer_rows: R, the number of rows that the experts work on. ``rows`` rows and their padding fit into it,
            whichever experts the rows go to.
        pair_rows: Largest number of rows that a rank sends to any one rank; None if the backend has no such bound.
    """

    rows: int
    buffer_rows: int
    pair_rows: int | None = None

    def holds(self, rows: int, pair_rows: int) -> bool:
        """Return whether a dispatch that needs ``rows`` and ``pair_rows`` rows drops none."""
        return rows <= self.rows and (self.pair_rows is None or pair_rows <= self.pair_rows)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes that the ranks agreed on, for one dispatch or for all dispatches of a forward.

    Attributes:
        padded_rows: Number of rows that every rank brings; None if each rank brings its own number.
        group_max_rows: Largest number of rows that any rank brings, padding included. None if it is not needed.
        capacity: Capacity of a graph-safe dispatch; None if sizes follow the routing.
        tokens_per_expert: Number of slots of all ranks that name each expert, (E,), if the ranks counted them while
            they agreed on the sizes of one dispatch (``Constraints.counts_with_sizes``); else None.
        columns: What travels with the rows of one dispatch, if ``Constraints.carries`` is "packets"; else None.
        keeps_route: Whether repetitions of the dispatch take its route, instead of a dispatch of their own.
        mark: Mark of one dispatch, as ``Backend.start`` has it, if the backend must read counts for want of
            ``tokens_per_expert``, so that it can read the marks of all ranks with them; else None.
    """

    padded_rows: int | None = None
    group_max_rows: int | None = None
    capacity: Capacity | None = None
    tokens_per_expert: tuple[int, ...] | None = None
    columns: CarriedColumns | None = None
    keeps_route: bool = False
    mark: int | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts that each row goes to, and their weights.

    Attributes:
        topk_ids: int64 (T, K), one row for each row of ``layout.flatten(x)``. Each value is the id of an expert in
            ``[0, num_experts)``, or ``-1`` for a slot that goes nowhere. If a row names an expert twice, the expert
            gets the row once, with the sum of both weights; each slot gets its own gradient.
        topk_weights: floating (T, K). They are applied in ``max(float32, x.dtype)``. The weight of a slot with id
            ``-1`` is never read. The others should be finite, which only ``debug=True`` checks.
        drift: int64 (2,): the slots whose replayed expert differs from the router's choice, and all replayed slots.
            ``moe_dispatch.replay.replayed`` counts them, and ``dispatch`` adds them to the metrics. None without
            replay.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    drift: Tensor | None = None

    @classmethod
    def from_map(cls, routing_map: Tensor, probs: Tensor, *, top_k: int) -> Routing:
        """Make a routing from a dense map and dense probabilities, as Megatron-LM has them.

        The ids of a row are ascending.

        Args:
            routing_map: bool (T, E), at most ``top_k`` True in a row. A row with fewer gets ``-1`` in its last slots.
            probs: floating (T, E). The gradient reaches the entries that the map selects.
            top_k: K, the number of slots of a row.

        Raises:
            InputError: The shapes differ, the map is not bool, or ``top_k`` exceeds the number of experts. On the CPU,
                also if a row selects more than ``top_k`` experts; a compiled call raises RuntimeError in this case. On
                a GPU this check would be a host sync, so it is left out: the row keeps its ``top_k`` lowest ids.
                ``debug=True`` in the config does not check it either.

        Cost: no host sync on a GPU, no collective.
        """
        if routing_map.shape != probs.shape or routing_map.dtype != torch.bool or routing_map.dim() != 2:
            raise InputError(
                f"Routing.from_map: routing_map must be bool (T, E) and probs the same shape, got {routing_map.dtype} "
                f"{tuple(routing_map.shape)} and {tuple(probs.shape)}."
            )
        if not 1 <= top_k <= routing_map.shape[1]:
            raise InputError(f"Routing.from_map: top_k must lie in 1..{routing_map.shape[1]}, got {top_k}.")
        if torch.compiler.is_compiling() and routing_map.is_cpu:
            told = f"Routing.from_map: no row may select more than top_k={top_k} experts. Pass the router's top_k."
            torch._assert_async((routing_map.sum(1) <= top_k).all(), told)
        elif routing_map.is_cpu and (most := int(routing_map.sum(1).amax()) if len(routing_map) else 0) > top_k:
            raise InputError(f"Routing.from_map: a row selects {most} experts, top_k is {top_k}. Pass top_k={most}.")
        chosen, ids = torch.sort(routing_map, dim=1, descending=True, stable=True)
        ids, chosen = ids[:, :top_k], chosen[:, :top_k]
        return cls(torch.where(chosen, ids, -1), torch.where(chosen, probs.gather(1, ids), 0))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A layout and the sizes that all ranks agreed on for it.

    ``Dispatcher.plan`` makes one for each forward. Every MoE layer of that forward gets the same plan.

    Attributes:
        layout: How the model's tensor holds tokens.
        num_rows: T, or None if neither a tensor nor a length on the host has given it yet.
        real_rows: int64 (real,), the indices of the rows that hold tokens. Only these rows are dispatched. None
            dispatches all rows.
        valid_T: bool (T,), whether each row holds a token. Set if the host knows the lengths but no row may be cut
            out, as in graph-safe mode; otherwise None.
        num_sent: Number of rows that this rank sends, before padding; None if not known yet.
        sizes: Sizes that the ranks agreed on, if the backend needs them: ``padded_rows``, Tp, equal on all ranks, and
            ``group_max_rows``, the largest row count of any rank.
        num_chunks: Number of dispatches that each layer call makes, 1 without ``chunks``. Equal on all ranks. The
            sizes are those of one of them.
        settled: Whether the ranks have agreed on the sizes. Only the draft of a plan, which its own rank makes first,
            is not settled.
        owner: Name of the channel that made the plan. A plan serves all dispatchers with the same config and group.
        footprint: Function behind ``bytes``, of the dtype and ``carry``; None if the config is not graph-safe.
    """

    layout: Layout
    num_rows: int | None
    real_rows: Tensor | None
    valid_T: Tensor | None = None
    num_sent: int | None = None
    sizes: Sizes = field(default_factory=Sizes)
    num_chunks: int = 1
    settled: bool = True
    owner: str
    footprint: Callable[..., dict[str, int]] | None = None

    def bytes(self, dtype: torch.dtype, carry: Mapping[str, torch.dtype] | None = None) -> dict[str, int]:
        """Return the bytes that one graph-safe dispatch of this rank allocates, by purpose. Nothing is allocated.

        Args:
            dtype: Dtype of the rows.
            carry: Dtypes of what travels with each row, by name, if the dispatch has ``carry``.

        Returns:
            Bytes by purpose. "rows" (R, D), "weights" (R,) and "index", which holds tables of integers, live until the
            backward. "wire" is for the buffers of ``dispatch``, and lives inside it; "carried" is what ``carry`` adds.
            "combine", "combine.backward" and "dispatch.backward" are what each of these holds at most at one time, with
            its result. So the peak of a dispatch is the sum of the first five. These are numbers of the kernels on a
            GPU, and upper bounds: up to 2% and a few integers for each slot more may be needed. Operators of torch need
            scratch of up to 6 MiB more on the CPU, where buffers are kept for the next call, with up to an eighth of
            slack. The buffers of a vendor's library are not included. Inside torch.compile, every rank dispatches
            ``max_tokens_per_rank`` rows, padded.

        Raises:
            StateError: The config is not graph_safe.
        """
        if self.footprint is None:
            raise StateError("Plan.bytes: without graph_safe, sizes follow the routing. Measure a step instead.")
        return self.footprint(dtype, carry)
