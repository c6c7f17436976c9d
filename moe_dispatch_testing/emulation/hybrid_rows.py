"""The rows of a HybridEP dispatch: which rows go where, their exchange, their order by expert, and their sums.

P ranks are N nodes of M ranks each. Each rank has T rows and L of the E experts, and receives R rows. They give
rows for its experts, one for each received row and expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import RankExchange
from moe_dispatch_testing.emulation.memory import stacked, take, uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HybridRows:
    """Tokens (R, H), their probabilities float32 (R, L*M), and scales float32 (R, H / 128), or those of expert rows."""

    tokens: Tensor
    probs: Tensor | None = None
    scales: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> HybridRows:
        """Apply a function to every tensor."""
        return HybridRows(
            tokens=function(self.tokens),
            probs=None if self.probs is None else function(self.probs),
            scales=None if self.scales is None else function(self.scales),
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HybridPath:
    """The way of the rows of one dispatch, as one rank finds it in the routing of all ranks.

    Attributes:
        exchange: Collectives of the group.
        ranks_per_node: M.
        in_rank_TP: bool, whether each row of this rank goes to each rank.
        rows_from: Number of rows that each rank sends here.
        local_RL: bool, the experts of this rank that each received row goes to.
        expert_row_RL: int64, the expert row of each received row and expert, -1 if there is none or it was dropped.
        overflowed: Whether expert rows were dropped.
    """

    exchange: RankExchange
    ranks_per_node: int
    in_rank_TP: Tensor
    rows_from: list[int]
    local_RL: Tensor
    expert_row_RL: Tensor
    overflowed: bool

    @staticmethod
    def of(
        exchange: RankExchange, ranks_per_node: int, map_TE: Tensor, *, pad_multiple: int, limit: int | None
    ) -> HybridPath:
        """Gather the routing, bool (T, E), and number the rows. Received rows are by source rank and token.

        Expert rows are by expert, with each expert padded to ``pad_multiple``. Rows with number ``limit`` or more are
        dropped, so the experts with the highest ids lose rows first (94a9f8f hybrid_ep_backend.cuh:5150-5222, 5429).
        """
        size, rank = exchange.size, exchange.rank
        maps = torch.cat(exchange.gather(map_TE)).view(size, len(map_TE), size, -1)
        here_PTL = maps[:, :, rank]
        needed_PT = here_PTL.any(-1)
        local_RL = here_PTL[needed_PT]
        counts = local_RL.sum(0)
        padded = _rounded_up(counts, pad_multiple)
        starts = padded.cumsum(0) - padded
        expert_row_RL = torch.where(local_RL, starts + local_RL.cumsum(0) - 1, -1)
        is_dropped = expert_row_RL >= limit if limit is not None else torch.zeros_like(local_RL)
        return HybridPath(
            exchange=exchange,
            ranks_per_node=ranks_per_node,
            in_rank_TP=maps[rank].any(-1),
            rows_from=needed_PT.sum(1).tolist(),
            local_RL=local_RL,
            expert_row_RL=torch.where(is_dropped, -1, expert_row_RL),
            overflowed=bool(is_dropped.any()),
        )

    def told(self) -> list[list[int]]:
        """Return the numbers of rows that this rank sends and receives, by rank."""
        return [self.in_rank_TP.sum(0).tolist(), self.rows_from]

    @property
    def num_received(self) -> int:
        return len(self.local_RL)

    @property
    def lost_a_token(self) -> bool:
        """Whether some received row lost all of its expert rows."""
        return bool((self.expert_row_RL < 0).all(1).any())

    def tokens_per_expert(self) -> Tensor:
        """Return the number of expert rows of each expert that were not dropped, int64 (L,), without padding."""
        return (self.expert_row_RL >= 0).sum(0)

    def padded_tokens_per_expert(self, pad_multiple: int) -> Tensor:
        return _rounded_up(self.tokens_per_expert(), pad_multiple)

    def send(self, rows: HybridRows) -> HybridRows:
        """Send rows. Return the n received rows.

        Probabilities are sent as float32 (T, E). A rank receives only the columns of its node's experts.
        """
        tokens = self._tokens()

        def received(values: Tensor) -> Tensor:
            return stacked(self.exchange.rows([take(values, index) for index in tokens]))

        probs = rows.probs
        if probs is not None:
            parts = [probs[index, self._columns_of_node(rank)] for rank, index in enumerate(tokens)]
            probs = stacked(self.exchange.rows(parts))
        scales = None if rows.scales is None else received(rows.scales)
        return HybridRows(tokens=received(rows.tokens), probs=probs, scales=scales)

    def permute(self, dense: HybridRows, num_out: int, pad_multiple: int) -> HybridRows:
        """Return the expert rows (R, ...). Rows that hold neither a token nor padding stay uninitialised.

        With ``pad_multiple`` <= 0, no padding is written.
        """
        row, expert = (self.expert_row_RL >= 0).nonzero(as_tuple=True)
        dest = self.expert_row_RL[row, expert]
        counts = self.tokens_per_expert()
        padded = _rounded_up(counts, pad_multiple)
        ends = padded.cumsum(0) - padded + counts
        spans = zip(ends.tolist(), (padded - counts).tolist(), strict=True)
        padding = torch.cat([torch.arange(end, end + pad) for end, pad in spans])
        _require_inside(torch.cat([dest, padding]), num_out, "permute writes")

        def placed(values: Tensor) -> Tensor:
            out = uninitialised((num_out, *values.shape[1:]), values.dtype)
            flat = out.view(torch.uint8) if out.dtype.itemsize == 1 else out  # float8 has no index_put
            flat[dest] = values.view(flat.dtype)
            flat[padding] = 0
            return out

        first = self._columns_of_rank().start
        return HybridRows(
            tokens=placed(take(dense.tokens, row)),
            probs=None if dense.probs is None else placed(dense.probs[row, first + expert]),
            scales=None if dense.scales is None else placed(dense.scales[row]),
        )

    def unpermute(self, rows: HybridRows) -> HybridRows:
        """Add up the expert rows of each received row in float32, and round once to bfloat16. Do not read padding."""
        _require_inside(self.expert_row_RL, len(rows.tokens), "unpermute reads")
        sums = torch.zeros(self.num_received, rows.tokens.shape[1], dtype=torch.float32)
        probs = torch.zeros(self.num_received, self.local_RL.shape[1] * self.ranks_per_node, dtype=torch.float32)
        first = self._columns_of_rank().start
        for expert, expert_row in enumerate(self.expert_row_RL.unbind(1)):
            kept = expert_row >= 0
            sums[kept] += rows.tokens[expert_row[kept]].float()
            if rows.probs is not None:
                probs[kept, first + expert] = rows.probs[expert_row[kept]]
        return HybridRows(tokens=sums.to(torch.bfloat16), probs=None if rows.probs is None else probs)

    def bring_back(self, rows: HybridRows, *, own_slice: bool) -> HybridRows:
        """Send rows back. Return the sums of this rank's tokens, bfloat16 (T, H), and probabilities, float32 (T, E).

        Sums are in float32. The rows of this node's ranks come first, then the sums of the other nodes in descending
        order from this node. Another node rounds its sum to bfloat16 before it sends it (94a9f8f
        hybrid_ep_backend.cuh:3300-3540).

        Args:
            rows: A row for each row that this rank received.
            own_slice: Whether to take from each rank only the probabilities of its own experts. If False, add up all
                columns of its node.
        """
        tokens, size = self._tokens(), self.exchange.size
        arrived = self.exchange.rows(rows.tokens.split(self.rows_from))
        total = torch.zeros(len(self.in_rank_TP), rows.tokens.shape[1], dtype=torch.float32)
        first_of_node = self.exchange.rank - self.exchange.rank % self.ranks_per_node
        for step in range(0, size, self.ranks_per_node):
            first = (first_of_node - step) % size
            of_node = torch.zeros_like(total)
            for rank in range(first, first + self.ranks_per_node):
                of_node[tokens[rank]] += arrived[rank].float()
            total += of_node if step == 0 else of_node.to(torch.bfloat16).float()
        if rows.probs is None:
            return HybridRows(tokens=total.to(torch.bfloat16))
        width, local = rows.probs.shape[1], rows.probs.shape[1] // self.ranks_per_node
        probs = torch.zeros(len(total), size * local, dtype=torch.float32)
        for rank, values in enumerate(self.exchange.rows(rows.probs.split(self.rows_from))):
            node, number = divmod(rank, self.ranks_per_node)
            columns = slice(number * local, (number + 1) * local) if own_slice else slice(0, width)
            probs[tokens[rank], slice(node * width + columns.start, node * width + columns.stop)] += values[:, columns]
        return HybridRows(tokens=total.to(torch.bfloat16), probs=probs)

    def _tokens(self) -> list[Tensor]:
        """List the rows of this rank that go to each rank, in ascending order."""
        return [column.nonzero().flatten() for column in self.in_rank_TP.unbind(1)]

    def _columns_of_node(self, rank: int) -> slice:
        width = self.local_RL.shape[1] * self.ranks_per_node
        node = rank // self.ranks_per_node
        return slice(node * width, (node + 1) * width)

    def _columns_of_rank(self) -> slice:
        """Return the columns of this rank's experts among those of its node."""
        local, number = self.local_RL.shape[1], self.exchange.rank % self.ranks_per_node
        return slice(number * local, (number + 1) * local)


def _rounded_up(counts: Tensor, multiple: int) -> Tensor:
    return counts if multiple <= 0 else -(-counts // multiple) * multiple


def _require_inside(rows: Tensor, num_rows: int, what: str) -> None:
    last = int(rows.max()) if rows.numel() else -1
    rule = f"{what} expert row {last} of {num_rows}. Raise num_permuted_tokens, or pass every row of the dispatch"
    require(last < num_rows, rule, EmulatedAbort)


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Turn ids (T, K) and weights (T, K) into the bool map (T, E) and float32 probabilities (T, E).

    Raises:
        EmulatedAbort: An id, such as -1, is outside [0, E). On the GPU scatter traps.
    """
    ids = topk_idx.to(torch.int64)
    rule = f"topk_idx must be in [0, {num_of_experts}). To send a row to no expert, pass a routing_map instead"
    require(not bool(((ids < 0) | (ids >= num_of_experts)).any()), rule, EmulatedAbort)
    return scattered(ids, topk_weights, num_of_tokens, num_of_experts)


def scattered(ids: Tensor, weights: Tensor | None, num_rows: int, num_experts: int) -> tuple[Tensor, Tensor | None]:
    """Turn ids and weights into a map and probabilities. Ids outside [0, E) route nowhere.

    An expert that a row names twice gets both weights.
    """
    columns = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(torch.int64)
    routing_map = torch.zeros(num_rows, num_experts + 1, dtype=torch.bool).scatter_(1, columns, True)
    routing_map = routing_map[:, :num_experts].contiguous()
    if weights is None:
        return routing_map, None
    probs = torch.zeros(num_rows, num_experts + 1, dtype=torch.float32)
    probs.scatter_add_(1, columns, weights.detach().to(torch.float32))
    return routing_map, probs[:, :num_experts].contiguous()


def unread_maps(route: HybridPath) -> dict[str, Any]:
    """Return the maps of a handle that only kernels read, uninitialised. Their shapes are those of the release."""
    size, ranks = route.exchange.size, route.ranks_per_node
    rows, nodes = len(route.in_rank_TP), size // ranks
    return {
        "sparse_to_dense_map": uninitialised((nodes * rows, ranks), torch.int32),
        "rdma_to_attn_map": uninitialised((max(16, rows + -rows % 16), nodes), torch.bool),
        "attn_to_rdma_map": uninitialised((rows, nodes - 1), torch.bool),
        "dense_chunk_layout": uninitialised((size,), torch.int32),
        "dense_to_expert_map": uninitialised((size * rows, route.local_RL.shape[1]), torch.int32),
    }
