"""What HybridEP checks in C, and what it does not check and would read out of bounds: both end the process."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.testing.emulation.hybrid.config import HybridEpConfigInstance, TokenDataType
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, require_cpu


def c_assert(holds: bool, condition: str, source: str) -> None:
    """An ``assert`` of their host code, which aborts the process."""
    if not holds:
        raise EmulatedAbort(f"{source}: Assertion `{condition}' failed.")


def undefined_unless(holds: bool, rule: str) -> None:
    """What nobody checks: the kernel reads or writes memory that is not the caller's."""
    if not holds:
        raise EmulatedAbort(f"{rule} It is not checked there, so the kernel touches foreign memory or returns garbage.")


def failed_compilation(said: str, source: str) -> RuntimeError:
    """What a static_assert of a kernel becomes: nvcc prints it, and its exit status is raised (jit/compiler.cu)."""
    return RuntimeError(
        "Failed to compile the code, compile command: nvcc (emulated). "
        f'nvcc printed: {source}: error: static assertion failed with "{said}"'
    )


def check_dispatch(config: HybridEpConfigInstance, rows: int, source: str, tensors: dict[str, Tensor | None]) -> None:
    """Tensors of a dispatch: hidden (T, H), probs float32 (T, E) or None, scaling_factor float32 (T, H / 128).

    Raises:
        EmulatedAbort: the rule, and where it stands.
    """
    hidden, probs, scales = tensors["hidden"], tensors["probs"], tensors["scaling_factor"]
    assert hidden is not None
    require_cpu("HybridEPBuffer", hidden, probs, scales)
    c_assert(hidden.is_contiguous(), "hidden.is_contiguous()", source)
    kind = config.token_data_type
    _check_shape("hidden", hidden, rows, config.hidden_dim)
    undefined_unless(
        hidden.dtype.itemsize == kind.value,
        f"hidden must have {kind.value} bytes an element ({kind.name}), got {hidden.dtype}.",
    )
    if probs is not None:
        check_probs(probs, source)
        experts = config.num_of_experts_per_rank * config.num_of_ranks_per_node * config.num_of_nodes
        _check_shape("probs", probs, rows, experts)
    if kind is TokenDataType.UINT8:
        c_assert(scales is not None, "scaling_factor.has_value()", source)
        assert scales is not None
        c_assert(scales.is_contiguous(), "scaling_factor.value().is_contiguous()", source)
        undefined_unless(scales.dtype == torch.float32, f"scaling_factor must be float32, got {scales.dtype}.")
        _check_shape("scaling_factor", scales, rows, config.hidden_dim // 128)


def check_probs(probs: Tensor, source: str) -> None:
    """Probabilities of any shape: contiguous and float32."""
    c_assert(probs.is_contiguous(), "probs.value().is_contiguous()", source)
    c_assert(probs.dtype == torch.float32, "probs.value().dtype() == torch::kFloat32", source)


def _check_shape(name: str, tensor: Tensor, rows: int, columns: int) -> None:
    undefined_unless(
        tensor.dim() == 2 and tensor.shape[0] >= rows and tensor.shape[1] == columns,
        f"{name} must be ({rows}, {columns}), got {tuple(tensor.shape)}.",
    )


def check_combine(config: HybridEpConfigInstance, hidden: Tensor, probs: Tensor | None, source: str) -> None:
    """Tensors of a combine: hidden 2 bytes an element, (R, H); probs float32.

    Raises:
        TypeError: hidden is no tensor, as pybind11 says it.
        EmulatedAbort: the rule, and where it stands.
    """
    if not isinstance(hidden, Tensor):
        raise TypeError(f"combine(): incompatible function arguments. hidden must be a Tensor, got {hidden!r}.")
    require_cpu("HybridEPBuffer", hidden, probs)
    c_assert(hidden.dtype.itemsize == 2, "c10::elementSize(hidden.scalar_type()) == 2", source)
    c_assert(hidden.is_contiguous(), "hidden.is_contiguous()", source)
    undefined_unless(
        hidden.dim() == 2 and hidden.shape[1] == config.hidden_dim,
        f"hidden must have {config.hidden_dim} columns, got shape {tuple(hidden.shape)}.",
    )
    if probs is not None:
        check_probs(probs, source)
