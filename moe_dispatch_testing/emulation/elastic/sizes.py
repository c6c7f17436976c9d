"""The sizes of the buffers of v2 and V2.5, and the number of SMs that their kernels use.

The emulated group is one NVLink domain of H200 GPUs. It has no scale-out ranks. Each GPU has 132 SMs and 18 links of
26.562 GB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from moe_dispatch_testing.emulation.elastic.release import ElasticRelease

ALIGNMENT_BYTES = 2 * 2**20  # csrc/kernels/backend/symmetric.hpp:16 of v2
PART_ALIGNMENT_BYTES = 32  # deep_ep/include/deep_ep/common/ptx.cuh:16 of v2
DEVICE_SMS = 132
NVLINK_GBS = 18 * 26.562 * 0.9
_HPP = "csrc/elastic/buffer.hpp"
_LAYOUT = "deep_ep/include/deep_ep/common/layout.cuh"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RowSizes:
    """The numbers that decide the bytes of a row in a buffer. Row addresses depend on them, so all ranks must agree."""

    release: ElasticRelease
    num_max_tokens_per_rank: int
    hidden: int
    element_bytes: int
    num_sf_packs: int
    num_topk: int

    def dispatch_bytes(self, num_ranks: int) -> int:
        """Return the bytes for every row of every rank (csrc/elastic/buffer.hpp:586-600)."""
        metadata = self.num_topk * 8 + (1 + self.num_topk) * 4
        return num_ranks * self.num_max_tokens_per_rank * self._row(self.num_sf_packs * 4, metadata)

    def combine_bytes(self, num_ranks: int, allow_multiple_reduction: bool) -> int:
        """Return the bytes for one row per token and rank, or per choice if only the source rank adds up (:616-633)."""
        rows = min(num_ranks, self.num_topk) if allow_multiple_reduction else self.num_topk
        return rows * self.num_max_tokens_per_rank * self._row(0, self.num_topk * 8)

    def _row(self, *parts: int) -> int:
        """Return the bytes of a row with these parts beside its hidden values."""
        num_bytes = self.hidden * self.element_bytes
        rule = "num_hidden_bytes % ptx::kNumTMAAlignBytes == 0"
        self.release.check(num_bytes % PART_ALIGNMENT_BYTES == 0, rule, f"{_LAYOUT}:198")
        used = num_bytes + sum(aligned(part, PART_ALIGNMENT_BYTES) for part in parts)
        return aligned(used, self.release.row_alignment_bytes)


def aligned(number: int, multiple: int) -> int:
    """Round ``number`` up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def buffer_bytes(
    release: ElasticRelease,
    num_ranks: int,
    *,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Return the bytes that dispatch and combine fit into, a multiple of 2 MiB (csrc/elastic/buffer.hpp:652-686)."""
    rule = "num_max_tokens_per_rank > 0 and hidden > 0"
    release.check(num_max_tokens_per_rank > 0 and hidden > 0, rule, f"{_HPP}:657")
    packs = -(-hidden // 32)
    release.check(packs * 4 <= hidden, "math::ceil_div(hidden, 32) * sizeof(float) <= hidden", f"{_HPP}:660")

    def sizes(element_bytes: int, num_sf_packs: int) -> RowSizes:
        return RowSizes(
            release=release,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            element_bytes=element_bytes,
            num_sf_packs=num_sf_packs,
            num_topk=num_topk or 32,
        )

    sent = sizes(1, packs) if use_fp8_dispatch else sizes(2, 0)
    combined = sizes(2, 0).combine_bytes(num_ranks, allow_multiple_reduction)
    return aligned(max(sent.dispatch_bytes(num_ranks), combined), ALIGNMENT_BYTES)


def check_experts(release: ElasticRelease, num_experts: int, num_ranks: int) -> None:
    """Check that the workspace has room for the experts (deep_ep/include/deep_ep/common/layout.cuh:37-40)."""
    release.check(num_experts % num_ranks == 0, "num_experts % num_ranks == 0", f"{_LAYOUT}:37")
    release.check(num_ranks <= 1024, "num_ranks <= kNumMaxRanks", f"{_LAYOUT}:38")
    release.check(num_experts <= 2048, "num_experts <= kNumMaxExperts", f"{_LAYOUT}:39")
    per_rank = "num_experts_per_rank <= kNumMaxExpertsPerRank"
    release.check(num_experts // num_ranks <= release.max_local_experts, per_rank, f"{_LAYOUT}:40")


def theoretical_num_sms(
    release: ElasticRelease,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    *,
    nvlink_gbs: float,
    sm_gbs: tuple[float, float],
    prefer_overlap_with_compute: bool,
) -> int:
    """Return the number of SMs that keeps the links busy under balanced routing, as the release computes it.

    There are no checks. As in the release, the arithmetic raises if ``num_experts`` is None or less than ``num_topk``.

    Source: deep_ep/buffers/elastic.py:720-840 of v2, deep_ep/buffers/ep.py:440-542 of V2.5.
    """
    assert num_experts % num_ranks == 0
    missed = math.comb(num_experts - num_experts // num_ranks, num_topk) / math.comb(num_experts, num_topk)
    copies = num_ranks * (1 - missed)
    to_peers = 1 - 1 / num_ranks
    num_sms: float = DEVICE_SMS
    if to_peers > 0:
        rows_gbs = (nvlink_gbs or NVLINK_GBS) / to_peers
        read_gbs, write_gbs = sm_gbs
        needed = [1 / copies / read_gbs, 1 / write_gbs]  # an SM reads each row once, and writes each of its copies
        if release.is_v25:  # V2.5 counts what combine reads and writes too
            needed += [(1 - to_peers) / read_gbs, (1 / copies + to_peers) / write_gbs]
        num_sms = rows_gbs * max(needed)
    found = aligned(max(4, math.ceil(num_sms * release.sm_margin)), release.sm_multiple)
    return min(found if prefer_overlap_with_compute else max(found, 64), DEVICE_SMS)
