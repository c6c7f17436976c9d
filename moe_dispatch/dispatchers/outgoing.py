"""What a rank sends in a dispatch: rows, and their expert ids, in which invalid ids become -1."""

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
class Outgoing:
    """What a rank sends in a dispatch, before rows are cut out and padded. ``prepare`` makes it.

    Attributes:
        x_TD: Rows of the model.
        weights_TK: Weights of the model's rows, in the accumulation dtype.
        given_TK: int64, the ids of the router in the rows to send; -1 in rows that are no tokens.
        ids_TK: int64, ``given_TK`` with -1 for each invalid id; ids of expert slots if there is a ``table``.
        outcome: int64 (), the second result of ``valid_ids``.
        real_rows: int64, the indices of the rows to send; None sends all rows.
        valid_T: bool, whether each row is a token. None if all rows are tokens, or if the other rows are cut out.
        table: Table that turned ids of experts into ids of expert slots; None if they are equal.
    """

    x_TD: Tensor
    weights_TK: Tensor
    given_TK: Tensor
    ids_TK: Tensor
    outcome: Tensor
    real_rows: Tensor | None
    valid_T: Tensor | None
    table: SlotTable | None = None

    def placed(self, table: SlotTable) -> Outgoing:
        """Return the same with ids of expert slots."""
        return replace(self, ids_TK=slots_of(self.ids_TK, table.copies_EC.to(self.ids_TK.device)), table=table)

    def problem(self, num_experts: int) -> InputError | None:
        """Return the result of ``problem_of_ids``. A host sync."""
        return problem_of_ids(self.given_TK, num_experts)

    def tally(self, num_experts: int) -> list[Tensor]:
        """Return the number of invalid ids, int64 (1,), and the number of slots of each expert, int64 (E,)."""
        return [self.outcome.view(1), count_experts(self.ids_TK, num_experts)]


def prepare(
    channel: Channel,
    x_TD: Tensor,
    slots: tuple[Tensor, Tensor],
    *,
    real_rows: Tensor | None,
    valid_T: Tensor | None,
    table: SlotTable | None,
    mark: int,
) -> Outgoing:
    """Mask ids, select those of the rows that are sent, replace invalid ids, and turn them into slots. No host sync.

    Args:
        channel: Channel of the dispatcher.
        x_TD: As in ``Outgoing``.
        slots: The ids of the router, int64 (T, K), without duplicates in a row; and their weights.
        real_rows: As in ``Outgoing``.
        valid_T: As in ``Outgoing``.
        table: As in ``Outgoing``.
        mark: Mark of this rank, which travels with counts if the ranks exchange counts.
    """
    ids_TK, weights_TK = slots
    if valid_T is not None:
        ids_TK = torch.where(valid_T.unsqueeze(1), ids_TK, -1)
    if real_rows is not None:
        ids_TK = ids_TK.index_select(0, real_rows)
    kernels = index_kernels(channel.config.permutation, ids_TK)
    marked = mark if channel.needs.exchanges_counts and not channel.config.graph_safe else None
    valid_TK, outcome = valid_ids(ids_TK, channel.config.num_experts, marked, kernels=kernels)
    found = Outgoing(
        x_TD=x_TD,
        weights_TK=weights_TK,
        given_TK=ids_TK,
        ids_TK=valid_TK,
        outcome=outcome,
        real_rows=real_rows,
        valid_T=valid_T,
    )
    return found if table is None else found.placed(table)


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
