"""Formulas of the memory of graph-safe mode, behind ``Plan.bytes``. No call loads this module.

They hold for the kernels of ``permutation="triton"``. Operators of torch also need scratch: up to three blocks of
``permutation.rows``, and one packet for each row that a rank brings. Tensors of a few bytes for each row or slot that
live inside a verb are not counted.

Legend: T rows that a rank brings, S rows that arrive, R rows of the experts with padding, K slots per row, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.wire import WireFormat, back_wire, dispatch_format, packet_format, row_format
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.seams.calls import load_carry
from moe_dispatch.types import Sizes


def planned(
    options: BackendOptions,
    shape: MoEShape,
    needs: Constraints,
    sizes: Sizes,
    rows: int,
    dtype: torch.dtype,
    carry: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:
    """Return ``Plan.bytes``: what the backend says, and what travels with the rows.

    Args:
        options: Options of the backend.
        shape: Shape of the dispatch, in graph-safe mode.
        needs: Constraints of the backend.
        sizes: Sizes of the dispatch, with a capacity.
        rows: T.
        dtype: Dtype of the rows.
        carry: Dtypes of what travels with each row, by name.
    """
    if not carry:
        return options.footprint(shape, sizes, rows, dtype)
    shape = replace(shape, column_bytes=sum(each.itemsize for each in carry.values()))
    found = options.footprint(shape, sizes, rows, dtype)
    return {**found, "carried": load_carry().carried_bytes(shape, needs, sizes)}


def delivered(shape: MoEShape, sizes: Sizes, dtype: torch.dtype, *, spare: int = 0) -> dict[str, int]:
    """Return the bytes of the rows and weights that experts get.

    A buffer that operators of torch fill has a ``spare`` row, for slots without a place.
    """
    assert sizes.capacity is not None
    grouped = sizes.capacity.buffer_rows + spare
    row = row_format(dtype, shape.hidden_size, shape.wire_dtype if shape.quantised else None)
    return {"rows": grouped * row.nbytes, "weights": grouped * accumulation_dtype(dtype).itemsize}


def local(shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of ``local``, which sends nothing. A ``wire`` still rounds its rows."""
    formats = [row_format(dtype, shape.hidden_size, shape.wire_dtype), gradient_format(shape, dtype)]
    back = row_format(dtype, shape.hidden_size, back_wire(shape.wire_dtype))
    rounded = 0 if back.numbers == dtype else rows * (back.nbytes + shape.hidden_size * dtype.itemsize)
    there, gradient = (0 if each.numbers == dtype else rows * each.nbytes for each in formats)
    return rank_major(
        shape,
        sizes,
        rows,
        dtype,
        arrived=rows,
        wire=there,
        back=rounded,
        gradients_out=0,
        gradients_in=gradient,
        gradients_back=rounded,
    )


def alltoall(shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of ``alltoall``: each buffer has ``pair_rows`` packets for each rank."""
    assert sizes.capacity is not None
    assert sizes.capacity.pair_rows is not None
    wide, places = accumulation_dtype(dtype), shape.ep_size * sizes.capacity.pair_rows
    back = row_format(dtype, shape.hidden_size, back_wire(shape.wire_dtype))
    gradients = places * gradient_format(shape, dtype).nbytes
    return rank_major(
        shape,
        sizes,
        rows,
        dtype,
        arrived=places,
        wire=2 * places * dispatch_format(shape, dtype, wide, note=True).stride,
        back=2 * places * back.nbytes,
        gradients_out=gradients,
        gradients_in=gradients,
        gradients_back=2 * places * packet_format(back, shape.top_k, wide).stride,
        tables=send_table_bytes(shape.ep_size, rows, sizes.capacity.pair_rows),
    )


def allgather(shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of ``allgather``: rows of all ranks come in, and their sums are wide."""
    wide, everyone, hidden = accumulation_dtype(dtype), shape.ep_size * rows, shape.hidden_size
    gradient = gradient_format(shape, dtype)
    return rank_major(
        shape,
        sizes,
        rows,
        dtype,
        arrived=everyone,
        wire=(rows + everyone) * dispatch_format(shape, dtype, wide).stride,
        back=(everyone + rows * (wide != dtype)) * hidden * wide.itemsize,
        gradients_out=0 if gradient.numbers == dtype else rows * gradient.nbytes,
        gradients_in=everyone * gradient.nbytes,
        gradients_back=(everyone + rows) * (hidden + shape.top_k) * wide.itemsize,
    )


def deep_ep(shape: MoEShape, sizes: Sizes, rows: int) -> dict[str, int]:
    """Return the bytes of ``deepep`` without ``expand``. The results of the library are counted, not its buffers."""
    arrived, slots, bfloat16 = shape.ep_size * (sizes.group_max_rows or rows), shape.top_k, torch.bfloat16
    there, gradient = row_format(bfloat16, shape.hidden_size, shape.wire_dtype), gradient_format(shape, bfloat16)
    sums = arrived * 2 * shape.hidden_size
    return rank_major(
        shape,
        sizes,
        rows,
        bfloat16,
        arrived=arrived,
        wire=arrived * (there.nbytes + 12 * slots),
        back=sums,
        gradients_out=0 if gradient.numbers == bfloat16 else rows * gradient.nbytes,
        gradients_in=arrived * gradient.nbytes,
        gradients_back=sums + 4 * arrived * slots,
    )


def rank_major(
    shape: MoEShape,
    sizes: Sizes,
    rows: int,
    dtype: torch.dtype,
    *,
    arrived: int,
    wire: int,
    back: int,
    gradients_out: int,
    gradients_in: int,
    gradients_back: int,
    tables: int = 0,
) -> dict[str, int]:
    """Return the bytes of a backend whose rows arrive by source rank, and are then grouped by expert.

    Args:
        shape: As in ``planned``.
        sizes: As in ``planned``.
        rows: T.
        dtype: As in ``planned``.
        arrived: S.
        wire: Bytes of the buffers of dispatch.
        back: Bytes of the buffers of combine.
        gradients_out: Bytes of what combine's backward sends, and frees before it groups the rows.
        gradients_in: Bytes of what it receives.
        gradients_back: Bytes of the buffers of dispatch's backward.
        tables: Bytes of what the route keeps beside the index.
    """
    found = delivered(shape, sizes, dtype, spare=1)
    assert sizes.capacity is not None
    index = index_bytes(arrived, shape.top_k, shape.num_local_experts, sizes.capacity.buffer_rows, shape.pad_multiple)
    wide, result = accumulation_dtype(dtype).itemsize, rows * shape.hidden_size * dtype.itemsize
    gradients = (found["weights"] // wide) * (shape.hidden_size * dtype.itemsize + wide * shape.weighs)
    return {
        **found,
        "index": index + tables,
        **({"wire": wire} if wire else {}),
        "combine": back + result,
        "combine.backward": gradients_in + max(gradients, gradients_out),
        "dispatch.backward": gradients_back + result + rows * shape.top_k * wide,
    }


def expert_major(shape: MoEShape, sizes: Sizes, rows: int, *, values: int, maps: int = 0) -> dict[str, int]:
    """Return the bytes of a backend whose library groups bfloat16 rows by expert, and adds them up.

    The results of the library are counted, and not its buffers.

    Args:
        shape: As in ``planned``.
        sizes: As in ``planned``.
        rows: T.
        values: Bytes of the gradients of the weights, as the library returns them.
        maps: Bytes of what dispatch gives the library beside the rows.
    """
    found = delivered(shape, sizes, torch.bfloat16)
    assert sizes.capacity is not None
    grouped, hidden = sizes.capacity.buffer_rows, shape.hidden_size
    there = row_format(torch.bfloat16, hidden, shape.wire_dtype)
    gradient, plain, result = gradient_format(shape, torch.bfloat16), 2 * grouped * hidden, 2 * rows * hidden
    narrow = gradient.numbers != torch.bfloat16
    # Rows of 8 bits are widened to bfloat16, or to float32 if they are multiplied by weights.
    arrived = grouped * (gradient.nbytes + narrow * shape.weighs * 4 * hidden)
    wire = maps
    if there.numbers != torch.bfloat16:
        wire += grouped * (not shape.quantised) * there.nbytes
    return {
        **found,
        **({"wire": wire} if wire else {}),
        "combine": plain * shape.weighs + result,
        "combine.backward": arrived * (narrow or shape.weighs) + plain + 4 * grouped * shape.weighs,
        "dispatch.backward": result + values + 4 * rows * shape.top_k,
    }


def gradient_format(shape: MoEShape, dtype: torch.dtype) -> WireFormat:
    """Return the format of the gradient rows that combine's backward sends."""
    return row_format(dtype, shape.hidden_size, shape.grad_wire_dtype or back_wire(shape.wire_dtype))


def index_bytes(num_rows: int, top_k: int, num_keys: int, buffer_rows: int, pad_multiple: int) -> int:
    """Return the number of bytes of an index of fixed size and its counts.

    The arguments are S, K, L, R and ``pad_multiple`` of ``group_statically``.
    """
    slots = num_rows * top_k
    of_slots = 3 * slots + 1  # slot_N, position_N, and byrow_N with a spare entry
    of_rows = num_rows + 1 + 2 * buffer_rows + 1  # cu_S, source_R, and filled_R with a spare entry
    of_keys = num_keys + 1 + num_keys + 1  # real_L with one count for slots without a key, padded_L, needed
    of_padding = num_keys * (pad_multiple - 1)
    return 8 * (of_slots + of_rows + of_keys + of_padding)


def send_table_bytes(size: int, rows: int, pair_rows: int) -> int:
    """Return the bytes of the tables of a ``SendTable`` that live until the backward: source_B, member_N and cu_T."""
    return 8 * (size * pair_rows + (size * rows + 1) + rows + 1)
