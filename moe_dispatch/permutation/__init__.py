"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.permutation.base import Permutation, accumulation_dtype
from moe_dispatch.permutation.choose import (
    choose_permutation,
    index_kernels,
    known_permutations,
    probe_permutation,
)
from moe_dispatch.permutation.index import (
    SlotIndex,
    count_values,
    front,
    group_slots,
    group_statically,
    index_bytes,
    round_up,
    running_total,
    true_places,
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
    "index_kernels",
    "known_permutations",
    "probe_permutation",
    "round_up",
    "running_total",
    "true_places",
]
