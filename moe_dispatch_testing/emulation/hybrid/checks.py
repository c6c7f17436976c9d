"""The checks of HybridEP's C++ code, and checks of rules that it does not check before it reads out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid.config import HybridEpConfigInstance, TokenDataType
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require_cpu


def c_assert(holds: bool, condition: str, source: str) -> None:
    """Raise EmulatedAbort for an ``assert`` of the release's host code, which aborts the process."""
    if not holds:
        raise EmulatedAbort(f"{source}: Assertion `{condition}' failed.")


def undefined_unless(holds: bool, rule: str) -> None:
    """Raise EmulatedAbort for a broken rule that the release does not check."""
    if not holds:
        raise EmulatedAbort(
            f"{rule} deep_ep does not check it, and the kernel accesses other memory or returns wrong numbers."
        )


def failed_compilation(said: str, source: str) -> RuntimeError:
    """Make the error of a failed static_assert in a kernel. nvcc prints the text, and then fails (jit/compiler.cu)."""
    return RuntimeError(
        "Failed to compile the code, compile command: nvcc (emulated). "
        f'nvcc printed: {source}: error: static assertion failed with "{said}"'
    )


def check_dispatch(config: HybridEpConfigInstance, rows: int, source: str, tensors: dict[str, Tensor | None]) -> None:
    """Check the tensors of a dispatch: hidden (T, H), probs (T, E) or None, scaling_factor float32 (T, H / 128).

    Raises:
        EmulatedAbort: A rule is broken. The text has its file and line.
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
        _check_shape("probs", probs, rows, config.num_experts)
    if kind is TokenDataType.UINT8:
        c_assert(scales is not None, "scaling_factor.has_value()", source)
        assert scales is not None
        c_assert(scales.is_contiguous(), "scaling_factor.value().is_contiguous()", source)
        undefined_unless(scales.dtype == torch.float32, f"scaling_factor must be float32, got {scales.dtype}.")
        _check_shape("scaling_factor", scales, rows, config.hidden_dim // 128)


def check_probs(probs: Tensor, source: str) -> None:
    """Require contiguous float32 probabilities of any shape."""
    c_assert(probs.is_contiguous(), "probs.value().is_contiguous()", source)
    c_assert(probs.dtype == torch.float32, "probs.value().dtype() == torch::kFloat32", source)


def _check_shape(name: str, tensor: Tensor, rows: int, columns: int) -> None:
    undefined_unless(
        tensor.dim() == 2 and tensor.shape[0] >= rows and tensor.shape[1] == columns,
        f"{name} must be ({rows}, {columns}), got {tuple(tensor.shape)}.",
    )


def check_combine(config: HybridEpConfigInstance, hidden: Tensor, probs: Tensor | None, source: str) -> None:
    """Check the tensors of a combine: hidden (R, H) with elements of 2 bytes, and probs float32.

    Raises:
        TypeError: hidden is not a tensor. pybind11 raises the same error.
        EmulatedAbort: A rule is broken. The text has its file and line.
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


def check_chunk(chunk: int, source: str, *, nodes: int = 1) -> None:
    """Raise RuntimeError for a chunk size with which the kernels do not compile."""
    if chunk % 16:
        raise failed_compilation("NUM_OF_TOKENS_PER_CHUNK must be multiple of rdma_to_attn_map_load_t.", source)
    if nodes > 1 and chunk % 32:
        raise failed_compilation("NUM_OF_TOKENS_PER_CHUNK must be multiple of 32.", source)


def check_capacity(config: HybridEpConfigInstance, source: str) -> None:
    """Raise RuntimeError for a capacity with which the combine kernel does not compile."""
    if config.max_num_of_tokens_per_rank % config.num_of_tokens_per_chunk_combine_api:
        raise failed_compilation("MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK.", source)
