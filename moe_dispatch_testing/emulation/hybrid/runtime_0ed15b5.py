"""``hybrid_ep_cpp.HybridEpBuffer`` of 0ed15b5: maps, dispatch and combine."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid.checks import (
    c_assert,
    check_capacity,
    check_chunk,
    check_combine,
    check_dispatch,
    failed_compilation,
    undefined_unless,
)
from moe_dispatch_testing.emulation.hybrid.config import HybridEpConfigInstance, TokenDataType
from moe_dispatch_testing.emulation.hybrid.handle import Handle
from moe_dispatch_testing.emulation.hybrid.maps import Topology, routing_rows, row_ids, scan
from moe_dispatch_testing.emulation.hybrid.rows import (
    Rows,
    permutation_of_row_ids,
    permute,
    require_inside,
    unpermute,
)
from moe_dispatch_testing.emulation.hybrid.wire import combine_rows, dispatch_rows
from moe_dispatch_testing.emulation.memory import grown
from moe_dispatch_testing.emulation.refusals import require_cpu

_BACKEND = "hybrid_ep_backend.cuh"


@final
class RuntimeOf0ed15b5:
    """The buffers of one rank. Every method is collective and works outside autograd."""

    def __init__(
        self, exchange: Exchange, topology: Topology, config: HybridEpConfigInstance, num_of_experts: int
    ) -> None:
        self._exchange = exchange
        self._topology = topology
        self._config = config
        self._experts = num_of_experts
        with exchange.entrance("HybridEpBuffer.init_buffer"):
            rows = config.max_num_of_tokens_per_rank * exchange.size
            c_assert(rows % 4 == 0, f"max_num_of_tokens_for_experts ({rows}) % 4 == 0", "hybrid_ep.cu:244")

    def metadata_preprocessing(self, routing: Tensor, rows: int) -> Handle:
        """Gather the routing, bool (T, E), and scan it.

        Raises:
            EmulatedHang: Ranks have different row counts.
        """
        with self._exchange.entrance("HybridEpBuffer.metadata_preprocessing") as entry:
            self._check_routing(routing, rows)
            entry.same = {"num_of_tokens_per_rank": rows}
        scanned = scan(torch.cat(self._exchange.gather(routing)), self._topology)
        return Handle(
            sparse_to_dense_map=scanned.sparse_to_dense_map,
            rdma_to_attn_map=scanned.rdma_to_attn_map,
            attn_to_rdma_map=scanned.attn_to_rdma_map,
            num_dispatched_tokens_tensor=torch.tensor([scanned.num_dispatched], dtype=torch.int32),
            local_expert_routing_map=routing_rows(scanned, scanned.received_PT.shape[0]),
            num_of_tokens_per_rank=rows,
            config=self._config,
        )

    def _check_routing(self, routing: Tensor, rows: int) -> None:
        require_cpu("HybridEpBuffer", routing)
        if routing.shape != (rows, self._experts):
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size: the routing map must be "
                f"{(rows, self._experts)}, got {tuple(routing.shape)}."
            )
        here = self._config.num_of_experts_per_rank * self._exchange.size
        undefined_unless(self._experts == here, f"num_of_experts must be {here}, got {self._experts}.")
        undefined_unless(
            rows > 0, "Every rank must have at least one row, got 0. Kernels take an empty remainder for a whole chunk."
        )

    def dispatch(self, handle: Handle, rows: Rows, received: int) -> Rows | None:
        """Send rows, and return the first ``received`` rows that arrive, or all if it is negative (executor.cu:115).

        Return None if there are no such rows.
        """
        dense = self._received(handle, rows, "dispatch")
        number = handle.num_dispatched if received < 0 else received
        if number == 0:
            return None
        return dense.each(lambda values: _resized(values, number))

    def dispatch_with_permute(
        self, handle: Handle, rows: Rows, *, received: int, num_out: int, pad_multiple: int
    ) -> Rows | None:
        """Send rows, and return the expert rows. Add row ids and the rows of each expert to a handle without them."""
        dense = self._received(handle, rows, "dispatch_with_permute")
        number = handle.num_dispatched if received < 0 else received
        if number == 0:
            return None
        if handle.row_id_map is None:
            self._make_row_ids(handle, number, pad_multiple)
            assert handle.tokens_per_expert is not None
            num_out = int(handle.tokens_per_expert.sum()) if num_out < 0 else num_out
        c_assert(num_out >= 0, "args.num_permuted_tokens >= 0", "executor.cu:135")
        assert handle.row_id_map is not None
        permutation = permutation_of_row_ids(handle.row_id_map, handle.num_dispatched, pad_multiple)
        require_inside(permutation, num_out, "permute_kernel writes", with_padding=True)
        return permute(dense, permutation, num_out, first_column=self._first_column())

    def _make_row_ids(self, handle: Handle, number: int, pad_multiple: int) -> None:
        experts = self._config.num_of_experts_per_rank
        c_assert(0 < experts <= 256, f"0 < num_of_local_experts ({experts}) <= block_size (256)", "permute.cu:276")
        undefined_unless(
            pad_multiple > 0, "permute.cu:198: pad_multiple must be at least 1, since the kernel divides by it, got 0."
        )
        undefined_unless(
            number >= handle.num_dispatched,
            f"num_dispatched_tokens must be at least {handle.num_dispatched}, got {number}.",
        )
        local = handle.local_expert_routing_map[: handle.num_dispatched]
        handle.row_id_map, handle.tokens_per_expert, _ = row_ids(
            local, pad_multiple=pad_multiple, limit=None, capacity=number
        )

    def _received(self, handle: Handle, rows: Rows, where: str) -> Rows:
        with self._exchange.entrance(f"HybridEpBuffer.{where}") as entry:
            config = self._config
            given = {"hidden": rows.tokens, "probs": rows.probs, "scaling_factor": rows.scales}
            check_dispatch(config, handle.num_of_tokens_per_rank, "hybrid_ep.cu:534-545", given)
            self._check_experts()
            # A hidden size below 128 passes this check, because the integer division gives 0.
            if (config.hidden_dim // 128) % 4:
                said = "Currently, scaling factor per token must be multiple of 16B."
                raise failed_compilation(said, f"{_BACKEND}(1786)")
            c_assert(config.hidden_dim % 8 == 0, "hidden_size % 8 == 0", "permute.cu:449")
            check_chunk(config.num_of_tokens_per_chunk_dispatch_api, _BACKEND)
            entry.same = handle.agreed(with_probs=rows.probs is not None)
        fp8 = config.token_data_type is TokenDataType.UINT8
        sent = rows if fp8 else Rows(tokens=rows.tokens, probs=rows.probs)
        return dispatch_rows(self._exchange, self._topology, handle, sent.detached())

    def _check_experts(self) -> None:
        if self._config.experts_per_node % 4:
            said = (
                "Currently, expert per node must be multiple of 4(So the prob for each token is multiple of 16B) to "
                "make TMA work."
            )
            raise failed_compilation(said, f"{_BACKEND}(1784)")

    def _first_column(self) -> int:
        return self._topology.local_rank * self._config.num_of_experts_per_rank

    def combine(self, handle: Handle, rows: Rows) -> Rows:
        with self._exchange.entrance("HybridEpBuffer.combine") as entry:
            self._check_combine(rows)
            if rows.probs is not None:
                columns = self._config.experts_per_node
                c_assert(rows.probs.shape[1] == columns, f"probs.value().size(1) == {columns}", "hybrid_ep.cu:482")
            entry.same = handle.agreed(with_probs=rows.probs is not None)
        return combine_rows(self._exchange, self._topology, handle, rows.detached(), own_slice=False)

    def combine_with_unpermute(self, handle: Handle, rows: Rows, *, received: int) -> Rows:
        """Add up the expert rows of each token, over experts and then over ranks.

        A rank that received no row aborts, because its handle has no row ids (executor.cu:216).
        """
        with self._exchange.entrance("HybridEpBuffer.combine_with_unpermute") as entry:
            self._check_combine(rows)
            c_assert(handle.row_id_map is not None, "args.row_id_map.has_value()", "executor.cu:216")
            assert handle.row_id_map is not None
            bf16 = rows.tokens.dtype == torch.bfloat16
            c_assert(bf16, "permuted_tokens.dtype() == torch::kBFloat16", "permute.cu:597")
            undefined_unless(
                received < 0 or received >= handle.num_dispatched,
                f"num_dispatched_tokens must be at least {handle.num_dispatched}, got {received}.",
            )
            columns = self._config.experts_per_node
            permutation = permutation_of_row_ids(handle.row_id_map, handle.num_dispatched, 0)
            require_inside(permutation, rows.tokens.shape[0], "unpermute_kernel reads", with_padding=False)
            dense = unpermute(rows.detached(), permutation, first_column=self._first_column(), num_columns=columns)
            entry.same = handle.agreed(with_probs=rows.probs is not None)
        return combine_rows(self._exchange, self._topology, handle, dense, own_slice=False)

    def _check_combine(self, rows: Rows) -> None:
        check_combine(self._config, rows.tokens, rows.probs, "hybrid_ep.cu:597-605")
        self._check_experts()
        check_chunk(self._config.num_of_tokens_per_chunk_combine_api, _BACKEND)
        check_capacity(self._config, f"{_BACKEND}(1873)")


def _resized(rows: Tensor, number: int) -> Tensor:
    return rows[:number] if number <= rows.shape[0] else grown(rows, number)
