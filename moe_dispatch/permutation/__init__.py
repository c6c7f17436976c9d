"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.choose import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.permutation.index import (
    SlotIndex,
    accumulation_dtype,
    count_experts,
    count_values,
    group_slots,
    group_statically,
    merge_slots,
    round_up,
)
from moe_dispatch.permutation.rows import TorchPermutation

__all__ = [
    "Permutation",
    "SlotIndex",
    "TorchPermutation",
    "accumulation_dtype",
    "choose_permutation",
    "count_experts",
    "count_values",
    "group_slots",
    "group_statically",
    "known_permutations",
    "merge_slots",
    "probe_permutation",
    "round_up",
]
