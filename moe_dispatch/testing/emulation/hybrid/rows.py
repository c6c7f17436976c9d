"""Between the rows a rank receives and the rows of its experts: permute and unpermute of HybridEP, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.hybrid.maps import rounded_up
from moe_dispatch.testing.emulation.memory import uninitialised
from moe_dispatch.testing.emulation.refusals import EmulatedAbort

_POISON = torch.iinfo(torch.int32).min


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Tokens (n, H), with probabilities float32 (n, L * ranks_per_node) or (R,) and scales float32 (n, H / 128)."""

    tokens: Tensor
    probs: Tensor | None = None
    scales: Tensor | None = None


def detached(rows: Rows) -> Rows:
    """Values without autograd: the kernels see memory only."""
    return Rows(
        tokens=rows.tokens.detach(),
        probs=None if rows.probs is None else rows.probs.detach(),
        scales=None if rows.scales is None else rows.scales.detach(),
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """``dest[i]`` is the expert row of received row ``row[i]`` for expert ``expert[i]``; ``zeroed`` is padding."""

    row: Tensor
    expert: Tensor
    dest: Tensor
    zeroed: Tensor
    num_rows: int  # received
    dropped_whole: bool  # a received row of which no expert row is left


def nowhere(places: Places) -> Places:
    """No expert row at all."""
    none = places.row[:0]
    return replace(places, row=none, expert=none, dest=none, zeroed=none)


def places_of_dense_map(dense_to_expert: Tensor, num_rows: int, tokens_per_expert: Tensor, pad_multiple: int) -> Places:
    """``pad_multiple`` <= 0 leaves padding rows unwritten (94a9f8f permute.cu:191-233)."""
    row, expert = (dense_to_expert[:num_rows] >= 0).nonzero(as_tuple=True)
    counts = tokens_per_expert.to(torch.int64)
    padded = rounded_up(counts, pad_multiple)
    ends = padded.cumsum(0) - padded + counts
    zeroed = [torch.arange(int(end), int(end + pad)) for end, pad in zip(ends, padded - counts, strict=True)]
    return Places(
        row=row,
        expert=expert,
        dest=dense_to_expert[row, expert].to(torch.int64),
        zeroed=torch.cat(zeroed),
        num_rows=num_rows,
        dropped_whole=row.unique().numel() < num_rows,
    )


def places_of_row_ids(row_id_map: Tensor, num_rows: int, pad_multiple: int) -> Places:
    """Padding rows are those that ``pad_multiple`` rows after the received ones name (34152ae permute.cu:300-370)."""
    padding = row_id_map[num_rows : num_rows + max(pad_multiple, 0)]
    if padding.shape[0] < pad_multiple or bool((padding == _POISON).any()):
        raise EmulatedAbort(
            f"permute_kernel: pad_multiple ({pad_multiple}) reads rows of row_id_map that nobody wrote. Pass the "
            "pad_multiple of the dispatch that made the handle."
        )
    row, expert = (row_id_map[:num_rows] > 0).nonzero(as_tuple=True)
    return Places(
        row=row,
        expert=expert,
        dest=row_id_map[row, expert].to(torch.int64) - 1,
        zeroed=-padding[padding < 0].to(torch.int64) - 1,
        num_rows=num_rows,
        dropped_whole=row.unique().numel() < num_rows,
    )


def permute(dense: Rows, places: Places, num_out: int, *, first_column: int) -> Rows:
    """The expert rows; rows of the ``num_out`` that no place names stay uninitialised.

    Args:
        dense: received rows, in order; probs have one column for each expert of the node.
        places: where they go.
        num_out: rows of the output.
        first_column: column of probs that belongs to local expert 0.
    """
    return Rows(
        tokens=_placed(dense.tokens[places.row], places, num_out),
        probs=None
        if dense.probs is None
        else _placed(dense.probs[places.row, places.expert + first_column], places, num_out),
        scales=None if dense.scales is None else _placed(dense.scales[places.row], places, num_out),
    )


def _placed(values: Tensor, places: Places, num_out: int) -> Tensor:
    out = uninitialised((num_out, *values.shape[1:]), values.dtype)
    as_bytes = out.view(torch.uint8) if out.dtype.itemsize == 1 else out  # float8 has no index_put
    as_bytes[places.dest] = values.view(as_bytes.dtype)
    as_bytes[places.zeroed] = 0
    return out


def unpermute(expert: Rows, places: Places, *, first_column: int, num_columns: int) -> Rows:
    """Received rows: the sum of their expert rows in float32, rounded once to bfloat16; padding is never read."""
    sums = torch.zeros(places.num_rows, expert.tokens.shape[1])
    for local in places.expert.unique().tolist():
        of_expert = places.expert == local
        sums[places.row[of_expert]] += expert.tokens[places.dest[of_expert]].float()
    probs = None
    if expert.probs is not None:
        probs = torch.zeros(places.num_rows, num_columns)
        probs[places.row, places.expert + first_column] = expert.probs[places.dest]
    return Rows(tokens=sums.to(torch.bfloat16), probs=probs)


def require_inside(places: Places, num_rows: int, what: str, *, with_padding: bool) -> None:
    """No place may lie past ``num_rows`` expert rows.

    Raises:
        EmulatedAbort: one does, where the kernel reads or writes all the same.
    """
    touched = torch.cat([places.dest, places.zeroed]) if with_padding else places.dest
    last = int(touched.max()) if touched.numel() else -1
    if last >= num_rows:
        raise EmulatedAbort(
            f"{what} expert row {last} of {num_rows}: nothing checks that, so it corrupts memory or traps."
        )
