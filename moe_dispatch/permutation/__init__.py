"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.permutation.base import Permutation, accumulation_dtype
from moe_dispatch.permutation.choose import (
    choose_permutation,
    known_permutations,
    probe_permutation,
)
from moe_dispatch.permutation.index import SlotIndex, index_bytes, round_up
from moe_dispatch.permutation.rows import TorchPermutation
from moe_dispatch.permutation.tables import (
    count_values,
    front,
    group_slots,
    group_statically,
    merge_slots,
    running_total,
    true_places,
    valid_ids,
)

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
    "true_places",
    "valid_ids",
]
