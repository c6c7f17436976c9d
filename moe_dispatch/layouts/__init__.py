"""How a model's tensor holds tokens, and which of its rows are real.

A layout is a frozen value: ``BSHD``, ``SBHD``, ``THD`` or ``Rows``, or a ``Shard`` of one. The functions beside them
work on lengths and rows without a process group, except ``broadcast_layout``.
"""

from moe_dispatch.layouts.base import Layout, ShardKind
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.rows import Rows
from moe_dispatch.layouts.shard import Shard
from moe_dispatch.layouts.thd import THD

__all__ = [
    "BSHD",
    "SBHD",
    "THD",
    "Layout",
    "Rows",
    "Shard",
    "ShardKind",
]
