"""How a model's tensor holds tokens, and which of its rows are real.

A layout is a frozen value: ``BSHD``, ``SBHD``, ``THD``, ``Rows`` or ``Masked``, or a ``Shard`` of a layout. The
functions of this package need no process group, except ``broadcast_layout``.
"""

from typing import TYPE_CHECKING

from moe_dispatch.layouts.base import Layout, Shard
from moe_dispatch.layouts.bshd import BSHD, SBHD
from moe_dispatch.layouts.rows import Masked, Rows
from moe_dispatch.layouts.shard import ShardKind, padded_length, sequence_multiple
from moe_dispatch.layouts.thd import THD
from moe_dispatch.seams.plug_ins import imported_on_use

if TYPE_CHECKING:
    from moe_dispatch.layouts.conversion import (
        bshd_to_thd,
        shard_for_context_parallel,
        thd_to_bshd,
        unshard_from_context_parallel,
    )
    from moe_dispatch.layouts.encoding import broadcast_layout
else:
    __getattr__, __dir__ = imported_on_use(
        globals(),
        broadcast_layout="moe_dispatch.layouts.encoding",
        bshd_to_thd="moe_dispatch.layouts.conversion",
        shard_for_context_parallel="moe_dispatch.layouts.conversion",
        thd_to_bshd="moe_dispatch.layouts.conversion",
        unshard_from_context_parallel="moe_dispatch.layouts.conversion",
    )

__all__ = [
    "BSHD",
    "SBHD",
    "THD",
    "Layout",
    "Masked",
    "Rows",
    "Shard",
    "ShardKind",
    "broadcast_layout",
    "bshd_to_thd",
    "padded_length",
    "sequence_multiple",
    "shard_for_context_parallel",
    "thd_to_bshd",
    "unshard_from_context_parallel",
]
