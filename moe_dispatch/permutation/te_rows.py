"""Moving the rows of a one-rank reorder by transformer-engine's fused kernels; the one module that imports it.

Its public functions (``moe_permute_with_probs``, ``moe_permute_and_pad_with_probs``, ``moe_unpermute``) derive an index
of their own from a boolean (row, expert) table in every call: with padding that is two host syncs, a row of weight 0
arrives as zeros, a row cannot name a key twice, and a row's experts are summed from the last to the first. An index is
what we have already, so it goes straight to the kernels beneath them,
``transformer_engine.pytorch.triton.permutation``, which take it as a table of positions and leave autograd to us.
"""

from __future__ import annotations

import sys
from typing import final

import torch
from torch import Tensor

from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.permutation.rows import TorchPermutation, _clear_padding
from moe_dispatch.permutation.te_kernels import FusedKernels, kernels_of, layout_problem, row_map
from moe_dispatch.probing import Rejected, Usable, import_whole

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


@final
class TransformerEnginePermutation(Permutation):
    """Kernels of transformer-engine where they do what we promise, the torch implementation elsewhere.

    - ``expand``, ``reduce``: theirs. Sums are in slot order, accumulated in float32 and rounded once, into a tensor
      that is then copied into ``out``.
    - ``expand_weighted`` with the gradient of weights: theirs from 2.20 on; before, a program's zeroing of that
      gradient is not ordered before its writing. Their dot products are added in blocks whose size is tuned by timing
      in every process, so the gradient of weights may differ in its last bits from run to run. Hence torch's where
      ``torch.use_deterministic_algorithms(True)`` is set.
    - torch's: everything with float64 (theirs accumulate in float32); sums into another dtype than the rows' (theirs
      round into that first); weighted gradients without the gradient of weights, ``sum_bags`` and ``gather`` (there are
      no kernels); no rows at all.

    Cost: about ten small torch operations per call to write the table of positions, int32 (S, 2K+1).
    """

    name = "te"

    def __init__(self, kernels: FusedKernels | None = None) -> None:
        self._kernels = _load() if kernels is None else kernels
        self._torch = TorchPermutation()

    @classmethod
    def probe(cls, device_type: str) -> Usable | Rejected:
        if device_type != "cuda":
            return Rejected(f"transformer-engine's kernels run on CUDA devices only, got {device_type!r}")
        if not torch.cuda.is_available():
            return Rejected("torch sees no CUDA device")
        try:
            kernels = _load()
            problem = layout_problem(kernels, torch.device(device_type))
        except (
            Exception
        ) as error:  # also AssertionError, FileNotFoundError and OSError, where CUDA libraries are missing
            return Rejected(f"loading transformer-engine raised {type(error).__name__}: {error}".rstrip("."))
        return Usable(version=kernels.version) if problem is None else Rejected(problem)

    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        self._torch.gather(rows, source, out)

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        if dtype not in _DTYPES or not _has_pairs(index):
            return self._torch.expand(rows_SD, index, dtype)
        with torch.cuda.device_of(rows_SD):  # theirs allocate on the current device
            out = self._kernels.permute(rows_SD.to(dtype), row_map(index), index.num_grouped)
        return _clear_padding(out, index)

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
        if partners_RD is None or not self._can_expand_weighted(rows_SD, index, dtype):
            return self._torch.expand_weighted(rows_SD, index, weights_R, partners_RD, dtype)
        weights_SK = index.to_slots(weights_R.float())
        with torch.cuda.device_of(rows_SD):
            out, dots_SK = self._kernels.unpermute_backward(rows_SD.to(dtype), row_map(index), partners_RD, weights_SK)
        return _clear_padding(out, index), index.to_grouped(dots_SK).to(weights_R.dtype)

    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        if rows_RD.dtype not in _DTYPES or rows_RD.dtype != out.dtype or not _has_pairs(index):
            self._torch.reduce(rows_RD, index, weights_R, out)
            return
        weights_SK = None if weights_R is None else index.to_slots(weights_R.float())
        with torch.cuda.device_of(rows_RD):
            out.copy_(self._kernels.unpermute(rows_RD, row_map(index), weights_SK))

    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        self._torch.sum_bags(rows, members_N, cu_S, weights_N, out)

    def _can_expand_weighted(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> bool:
        widens = torch.promote_types(rows_SD.dtype, dtype) == dtype  # narrowing would round before the product
        promised = self._kernels.orders_zeroing and not torch.are_deterministic_algorithms_enabled()
        return widens and promised and dtype in _DTYPES and _has_pairs(index)


def _load() -> FusedKernels:
    module = import_whole("transformer_engine.pytorch.triton.permutation", "transformer_engine")
    return kernels_of(module, str(sys.modules["transformer_engine"].__version__))


def _has_pairs(index: SlotIndex) -> bool:
    return index.byrow_N.shape[0] > 0
