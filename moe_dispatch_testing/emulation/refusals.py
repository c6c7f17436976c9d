"""The errors of the emulation. If the real library raises an error, the emulation uses the same text."""

from __future__ import annotations

from torch import Tensor


class EmulatedAbort(RuntimeError):
    """The real library would have aborted this process, or trapped on the GPU. The text names the broken rule."""


class EmulatedHang(RuntimeError):
    """The real library would have waited here for ever, or until its time-out. The text names the broken rule."""


def host_assert(holds: bool, condition: str, source: str) -> None:
    """Raise RuntimeError if a check on the host fails, like the exception of deep_ep behind pybind11.

    ``condition`` is the condition in the source of the release, and ``source`` is its file:line. The text has the form
    of csrc/kernels/exception.cuh:17 of v1.2.1.
    """
    if not holds:
        raise RuntimeError(f"Failed: Assertion error {source} '{condition}'")


def elastic_assert(holds: bool, condition: str, source: str) -> None:
    """Do the same as ``host_assert``, with the text of v2 (deep_ep/include/deep_ep/common/exception.cuh:16)."""
    if not holds:
        raise RuntimeError(f"Assertion exception ({source}): {condition}")


def device_assert(holds: bool, condition: str, source: str, said: str = "") -> None:
    """Raise EmulatedAbort if a check on the GPU fails: the real kernel traps, and the process loses the GPU.

    ``said`` adds values to the text, if the condition alone does not show the mistake.
    """
    if not holds:
        raise EmulatedAbort(f"Assertion failed: {source}, condition: {condition}{said and f' ({said})'}")


def require_cpu(where: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that are not on the CPU.

    Raises:
        RuntimeError: A tensor is not on the CPU.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise RuntimeError(
                f"{where}: the emulation of deep_ep takes CPU tensors, got one on {tensor.device}. "
                "Move the tensor to the CPU, or use the real deep_ep."
            )
