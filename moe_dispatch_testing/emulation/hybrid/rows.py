"""Permute and unpermute of HybridEP: copy received rows to expert rows, and add expert rows up to received rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid.maps import rounded_up
from moe_dispatch_testing.emulation.memory import uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort

_POISON = torch.iinfo(torch.int32).min


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Tokens (n, H), their probabilities float32 (n, L * ranks_per_node) or (R,), and scales float32 (n, H / 128)."""

    tokens: Tensor
    probs: Tensor | None = None
    scales: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Apply a function to every tensor."""
        return Rows(
            tokens=function(self.tokens),
            probs=None if self.probs is None else function(self.probs),
            scales=None if self.scales is None else function(self.scales),
        )

    def detached(self) -> Rows:
        """Detach the rows from autograd, because kernels work outside autograd."""
        return self.each(Tensor.detach)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """``dest[i]`` is the expert row of received row ``row[i]`` at expert ``expert[i]``. ``zeroed`` is the padding."""

    row: Tensor
    expert: Tensor
    dest: Tensor
    zeroed: Tensor
    num_rows: int  # number of received rows
    dropped_whole: bool  # whether some received row lost all of its expert rows


def emptied(permutation: Permutation) -> Permutation:
    """Drop every expert row."""
    none = permutation.row[:0]
    return replace(permutation, row=none, expert=none, dest=none, zeroed=none)


def permutation_of_dense_map(
    dense_to_expert: Tensor, num_rows: int, tokens_per_expert: Tensor, pad_multiple: int
) -> Permutation:
    """Read a dense map. With ``pad_multiple`` <= 0 there are no padding rows (94a9f8f permute.cu:191-233)."""
    row, expert = (dense_to_expert[:num_rows] >= 0).nonzero(as_tuple=True)
    counts = tokens_per_expert.to(torch.int64)
    padded = rounded_up(counts, pad_multiple)
    ends = padded.cumsum(0) - padded + counts
    zeroed = [torch.arange(int(end), int(end + pad)) for end, pad in zip(ends, padded - counts, strict=True)]
    return Permutation(
        row=row,
        expert=expert,
        dest=dense_to_expert[row, expert].to(torch.int64),
        zeroed=torch.cat(zeroed),
        num_rows=num_rows,
        dropped_whole=row.unique().numel() < num_rows,
    )


def permutation_of_row_ids(row_id_map: Tensor, num_rows: int, pad_multiple: int) -> Permutation:
    """Read row ids. The last ``pad_multiple`` rows of the map name the padding rows (34152ae permute.cu:300-370)."""
    padding = row_id_map[num_rows : num_rows + max(pad_multiple, 0)]
    if padding.shape[0] < pad_multiple or bool((padding == _POISON).any()):
        raise EmulatedAbort(
            f"permute_kernel: row_id_map must have padding rows for pad_multiple ({pad_multiple}), got uninitialised "
            "rows. Pass the pad_multiple of the dispatch that made the handle."
        )
    row, expert = (row_id_map[:num_rows] > 0).nonzero(as_tuple=True)
    return Permutation(
        row=row,
        expert=expert,
        dest=row_id_map[row, expert].to(torch.int64) - 1,
        zeroed=-padding[padding < 0].to(torch.int64) - 1,
        num_rows=num_rows,
        dropped_whole=row.unique().numel() < num_rows,
    )


def permute(dense: Rows, permutation: Permutation, num_out: int, *, first_column: int) -> Rows:
    """Return the expert rows. Rows that ``permutation`` does not name stay uninitialised.

    Args:
        dense: Received rows, in order. Their probs have one column for each expert of the node.
        permutation: Expert rows of each received row.
        num_out: Number of rows of the output.
        first_column: Column of probs that belongs to local expert 0.
    """
    return Rows(
        tokens=_placed(dense.tokens[permutation.row], permutation, num_out),
        probs=None
        if dense.probs is None
        else _placed(dense.probs[permutation.row, permutation.expert + first_column], permutation, num_out),
        scales=None if dense.scales is None else _placed(dense.scales[permutation.row], permutation, num_out),
    )


def _placed(values: Tensor, permutation: Permutation, num_out: int) -> Tensor:
    out = uninitialised((num_out, *values.shape[1:]), values.dtype)
    as_bytes = out.view(torch.uint8) if out.dtype.itemsize == 1 else out  # float8 has no index_put
    as_bytes[permutation.dest] = values.view(as_bytes.dtype)
    as_bytes[permutation.zeroed] = 0
    return out


def unpermute(expert: Rows, permutation: Permutation, *, first_column: int, num_columns: int) -> Rows:
    """Add up the expert rows of each received row in float32, and round once to bfloat16. Do not read padding."""
    sums = torch.zeros(permutation.num_rows, expert.tokens.shape[1], dtype=torch.float32)
    for local in permutation.expert.unique().tolist():
        of_expert = permutation.expert == local
        sums[permutation.row[of_expert]] += expert.tokens[permutation.dest[of_expert]].float()
    probs = None
    if expert.probs is not None:
        probs = torch.zeros(permutation.num_rows, num_columns, dtype=torch.float32)
        probs[permutation.row, permutation.expert + first_column] = expert.probs[permutation.dest]
    return Rows(tokens=sums.to(torch.bfloat16), probs=probs)


def require_inside(permutation: Permutation, num_rows: int, what: str, *, with_padding: bool) -> None:
    """Require that ``permutation`` names no expert row past ``num_rows``.

    Raises:
        EmulatedAbort: A row is past ``num_rows``. The kernel does not check this, and reads or writes the row.
    """
    touched = torch.cat([permutation.dest, permutation.zeroed]) if with_padding else permutation.dest
    last = int(touched.max()) if touched.numel() else -1
    if last >= num_rows:
        raise EmulatedAbort(
            f"{what} expert row {last} of {num_rows}: deep_ep does not check it, and the kernel corrupts memory or "
            "traps. Raise num_permuted_tokens, or pass every row that dispatch returned."
        )
