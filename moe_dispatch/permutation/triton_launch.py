"""Launch Triton kernels quickly. With few rows, a step of a model is bound by the time that the host takes to launch.

In each launch Triton inspects all arguments to find the code that it has compiled for such arguments. That takes most
of the time of a launch. A ``Kernel`` remembers the code it found.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_MOST = 4096
_READ = {"3.6", "3.7"}
"""Versions of Triton whose own launch a ``Kernel`` repeats. It is not public, so others launch by themselves."""

_runtime: Any = triton.knobs.runtime


class Kernel(JITFunction):  # type: ignore[misc]
    """A kernel that runs on the device of its first argument. Arguments in ``do_not_specialize`` are integers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sizes = [each.num for each in self.params if each.do_not_specialize]
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch what was compiled for arguments of these dtypes, alignments and integers. Return it."""
        if (device := args[0].get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(grid, *args, **options)
        if self.pre_run_hooks or _is_observed():
            return self.run(*args, grid=grid, warmup=False, **options)
        kind = [
            each if not isinstance(each, Tensor) else each.dtype if each.data_ptr() % 16 == 0 else (each.dtype,)
            for each in args
        ]
        for size in self._sizes:
            kind[size] >>= 31  # Triton compiles for 32 or for 64 bits
        key = (device, *kind, *options, *options.values())
        found = self._known.get(key)
        if found is None:
            compiled = self.run(*args, grid=grid, warmup=False, **options)
            # On AMD devices, code also depends on the size of memory.
            known = torch.version.hip is None and triton.__version__.rpartition(".")[0] in _READ
            if compiled is not None and known:
                if len(self._known) >= _MOST:
                    self._known.clear()
                shapes = [options[name] for name in self.arg_names[len(args) :]]
                self._known[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, shapes
            return compiled
        compiled, run, function, metadata, shapes = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *args, *shapes)
        return compiled


def _is_observed() -> bool:
    """Return whether a profiler has set hooks. Triton calls them, and may compile other code for them."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def kernel(function: Any = None, **options: Any) -> Any:
    """Make a kernel of a function, as ``triton.jit`` does. Triton's interpreter has kernels of its own."""
    if function is None:
        return partial(kernel, **options)
    return triton.jit(function, **options) if _runtime.interpret else Kernel(function, **options)


def cdiv(count: int, size: int) -> int:
    """Return ``count / size``, rounded up. Triton's own function costs microseconds, as does its next power of 2."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is at least ``count``."""
    return 1 << (count - 1).bit_length()
