"""The one-rank reorder by Triton kernels: each operation is one pass over its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.index import SlotIndex, accumulation_dtype
from moe_dispatch.permutation.rows import consists_of
from moe_dispatch.seams.plug_ins import Rejected, Usable, import_whole

_OLDEST_CAPABILITY = (8, 0)  # older GPUs cannot compute with bfloat16, and our tests do not compile for them


@final
class TritonPermutation(Permutation):
    """The reorder by the kernels of ``triton_kernels``. Nothing is tuned at run time.

    Temporary memory is one tensor of R numbers and one of N numbers.

    The results compare with the torch implementation as follows:

    - Copies, gradients of rows and unweighted sums have the same bits, with one exception: if a sum lies halfway
      between two bfloat16 numbers, torch on the CPU rounds it away from zero, and these kernels round it to even.
    - Weighted sums differ in the last bits of the accumulation dtype. These kernels use one fused multiply-add per
      term. The arithmetic of torch depends on the device.
    - Gradients of weights differ in the last bits too, because torch adds along a row in another order.
    """

    name = "triton"

    def __init__(self) -> None:
        self._kernels = _load()
        tables = import_whole("moe_dispatch.permutation.triton_tables", "triton")
        self.merge_slots, self.valid_ids, self.count_owners = tables.merge_slots, tables.valid_ids, tables.count_owners
        self.group_slots, self.group_statically = tables.group_slots, tables.group_statically
        self.to_grouped, self._to_slots = tables.to_grouped, tables.to_slots
        self.send_places, self.pack_slots = tables.send_places, tables.pack_slots

    @classmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        try:
            kernels = _load()
        except Exception as error:  # a broken installation may raise anything
            return Rejected(f"importing triton raised {type(error).__name__}: {error}".rstrip("."))
        if device_type == "cpu" and kernels.INTERPRETED:
            return Usable(version=kernels.VERSION)
        if device_type != "cuda":
            where = "on CUDA devices, and on the CPU in its interpreter"
            return Rejected(f"Triton's kernels run {where}, got {device_type!r}")
        if not torch.cuda.is_available():
            return Rejected("torch sees no CUDA device")
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < _OLDEST_CAPABILITY:
            return Rejected(f"compute capability 8.0 or later is needed, got {major}.{minor}")
        return Usable(version=kernels.VERSION)

    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        self._kernels.gather(*_as_words(rows, out), source)

    def scatter(self, rows: Tensor, source_B: Tensor, member_B: Tensor, cu_S: Tensor, out: Tensor) -> None:
        self._kernels.scatter(*_as_words(rows, out), member_B, cu_S, None)

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        out = torch.empty(index.num_grouped, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
        self._kernels.scatter(*_as_words(rows_SD, out), index.byrow_N, index.cu_S, index.padding)
        return out

    def expand_weighted(
        self,
        rows_SD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        partners_RD: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        if weights_R is None:
            return self.expand(rows_SD, index, dtype), None
        accumulate = accumulation_dtype(dtype)
        out = torch.empty(index.num_grouped, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
        dots = None if partners_RD is None else torch.empty(index.num_grouped, dtype=accumulate, device=out.device)
        tables, given = (index.byrow_N, index.cu_S, index.padding), {"partners": partners_RD, "dots": dots}
        self._kernels.scatter_weighted(rows_SD, *tables, weights_R, out, most=index.top_k, **given)
        return out, None if dots is None else dots.to(weights_R.dtype)

    def weigh(
        self,
        rows_RD: Tensor,
        weights_R: Tensor,
        is_real: Callable[[], Tensor],
        dtype: torch.dtype,
        *,
        partners_RD: Tensor | None = None,
        clears: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        accumulate = accumulation_dtype(rows_RD.dtype, dtype)
        out = torch.empty(rows_RD.shape, dtype=dtype, device=rows_RD.device)
        dots = None if partners_RD is None else torch.empty(len(out), dtype=accumulate, device=out.device)
        self._kernels.weigh(rows_RD, weights_R, is_real(), out, partners=partners_RD, dots=dots, clears=clears)
        return out, None if dots is None else dots.to(weights_R.dtype)

    def reduce(
        self,
        rows_RD: Tensor,
        index: SlotIndex,
        weights_R: Tensor | None,
        out: Tensor,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        cleared = None if values is None else values[1]
        tables: Any = {"of_rows": True, "cleared": cleared}
        self._kernels.sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_R, out, **tables)
        if values is not None:
            self._to_slots(index, *values)

    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        self._kernels.sum_bags(rows, members_N, cu_S, weights_N, out)


def _as_words(rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """View rows of one dtype as 16-bit words if their sizes and strides allow it.

    Triton joins the accesses of a lane to 16 bytes if it knows that rows begin at multiples of 16 numbers. Packets
    begin at multiples of 32 bytes.
    """
    if rows.dtype == out.dtype and consists_of(rows, 2) and consists_of(out, 2):
        return rows.view(torch.int16), out.view(torch.int16)
    return rows, out


def _load() -> Any:
    return import_whole("moe_dispatch.permutation.triton_kernels", "triton")
