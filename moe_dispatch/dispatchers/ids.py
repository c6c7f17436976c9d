"""The expert ids of a dispatch: invalid ids become -1, and the ranks may count the slots of each expert together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.local import count_experts
from moe_dispatch.balance.slot_table import SlotTable, slots_of
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import InputError
from moe_dispatch.permutation import index_kernels


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SentIds:
    """The ids of the rows that a dispatch sends, without padding.

    Attributes:
        given_TK: int64, the ids of the router; -1 in rows that are no tokens.
        ids_TK: int64, ``given_TK`` with -1 for each invalid id. ``placed`` turns them into ids of expert slots.
        outcome: int64 (), the second result of ``valid_ids``.
    """

    given_TK: Tensor
    ids_TK: Tensor
    outcome: Tensor

    def placed(self, table: SlotTable | None) -> SentIds:
        """Return the same with ids of expert slots. ``table`` is None if they equal the ids of experts."""
        if table is None:
            return self
        return replace(self, ids_TK=slots_of(self.ids_TK, table.copies_EC.to(self.ids_TK.device)))

    def tally(self, num_experts: int) -> list[Tensor]:
        """Return the number of invalid ids, int64 (1,), and the number of slots of each expert, int64 (E,)."""
        return [self.outcome.view(1), count_experts(self.ids_TK, num_experts)]


def sent_ids(
    channel: Channel, ids_TK: Tensor, valid_T: Tensor | None, real_rows: Tensor | None, *, mark: int | None
) -> SentIds:
    """Mask ids, select those of the rows that are sent, and replace invalid ids. No host sync.

    Args:
        channel: Channel of the dispatcher.
        ids_TK: int64 ids of the router, without duplicates in a row.
        valid_T: bool, whether each row is a token; None if all are, or if the other rows are cut out.
        real_rows: int64, the indices of the rows to send; None sends all.
        mark: As in ``valid_ids``.
    """
    if valid_T is not None:
        ids_TK = torch.where(valid_T.unsqueeze(1), ids_TK, -1)
    if real_rows is not None:
        ids_TK = ids_TK.index_select(0, real_rows)
    kernels = index_kernels(channel.config.permutation, ids_TK)
    valid, outcome = valid_ids(ids_TK, channel.config.num_experts, mark, kernels=kernels)
    return SentIds(given_TK=ids_TK, ids_TK=valid, outcome=outcome)


def problem_of_ids(ids: Tensor, num_experts: int) -> InputError | None:
    """Return an error with the lowest and the highest id if some id is invalid, otherwise None. A host sync."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if -1 <= low <= high < num_experts:
        return None
    return InputError(
        f"Dispatcher.dispatch: topk_ids must lie in -1..{num_experts - 1}, got {low}..{high}. Check the router."
    )


def valid_ids(ids: Tensor, num_experts: int, mark: int | None = None, *, kernels: Any = None) -> tuple[Tensor, Tensor]:
    """Replace invalid ids, those outside -1..num_experts-1, so that the ids can serve as indices. No host sync.

    Args:
        ids: int64 ids of the router.
        num_experts: E.
        mark: Mark that this rank sends if all its ids are valid; None if it sends none.
        kernels: Result of ``index_kernels``: a kernel that does all, or None for operators of torch.

    Returns:
        The ids, with -1 for each invalid id; and an int64 (). Without ``mark`` it is the number of invalid ids, else it
        is ``mark``, or -1 if there are invalid ids.
    """
    if kernels is not None:
        return kernels.valid_ids(ids, num_experts, mark)  # type: ignore[no-any-return]
    nearest = ids.clamp(-1, num_experts - 1)
    invalid = nearest != ids
    outcome = invalid.sum() if mark is None else torch.where(invalid.any(), -1, mark)
    return nearest.masked_fill_(invalid, -1), outcome
