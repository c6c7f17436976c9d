"""What v2's combine sends back: one row per token that arrived here, or one per choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.sums import reduced
from moe_dispatch.testing.emulation.refusals import EmulatedAbort


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Returning:
    """Rows (M, D) bfloat16 and weights (M, K), with the rank, token and choice that each goes back to."""

    x: Tensor
    topk_weights: Tensor | None
    source: Tensor
    token: Tensor
    choice: Tensor


def returning(x: Tensor, topk_weights: Tensor | None, handle: EPHandle, *, sends_all: bool) -> Returning:
    """The three cases of deep_ep/include/deep_ep/impls/combine.cuh:121-224 of v2."""
    num_ranks = handle.psum_num_recv_tokens_per_scaleup_rank.shape[0]
    rows = handle.recv_src_metadata.shape[0]
    if rows == handle.num_max_tokens_per_rank * num_ranks:
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])  # of a dispatch that did not wait for counts
    metadata = handle.recv_src_metadata[:rows].long()
    num_topk = metadata.shape[1] - 2
    source, master = metadata[:, 1] // num_topk, metadata[:, 1] % num_topk
    token = metadata[:, 0] % handle.num_max_tokens_per_rank
    if not handle.do_expand:
        weights = None if topk_weights is None else topk_weights.detach()[:rows]
        return Returning(x=x[:rows], topk_weights=weights, source=source, token=token, choice=master)
    places = metadata[:, 2:]
    _require_rows(x, places)
    if sends_all:
        row, choice = (places >= 0).nonzero(as_tuple=True)
        sent = x[places[row, choice]]
        return Returning(x=sent, topk_weights=None, source=source[row], token=token[row], choice=choice)
    here = places >= 0
    sums = reduced(x[places.clamp(min=0)], here, []) if rows else x[:0]
    weights = None
    if topk_weights is not None:
        weights = (
            torch.where(here, topk_weights.detach()[places.clamp(min=0)], 0.0) if rows else x.new_zeros(0, num_topk)
        )
    return Returning(x=sums, topk_weights=weights, source=source, token=token, choice=master)


def _require_rows(x: Tensor, places: Tensor) -> None:
    """Expanded, nothing compares the rows of x with the handle (csrc/elastic/buffer.hpp:1219)."""
    needed = int(places.max()) + 1 if places.numel() else 0
    if needed > x.shape[0]:
        raise EmulatedAbort(
            f"ElasticBuffer.combine: x must have every row that its dispatch filled, {needed} or more, got "
            f"{x.shape[0]}. The kernel reads past its end. Pass a tensor with as many rows as recv_x."
        )
