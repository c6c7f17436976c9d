"""The one-rank reorder by the fused kernels of transformer-engine. The one module that imports it.

The public functions of transformer-engine (``moe_permute_with_probs``, ``moe_permute_and_pad_with_probs``,
``moe_unpermute``) derive an index of their own from a boolean (row, expert) table in every call. This has drawbacks:

- With padding, the index costs two host syncs.
- A row of weight 0 arrives as zeros.
- A row cannot name an expert twice.
- The experts of a row are summed from the last to the first.

This library has a ``SlotIndex`` already. So this module calls the kernels beneath the public functions, in
``transformer_engine.pytorch.triton.permutation``. The kernels take a table of positions, and the caller does autograd.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch._probing import Rejected, Usable, import_whole
from moe_dispatch.errors import BackendUnavailableError
from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.permutation.rows import TorchPermutation, clear_padding

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# The parameters of each function. They are the same in 2.10.0 to 2.20.2, except that 2.12 added pad_offsets. It is not
# needed here, because the positions in the table of ``row_map`` include the padding.
_ARGUMENTS = {
    "make_row_id_map": "routing_map num_tokens num_experts",
    "permute_with_mask_map": (
        "inp row_id_map probs scale num_tokens num_experts num_out_tokens hidden_size scale_hidden_dim"
    ),
    "unpermute_with_mask_map": "inp row_id_map merging_probs permuted_probs num_tokens num_experts hidden_size",
    "unpermute_with_mask_map_bwd_with_merging_probs": (
        "fwd_output_grad row_id_map fwd_input merging_probs num_tokens num_experts num_out_tokens hidden_size"
    ),
}
_ORDERS_ZEROING = (2, 20)  # the first version whose ``orders_zeroing`` is True


@final
class TransformerEnginePermutation(Permutation):
    """The reorder by transformer-engine's kernels where they keep the promises of ``Permutation``, else by torch.

    - ``expand`` and ``reduce`` use the kernels. The kernel of ``reduce`` adds in slot order, accumulates in float32 and
      rounds once. It writes a tensor of its own, which is then copied to ``out``.
    - ``expand_weighted`` uses the kernel if the gradient of the weights is wanted and the version is 2.20 or later.
      Earlier versions may zero this gradient after a part of it was written. The kernel adds dot products in blocks,
      and each process chooses the size of the blocks by timing. So the last bits of the gradient may differ from run to
      run, and torch computes it if ``torch.use_deterministic_algorithms(True)`` is set.
    - Torch does the rest: float64 (the kernels accumulate in float32), sums whose dtype is not the dtype of the rows
      (the kernels would round to the dtype of the rows first), weighted gradients without the gradient of the weights,
      ``sum_bags``, ``weigh`` and ``gather`` (there are no kernels), and an index without rows.

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
        except Exception as error:  # missing CUDA libraries raise AssertionError, FileNotFoundError or OSError
            return Rejected(f"loading transformer-engine raised {type(error).__name__}: {error}".rstrip("."))
        return Usable(version=kernels.version) if problem is None else Rejected(problem)

    def gather(self, rows: Tensor, source: Tensor, out: Tensor) -> None:
        self._torch.gather(rows, source, out)

    def expand(self, rows_SD: Tensor, index: SlotIndex, dtype: torch.dtype) -> Tensor:
        if dtype not in _DTYPES or not _has_rows(index):
            return self._torch.expand(rows_SD, index, dtype)
        own = {"inp": rows_SD.to(dtype), "probs": None, "scale": None, "scale_hidden_dim": None}
        found = self._kernels.run("permute_with_mask_map", index, rows_SD, num_out_tokens=index.num_grouped, **own)
        return clear_padding(found[0], index)

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
        widens = torch.promote_types(rows_SD.dtype, dtype) == dtype  # a narrower dtype would round before the product
        promised = self._kernels.orders_zeroing and not torch.are_deterministic_algorithms_enabled()
        if partners_RD is None or not (widens and promised and dtype in _DTYPES and _has_rows(index)):
            return self._torch.expand_weighted(rows_SD, index, weights_R, partners_RD, dtype)
        weights_SK = index.to_slots(weights_R.float())
        own = {"fwd_output_grad": rows_SD.to(dtype), "fwd_input": partners_RD, "merging_probs": weights_SK}
        name = "unpermute_with_mask_map_bwd_with_merging_probs"
        out, dots_SK = self._kernels.run(name, index, rows_SD, num_out_tokens=index.num_grouped, **own)
        return clear_padding(out, index), index.to_grouped(dots_SK).to(weights_R.dtype)

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
        return self._torch.weigh(rows_RD, weights_R, is_real, dtype, partners_RD=partners_RD, clears=clears)

    def reduce(self, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        if rows_RD.dtype not in _DTYPES or rows_RD.dtype != out.dtype or not _has_rows(index):
            self._torch.reduce(rows_RD, index, weights_R, out)
            return
        weights_SK = None if weights_R is None else index.to_slots(weights_R.float())
        own = {"inp": rows_RD, "merging_probs": weights_SK, "permuted_probs": None}
        out.copy_(self._kernels.run("unpermute_with_mask_map", index, rows_RD, **own)[0])

    def sum_bags(self, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        self._torch.sum_bags(rows, members_N, cu_S, weights_N, out)


def _has_rows(index: SlotIndex) -> bool:
    return index.byrow_N.shape[0] > 0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FusedKernels:
    """The kernels of transformer-engine, with one signature for all versions. ``kernels_of`` makes this object.

    Attributes:
        version: Version of the library.
        functions: The functions by name. If a function takes ``pad_offsets``, None is already bound to it.
    """

    version: str
    functions: dict[str, Callable[..., Any]]

    @property
    def orders_zeroing(self) -> bool:
        """Whether a program zeroes its gradients of weights before any of its warps writes one. True from 2.20 on."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return numbers is not None and tuple(map(int, numbers.groups())) >= _ORDERS_ZEROING

    def run(self, name: str, index: SlotIndex, rows: Tensor, **arguments: Any) -> Any:
        """Call a function with the arguments that all of them share, and its own.

        The kernels expect a table of weights with one column per expert. They are given one with K columns instead, so
        their ``num_experts`` is K, and the "expert" of a slot is its k.
        """
        with torch.cuda.device_of(rows):  # the kernels allocate on the current device
            return self.functions[name](
                row_id_map=row_map(index),
                num_tokens=index.num_rows,
                num_experts=index.top_k,
                hidden_size=rows.shape[1],
                **arguments,
            )


def _load() -> FusedKernels:
    module = import_whole("transformer_engine.pytorch.triton.permutation", "transformer_engine")
    return kernels_of(module, str(sys.modules["transformer_engine"].__version__))


def kernels_of(module: Any, version: str) -> FusedKernels:
    """Look up the functions of ``transformer_engine.pytorch.triton.permutation``.

    Raises:
        BackendUnavailableError: A function is missing, or its parameters are not those of the known versions.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for name, known in _ARGUMENTS.items():
        function: Any = getattr(module, name, None)
        takes = set() if function is None else {*inspect.signature(function).parameters}
        if takes - {"pad_offsets"} != {*known.split()}:
            raise BackendUnavailableError(
                f"transformer-engine {version}: {name} must take ({known.replace(' ', ', ')}), "
                f"got ({', '.join(sorted(takes))}). Install a version from 2.10 to 2.20."
            )
        functions[name] = partial(function, pad_offsets=None) if "pad_offsets" in takes else function
    return FusedKernels(version=version, functions=functions)


def row_map(index: SlotIndex) -> Tensor:
    """Make the table of positions that the kernels read, int32 (S, 2K+1).

    If n slots of a row have a key, columns 0 to n-1 hold their grouped positions, columns K to K+n-1 hold their k, and
    the last column holds n. The kernels add in this order. They do not read the other columns.

    In the example of ``SlotIndex``, slots 0 and 1 of row 0 stand at the grouped positions 2 and 0, and slot 1 of row 1
    stands at 3. So the table is [[2, 0, 0, 1, 2], [3, _, 1, _, 1]].
    """
    top_k, device = index.top_k, index.byrow_N.device
    width = 2 * top_k + 1
    slot_SK = torch.arange(index.num_rows * top_k, device=device).view(-1, top_k)
    slot_N = index.in_row_order(slot_SK)
    row_N = slot_N.div(top_k, rounding_mode="floor")
    column_N = torch.arange(len(slot_N), device=device) - index.cu_S.index_select(0, row_N)
    first_N = row_N * width + column_N
    table = torch.zeros(index.num_rows * width, dtype=torch.int32, device=device)
    table.index_copy_(0, first_N, index.byrow_N.int())
    table.index_copy_(0, first_N + top_k, (slot_N - row_N * top_k).int())
    table[width - 1 :: width] = index.cu_S.diff()
    return table.view(-1, width)


def layout_problem(kernels: FusedKernels, device: torch.device) -> str | None:
    """Check on an example that transformer-engine lays out its own table as ``row_map`` does.

    Returns:
        What differs, or None if nothing does.

    Cost: three small kernels and a host sync.
    """
    routing_SE = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.int32, device=device)
    table: Tensor = kernels.functions["make_row_id_map"](routing_map=routing_SE, num_tokens=3, num_experts=3)
    expected: list[dict[int, int]] = [{0: 0, 2: 3}, {}, {0: 1, 1: 2}]  # of each row: expert -> position
    found: list[dict[int, int]] = []
    for row in table.tolist():
        count = row[-1] if len(row) == 7 else 0
        found.append(dict(zip(row[3 : 3 + count], row[:count], strict=True)))
    if found == expected:
        return None
    return f"transformer-engine {kernels.version}: its table of positions must hold {expected}, got {table.tolist()}"
