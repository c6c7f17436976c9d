"""``deep_ep.Config`` of v1.2.1: the number of SMs, the queue lengths, and hints for buffer sizes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import final

NVL_PEERS = 8  # ranks of a node
# Bytes of a row beside its hidden values: its source, and the largest numbers of ids with weights and of scales.
_ROW_EXTRAS = 8 + 128 * (8 + 4) + 128 * 4


@final
@dataclass(frozen=True)
class Config:
    """The number of SMs and the queue lengths. In the emulation they only decide which buffers are too small.

    The size hints take no keyword arguments, as in the release.

    Source: csrc/config.hpp of v1.2.1.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Return the bytes of an NVLink buffer that has room for any top-k up to 128."""
        queues = self.num_channels * min(num_ranks, NVL_PEERS)
        flags = queues * (2 * max(num_ranks // NVL_PEERS, 1) + 3) * 4
        return _aligned(flags + self.nvl_bytes(hidden_bytes + _ROW_EXTRAS, num_ranks))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Return the bytes of an RDMA buffer, 0 within one node."""
        flags = self.num_channels * (num_ranks // NVL_PEERS) * (NVL_PEERS * 2 + 2) * 2 * 4
        rows = self.rdma_bytes(hidden_bytes + _ROW_EXTRAS + 16, num_ranks)
        return _aligned(flags + rows) if num_ranks > NVL_PEERS else 0

    @property
    def num_channels(self) -> int:
        """Return the number of channels. A channel is a sending and a receiving SM, and moves a part of the tokens."""
        return self.num_sms // 2

    def nvl_bytes(self, row_bytes: int, num_ranks: int) -> int:
        """Return the bytes of the rows in all queues of a node."""
        return self.num_channels * min(num_ranks, NVL_PEERS) * self.num_max_nvl_chunked_recv_tokens * row_bytes

    def rdma_bytes(self, row_bytes: int, num_ranks: int) -> int:
        """Return the bytes of the rows in all queues between nodes, 0 within one node."""
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        queues = self.num_channels * (num_ranks // NVL_PEERS) * 2 if num_ranks > NVL_PEERS else 0
        return queues * -(-recv // send) * send * row_bytes

    def layout(self) -> tuple[int, ...]:
        """Return the numbers that must be the same on all ranks of a call, because queue addresses depend on them."""
        return astuple(self)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128


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
