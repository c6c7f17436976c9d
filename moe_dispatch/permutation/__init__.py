"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.choose import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.permutation.index import (
    SlotIndex,
    accumulation_dtype,
    count_values,
    front,
    group_slots,
    group_statically,
    index_bytes,
    merge_slots,
    round_up,
    running_total,
    true_positions,
    valid_ids,
)
from moe_dispatch.permutation.rows import TorchPermutation

__all__ = [
    "Permutation",
    "SlotIndex",
    "TorchPermutation",
    "accumulation_dtype",
    "choose_permutation",
    "count_values",
    "front",
    "group_slots",
    "group_statically",
    "index_bytes",
    "known_permutations",
    "merge_slots",
    "probe_permutation",
    "round_up",
    "running_total",
    "true_positions",
    "valid_ids",
]
