"""From the receive buffer of v2's ElasticBuffer to the tensors that dispatch returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.elastic.counts import Counts
from moe_dispatch.testing.emulation.elastic.moves import Arrived
from moe_dispatch.testing.emulation.elastic.routes import gaps
from moe_dispatch.testing.emulation.elastic.sizes import aligned
from moe_dispatch.testing.emulation.memory import grown, take, uninitialised


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows in their places; ``topk_idx`` only compact, (R, K); weights (R, K) compact, (R,) expanded."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor

    def with_column_major_sf(self) -> Rows:
        """Scale packs with token stride 1 and columns of whole 16 bytes (csrc/elastic/buffer.hpp:1094-1099)."""
        if self.sf is None:
            return self
        rows, packs = self.sf.shape
        out = torch.empty_strided((rows, packs), (1, aligned(rows, 16 // self.sf.element_size())), dtype=self.sf.dtype)
        return replace(self, sf=out.copy_(self.sf))


def local_ids(topk_idx: Tensor, rank: int, num_local_experts: int) -> Tensor:
    """Ids as the rank numbers its own experts, -1 for all others."""
    local = topk_idx - rank * num_local_experts
    return torch.where((topk_idx >= 0) & (local >= 0) & (local < num_local_experts), local, -1)


def compact(arrived: Arrived, ids: Tensor, num_rows: int) -> Rows:
    """As they lie. Weights are those of all choices, of other ranks' experts too (dispatch_copy_epilogue.cuh:184)."""
    return Rows(
        x=grown(arrived.x, num_rows),
        sf=None if arrived.sf is None else grown(arrived.sf, num_rows),
        topk_idx=grown(ids, num_rows),
        topk_weights=grown(arrived.topk_weights, num_rows),
    )


def expanded(arrived: Arrived, places: Tensor, num_rows: int, *, zero: Tensor | None) -> Rows:
    """A row for each choice that has a place, and zeros in the rows ``zero``."""
    row, choice = (places >= 0).nonzero(as_tuple=True)
    place = places[row, choice].long()

    def filled(values: Tensor) -> Tensor:
        out = uninitialised((num_rows, *values.shape[1:]), values.dtype)
        flat = out.view(torch.uint8) if out.element_size() == 1 else out
        flat[place] = take(values, row).view(flat.dtype)
        if zero is not None:
            flat[zero] = 0
        return out

    weights = uninitialised((num_rows,), torch.float32)
    weights[place] = arrived.topk_weights[row, choice]
    if zero is not None:
        weights[zero] = 0
    sf = None if arrived.sf is None else filled(arrived.sf)
    return Rows(x=filled(arrived.x), sf=sf, topk_idx=None, topk_weights=weights)


def padding(counts: Counts) -> Tensor:
    """The rows between the experts."""
    return gaps(counts.starts, counts.per_expert, counts.aligned)


def metadata(arrived: Arrived, ids: Tensor, places: Tensor | None, *, num_rows: int, capacity: int) -> Tensor:
    """int32 (num_rows, 2 + K): where each row came from (dispatch_copy_epilogue.cuh:188-206).

    Neither the tail nor, compact, the places are written.
    """
    rows, num_topk = ids.shape
    out = uninitialised((num_rows, 2 + num_topk), torch.int32)
    lanes = torch.arange(num_topk)
    master = torch.where(ids >= 0, lanes, -1).amax(1) if num_topk else torch.full((rows,), -1)
    out[:rows, 0] = (arrived.source * capacity + arrived.token).int()
    out[:rows, 1] = (arrived.source * num_topk + master).int()
    if places is not None:
        out[:rows, 2:] = places
    return out
