"""The frozen values that travel between a model, a Dispatcher and a backend.

Dimension suffixes, used on tensor names throughout the package:

    T   rows of this rank as the model gave them      Tp  the same after padding
    D   hidden size                                   K   top_k
    E   experts in the whole expert-parallel group    L   experts on this rank
    P   ranks in the group                            R   rows that this rank's experts see
    S   rows that reached this rank, before they are spread over its experts
    N   (row, slot) pairs that really go somewhere
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Sizes
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout


@final
@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which experts each row goes to, and with what weight.

    Attributes:
        topk_ids: int64 (T, K), expert ids in ``[0, num_experts)``, ``-1`` where a slot goes nowhere. One row per row of
            ``layout.flatten(x)``. An expert named twice by one row is merged: weights add up, each slot gets its
            gradient.
        topk_weights: floating (T, K). Applied in ``max(float32, x.dtype)``; weights of ``-1`` slots are never read.
    """

    topk_ids: Tensor
    topk_weights: Tensor

    @classmethod
    def from_map(cls, routing_map: Tensor, probs: Tensor, *, top_k: int) -> Routing:
        """Routing from a dense map, Megatron's form.

        Args:
            routing_map: bool (T, E), at most ``top_k`` True per row; rows with fewer get ``-1`` slots.
            probs: floating (T, E); the gradient reaches the entries the map selects.
            top_k: slots per row.

        Raises:
            InputError: the two differ in shape, the map is not bool, or ``top_k`` exceeds the number of experts. On the
                CPU also when a row selects more than ``top_k`` experts; a compiled call raises torch's RuntimeError
                then. On a GPU that would be a host sync, so there the surplus of highest expert id is cut;
                ``debug=True`` in the config does not see it either.

        Cost: no host sync on a GPU, no collective. Ids of a row are ascending.
        """
        if routing_map.shape != probs.shape or routing_map.dtype != torch.bool or routing_map.dim() != 2:
            raise InputError(
                f"Routing.from_map: routing_map must be bool (T, E) and probs the same shape, got {routing_map.dtype} "
                f"{tuple(routing_map.shape)} and {tuple(probs.shape)}. Pass the router's map and its dense "
                f"probabilities."
            )
        if not 1 <= top_k <= routing_map.shape[1]:
            raise InputError(
                f"Routing.from_map: top_k must lie in 1..{routing_map.shape[1]} (experts), got {top_k}. "
                "Pass the router's top_k."
            )
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
    """A layout on whose sizes all ranks have agreed; made by ``Dispatcher.plan``, given to every layer of a forward.

    Attributes:
        layout: how the model's tensor holds tokens.
        num_rows: T, or None while no tensor and no host-known length told it.
        real_rows: int64 (real,) index of the rows that are cut out before padding, or None when none are cut.
        valid_T: bool (T,), where real_rows would be on the host but no row is cut (graph-safe); else None.
        sizes: what the ranks agreed on, if the backend needs it: ``padded_rows``, Tp, equal on all ranks, and
            ``group_max_rows``, the largest count any rank brings.
        owner: the channel it was settled on; a plan is good for dispatchers of the same config and group.
        footprint: what ``bytes`` asks; None where sizes follow the routing.
    """

    layout: Layout
    num_rows: int | None
    real_rows: Tensor | None
    valid_T: Tensor | None = None
    sizes: Sizes
    owner: str
    footprint: Callable[[torch.dtype], dict[str, int]] | None = None

    def bytes(self, dtype: torch.dtype) -> dict[str, int]:
        """What one graph-safe dispatch of this rank allocates, by purpose; nothing is allocated to tell it.

        Args:
            dtype: of the rows, and so of what experts work on.

        Returns:
            "rows" (R, D) and "weights" (R,) that experts are given, and "index", the tables of integers: all three live
            until the backward. "wire", what is sent and received, only lives inside a verb; on the CPU it is kept for
            the next, with up to an eighth of slack. A vendor's library has buffers of its own beside these. Inside
            torch.compile every rank brings ``max_tokens_per_rank`` rows, padded.

        Raises:
            StateError: the config is not graph_safe.
        """
        if self.footprint is None:
            raise StateError(
                "Plan.bytes: the config must be graph_safe, got graph_safe=False, where sizes follow the routing. "
                "Set graph_safe, or measure a step."
            )
        return self.footprint(dtype)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dispatched:
    """What this rank's experts work on, and what ``combine`` needs to bring it back.

    Attributes:
        rows: (R, D), expert-major: each expert's real rows by source rank, then token, then its zero padding.
        tokens_per_expert: int64 (L,) on the device, with padding; an expert without tokens stays 0.
        real_tokens_per_expert: int64 (L,) on the device, without padding.
        tokens_per_expert_list: ``tokens_per_expert`` on the host, from the one sync that happened anyway.
        weights: float32 (R,) (float64 for float64 rows), part of the autograd graph, 0 on padding.
        pad_multiple: what rows per expert were rounded up to; experts must not pad again.
        state: the dispatcher's and the backend's own.
    """

    rows: Tensor
    tokens_per_expert: Tensor
    real_tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...] | None
    weights: Tensor
    pad_multiple: int
    state: Any

    @property
    def offs(self) -> Tensor:
        """int32 (L,), inclusive sums of ``tokens_per_expert``: what ``torch._grouped_mm`` takes."""
        return self.tokens_per_expert.cumsum(0, dtype=torch.int32)

    @property
    def cu_tokens_per_expert(self) -> Tensor:
        """int32 (L+1,), the same sums with a leading 0."""
        return torch.nn.functional.pad(self.offs, (1, 0))

    def wait(self) -> Dispatched:
        """This value; so that code written for ``async_op=True`` runs on either."""
        return self


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlight:
    """A dispatch whose rows are still travelling, from ``dispatch(..., async_op=True)``."""

    finish: Callable[[], Dispatched]

    def wait(self) -> Dispatched:
        """The arrived rows. Call once; the autograd graph of the dispatch starts here."""
        return self.finish()
