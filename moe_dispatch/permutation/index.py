"""The index of a one-rank reorder: where the copies of each row stand after the rows are grouped by key.

``group_slots`` and ``group_statically`` make an index by operators of torch. The functions before them clean and count
the slots. ``triton_tables.py`` does the same by kernels, in functions of the same names; a ``Permutation`` has either.

Legend: S rows, K slots per row, R grouped rows with their padding, L keys. A slot is one (row, k) pair. The key of a
slot is an expert or a rank; a slot may also have no key. N is the number of slots that have a key. T rows, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from moe_dispatch.communication import to_device


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are accumulated: float64 if any of ``dtypes`` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``. 0 stays 0."""
    return -(-value // multiple) * multiple


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """The positions of all slots among the grouped rows. ``group_slots`` and ``group_statically`` make an index.

    Grouped rows are ordered by key, and by row within a key. Padding follows the rows of each key.

    For example, two rows have the keys ``[[1, 0], [-1, 1]]``, where -1 is no key. With ``pad_multiple=2`` the grouped
    rows are: row 0 for key 0, padding, row 0 for key 1, row 1 for key 1. So ``source_R`` is [0, 0, 0, 1], ``slot_N``
    is [1, 0, 3], ``position_N`` is [0, 2, 3], ``byrow_N`` is [2, 0, 3], ``cu_S`` is [0, 2, 3] and ``padding`` is [1].

    An index has a fixed size if its shapes do not depend on the keys. Then N is S * K. Slots without a key come last in
    ``slot_N``; their position is R, one behind the last grouped row. ``byrow_N`` ends in zeros. ``padding``
    is filled up with R. So a buffer that is written at ``position_N`` or ``padding`` needs one spare row, number R. The
    grouped rows behind the padding of the last key are slack: like padding, they are copies of no row.

    With a fixed size of R = 6, the example has two rows of slack. ``source_R`` is [0, 0, 0, 1, 0, 0], ``filled_R`` is
    [0, -1, 0, 1, -1, -1], ``slot_N`` is [1, 0, 3, 2], ``position_N`` is [0, 2, 3, 6], ``byrow_N`` is [2, 0, 3, 0],
    ``cu_S`` is [0, 2, 3] and ``padding`` is [1, 6].

    Attributes:
        num_rows: S.
        top_k: K.
        num_grouped: R.
        pad_multiple: The number of rows of each key is rounded up to a multiple of this; a key without rows stays
            empty.
        source_R: int64 (R,), the row that each grouped row is a copy of; 0 on padding and slack.
        slot_N: int64 (N,), the slot (row * K + k) of each real grouped row, in grouped order.
        position_N: int64 (N,), the grouped position of each entry of ``slot_N``; None if it is 0, 1, ..., N-1.
        byrow_N: int64 (N,), the grouped positions of the slots that have a key, in the order of the slots.
        cu_S: int64 (S+1,), where the slots of each row begin in ``byrow_N``.
        padding: int64, the grouped positions that are padding; None if ``pad_multiple`` is 1.
        filled_R: int64 (R,), ``source_R`` with -1 on padding and slack; None without a fixed size.
        counts: The number of slots of each key, on the host, without padding; None with a fixed size. An index that
            was rebuilt from its tables has neither ``counts`` nor ``real_L``, ``padded_L`` and ``needed``.
        real_L: int64 (L,), the number of slots of each key, on the device, without padding. With a fixed size, dropped
            slots are not counted. Without a fixed size, it is None if the caller of ``group_slots`` did not have it.
        padded_L: int64 (L,), ``real_L`` with padding; without a fixed size, None unless a kernel made the index.
        needed: int64 (), the number of slots that have a key, dropped slots included; None without a fixed size.
    """

    num_rows: int
    top_k: int
    num_grouped: int
    pad_multiple: int
    source_R: Tensor
    slot_N: Tensor
    position_N: Tensor | None
    byrow_N: Tensor
    cu_S: Tensor
    padding: Tensor | None
    filled_R: Tensor | None = None
    counts: Sequence[int] | None = None
    real_L: Tensor | None = None
    padded_L: Tensor | None = None
    needed: Tensor | None = None

    @property
    def fixed_size(self) -> bool:
        """Whether the shapes do not depend on the keys."""
        return self.filled_R is not None

    def to_grouped(self, values_SK: Tensor) -> Tensor:
        """Move one value per slot, (S, K), to the grouped rows, (R,).

        Padding gets 0. The values of slots without a key are never read.
        """
        if self.filled_R is None:
            real = values_SK.take(self.slot_N)
            if self.position_N is None:
                return real
            return real.new_zeros(self.num_grouped).index_copy_(0, self.position_N, real)
        assert self.position_N is not None
        values_N = values_SK.reshape(-1).index_select(0, self.slot_N)
        grouped = values_N.new_zeros(self.num_grouped + 1).index_copy_(0, self.position_N, values_N)
        return grouped.resize_(self.num_grouped)  # not a view: the caller may write to the result

    def to_slots(self, values_R: Tensor) -> Tensor:
        """Move one value per grouped row, (R,), back to the slots, (S, K).

        Slots without a key get 0. The values on padding are never read.
        """
        if self.filled_R is not None:
            values_R = torch.cat([values_R, values_R.new_zeros(1)])  # position R, where slots without a key stand
        real = values_R if self.position_N is None else values_R.index_select(0, self.position_N)
        slots = real.new_zeros(self.num_rows * self.top_k)
        return slots.index_copy_(0, self.slot_N, real).view(self.num_rows, self.top_k)

    def in_row_order(self, values_SK: Tensor) -> Tensor:
        """Return the values of the slots that have a key, (N,), in the order of the slots."""
        return self.to_grouped(values_SK).index_select(0, self.byrow_N)

    def tokens_per_key(self, device: torch.device) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Return the number of rows of each key. ``group_slots`` or ``group_statically`` must have made the index.

        Args:
            device: Device for the counts.

        Returns:
            The counts without padding on the device, int64 (L,); the counts with padding on the device, int64 (L,); and
            the counts with padding on the host. The last is None with a fixed size, because the host does not know
            them. If ``pad_multiple`` is 1, the first two may be one tensor.

        Cost: no host sync; one copy to the device if the index knows the counts only on the host.
        """
        if self.counts is None:
            assert self.real_L is not None
            assert self.padded_L is not None
            return self.real_L, self.padded_L, None
        real_L, multiple = self.real_L, self.pad_multiple
        if real_L is None:
            real_L = to_device(self.counts, device)
        if multiple == 1:
            return real_L, real_L, tuple(self.counts)
        padded_L = real_L + (-real_L % multiple) if self.padded_L is None else self.padded_L
        return real_L, padded_L, tuple(round_up(count, multiple) for count in self.counts)


def merge_slots(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
    """Merge the slots of a row that name the same expert. The gradient reaches each slot.

    The first of these slots gets the sum of the weights; the ids of the later ones become -1. For example, ids
    [3, 5, 3] with weights [.2, .3, .5] become [3, 5, -1] with [.7, .3, 0]. Weights of slots with id -1 are never read.

    Args:
        ids_TK: int64. Invalid ids stay invalid.
        weights_TK: Floating, in the accumulation dtype.
        asks: Whether to return early if there are no duplicates; this works on the CPU only. On a GPU the question
            would be a host sync, so the (T, K, K) tables are always summed.
    """
    if ids_TK.shape[1] == 1:
        return ids_TK, weights_TK
    same_TKK = ids_TK.unsqueeze(2) == ids_TK.unsqueeze(1)
    if asks and ids_TK.is_cpu:
        if int(same_TKK.count_nonzero()) == ids_TK.numel():
            return ids_TK, weights_TK
        real_TK = ids_TK >= 0  # all slots that go nowhere have the same id
        if int((same_TKK & real_TK.unsqueeze(2)).count_nonzero()) == int(real_TK.count_nonzero()):
            return ids_TK, weights_TK
    slots_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    is_first = (same_TKK.to(torch.uint8).argmax(2) == slots_K) & (ids_TK >= 0)
    merged = torch.where(same_TKK, weights_TK.unsqueeze(1), 0).sum(2)
    return torch.where(is_first, ids_TK, ids_TK.clamp(max=-1)), torch.where(is_first, merged, 0)


def valid_ids(
    ids_TK: Tensor, num_experts: int, mark: int | None = None, *, valid_T: Tensor | None = None, asks: bool
) -> tuple[Tensor, Tensor]:
    """Replace invalid ids, those outside -1..num_experts-1, so that the ids can serve as indices. No host sync.

    Args:
        ids_TK: int64 ids of the router.
        num_experts: E.
        mark: Mark that this rank sends if all its ids are valid; None if it sends none.
        valid_T: bool, whether each row is a token; None if all are. Ids of other rows become -1 and count as valid.
        asks: Whether to return early if all ids are valid; this works on the CPU only.

    Returns:
        The ids in new memory, with -1 for each invalid id; and an int64 (). Without ``mark`` it is the number of
        invalid ids, else it is ``mark``, or -1 if there are invalid ids.
    """
    ids = ids_TK if valid_T is None else torch.where(valid_T.unsqueeze(1), ids_TK, -1)
    nearest = ids.clamp(-1, num_experts - 1)
    if asks and ids.is_cpu and nearest.equal(ids):
        return nearest, torch.scalar_tensor(mark or 0, dtype=torch.int64, device=ids.device)
    invalid = nearest != ids
    outcome = invalid.sum() if mark is None else torch.where(invalid.any(), -1, mark)
    return nearest.masked_fill_(invalid, -1), outcome


def count_owners(
    ids_TK: Tensor, num_local_experts: int, width: int, length: int, *, graph_safe: bool
) -> tuple[Tensor, Tensor]:
    """Find the rank that owns each slot, and count the slots of each expert. No host sync on a GPU.

    Args:
        ids_TK: int64 (T, K), global expert ids; -1 for no expert.
        num_local_experts: L, the number of experts of each rank.
        width: Number of columns of the table of counts, at least L.
        length: Number of entries of the table, a multiple of ``width``.
        graph_safe: Whether no value may be read on the CPU either.

    Returns:
        1 + the rank of each slot's expert, (T, K), 0 for -1; and the table of counts, int64 (length,) and flat, in
        which entry (r + 1) * width + e is the number of slots of local expert e of rank r. Slots without an expert may
        be counted in the first row. Other entries are 0.
    """
    shifted_TK = ids_TK + num_local_experts
    owner_TK = shifted_TK.div(num_local_experts, rounding_mode="floor")
    entries_N = torch.add(shifted_TK, owner_TK, alpha=width - num_local_experts).reshape(-1)
    if entries_N.is_cpu and not graph_safe:
        return owner_TK, torch.bincount(entries_N, minlength=length)
    return owner_TK, count_values(entries_N, length, graph_safe=graph_safe)


def group_slots(
    keys_SK: Tensor,
    counts: Sequence[int],
    pad_multiple: int = 1,
    *,
    first: int = 0,
    entries_per_key: int = 1,
    real_L: Tensor | None = None,
) -> SlotIndex:
    """Make the index of a table of keys when the host knows how many slots each key has.

    Args:
        keys_SK: int16, int32 or int64 (S, K). With M ``entries_per_key``, the entries of a key are
            ``[key * M, (key + 1) * M)``. A slot whose entry belongs to none of the keys has no key.
        counts: The number of slots of each key, on the host.
        pad_multiple: The number of rows of each key is rounded up to a multiple of this; a key without rows stays
            empty.
        first: The number in ``keys_SK`` that stands for key 0, times M.
        entries_per_key: M. The rows of a key are ordered by entry first.
        real_L: int64 (L,), ``counts`` on the device, if the caller has them there. The index keeps this tensor.

    Cost: one stable sort of S*K keys, one sort of N slots, and single passes; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    real, device = sum(counts), keys_SK.device
    keys_SK = keys_SK - first if first else keys_SK
    # Without its sign bit, a negative key is large (-1 in int64 becomes 2**63 - 1), so it sorts behind all groups.
    keys = keys_SK.bitwise_and(torch.iinfo(keys_SK.dtype).max)
    slot_N = keys.reshape(-1).sort(stable=True).indices[:real]
    source_R = slot_N.div(top_k, rounding_mode="floor")
    byrow = slot_N.sort()
    byrow_N, firsts_S = byrow.indices, torch.arange(0, (num_rows + 1) * top_k, top_k, device=device)
    position_N, padding, padded = None, None, real
    if pad_multiple > 1:  # counts [1, 2] and multiple 2: real rows stand at [0, 2, 3], the padding at [1]
        padded = sum(round_up(count, pad_multiple) for count in counts)
        shifts = accumulate((-count % pad_multiple for count in counts[:-1]), initial=0)
        shift_L, counts_L = to_device([*shifts, *counts], device).view(2, len(counts)).unbind()
        position_N = torch.arange(real, device=device) + shift_L.repeat_interleave(counts_L, output_size=real)
        is_padding = torch.ones(padded, dtype=torch.bool, device=device).index_fill_(0, position_N, 0)
        padding = true_positions(is_padding, padded - real).view(-1)
        source_R = source_R.new_zeros(padded).index_copy_(0, position_N, source_R)
        byrow_N = position_N.index_select(0, byrow_N)
    return SlotIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=padded,
        pad_multiple=pad_multiple,
        source_R=source_R,
        slot_N=slot_N,
        position_N=position_N,
        byrow_N=byrow_N,
        cu_S=torch.searchsorted(byrow.values, firsts_S),
        padding=padding,
        counts=counts,
        real_L=real_L,
    )


def group_statically(
    keys_SK: Tensor,
    num_keys: int,
    *,
    rows: int,
    buffer_rows: int,
    pad_multiple: int,
    weights_SK: Tensor | None,
    first: int = 0,
) -> SlotIndex:
    """Make the index of a table of keys for a buffer of fixed size.

    Args:
        keys_SK: int16, int32 or int64 (S, K), S at least 1. A slot whose entry lies outside ``[0, num_keys)`` has no
            key.
        num_keys: L.
        rows: Largest number of slots that get a place. If more slots have a key, the slots with the smallest weights
            are dropped. Of slots with equal weights, the last are dropped first.
        buffer_rows: R, the size of the buffer: room for ``rows`` rows and their padding.
        pad_multiple: As in ``group_slots``.
        weights_SK: floating (S, K), the weights that decide which slots are dropped; None if there is room for all.
        first: As in ``group_slots``.

    Cost: one stable sort of S*K keys, a second one with ``weights_SK``, and single passes; no host sync.
    """
    num_rows, top_k = keys_SK.shape
    keys_N, needed = kept_keys(keys_SK - first if first else keys_SK, num_keys, weights_SK, rows)
    sorted_N, slot_N = keys_N.sort(stable=True)
    real_L = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys_N.device)
    real_L = real_L.scatter_add_(0, keys_N.long(), torch.ones_like(slot_N))[:num_keys]
    padded_L = real_L + (-real_L % pad_multiple)
    shift_L = running_total(padded_L) - running_total(real_L)
    in_order_N = torch.arange(len(keys_N), device=keys_N.device)
    position_N = torch.where(sorted_N < num_keys, in_order_N + shift_L.index_select(0, sorted_N.int()), buffer_rows)
    filled_R = torch.full((buffer_rows + 1,), -1, dtype=torch.int64, device=keys_N.device)
    filled_R.index_copy_(0, position_N, slot_N.div(top_k, rounding_mode="floor"))
    padding = None
    if pad_multiple > 1:
        step = torch.arange(pad_multiple - 1, device=keys_N.device)
        at = (padded_L.cumsum(0) - padded_L + real_L).unsqueeze(1) + step
        padding = torch.where(step < (padded_L - real_L).unsqueeze(1), at, buffer_rows).view(-1)
    position_SK = torch.empty_like(position_N).index_copy_(0, slot_N, position_N)
    is_real_SK = position_SK < buffer_rows
    return SlotIndex(
        num_rows=num_rows,
        top_k=top_k,
        num_grouped=buffer_rows,
        pad_multiple=pad_multiple,
        source_R=filled_R[:buffer_rows].clamp(min=0),
        filled_R=filled_R[:buffer_rows],
        slot_N=slot_N,
        position_N=position_N,
        byrow_N=front(position_SK, is_real_SK),
        cu_S=running_total(is_real_SK.view(num_rows, top_k).sum(1)),
        padding=padding,
        real_L=real_L,
        padded_L=padded_L,
        needed=needed,
    )


def kept_keys(keys_SK: Tensor, num_keys: int, weights_SK: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Return the key of each slot that gets a place, L for the others: (N,); and the number of keys, int64 ().

    Arguments are those of ``group_statically``. The number includes keys of dropped slots.
    """
    keys_N = keys_SK.reshape(-1)
    keys_N = torch.where((keys_N < 0) | (keys_N >= num_keys), num_keys, keys_N)
    needed = (keys_N < num_keys).sum()
    if weights_SK is not None:
        keys_N = torch.where(heaviest(weights_SK.reshape(-1), keys_N < num_keys, rows), keys_N, num_keys)
    return keys_N, needed


def heaviest(weights: Tensor, is_real: Tensor, room: int) -> Tensor:
    """Mark at most ``room`` of the real entries of each row, the ones with the largest weights: bool (..., N).

    Of entries with equal weights, the first are marked. A NaN counts as the largest weight: it must reach the output
    and not be dropped.
    """
    lightness = -torch.where(weights.isnan(), float("inf"), weights)
    # An entry that is not real becomes NaN, which sorts behind every number.
    order = torch.where(is_real, lightness, float("nan")).sort(stable=True).indices
    return torch.zeros_like(is_real).scatter_(-1, order[..., :room], True) & is_real


def front(values_N: Tensor, is_kept_N: Tensor) -> Tensor:
    """Move the kept values to the front, in their order, and fill the rest with zeros.

    For example, [5, 6, 7] with only the last two kept becomes [6, 7, 0].
    """
    count = len(values_N)
    target_N = torch.where(is_kept_N, is_kept_N.cumsum(0) - 1, count)
    return values_N.new_zeros(count + 1).index_copy_(0, target_N, values_N)[:count]


def running_total(counts: Tensor) -> Tensor:
    """Return int64 (n+1,): 0, then the inclusive sums of the n counts. [3, 1] becomes [0, 3, 4]."""
    total = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=total[1:])
    return total


def count_values(values_N: Tensor, length: int, *, graph_safe: bool = False) -> Tensor:
    """Count how often each number of ``range(length)`` occurs in int64 (N,). Return int64 (length,). No host sync."""
    if values_N.device.type == "cpu" and not graph_safe:
        # Faster on the CPU. Its length depends on the largest value, for which a GPU would wait.
        return torch.bincount(values_N, minlength=length)
    counts = torch.zeros(length, dtype=torch.int64, device=values_N.device)
    return counts.scatter_add_(0, values_N, torch.ones_like(values_N))


def count_experts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Count how many slots name each expert: int64 (E,). Ids of -1 are not counted. No host sync, integer sums only."""
    return count_values((ids_TK + 1).reshape(-1), num_experts + 1)[1:]


def true_positions(mask: Tensor, count: int | None) -> Tensor:
    """Return the positions at which the mask is True, in order: int64 (count, dims). No host sync.

    Args:
        mask: bool.
        count: The number of True entries, if the host knows it; needed on a GPU only.
    """
    if mask.is_cpu:
        return mask.nonzero()  # three times as fast on the CPU; on a GPU it would wait for the count
    assert count is not None
    return torch.nonzero_static(mask, size=count)
