"""The versions that this library serves, of other software and of its own files, and how to install the rest.

Integrations check their framework against ``SUPPORT``, and the docs show it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """What is known of one piece of software.

    Attributes:
        tested: The versions that ran with this library, ascending. The versions between them count as tested.
        emulated: The releases of which a stand-in ran, in place of the software itself.
        lowest: The first version that is not refused; None if no version is refused.
        refused: What is refused instead of lower versions.
        target: The target of make that runs it.
    """

    target: str
    tested: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    lowest: str | None = None
    refused: str = ""


SUPPORT = {
    "Python": Support(tested=("3.11", "3.12", "3.13"), lowest="3.11", target="matrix"),
    "torch": Support(
        tested=("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"), lowest="2.10", target="matrix"
    ),
    "megatron-core": Support(tested=("0.16.1", "0.19.2"), lowest="0.16.0", target="integration"),
    "transformers": Support(tested=("5.20.1", "5.22.2", "5.23.0", "5.24.0"), lowest="5.20.1", target="integration"),
    "torchtitan": Support(tested=("0.3.0",), lowest="0.3.0", target="integration"),
    "deepspeed": Support(tested=("0.19.8",), lowest="0.19.8", target="integration"),
    "axolotl": Support(tested=("0.21.0",), lowest="0.21.0", target="integration"),
    "nemo-automodel": Support(tested=("0.7.0",), lowest="0.7.0", target="integration"),
    "megatron-bridge": Support(tested=("0.6.2",), target="integration"),
    "verl": Support(tested=("0.9.1",), target="integration"),
    "areal": Support(tested=("1.0.4",), target="integration"),
    "ms-swift": Support(tested=("4.6.0",), target="integration"),
    "DeepEP": Support(emulated=("v1.2.1", "v2-2.1.0", "v2.5.0"), lowest="v1.2.1", target="test"),
    "UCCL-EP": Support(emulated=("uccl-da914a2",), target="test"),
    "ROCm DeepEP": Support(emulated=("rocm-92b4ae1",), target="test"),
    "HybridEP": Support(
        emulated=("hybridep-94a9f8f", "hybridep-744", "hybridep-746"), refused="before 94a9f8f", target="test"
    ),
    "transformer-engine": Support(
        emulated=("2.20.2",), refused="below 2.20, or built without NCCL EP", target="integration"
    ),
}
"""What is supported, by the name of the distribution or of the library."""


def newer_format(found: object, known: int) -> str | None:
    """Return what an error says of a file in a format newer than ``known``, or None if it is not newer."""
    number = int(text) if (text := str(found)[:9]).isdecimal() else 0
    return f"got format {number}, of a newer moe-dispatch. Upgrade moe-dispatch." if number > known else None


def how_to_install(extra: str, checkout: Path = Path(__file__).parents[1]) -> str:
    """Return a sentence with the command that installs the packages of an extra.

    Args:
        extra: Name of the extra in ``pyproject.toml``.
        checkout: Folder that holds the package: a checkout, or ``site-packages`` if it was installed from a wheel.
    """
    if (checkout / "pyproject.toml").is_file():
        return f"In {checkout}, run: pip install -e '.[{extra}]'."
    # No index is asked for moe-dispatch, because it is installed: pip only installs what its metadata lists.
    return f"Run: pip install 'moe-dispatch[{extra}]'."


def loaded_nccl() -> tuple[int, int, int] | None:
    """Return the version of the NCCL that this process has loaded; None if none is loaded, or it cannot be asked.

    ``torch.cuda.nccl.version()`` is the version that torch was compiled with. It stays the same if another NCCL is
    installed. Builds of torch that link NCCL statically may export its function from ``libtorch_cuda.so``.
    """
    for name in ("libnccl.so.2", "libtorch_cuda.so"):
        with suppress(OSError, AttributeError):  # not loaded, or without the function
            number = ctypes.c_int()
            # RTLD_NOLOAD finds a library only if the process has loaded it. Not every system has it.
            if ctypes.CDLL(name, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number)) == 0:
                return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None
