"""Moving the rows of a one-rank reorder by our Triton kernels: each operation is one pass over its rows."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.blocks import accumulation_dtype
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.permutation.rows import as_words
from moe_dispatch.probing import Rejected, Usable, import_whole

_OLDEST_CAPABILITY = (8, 0)  # the first that computes with bfloat16, and the first that our tests compile for


@final
class TritonPermutation(Permutation):
    """Kernels of ours. No temporary memory but an index of R and one of N; nothing tuned at run time.

    Results equal the torch implementation's in every bit in copies, gradients of rows and unweighted sums, but that
    torch's sums of bfloat16 on the CPU round a tie away from zero, here as everywhere to even. They differ in the last
    bits of the accumulation dtype in weighted sums (one fused multiply-add to each term here; torch's depends on the
    device) and in gradients of weights (torch adds along a row in another order).
    """

    name = "triton"

    def __init__(self) -> None:
        self._kernels = _load()

    @classmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        try:
            kernels = _load()
        except Exception as error:  # whatever a broken installation raises
            return Rejected(f"importing triton raised {type(error).__name__}: {error}".rstrip("."))
        if device_type == "cuda":
            problem = _problem_of_device()
        elif device_type == "cpu" and kernels.INTERPRETED:
            problem = None
        else:
            problem = f"Triton's kernels run on CUDA devices, and on the CPU in its interpreter, got {device_type!r}"
        return Usable(version=kernels.VERSION) if problem is None else Rejected(problem)

    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        if rows.dtype == out.dtype:
            rows, out = as_words(rows, out)
        self._kernels.gather(rows, source, out)

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        out = torch.empty(index.num_grouped, rows_SD.shape[1], dtype=dtype, device=rows_SD.device)
        self.gather(rows_SD, index.source_or_none(), out)
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
        source = index.source_or_none()
        self._kernels.gather_weighted(
            rows_SD, source, weights_R, out, accumulate=accumulate, partners=partners_RD, dots=dots
        )
        return out, None if dots is None else dots.to(weights_R.dtype)

    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        weights_N = None if weights_R is None else weights_R.index_select(0, index.byrow_N)
        self.sum_bags(rows_RD, index.byrow_N, index.cu_S, weights_N, out)

    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        accumulate = accumulation_dtype(torch.promote_types(rows.dtype, out.dtype))
        self._kernels.sum_bags(rows, members_N, cu_S, weights_N, out, accumulate=accumulate)


def _load() -> Any:
    return import_whole("moe_dispatch.permutation.triton_kernels", "triton")


def _problem_of_device() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"compute capability 8.0 or later is needed, got {capability[0]}.{capability[1]}"
    return None
