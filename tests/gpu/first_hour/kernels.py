"""Kernels of one rank against a copy: ``python -m tests.gpu.first_hour.kernels kernels cuda full``.

The speed of a pass is the number of bytes that it must read and write, divided by its time. It is told as a share of
the speed of a copy of the grouped rows in the same run: 1.0 is the speed of the copy. ``index_select`` of torch, which
makes the grouped rows too, is the floor to compare with.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.backends.wire import packet_format, row_format
from moe_dispatch.permutation import (
    Permutation,
    SlotIndex,
    choose_permutation,
    group_slots,
    known_permutations,
    probe_permutation,
)
from moe_dispatch.seams.plug_ins import Rejected

# Rows, columns, experts, top_k. With top-k 2 and 6, packets of rows and slots have other strides than with top-k 8.
SHAPES = {
    "full": [(8192, 7168, 256, 8), (8192, 7168, 256, 6), (8192, 7168, 256, 2), (8192, 4096, 64, 8), (256, 4096, 64, 8)],
    "small": [(24, 256, 8, 2)],
}
WIRES = ("float8_e4m3fn", "mxfp8")
Passes = dict[str, tuple[Callable[[], object], int]]
"""By name, a pass over rows, and the bytes that it must read and write."""


def main(_: str, device: str, scale: str) -> None:
    found: dict[str, Any] = {}
    for rows, width, experts, top_k in SHAPES[scale]:
        for name in known_permutations():
            where = f"{name} {rows} x {width}, {experts} experts, top-{top_k}"
            verdict = probe_permutation(name, device)
            if isinstance(verdict, Rejected):
                found[where] = f"skipped: {verdict.reason}"
            else:
                found |= _measured(where, name, device, rows, width, experts, top_k)
    print(json.dumps(found), flush=True)


def _measured(where: str, name: str, device: str, rows: int, width: int, experts: int, top_k: int) -> dict[str, str]:
    generator = torch.Generator(device).manual_seed(0)
    weights_TK, ids_TK = torch.rand(rows, experts, generator=generator, device=device).topk(top_k)
    index = group_slots(ids_TK, torch.bincount(ids_TK.flatten(), minlength=experts).tolist())
    rows_SD = torch.randn(rows, width, dtype=torch.bfloat16, generator=generator, device=device)
    rows_RD = torch.randn(index.num_grouped, width, dtype=torch.bfloat16, generator=generator, device=device)
    permutation, copied = choose_permutation(name, device), torch.empty_like(rows_RD)
    speed = 2 * rows_RD.nbytes / milliseconds(device, lambda: copied.copy_(rows_RD))
    found = {f"{where}: copy": f"{speed / 1e6:.0f} GB/s"}
    groups = (
        _of_rows(permutation, index, rows_SD, rows_RD),
        _of_packets(permutation, index, rows_SD, rows_RD, weights_TK, ids_TK),
        *(_of_wire(wire, permutation, index, rows_SD) for wire in WIRES),
    )
    for label, (action, moved) in (each for passes in groups for each in passes.items()):
        ms = milliseconds(device, action)
        found[f"{where}: {label}"] = f"{moved / ms / speed:.2f} of the copy ({ms * 1e3:.0f} us)"
    return found


def _of_rows(permutation: Permutation, index: SlotIndex, rows_SD: Tensor, rows_RD: Tensor) -> Passes:
    """Return passes over rows and grouped rows, and those that multiply expert-major rows by weights."""
    weights_R = torch.rand(len(rows_RD), device=rows_RD.device)
    grouped, single, dtype = rows_RD.nbytes, rows_SD.nbytes, rows_SD.dtype
    is_real_R, out = torch.ones_like(weights_R, dtype=torch.bool), torch.empty_like(rows_SD)
    weigh = partial(permutation.weigh, rows_RD, weights_R, lambda: is_real_R, dtype)
    return {
        "index_select": (lambda: rows_SD.index_select(0, index.source_R), grouped + single),
        "expand": (lambda: permutation.expand(rows_SD, index, dtype), grouped + single),
        "reduce": (lambda: permutation.reduce(rows_RD, index, weights_R, out), grouped + single),
        "expand_weighted": (
            lambda: permutation.expand_weighted(rows_SD, index, weights_R, rows_RD, dtype),
            2 * grouped + single,
        ),
        "weights on expert-major rows": (weigh, 2 * grouped),
        "weights on expert-major rows, backward": (lambda: weigh(partners_RD=rows_RD, clears=True), 3 * grouped),
    }


def _of_packets(
    permutation: Permutation, index: SlotIndex, rows_SD: Tensor, rows_RD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> Passes:
    """Return passes over packets of rows with their slots, whose rows have a stride."""
    form = packet_format(row_format(rows_SD.dtype, rows_SD.shape[1]), index.top_k, torch.float32, torch.int16)
    packets = form.pack(rows_SD, weights_TK, ids_TK)
    order, out = torch.randperm(len(packets), device=packets.device), torch.empty_like(packets)
    of_packets, of_out = form.rows(packets), form.rows(out)
    grouped, single = rows_RD.nbytes, rows_SD.nbytes
    copies, num_rows = min(index.top_k, 4), len(rows_SD)  # of a row, for as many ranks
    members, edges = (torch.arange(count, device=out.device) for count in (copies * num_rows, num_rows + 1))
    tables = members // copies, members, edges * copies
    of_ranks = form.rows(torch.empty(len(members), form.stride, dtype=torch.uint8, device=out.device))
    return {
        f"packets, each row scattered to {copies}": (
            lambda: permutation.scatter(rows_SD, *tables, of_ranks),
            single + copies * single,
        ),
        "packets, packed": (lambda: form.pack(rows_SD, weights_TK, ids_TK), single + packets.nbytes),
        "packets, gathered": (lambda: permutation.gather(packets, order, out), 2 * packets.nbytes),
        "packets, expanded": (lambda: permutation.expand(of_packets, index, rows_SD.dtype), grouped + single),
        "packets, summed into": (lambda: permutation.reduce(rows_RD, index, None, of_out), grouped + single),
    }


def _of_wire(wire: str, permutation: Permutation, index: SlotIndex, rows_SD: Tensor) -> Passes:
    """Return passes that quantise rows into packets, and that copy rows from there to their experts."""
    dtype, (num_rows, width) = rows_SD.dtype, rows_SD.shape
    form = packet_format(row_format(dtype, width, wire), index.top_k, torch.float32, torch.int16)
    packets = torch.empty(num_rows, form.stride, dtype=torch.uint8, device=rows_SD.device)
    coded = packets.split_with_sizes(form.widths, 1)[0]
    form.row.encode(rows_SD, coded)
    arrived: Any = form.row.decode(coded)
    single, grouped = num_rows * form.row.nbytes, index.num_grouped * form.row.nbytes
    expand = partial(arrived.expand, permutation, index, dtype)
    return {
        f"{wire}, encoded": (lambda: form.row.encode(rows_SD, coded), rows_SD.nbytes + single),
        f"{wire}, widened and expanded": (
            lambda: expand(as_sent=False),
            single + index.num_grouped * width * dtype.itemsize,
        ),
        f"{wire}, expanded as sent": (lambda: expand(as_sent=True), single + grouped),
    }


def milliseconds(device: str, action: Callable[[], object]) -> float:
    """Return the shortest of some runs."""
    if device != "cuda":
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3
    action()
    found: list[float] = []
    for _ in range(20):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        action()
        end_event.record()
        end_event.synchronize()
        found.append(begin_event.elapsed_time(end_event))
    return max(min(found), 1e-6)  # a simulated device has no clock


if __name__ == "__main__":
    main(*sys.argv[1:])
