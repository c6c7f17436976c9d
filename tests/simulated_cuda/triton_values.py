"""Values for Triton kernels: they are compiled and launched for the device, and computed on the CPU.

Triton's interpreter computes them. It takes a millisecond for each program, so that the kernels with one program for
each row have a form in torch here. ``tests/backends/test_permutation_triton.py`` holds these kernels against torch in
the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction, _patch_lang, interpreter_builder
from triton.runtime.jit import JITFunction

from moe_dispatch.capabilities.quantised.formats import Float8, Mxfp8, Quantised, quantise
from moe_dispatch.capabilities.quantised.rows import as_bytes, widen
from moe_dispatch.permutation.triton_launch import Kernel
from moe_dispatch_testing.host_syncs import allow_host_syncs
from tests.simulated_cuda import values
from tests.simulated_cuda.device import note_access, placed
from tests.simulated_cuda.traffic import (
    Touched,
    expand_bytes,
    expand_weighted_bytes,
    gather_bytes,
    note_traffic,
    quantise_bytes,
    scatter_bytes,
    scatter_weighted_bytes,
    sum_bags_bytes,
    weigh_bytes,
)

# The interpreter replaces functions of triton.language while it runs, so that no other thread may compile.
_lock = threading.RLock()
_LANGUAGE: Any = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
_touched = Touched()
_touched.watch(interpreter_builder)


@contextmanager
def computed(findings: values.Findings) -> Iterator[None]:
    """Compute every Triton kernel that is launched inside on the memory of its arguments."""
    kernels: Any = Kernel
    original, call = Kernel.launch, JITFunction.__call__

    def launch(self: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock, placed(f"triton::{self.fn.__name__}"):
            compiled = original(self, grid, *args, **kwargs)
            with torch.cuda.device_of(args[0]):
                again = _again(self, args, grid, kwargs)
                _touched.read = _touched.written = 0
                _compute_first(self.fn.__name__, args, again)
                _note_bytes(self, args, kwargs)
                findings.note(again)
        return compiled

    # Outside a kernel, Triton refuses calls of functions that are compiled. The interpreter makes such calls.
    kernels.launch, JITFunction.__call__ = launch, lambda self, *args, **kwargs: _rewritten(self)(*args, **kwargs)
    try:
        yield
    finally:
        kernels.launch, JITFunction.__call__ = original, call


def _rewritten(function: Any) -> Any:
    return InterpretedFunction(function.fn).rewrite()


def _again(kernel: Any, args: Any, grid: Any, kwargs: Any) -> Callable[[], None]:
    """Return a function that computes a kernel: now, and in every replay of a graph."""
    given = _on_cpu(args)
    kept = [value.untyped_storage() for value in args if isinstance(value, Tensor)]
    in_torch, _ = _IN_TORCH.get(kernel.fn.__name__, (None, None))

    def again(kept: object = kept) -> None:
        with _outside():
            if in_torch is None:
                _interpret(kernel, grid, given, kwargs)
            else:
                in_torch(_named(kernel, given, kwargs))

    return again


def _on_cpu(args: Any) -> tuple[Any, ...]:
    with _outside():
        return tuple(values.on_cpu(value.detach()) if isinstance(value, Tensor) else value for value in args)


def _named(kernel: Any, given: Any, kwargs: Any) -> SimpleNamespace:
    """Return the arguments of a kernel by name."""
    return SimpleNamespace(**dict(zip(kernel.arg_names, given, strict=False)), **kwargs)


def _note_bytes(kernel: Any, args: Any, kwargs: Any) -> None:
    """Record the bytes that a kernel has touched, as the interpreter counted them or by the formula of its form."""
    name = kernel.fn.__name__
    if name in _IN_TORCH:
        given = _on_cpu(args)
        with _outside():
            read, written = _IN_TORCH[name][1](_named(kernel, given, kwargs))
    else:
        read, written = _touched.read, _touched.written
    note_traffic(f"triton::{name}", read, written)


@contextmanager
def _outside() -> Iterator[None]:
    """Leave the modes of the thread, so that memory can be written to whatever the thread is doing."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), allow_host_syncs():
        yield


def _interpret(kernel: Any, grid: Any, given: Any, kwargs: Any) -> None:
    with _lock:
        scope = _patch_lang(_LANGUAGE)
        try:
            InterpretedFunction(kernel.fn)[grid](*given, **kwargs)
        finally:
            scope.restore()


def _taken(rows: Tensor, source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``rows[source]``, with zeros where the source is negative."""
    if not len(rows):
        return torch.zeros(len(source), rows.shape[1], dtype=dtype)
    return rows[source.clamp(min=0)].to(dtype).masked_fill_((source < 0).unsqueeze(1), 0)


def _accumulate(given: Any) -> torch.dtype:
    return torch.float64 if given.accumulate == tl.float64 else torch.float32


def _store(out: Tensor, found: Tensor) -> None:
    """Round as the kernels do: float64 by way of float32."""
    out.copy_(found.float() if found.dtype == torch.float64 and out.dtype != torch.float64 else found)


def _gather(given: Any) -> None:
    _store(given.out, _taken(given.rows, given.source, given.rows.dtype))


def _scatter(given: Any) -> None:
    counts = given.edges.diff()
    places = given.places[int(given.edges[0]) : int(given.edges[-1])]
    source = torch.arange(len(counts)).repeat_interleave(counts)
    if len(places):
        found = torch.empty(len(places), given.out.shape[1], dtype=given.out.dtype)
        _store(found, _taken(given.rows, source, given.rows.dtype))
        given.out[places] = found
    if given.padding is not None:
        given.out[given.padding[given.padding < given.num_grouped]] = 0


def _scatter_weighted(given: Any) -> None:
    counts = given.edges.diff()
    places = given.places[int(given.edges[0]) : int(given.edges[-1])]
    if len(places):
        source = torch.arange(len(counts)).repeat_interleave(counts)
        values = _taken(given.rows, source, _accumulate(given))
        found = torch.empty(len(places), given.out.shape[1], dtype=given.out.dtype)
        _store(found, values * given.weights[places].to(values.dtype).unsqueeze(1))
        given.out[places] = found
        if given.partners is not None:
            given.dots[places] = (values * given.partners[places].to(values.dtype)).sum(1)
    if given.padding is not None:
        padding = given.padding[given.padding < given.num_grouped]
        given.out[padding] = 0
        if given.partners is not None:
            given.dots[padding] = 0


def _weigh(given: Any) -> None:
    exists = given.is_real
    found = given.rows.to(_accumulate(given)).masked_fill(~exists.unsqueeze(1), 0)
    weights = torch.where(exists, given.weights.to(found.dtype), 0)
    products = found * weights.unsqueeze(1)
    if given.clears:
        _store(given.out, products)
    else:
        rounded = torch.empty_like(given.out)
        _store(rounded, products)
        given.out[exists] = rounded[exists]
    if given.partners is not None:
        partners = given.partners.to(found.dtype).masked_fill(~exists.unsqueeze(1), 0)
        given.dots.copy_((found * partners).sum(1))


def _sum_bags(given: Any) -> None:
    begins, lengths = given.edges[:-1], given.edges.diff()
    rows, dtype = given.rows[:, : given.out.shape[1]], _accumulate(given)
    total = torch.zeros(given.out.shape, dtype=dtype)
    for step in range(int(lengths.max())):  # the terms of all bags in the order of the kernel
        bags = (lengths > step).nonzero().view(-1)
        at = begins[bags] + step
        terms = rows[given.members[at]].to(dtype)
        weighed = given.members[at] if given.of_rows else at
        total[bags] += terms if given.weights is None else terms * given.weights[weighed].to(dtype).unsqueeze(1)
    _store(given.out, total)
    if given.cleared is not None:
        given.cleared.zero_()


def _places(given: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the places that a kernel writes to, and the row that stands in each."""
    rows = torch.arange(count)
    if given.places is None:
        return rows, rows
    return given.places[int(given.edges[0]) : int(given.edges[-1])], rows.repeat_interleave(given.edges.diff())


def _quantise(given: Any) -> None:
    codes, scales = as_bytes(quantise(given.rows, Mxfp8 if given.powers else Float8))
    places, source = _places(given, len(given.rows))
    given.codes[places], given.scales[places] = codes[source], scales[source]


def _expand(given: Any) -> None:
    places, source = _places(given, given.num_rows)
    if given.padding is not None:
        padding = given.padding[given.padding < given.num_grouped]
        given.out[padding] = 0
        if given.out_scales is not None:
            given.out_scales[padding] = 127 if given.powers else 1
    if given.out_scales is not None:
        given.out[places], given.out_scales[places] = given.codes[source], given.scales[source]
    elif len(places):
        scales = given.scales.view(torch.float8_e8m0fnu) if given.powers else given.scales
        rows = widen(Quantised(given.codes.view(torch.float8_e4m3fn), scales), given.out.dtype)
        given.out[places] = rows[source]


def _expand_weighted(given: Any) -> None:
    scales = given.scales.view(torch.float8_e8m0fnu) if given.powers else given.scales
    given.rows = widen(Quantised(given.codes.view(torch.float8_e4m3fn), scales), given.out.dtype)
    _scatter_weighted(given)


# For a kernel with a form in torch: the form, and the formula of the bytes that the kernel reads and writes.
_IN_TORCH: dict[str, tuple[Callable[[Any], None], Callable[[Any], tuple[int, int]]]] = {
    "gather_kernel": (_gather, gather_bytes),
    "scatter_kernel": (_scatter, scatter_bytes),
    "scatter_weighted_kernel": (_scatter_weighted, scatter_weighted_bytes),
    "weigh_kernel": (_weigh, weigh_bytes),
    "sum_bags_kernel": (_sum_bags, sum_bags_bytes),
    "quantise_kernel": (_quantise, quantise_bytes),
    "expand_kernel": (_expand, expand_bytes),
    "expand_weighted_kernel": (_expand_weighted, expand_weighted_bytes),
}


def _compute_first(name: str, args: Any, again: Callable[[], None]) -> None:
    """Compute a kernel, and record which of its tensors it wrote: those whose bytes have changed."""
    tensors = [value for value in args if isinstance(value, Tensor) and value.numel()]
    with _disable_current_modes():
        before = [_bytes(tensor).clone() for tensor in tensors]
        again()
        changed = [not torch.equal(_bytes(tensor), old) for tensor, old in zip(tensors, before, strict=True)]
        for tensor, writes in zip(tensors, changed, strict=True):
            note_access(tensor, name, writes=writes)


def _bytes(tensor: Tensor) -> Tensor:
    flat: Tensor = values.on_cpu(tensor.detach()).contiguous().view(-1)
    return flat.view(torch.uint8)
