"""The errors of the emulation, and the check behind most of them. A text names the broken rule and what it got."""

from __future__ import annotations

from torch import Tensor


class EmulatedAbort(RuntimeError):
    """The real library would have aborted this process, or trapped on the GPU. The text names the broken rule."""


class EmulatedHang(RuntimeError):
    """The real library would have waited here for ever, or until its time-out. The text names the broken rule."""


def require(holds: bool, rule: str, error: type[RuntimeError] = RuntimeError) -> None:
    """Raise ``error`` with the text of a rule that is broken.

    A plain RuntimeError stands for an assertion that the real library raises. EmulatedAbort stands for a rule that it
    checks where the process dies, or does not check at all: its kernel then reads or writes other memory.
    """
    if not holds:
        raise error(f"deep_ep: {rule}.")


def require_cpu(*tensors: Tensor | None) -> None:
    """Refuse tensors that are not on the CPU."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise RuntimeError(
                f"The emulation of deep_ep takes CPU tensors, got one on {tensor.device}. "
                "Move the tensor to the CPU, or use the real deep_ep."
            )
