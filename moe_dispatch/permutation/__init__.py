"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.permutation.bags import sum_bags
from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.blocks import accumulation_dtype
from moe_dispatch.permutation.choose import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.permutation.index import (
    SlotIndex,
    blank_index,
    count_values,
    group_slots,
    index_from,
    round_up,
    running_total,
    true_places,
)
from moe_dispatch.permutation.rows import TorchPermutation, expand, expand_weighted, gather, reduce
from moe_dispatch.permutation.static_index import (
    StaticIndex,
    blank_static_index,
    front,
    group_statically,
    index_bytes,
    static_index_from,
)
from moe_dispatch.permutation.static_rows import StaticTorchPermutation

__all__ = [
    "Permutation",
    "SlotIndex",
    "StaticIndex",
    "StaticTorchPermutation",
    "TorchPermutation",
    "accumulation_dtype",
    "blank_index",
    "blank_static_index",
    "choose_permutation",
    "count_values",
    "expand",
    "expand_weighted",
    "front",
    "gather",
    "group_slots",
    "group_statically",
    "index_bytes",
    "index_from",
    "known_permutations",
    "probe_permutation",
    "reduce",
    "round_up",
    "running_total",
    "static_index_from",
    "sum_bags",
    "true_places",
]
