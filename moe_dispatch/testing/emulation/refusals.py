"""The errors of the emulation, in the words of the real library where it has any."""

from __future__ import annotations

from torch import Tensor


class EmulatedAbort(RuntimeError):
    """The real library would have aborted this process, or trapped on the GPU; the text names its rule."""


class EmulatedHang(RuntimeError):
    """The real library would have waited here for ever, or until its own time-out; the text names its rule."""


def host_assert(holds: bool, condition: str, source: str) -> None:
    """Raise RuntimeError for a failed check on the host, as pybind11 turns deep_ep's exception into one.

    ``source`` is file:line of the release, and ``condition`` the condition in its source (csrc/kernels/exception.cuh:17
    of v1.2.1).
    """
    if not holds:
        raise RuntimeError(f"Failed: Assertion error {source} '{condition}'")


def elastic_assert(holds: bool, condition: str, source: str) -> None:
    """``host_assert`` in the words of v2 (deep_ep/include/deep_ep/common/exception.cuh:16)."""
    if not holds:
        raise RuntimeError(f"Assertion exception ({source}): {condition}")


def device_assert(holds: bool, condition: str, source: str, said: str = "") -> None:
    """Raise EmulatedAbort for a failed check on the GPU: it traps, and the process cannot use the GPU any more.

    ``said`` adds the values, if the condition alone does not tell what was wrong.
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
