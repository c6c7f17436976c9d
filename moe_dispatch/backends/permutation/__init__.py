"""The one-rank reorder between rows as they arrived and rows grouped by expert."""

from moe_dispatch.backends.permutation.index import SlotIndex, group_slots, round_up, running_total
from moe_dispatch.backends.permutation.rows import accumulation_dtype, expand, expand_weighted, reduce, sum_bags

__all__ = [
    "SlotIndex",
    "accumulation_dtype",
    "expand",
    "expand_weighted",
    "group_slots",
    "reduce",
    "round_up",
    "running_total",
    "sum_bags",
]
