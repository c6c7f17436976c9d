"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.backends.permutation.bags import sum_bags
from moe_dispatch.backends.permutation.base import Permutation
from moe_dispatch.backends.permutation.blocks import accumulation_dtype
from moe_dispatch.backends.permutation.choose import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.backends.permutation.index import (
    SlotIndex,
    blank_index,
    group_slots,
    index_from,
    round_up,
    running_total,
)
from moe_dispatch.backends.permutation.rows import TorchPermutation, expand, expand_weighted, gather, reduce

__all__ = [
    "Permutation",
    "SlotIndex",
    "TorchPermutation",
    "accumulation_dtype",
    "blank_index",
    "choose_permutation",
    "expand",
    "expand_weighted",
    "gather",
    "group_slots",
    "index_from",
    "known_permutations",
    "probe_permutation",
    "reduce",
    "round_up",
    "running_total",
    "sum_bags",
]
