"""``deep_ep.Config`` of v1.2.1: the number of SMs, the queue lengths, and the buffer sizes that follow from them."""

from __future__ import annotations

from typing import final

from moe_dispatch_testing.emulation.refusals import host_assert

NVL_PEERS = 8  # csrc/kernels/configs.cuh:3 of v1.2.1
_SOURCE = "csrc/config.hpp"
# The largest numbers of top-k choices and of scales that fit into a row of a queue (csrc/config.hpp:48-65 of v1.2.1).
_MAX_TOPK, _MAX_SCALES = 128, 128
SOURCE_META_BYTES = 8  # two int32 (csrc/kernels/internode.cu:17 of v1.2.1)


@final
class Config:
    """The number of SMs and the queue lengths. In the emulation they only decide which buffers are too small.

    The size hints take no keyword arguments, as in the release.

    Source: csrc/config.hpp:18-97 and csrc/deep_ep.cpp:1345 of v1.2.1.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl = (num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens)
        rdma = (num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens)
        host_assert(num_sms >= 0, "num_sms >= 0", f"{_SOURCE}:33")
        _require_queue(*nvl, "nvl", positive=34, shorter=35)
        host_assert(min(rdma) > 0, _both_positive("rdma"), f"{_SOURCE}:36")
        rdma = (rdma[0], -(-rdma[1] // rdma[0]) * rdma[0])
        _require_queue(*rdma, "rdma", positive=36, shorter=40)
        self._num_sms = num_sms
        self._nvl = nvl
        self._rdma = rdma

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Return the bytes of an NVLink buffer that has room for any top-k up to 128 (csrc/config.hpp:45-72)."""
        _require_whole_nodes(num_ranks)
        host_assert(
            num_ranks <= NVL_PEERS or self._num_sms % 2 == 0,
            "num_ranks <= NUM_MAX_NVL_PEERS or num_sms % 2 == 0",
            f"{_SOURCE}:51",
        )
        queues = self.num_channels * min(num_ranks, NVL_PEERS)
        rows = queues * self._nvl[1]
        flags = queues * (2 * max(num_ranks // NVL_PEERS, 1) + 3) * 4
        return _aligned(flags + rows * (hidden_bytes + SOURCE_META_BYTES + _topk_and_scale_bytes()))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Return the bytes of an RDMA buffer, 0 within one node (csrc/config.hpp:74-97)."""
        if num_ranks <= NVL_PEERS:
            return 0
        host_assert(num_ranks % NVL_PEERS == 0, "num_ranks % NUM_MAX_NVL_PEERS == 0", f"{_SOURCE}:79")
        host_assert(self._num_sms % 2 == 0, "num_sms % 2 == 0", f"{_SOURCE}:80")
        queues = self.num_channels * (num_ranks // NVL_PEERS)
        rows = queues * self._rdma[1]
        flags = queues * (NVL_PEERS * 2 + 2) * 2 * 4
        return _aligned(flags + rows * 2 * (hidden_bytes + SOURCE_META_BYTES + _topk_and_scale_bytes() + 16))

    @property
    def num_channels(self) -> int:
        """Return the number of channels. A channel is a sending and a receiving SM, and moves a part of the tokens."""
        return self._num_sms // 2

    def layout(self) -> list[int]:
        """Return the numbers that must be the same on all ranks of a call, because queue addresses depend on them."""
        return [self._num_sms, *self._nvl, *self._rdma]

    @property
    def has_even_sms(self) -> bool:
        """Return whether the number of SMs is even, so that every SM has a partner."""
        return self._num_sms % 2 == 0

    @property
    def nvl_send(self) -> int:
        """Return the number of rows that are sent over NVLink at once."""
        return self._nvl[0]

    @property
    def nvl_queue_rows(self) -> int:
        """Return the number of rows in the queue of one channel and rank."""
        return self._nvl[1]

    @property
    def rdma_send(self) -> int:
        """Return the number of rows that are sent between nodes at once."""
        return self._rdma[0]

    @property
    def rdma_queue_rows(self) -> int:
        """Return the number of rows in the queue of one channel and node."""
        return self._rdma[1]


def _topk_and_scale_bytes() -> int:
    return _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128


def _require_whole_nodes(num_ranks: int) -> None:
    rule = "num_ranks < NUM_MAX_NVL_PEERS or num_ranks % NUM_MAX_NVL_PEERS == 0"
    host_assert(num_ranks < NVL_PEERS or num_ranks % NVL_PEERS == 0, rule, f"{_SOURCE}:50")


def _require_queue(send: int, recv: int, kind: str, *, positive: int, shorter: int) -> None:
    host_assert(send > 0 and recv > 0, _both_positive(kind), f"{_SOURCE}:{positive}")
    rule = f"num_max_{kind}_chunked_send_tokens < num_max_{kind}_chunked_recv_tokens"
    host_assert(send < recv, rule, f"{_SOURCE}:{shorter}")


def _both_positive(kind: str) -> str:
    return f"num_max_{kind}_chunked_send_tokens > 0 and num_max_{kind}_chunked_recv_tokens > 0"


# The four queue lengths that deep_ep recommends, by number of ranks (deep_ep/buffer.py:232-243 and :260-271 of v1.2.1).
DISPATCH_QUEUES = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (8, 288, 32, 128),
    32: (32, 288, 32, 128),
    64: (20, 288, 28, 128),
    128: (20, 560, 32, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE_QUEUES = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    64: (1, 288, 20, 128),
    128: (1, 560, 12, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}
