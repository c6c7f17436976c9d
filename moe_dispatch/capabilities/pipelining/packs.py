"""The layouts of micro-batches, in a form that torch's schedules cut as they cut x."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.errors import InputError, LayoutError
from moe_dispatch.layouts import Layout
from moe_dispatch.layouts.encoding import broadcast_encoded, decode

# What every row begins with: eight characters of JSON in an integer.
_BEGIN = int.from_bytes(b'{"layout', "little")


def share_layouts(layouts: Sequence[Layout] | None, group: dist.ProcessGroup, src: int = 0) -> Tensor:
    """Send the layouts of all micro-batches of a step from rank ``src`` to every rank of the group.

    Every rank passes the result to ``step`` of its schedule as a keyword, such as ``packs``. The schedule cuts it into
    rows, one for each micro-batch, and each stage gets its row and calls ``read_layout``.

    Args:
        layouts: On rank ``src``, a layout for each micro-batch, all of one number of rows, because stages exchange
            tensors of one shape. None on every other rank.
        group: All ranks that see the same tokens: all stages and tensor-parallel ranks of a replica of the model. Each
            of them must call this function.
        src: Rank in the group that has the layouts.

    Returns:
        int64 (M, W), on the CPU. Row i holds the layout of micro-batch i. Pass it on as it is.

    Raises:
        ConfigError: ``src`` is not a rank of the group.
        LayoutError: Rank ``src`` gives no layouts or a layout of an unknown class, another rank gives some too, they
            differ in their number of rows, or what arrived on some rank is not what was sent. All ranks raise the same
            error.

    Cost: an all-gather of two integers, a broadcast, and an all-gather of an integer, for all micro-batches of a step.
    There are host syncs if the group is NCCL or tensors of the layouts are on a device.
    """
    table = broadcast_encoded("share_layouts", layouts, group, src)
    rows = [decode(row).num_rows() for row in table]
    known = {each for each in rows if each is not None}
    if len(known) > 1:
        raise LayoutError(
            "share_layouts: micro-batches must have the same number of rows, because stages exchange tensors of one "
            f"shape, got {rows}. Let each pack end in padding: cu_seqlens_padded=[..., {max(known)}]."
        )
    return table


def read_layout(row: Tensor) -> Layout:
    """Return the layout of a micro-batch, in the forward of a stage.

    Args:
        row: int64 (1, W), the row of a result of ``share_layouts`` that the schedule has cut for this micro-batch.

    Returns:
        The layout as it was given. Tensors that were on a device are on this process's accelerator.

    Raises:
        InputError: ``row`` is not the row of one micro-batch.

    Cost: a text is read on the host, so call it once for each micro-batch and stage, not in each layer.
    """
    if row.dim() != 2 or len(row) != 1:
        raise InputError(
            f"read_layout: row must be the row of one micro-batch, (1, W), got {tuple(row.shape)}. Give share_layouts "
            "as many layouts as the schedule has micro-batches."
        )
    return decode(row[0])


def holds_layouts(value: object) -> bool:
    """Return whether this is a result of ``share_layouts``, or some of its rows."""
    if not (isinstance(value, Tensor) and value.dtype is torch.int64 and value.dim() == 2 and value.numel()):
        return False
    return value.device.type == "cpu" and int(value[0, 0]) == _BEGIN
