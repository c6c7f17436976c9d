"""How the emulation says what the real library would have done to the process."""

from __future__ import annotations

from torch import Tensor


class EmulatedAbort(RuntimeError):
    """The real library would have aborted this process, or trapped on the GPU; the text names its rule."""


class EmulatedHang(RuntimeError):
    """The real library would have waited here for ever, or until its own time-out; the text names its rule."""


def host_assert(holds: bool, condition: str, source: str) -> None:
    """deep_ep's check on the host: an exception of theirs, which pybind11 hands to Python as RuntimeError.

    ``source`` is file:line of the release; ``condition`` is what stands there, in their words (v1.2.1:
    csrc/kernels/exception.cuh:17).
    """
    if not holds:
        raise RuntimeError(f"Failed: Assertion error {source} '{condition}'")


def elastic_assert(holds: bool, condition: str, source: str) -> None:
    """``host_assert`` in the words of v2 (deep_ep/include/deep_ep/common/exception.cuh:16)."""
    if not holds:
        raise RuntimeError(f"Assertion exception ({source}): {condition}")


def device_assert(holds: bool, condition: str, source: str, said: str = "") -> None:
    """deep_ep's check on the GPU: it prints the condition and traps, after which the process cannot use the GPU.

    Where their condition alone does not tell what was wrong, ``said`` adds it.
    """
    if not holds:
        raise EmulatedAbort(f"Assertion failed: {source}, condition: {condition}{said and f' ({said})'}")


def require_cpu(where: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that the emulation cannot hold.

    Raises:
        RuntimeError: one of them is not on the CPU.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise RuntimeError(
                f"{where}: the emulation of deep_ep takes CPU tensors, got one on {tensor.device}. "
                "Move it to the CPU, or use the real deep_ep."
            )
