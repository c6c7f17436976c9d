"""The entries of a routing table: how ids are stored, and how often each entry was used.

The table stores each id plus 2, in the smallest integer type. With 5 experts, experts 0..4 are stored as 2..6, a slot
that goes nowhere (-1) as 1, and an unknown slot (-2) as 0. So a table of zeros knows nothing, and one formula,
``stored - 2``, gives the ids for every type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import InputError

Entries = Any  # a tensor, an array of numpy, or a sequence of these, one behind another

UNKNOWN, NOWHERE = -2, -1
_TYPES = (torch.uint8, torch.int16, torch.int32)
_AT_A_TIME = 1 << 20  # entries whose uses are exchanged in one collective


def storage_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer type for ids 0 to ``num_experts - 1``, for "nowhere" and for "unknown"."""
    return next(dtype for dtype in _TYPES if num_experts - 1 - UNKNOWN <= torch.iinfo(dtype).max)


def integers(entries: Entries, of: str) -> Tensor:
    """Return ids on the CPU, int64 (S, L, K). ``of`` says in an error whose ids they are."""
    several = entries if isinstance(entries, list | tuple) else [entries]
    # as_tensor would warn of an array that is read-only, as those of Ray are.
    ids = torch.cat([part if isinstance(part, Tensor) else torch.tensor(part) for part in several])
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool or 0 in ids.shape[1:]:
        raise InputError(
            f"RoutingTable: the ids of a sequence must be integers (positions, layers, top_k), got {ids.dtype} "
            f"{tuple(ids.shape)} for {of}. Reshape them."
        )
    return ids.detach().to("cpu", torch.int64)


def stored_entries(name: int | str, entries: Entries, num_experts: int) -> Tensor:
    """Check the ids of one sequence, (S, L, K), and convert them to the form in which a table stores them."""
    ids = integers(entries, repr(name))
    # Check before narrowing: an out-of-range id could wrap around in int32 and look valid.
    if len(ids):
        low, high = map(int, torch.aminmax(ids))
        if low < -1 or high >= num_experts:
            raise InputError(
                f"RoutingTable: ids must lie in -1..{num_experts - 1}, got {low if low < -1 else high} in sequence "
                f"{name!r}. Pass logical ids of this model, and the right num_experts."
            )
    return stored(ids.masked_fill((ids < 0).all(2, keepdim=True), UNKNOWN), num_experts)


def stored(ids: Tensor, num_experts: int) -> Tensor:
    """Convert ids (-2 to ``num_experts - 1``) to the form in which a table stores them."""
    return (ids.to(torch.int32) - UNKNOWN).to(storage_dtype(num_experts))


def ids_of(values: Tensor) -> Tensor:
    """Convert stored values back to ids, int64."""
    return values.to(torch.int64).add_(UNKNOWN)  # stored values are never int64, so this is a copy


def has_repeats(values_NLK: Tensor) -> Tensor:
    """Return whether each stored entry names an expert twice, bool (N, L)."""
    found_NL = torch.zeros(values_NLK.shape[:2], dtype=torch.bool, device="cpu")
    for distance in range(1, values_NLK.shape[2]):
        one, other = values_NLK[:, :, distance:], values_NLK[:, :, :-distance]
        found_NL |= ((one == other) & (one > NOWHERE - UNKNOWN)).any(2)
    return found_NL


@final
class Uses:
    """The step in which each entry of a table was used.

    A count is 0 for an entry that was never used, ``step + 1`` for one that was used in this step only, and
    ``SEVERAL`` for one that was used in several steps. The counts are allocated at the first lookup.

    Args:
        num_rows: Number of rows of the table.
        num_layers: Number of layers of the table.
    """

    SEVERAL = -1

    def __init__(self, num_rows: int, num_layers: int) -> None:
        self._shape = num_rows, num_layers
        self._steps_NL: Tensor | None = None

    def count(self, rows_T: Tensor, columns: Sequence[int], step: int) -> None:
        """Count a lookup of rows of the table in some of its columns."""
        if self._steps_NL is None:
            self._steps_NL = self._never()
        for column in columns:
            steps_N = self._steps_NL[:, column]
            before = steps_N[rows_T]
            is_first = (before == 0) | (before == step + 1)
            steps_N[rows_T] = torch.where(is_first, step + 1, self.SEVERAL).to(torch.int32)

    def take(self, everyone: Communicator | None) -> Tensor:
        """Return the counts, int32 (rows, layers), of this rank or of all ranks together. Then start to count anew."""
        steps_NL = self._never() if self._steps_NL is None else self._steps_NL
        self._steps_NL = None
        if everyone is None:
            return steps_NL
        joined = []
        for mine in steps_NL.flatten().split(_AT_A_TIME):
            steps_PN = everyone.gather_tensor(mine, label="replay")
            latest_N = steps_PN.amax(0)
            several_N = ((steps_PN != 0) & (steps_PN != latest_N)).any(0)
            joined.append(torch.where(several_N, self.SEVERAL, latest_N))
        return torch.cat(joined).view_as(steps_NL)

    def _never(self) -> Tensor:
        with torch.inference_mode(False):  # training must be able to write to counts that an evaluation made
            return torch.zeros(self._shape, dtype=torch.int32, device="cpu")
