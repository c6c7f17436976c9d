"""The implementations that run here, for tests that hold each against the same plain computation."""

from __future__ import annotations

import os
from typing import Any

import torch

from moe_dispatch.permutation import Permutation, TorchPermutation
from moe_dispatch.permutation.triton_rows import TritonPermutation

# Triton reads this once, when it is imported, and its compiler and its interpreter exclude each other in a process. So
# the interpreter's cases run in a process of their own, which test_permutation_triton.py starts.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def implementations() -> dict[str, Permutation]:
    """By name."""
    found: dict[str, Permutation] = {"torch": TorchPermutation()}
    if INTERPRETED:
        _convert_as_hardware_does()
        found["triton"] = TritonPermutation()
    return found


def _convert_as_hardware_does() -> None:
    """Triton 3.7.1's interpreter rounds into bfloat16 by cutting bits off; GPUs round to the nearest, as torch does."""
    from triton.runtime import interpreter

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        numbers = torch.from_numpy(values.copy()).view(_TORCH[source.name]).to(_TORCH[target.name])
        unsigned = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[numbers.element_size()]
        return numbers.view(unsigned).numpy()

    interpreter._convert_float = convert


_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
