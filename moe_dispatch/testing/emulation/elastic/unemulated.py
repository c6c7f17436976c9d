"""What ElasticBuffer of v2 has beside expert parallelism, refused one by one with the real signatures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

Shapes = tuple[int, ...] | torch.Size | Sequence[tuple[int, ...] | torch.Size]


class UnemulatedParts:
    """Engram storage, pipeline-parallel sends, all-gather sessions, streams.

    Source: deep_ep/buffers/elastic.py:412-727 of v2.
    """

    def get_comm_stream(self) -> NoReturn:
        _refuse("get_comm_stream")

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> NoReturn:
        _refuse("get_engram_storage_size_hint")

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> NoReturn:
        _refuse("engram_write")

    def engram_fetch(self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False) -> NoReturn:
        _refuse("engram_fetch")

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> NoReturn:
        _refuse("get_pp_buffer_size_hint")

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> NoReturn:
        _refuse("pp_set_config")

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> NoReturn:
        _refuse("pp_send")

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> NoReturn:
        _refuse("pp_recv")

    @staticmethod
    def get_agrs_num_max_session_bytes(group: dist.ProcessGroup, shapes: Shapes, dtype: torch.dtype) -> NoReturn:
        _refuse("get_agrs_num_max_session_bytes")

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> NoReturn:
        _refuse("get_agrs_buffer_size_hint")

    def create_agrs_session(self) -> NoReturn:
        _refuse("create_agrs_session")

    def destroy_agrs_session(self) -> NoReturn:
        _refuse("destroy_agrs_session")

    def agrs_new_session(self, enabled: bool = True) -> AbstractContextManager[None]:
        _refuse("agrs_new_session")

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> NoReturn:
        _refuse("agrs_set_config")

    def agrs_get_inplace_tensor(self, shapes: Shapes, dtype: torch.dtype) -> NoReturn:
        _refuse("agrs_get_inplace_tensor")

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> NoReturn:
        _refuse("all_gather")


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(f"ElasticBuffer.{method}: not emulated. Only dispatch and combine of experts' rows are.")
