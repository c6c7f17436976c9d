"""The rows of a combine of v2 and V2.5: which rows go back, their exchange, and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.elastic.call import CombineInput
from moe_dispatch_testing.emulation.elastic.dispatch import masters
from moe_dispatch_testing.emulation.elastic.handle import EPHandle
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.memory import stacked, take, uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Returning:
    """Rows (M, D) bfloat16 and weights (M, K) to send, and the rank, token and choice that each row goes back to."""

    x: Tensor
    topk_weights: Tensor | None
    source: Tensor
    token: Tensor
    choice: Tensor


def returning(sent: CombineInput, handle: EPHandle, *, sends_all: bool) -> Returning:
    """Choose the rows to send back (deep_ep/include/deep_ep/impls/combine.cuh:121-224 of v2).

    Compact rows go back unchanged. With ``sends_all``, all expanded rows go back. Otherwise the expanded rows of a
    token are added up, and the sum goes back.
    """
    x, topk_weights = sent.x.detach(), sent.topk_weights
    num_ranks = handle.psum_num_recv_tokens_per_scaleup_rank.shape[0]
    rows = handle.recv_src_metadata.shape[0]
    if rows == handle.num_max_tokens_per_rank * num_ranks:
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])  # if the dispatch did not wait for the counts
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
        rows_of_choices = x[places[row, choice]]
        return Returning(x=rows_of_choices, topk_weights=None, source=source[row], token=token[row], choice=choice)
    here = places >= 0
    sums = reduced(x[places.clamp(min=0)], here, []) if rows else x[:0]
    weights = None
    if topk_weights is not None:
        weights = (
            torch.where(here, topk_weights.detach()[places.clamp(min=0)], 0.0)
            if rows
            else topk_weights.new_zeros(0, num_topk)
        )
    return Returning(x=sums, topk_weights=weights, source=source, token=token, choice=master)


def _require_rows(x: Tensor, places: Tensor) -> None:
    """Refuse too few expanded rows, which the release does not count (csrc/elastic/buffer.hpp:1219)."""
    needed = int(places.max()) + 1 if places.numel() else 0
    if needed > x.shape[0]:
        raise EmulatedAbort(
            f"combine: x must have every row that its dispatch filled, {needed} or more, got "
            f"{x.shape[0]}. The kernel reads past its end. Pass a row for each row of recv_x."
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Returned:
    """The combine buffer by token and choice: rows (T, K, D) and weights (T, K, K), NaN where no rank sent a row."""

    x: Tensor
    topk_weights: Tensor | None


def bring_back(exchange: Exchange, rows: Returning, topk_idx: Tensor) -> Returned:
    """Send every row back to its token and choice. ``topk_idx`` (T, K) holds the choices of this rank's own tokens."""
    num_tokens, num_topk = topk_idx.shape
    by_rank = [(rows.source == rank).nonzero().flatten() for rank in range(exchange.size)]

    def arrived(values: Tensor) -> Tensor:
        return stacked(exchange.rows([take(values, index) for index in by_rank]))

    index = arrived(torch.stack([rows.token, rows.choice], dim=1).long())
    is_inside = (index[:, 0] >= 0) & (index[:, 0] < num_tokens)
    at = index[is_inside].unbind(1)
    back = uninitialised((num_tokens, num_topk, rows.x.shape[1]), rows.x.dtype)
    back[at] = arrived(rows.x)[is_inside]
    if rows.topk_weights is None:
        return Returned(x=back, topk_weights=None)
    weights = uninitialised((num_tokens, num_topk, num_topk), torch.float32)
    weights[at] = arrived(rows.topk_weights)[is_inside]
    return Returned(x=back, topk_weights=weights)


def reduced(rows: Tensor, valid: Tensor, biases: list[Tensor]) -> Tensor:
    """Add up the biases, then the rows (T, N, D) that ``valid`` (T, N) flags, in the order of dim 1: bfloat16 (T, D).

    Here all sums are in float32 and are rounded once. The kernel does the same, except that it adds one or two rows
    without a bias in bfloat16, which gives the same number (deep_ep/include/deep_ep/impls/combine_utils.cuh:67-70 of
    v2).
    """
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for addend in [*biases, *torch.where(valid[:, :, None], rows, 0).unbind(1)]:
        total += addend.float()
    return total.bfloat16()


def combined_weights(received: Tensor, owner: Tensor) -> Tensor:
    """Pick for each choice the weight that its rank sent, float32 (T, K). Weights are not added up.

    ``received`` is (T, K, K). If m is the master choice of a rank, [t, m] holds the weights that this rank sent.

    Source: deep_ep/include/deep_ep/impls/combine_reduce_epilogue.cuh:128-139 of v2.
    """
    if owner.numel() == 0:
        return torch.zeros(owner.shape, dtype=torch.float32)
    leads = masters(owner)
    is_master_of = (owner[:, :, None] == owner[:, None, :]) & leads[:, None, :]
    master = is_master_of.int().argmax(2)
    by_choice = received.gather(1, master[:, :, None].expand_as(received)).diagonal(dim1=1, dim2=2)
    return torch.where(owner >= 0, by_choice, 0.0)
