"""``deep_ep.ElasticBuffer`` of v2. Source: DeepEP main of 2026-07 (2.1.0), deep_ep/buffers and csrc/elastic."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.collectives import Communicator
from moe_dispatch.backends.vendor.library import Library
from moe_dispatch.backends.vendor.pool import BufferPool
from moe_dispatch.backends.vendor.transport import Delivery, Payload, Transport, Way

_MOST_RANKS = 1024
_torch_deterministic: Any = torch.utils.deterministic  # a module with properties, which type checkers do not see


def constraints(device: str, *, expand: bool) -> Constraints:
    """Needs of 2.1.0; its kernels are compiled for the group's largest row count, so ranks agree on that."""
    return Constraints(
        group_max=True,
        hidden_multiple=256,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        max_top_k=32,
        group_sizes=frozenset(range(1, _MOST_RANKS + 1)),
        max_local_experts=256,
        pads_experts=expand,
        wire_dtypes=frozenset({"bfloat16"} if expand else {"bfloat16", "float8_e4m3fn"}),
        differentiable=not expand,
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expanded:
    """Expert-major rows: what the library calls expanded.

    Attributes:
        rows_RD: bfloat16; each expert's rows, then zeros up to the alignment.
        weights_R: float32, 0 on those zeros.
        padded_counts: rows per local expert with the zeros, on the host.
        real_counts_L: int32, without them, on the device.
        way: for the combine.
    """

    rows_RD: Tensor
    weights_R: Tensor
    padded_counts: list[int]
    real_counts_L: Tensor
    way: Way


@final
class ElasticTransport(Transport):
    """Buffers sized for the group's largest row count. Cost of ``send``: one host sync, for the counts."""

    def __init__(
        self,
        library: Library,
        shape: MoEShape,
        communicator: Communicator,
        *,
        num_sms: int | None,
        deterministic: bool,
        on_its_stream: bool,
    ) -> None:
        self._shape = shape
        self._num_sms = num_sms or 0  # 0: the library's choice
        self._on_its_stream = on_its_stream

        def make(rows: int) -> Any:
            with _unfilled_memory:
                return library.module.ElasticBuffer(
                    communicator.group,
                    num_max_tokens_per_rank=rows,
                    hidden=shape.hidden_size,
                    num_topk=shape.top_k,
                    deterministic=deterministic,
                    explicitly_destroy=True,
                )

        self._pool = BufferPool("deepep", make, most_rows=shape.max_tokens_per_rank)
        if shape.max_tokens_per_rank is not None:
            self._pool.reserve(shape.max_tokens_per_rank)

    @property
    def buffers(self) -> str:
        return "buffers for the largest number of rows of any rank"

    def reserve(self, rows: int) -> None:
        self._pool.reserve(max(rows, 1))

    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool) -> Delivery:
        buffer = self._pool.current
        on_its_stream = asynchronously and self._on_its_stream
        with _unfilled_memory:
            received, ids_SK, weights_SK, handle, event = buffer.dispatch(
                payload,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_experts=self._shape.num_experts,
                num_max_tokens_per_rank=self._pool.rows,
                num_sms=self._num_sms,
                previous_event=buffer.capture() if on_its_stream else None,
                async_with_compute_stream=asynchronously,
                allocate_on_comm_stream=on_its_stream,
            )
        return Delivery(
            payload=received,
            ids_SK=ids_SK,
            weights_SK=weights_SK,
            counts=handle.num_recv_tokens_per_expert_list,
            way=Way(buffer=buffer, handle=handle),
            wait=event.current_stream_wait if asynchronously else _nothing,
        )

    def send_again(self, payload: Payload, way: Way) -> Payload:
        self._pool.check_open()
        with _unfilled_memory:
            # The library derives its default number of SMs before it has looked into the handle, and fails.
            received: Payload = way.buffer.dispatch(
                payload,
                handle=way.handle,
                num_sms=way.handle.num_sms,
                do_expand=way.handle.do_expand,
                do_zero_padding=way.handle.do_expand,
            )[0]
        return received

    def sum_at_home(self, rows_SD: Tensor, values_SK: Tensor | None, way: Way) -> tuple[Tensor, Tensor | None]:
        self._pool.check_open()
        with _unfilled_memory:
            rows_TD, values_TK, _ = way.buffer.combine(rows_SD, way.handle, topk_weights=values_SK)
        return rows_TD, values_TK

    def send_expanded(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Expanded:
        """Each row to every expert it names. Without a way back for gradients: its combine refuses them."""
        buffer = self._pool.current
        with _unfilled_memory:
            rows_RD, _, weights_R, handle, _ = buffer.dispatch(
                rows_TD,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_experts=self._shape.num_experts,
                num_max_tokens_per_rank=self._pool.rows,
                expert_alignment=self._shape.pad_multiple,
                num_sms=self._num_sms,
                do_expand=True,
                do_zero_padding=True,
            )
        return Expanded(
            rows_RD=rows_RD,
            weights_R=weights_R,
            padded_counts=handle.num_recv_tokens_per_expert_list,
            real_counts_L=handle.num_unaligned_recv_tokens_per_expert,
            way=Way(buffer=buffer, handle=handle),
        )

    def close(self) -> None:
        self._pool.close()


class _UnfilledMemory:
    """Inside it torch leaves fresh memory as it is, in deterministic mode too: the library refuses to run otherwise.

    The switch is one for the whole process, so ranks that are threads share it: the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _torch_deterministic.fill_uninitialized_memory
                _torch_deterministic.fill_uninitialized_memory = False
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _torch_deterministic.fill_uninitialized_memory = self._before


_unfilled_memory = _UnfilledMemory()


def _nothing() -> None:
    return None
