"""The driver of ``deep_ep.ElasticBuffer``, the buffer class of v2.

Source: DeepEP main of 2026-07 (2.1.0), deep_ep/buffers and csrc/elastic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, Constraints, MoEShape, WireDtype
from moe_dispatch.backends.capacity import worst_rows
from moe_dispatch.backends.deep_ep.driver import Handle, Payload, RankMajorDriver, RankMajorRows, arrived
from moe_dispatch.backends.deep_ep.library import Library
from moe_dispatch.backends.deep_ep.pool import BufferPool
from moe_dispatch.backends.deep_ep.switch import ProcessSwitch
from moe_dispatch.permutation import round_up

_MOST_RANKS, _MOST_EXPERTS = 1024, 2048
_torch_deterministic: Any = torch.utils.deterministic  # type checkers do not see that this module has properties
# In deterministic mode torch fills fresh memory. The library refuses to run while it does.
_filling = ProcessSwitch(
    "torch.utils.deterministic.fill_uninitialized_memory",
    lambda: _torch_deterministic.fill_uninitialized_memory,
    lambda value: setattr(_torch_deterministic, "fill_uninitialized_memory", value),
)


def constraints(device: str, shape: MoEShape, ranks_per_node: int, *, expand: bool, deterministic: bool) -> Constraints:
    """Return the constraints of version 2.1.0.

    Its kernels are compiled for the largest number of rows of any rank, so the ranks agree on this number.
    """
    within_node = ranks_per_node >= shape.ep_size
    # No float8 across nodes: gradients are sent in bfloat16 with the handle of the dispatch, and across nodes they need
    # not be laid out as the float8 rows were.
    float8: set[WireDtype] = {"float8_e4m3fn"} if within_node and not expand else set()
    # The deterministic sort of the library selects by boolean masks, so the host reads from the device how many entries
    # are True. It does so for the slots of expanded rows, and for the lists of rows that are forwarded between nodes.
    sorts_by_masks = deterministic and (expand or not within_node)
    return Constraints(
        group_max=True,
        hidden_multiple=256,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        max_top_k=32,
        group_sizes=frozenset(range(1, _MOST_RANKS + 1)),
        max_local_experts=min(256, _MOST_EXPERTS // shape.ep_size),
        pads_experts=expand,
        wire_dtypes=frozenset({"bfloat16", *float8}),
        differentiable=not expand,
        graph_safe=not sorts_by_masks,
        graph_safe_reason=(
            f"v2 reads the device while it sorts {'expanded rows' if expand else 'rows across nodes'}; the option "
            "deterministic=False turns this sort off"
        ),
    )


def expanded_rows(shape: MoEShape) -> int:
    """Return the number of expert-major rows that the library allocates for the worst case.

    It is up to ``pad_multiple`` rows more than the worst case needs.
    """
    return round_up(worst_rows(shape) + (shape.pad_multiple - 1) * shape.num_local_experts, shape.pad_multiple)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expanded:
    """The expert-major rows of one dispatch. The library calls such rows expanded.

    Attributes:
        rows_RD: bfloat16 (R, D), the rows of each expert, followed by zero rows up to the alignment.
        weights_R: float32 (R,), 0 on zero rows.
        padded_counts: Number of rows of each local expert with its zero rows, on the host; empty if the host did not
            wait for the counts.
        real_counts_L: int32 (L,), number of rows of each local expert without its zero rows, on the device.
        handle: Handle of this dispatch, for combine.
    """

    rows_RD: Tensor
    weights_R: Tensor
    padded_counts: list[int]
    real_counts_L: Tensor
    handle: Handle


@final
class ElasticDriver(RankMajorDriver):
    """The driver of v2. Its buffers are made for the largest number of rows of any rank.

    Cost of ``send`` and ``send_expanded``: one host sync, for the counts; none in graph-safe mode.
    """

    def __init__(
        self,
        library: Library,
        context: BackendContext,
        *,
        num_sms: int | None,
        deterministic: bool,
        on_its_stream: bool,
    ) -> None:
        shape, communicator = context.shape, context.communicator
        self._shape = shape
        self._num_sms = num_sms or 0  # 0 lets the library choose
        self._on_its_stream = on_its_stream

        def make(rows: int) -> Any:
            with _filling.at(False):
                return library.module.ElasticBuffer(
                    communicator.group,
                    num_max_tokens_per_rank=rows,
                    hidden=shape.hidden_size,
                    num_topk=shape.top_k,
                    deterministic=deterministic,
                    explicitly_destroy=True,
                )

        if not library.emulated:  # it takes over the group's NCCL communicator, which the first collective creates
            communicator.touch(torch.device("cuda"))
        self._ids_dtype: torch.dtype = getattr(library.module, "topk_idx_t", torch.int64)
        self._pool = BufferPool("deepep", make, most_rows=context.most_rows)

    @property
    def buffers(self) -> str:
        return "buffers for the largest number of rows of any rank"

    def reserve(self, rows: int) -> None:
        self._pool.reserve(max(rows, 1))

    def send(
        self,
        payload: Payload,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        asynchronously: bool,
        worst_rows: int | None = None,
    ) -> RankMajorRows:
        """Send rows as the base class says.

        With ``worst_rows`` the library delivers P times the number of rows that its buffer has room for. That product
        equals ``worst_rows``.
        """
        pooled = self._pool.current
        buffer = pooled.buffer
        on_its_stream = asynchronously and self._on_its_stream
        with _filling.at(False):
            received, ids_SK, weights_SK, handle, event = buffer.dispatch(
                payload,
                topk_idx=ids_TK.to(self._ids_dtype),
                topk_weights=weights_TK,
                num_experts=self._shape.num_experts,
                num_max_tokens_per_rank=self._pool.rows,
                num_sms=self._num_sms,
                previous_event=buffer.capture() if on_its_stream else None,
                async_with_compute_stream=asynchronously,
                allocate_on_comm_stream=on_its_stream,
                do_cpu_sync=worst_rows is None,
            )
        return RankMajorRows(
            payload=received,
            ids_SK=ids_SK,
            weights_SK=weights_SK,
            counts=handle.num_recv_tokens_per_expert_list,
            handle=Handle(pooled=pooled, raw=handle),
            wait=event.current_stream_wait if asynchronously else arrived,
            num_received=None if worst_rows is None else handle.psum_num_recv_tokens_per_scaleup_rank[-1],
        )

    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        with _filling.at(False):
            # num_sms must be given: the library would compute its default before it reads the handle, and fail.
            received: Payload = handle.buffer.dispatch(
                payload,
                handle=handle.raw,
                num_sms=handle.raw.num_sms,
                do_expand=handle.raw.do_expand,
                do_zero_padding=handle.raw.do_expand,
            )[0]
        return received

    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        with _filling.at(False):
            rows_TD, values_TK, _ = handle.buffer.combine(rows_SD, handle.raw, topk_weights=values_SK)
        return rows_TD, values_TK

    def send_expanded(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Expanded:
        """Send each row to every expert that it names. There is no backward: combine refuses gradients.

        In graph-safe mode ``expanded_rows`` rows are delivered. Rows and weights behind the last expert's rows may hold
        anything.
        """
        pooled = self._pool.current
        buffer = pooled.buffer
        with _filling.at(False):
            rows_RD, _, weights_R, handle, _ = buffer.dispatch(
                rows_TD,
                topk_idx=ids_TK.to(self._ids_dtype),
                topk_weights=weights_TK,
                num_experts=self._shape.num_experts,
                num_max_tokens_per_rank=self._pool.rows,
                expert_alignment=self._shape.pad_multiple,
                num_sms=self._num_sms,
                do_cpu_sync=not self._shape.graph_safe,
                do_expand=True,
                do_zero_padding=True,
            )
        return Expanded(
            rows_RD=rows_RD,
            weights_R=weights_R,
            padded_counts=handle.num_recv_tokens_per_expert_list,
            real_counts_L=handle.num_unaligned_recv_tokens_per_expert,
            handle=Handle(pooled=pooled, raw=handle),
        )

    def close(self) -> None:
        self._pool.close()
