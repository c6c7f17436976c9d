"""The kernels of transformer-engine that we call: their arguments by version, and the table of positions they read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import BackendUnavailableError
from moe_dispatch.permutation.index import SlotIndex

# Arguments by function of transformer_engine.pytorch.triton.permutation: the same from 2.10.0 to 2.20.2, but that 2.12
# put in pad_offsets, which the positions in our table make needless.
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
_ORDERS_ZEROING = (2, 20)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FusedKernels:
    """transformer-engine's functions, called alike in every version; made by ``kernels_of``. ``map`` is ``row_map``'s.

    Attributes:
        version: of the library.
        functions: by name; ``pad_offsets`` is bound where there is one.
    """

    version: str
    functions: dict[str, Callable[..., Any]]

    @property
    def orders_zeroing(self) -> bool:
        """Whether a program zeroes the gradient of weights before any of its warps writes to it: 2.20 and later."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return numbers is not None and tuple(map(int, numbers.groups())) >= _ORDERS_ZEROING

    def make_map(self, routing_SE: Tensor) -> Tensor:
        """Their own table of positions, for a routing table of 0 and 1, int32 (S, E)."""
        num_tokens, num_experts = routing_SE.shape
        table: Tensor = self.functions["make_row_id_map"](
            routing_map=routing_SE, num_tokens=num_tokens, num_experts=num_experts
        )
        return table

    def permute(self, rows_SD: Tensor, map_SM: Tensor, num_grouped: int) -> Tensor:
        """(R, D), contents of padding undefined."""
        rows_RD: Tensor = self.functions["permute_with_mask_map"](
            inp=rows_SD,
            probs=None,
            scale=None,
            num_out_tokens=num_grouped,
            scale_hidden_dim=None,
            **_shared(map_SM, rows_SD),
        )[0]
        return rows_RD

    def unpermute(self, rows_RD: Tensor, map_SM: Tensor, weights_SK: Tensor | None) -> Tensor:
        """(S, D): sums in the order of the map, in float32, rounded once into the dtype of the rows."""
        sums_SD: Tensor = self.functions["unpermute_with_mask_map"](
            inp=rows_RD, merging_probs=weights_SK, permuted_probs=None, **_shared(map_SM, rows_RD)
        )[0]
        return sums_SD

    def unpermute_backward(
        self, grad_SD: Tensor, map_SM: Tensor, rows_RD: Tensor, weights_SK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows, (R, D) with contents of padding undefined, and of the weights, (S, K)."""
        grad_RD, grad_SK = self.functions["unpermute_with_mask_map_bwd_with_merging_probs"](
            fwd_output_grad=grad_SD,
            fwd_input=rows_RD,
            merging_probs=weights_SK,
            num_out_tokens=rows_RD.shape[0],
            **_shared(map_SM, grad_SD),
        )
        return grad_RD, grad_SK


def _shared(map_SM: Tensor, rows: Tensor) -> dict[str, Any]:
    """What their functions call experts, and index weights by, are slots here."""
    num_rows, top_k = map_SM.shape[0], map_SM.shape[1] // 2
    return {"row_id_map": map_SM, "num_tokens": num_rows, "num_experts": top_k, "hidden_size": rows.shape[1]}


def kernels_of(module: Any, version: str) -> FusedKernels:
    """The functions of ``transformer_engine.pytorch.triton.permutation``.

    Raises:
        BackendUnavailableError: one of them is missing or takes other arguments than in the versions we know.
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
    """int32 (S, 2K+1): by row the grouped positions of its pairs, from column K their slots, in the last how many.

    Pairs are in slot order, which is the order in which their kernels add. What is between is not read.
    """
    top_k, device = index.top_k, index.byrow_N.device
    width = 2 * top_k + 1
    pair_SK = torch.arange(index.num_rows * top_k, device=device).view(-1, top_k)
    pair_N = index.in_row_order(pair_SK)
    row_N = pair_N.div(top_k, rounding_mode="floor")
    column_N = torch.arange(len(pair_N), device=device) - index.cu_S.index_select(0, row_N)
    first_N = row_N * width + column_N
    table = torch.zeros(index.num_rows * width, dtype=torch.int32, device=device)
    table.index_copy_(0, first_N, index.byrow_N.int())
    table.index_copy_(0, first_N + top_k, (pair_N - row_N * top_k).int())
    table[width - 1 :: width] = index.cu_S.diff()
    return table.view(-1, width)


def layout_problem(kernels: FusedKernels, device: torch.device) -> str | None:
    """Whether their table of positions still looks like ``row_map``'s; what is wrong with it if not.

    Cost: three small kernels of theirs and a host sync, once.
    """
    routing_SE = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.int32, device=device)
    table = kernels.make_map(routing_SE)
    expected: list[dict[int, int]] = [{0: 0, 2: 3}, {}, {0: 1, 1: 2}]  # by row: expert -> position
    found: list[dict[int, int]] = []
    for row in table.tolist():
        count = row[-1] if len(row) == 7 else 0
        found.append(dict(zip(row[3 : 3 + count], row[:count], strict=True)))
    if found == expected:
        return None
    return f"transformer-engine {kernels.version}: its table of positions must hold {expected}, got {table.tolist()}"
