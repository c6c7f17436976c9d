"""Bytes of device memory that operators of torch and Triton kernels read and write.

An operator is counted by the memory that its tensors cover: an expanded tensor by what it is expanded from, a view by
its own elements. Memory that an operator overwrites, as ``copy_`` does, is not read. Operators that take indices touch
only the rows that the indices name. A Triton kernel is counted by the addresses of its loads and stores that a mask
lets through; lanes that access one address in one instruction count once. Nothing is found in a cache: what two
operators read is read twice.

Only what the operator must touch is counted. The passes of a sort over its keys, and temporary memory inside an
operator, are not seen. Collectives count as nothing: they move what a send buffer holds into a receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.simulated_cuda.device import caller


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one operator or kernel reads and writes.

    Attributes:
        name: Name of the operator, or "triton::" and the name of the kernel.
        place: Lines of moe_dispatch that called it, innermost first.
        device: Number of the device.
        read: Bytes that it reads.
        written: Bytes that it writes.
    """

    name: str
    place: str
    device: int
    read: int
    written: int

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


_open: list[list[Traffic]] = []


@contextmanager
def traffic() -> Iterator[list[Traffic]]:
    """Collect what operators and kernels of all threads touch. Use it inside ``simulated``. Blocks may be nested."""
    found: list[Traffic] = []
    _open.append(found)
    try:
        yield found
    finally:
        _open[:] = [each for each in _open if each is not found]


def note_traffic(name: str, read: int, written: int) -> None:
    """Add the bytes of an operator or kernel to all open lists."""
    entry = Traffic(name, caller(), torch.cuda.current_device(), read, written)
    for found in _open:
        found.append(entry)


def note_operator(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Add the bytes of an operator of torch that was called with these arguments and returned ``out``."""
    if _open:
        note_traffic(func.name(), *operator_bytes(func, args, kwargs, out))


def operator_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the bytes that an operator reads and writes on devices."""
    schema = func._schema
    given = {argument.name: kwargs.get(argument.name) for argument in schema.arguments}
    given |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    rule = _RULES.get(schema.name)
    if rule is not None:
        return rule(given, out)
    read, written, updated = 0, 0, set[int]()
    for argument in schema.arguments:
        tensors, is_written = _tensors(given[argument.name]), _is_written(argument)
        nbytes = sum(map(covered, tensors))
        if is_written:
            written += nbytes
            updated |= {tensor.data_ptr() for tensor in tensors}
        if not is_written or not (argument.is_out or schema.name in _OVERWRITING):
            read += nbytes
    return read, written + sum(covered(each) for each in _tensors(out) if each.data_ptr() not in updated)


def covered(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor of a device covers; elements that share memory count once."""
    if not tensor.is_cuda or not tensor.numel():
        return 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


# Operators in place that do not read what they overwrite.
_OVERWRITING = {f"aten::{name}_" for name in ("copy", "fill", "normal", "random", "uniform", "zero")}


def _taken(given: Any, out: Tensor) -> tuple[int, int]:
    """Count an operator that reads one element, or row, of its first argument for each one that it returns."""
    indices = sum(map(covered, _tensors(given.get("index", given.get("indices")))))
    return indices + covered(out), covered(out)


def _rows_of(given: Any) -> int:
    """Return the bytes of the rows of ``self`` that ``index`` names."""
    rows: int = given["self"].shape[given["dim"]]
    count: int = given["index"].numel()
    return covered(given["self"]) // max(rows, 1) * count


def _index_copied(given: Any, out: Tensor) -> tuple[int, int]:
    return covered(given["index"]) + covered(given["source"]), _rows_of(given)


def _index_added(given: Any, out: Tensor) -> tuple[int, int]:
    return covered(given["index"]) + covered(given["source"]) + _rows_of(given), _rows_of(given)


def _index_filled(given: Any, out: Tensor) -> tuple[int, int]:
    return covered(given["index"]), _rows_of(given)


def _scattered(given: Any, out: Tensor) -> tuple[int, int]:
    source = covered(given["src"]) if isinstance(given.get("src"), Tensor) else 0
    return covered(given["index"]) + source, given["index"].numel() * given["self"].element_size()


def _scatter_added(given: Any, out: Tensor) -> tuple[int, int]:
    read, written = _scattered(given, out)
    return read + written, written


def _index_put(given: Any, out: Tensor) -> tuple[int, int]:
    indices = _tensors(given["indices"])
    elements = prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    written = elements * prod(given["self"].shape[len(indices) :]) * given["self"].element_size()
    read = sum(map(covered, indices)) + covered(given["values"])
    return read + (written if given["accumulate"] else 0), written


def _bagged(given: Any, out: Any) -> tuple[int, int]:
    members = given["indices"].numel() * given["weight"].shape[1] * given["weight"].element_size()
    tables = sum(map(covered, _tensors([given["indices"], given["offsets"], given["per_sample_weights"]])))
    return members + tables, covered(out[0])


def _made(given: Any, out: Any) -> tuple[int, int]:
    """Count an operator that takes only the shape of its argument."""
    return 0, covered(out)


_RULES: dict[str, Callable[[Any, Any], tuple[int, int]]] = {
    **{f"aten::{name}_like": _made for name in ("full", "ones", "rand", "randn", "zeros")},
    **{f"aten::new_{name}": _made for name in ("full", "ones", "zeros")},
    **{f"aten::{name}": _taken for name in ("index_select", "take", "gather", "index")},
    "aten::index_copy_": _index_copied,
    "aten::index_add_": _index_added,
    "aten::index_fill_": _index_filled,
    "aten::scatter_": _scattered,
    "aten::scatter_add_": _scatter_added,
    "aten::scatter_reduce_": _scatter_added,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_embedding_bag": _bagged,
    "aten::_embedding_bag_forward_only": _bagged,
}


class Touched:
    """Bytes that an interpreted Triton kernel has read and written so far.

    Triton's interpreter computes a block as an array of numpy, so a load or a store has the addresses of its elements.
    """

    def __init__(self) -> None:
        self.read = self.written = 0

    def watch(self, builder: Any) -> None:
        """Count the loads, stores and atomic operations of Triton's interpreter from now on."""
        load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def masked_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
            self.read += _touched(ptrs, mask)
            return load(ptrs, mask, *rest)

        def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.written += _touched(ptrs, mask)
            return store(ptrs, value, mask, *rest)

        def atomic_rmw(operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.read += _touched(ptr, mask)
            self.written += _touched(ptr, mask)
            return atomic(operation, ptr, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        builder.create_atomic_rmw = atomic_rmw


def _touched(ptrs: Any, mask: Any) -> int:
    """Return the bytes of the distinct addresses that a mask lets through. Triton keeps a bool in a byte."""
    addresses, allowed = np.broadcast_arrays(ptrs.data, mask.data)
    bits: int = ptrs.get_element_ty().primitive_bitwidth
    return np.unique(addresses[allowed.astype(bool)]).size * max(bits // 8, 1)


def gather_bytes(given: Any) -> tuple[int, int]:
    """Return what ``gather_kernel`` reads and writes. Each block of columns reads the source of its row."""
    source, rows, width = given.source, given.rows, given.width
    count, blocks = len(source), -(-width // given.block)
    real = int((source >= 0).sum())
    return 8 * count * blocks + real * width * rows.element_size(), count * width * given.out.element_size()


def scatter_bytes(given: Any) -> tuple[int, int]:
    """Return what ``scatter_kernel`` reads and writes. Each block of columns reads the places of its row."""
    count, width, counts = given.num_rows, given.width, given.edges.diff()
    blocks, copies, used = -(-width // given.block), int(counts.sum()), int((counts > 0).sum())
    padding = given.edges[:0] if given.padding is None else given.padding
    tables = 8 * (2 * count + copies + len(padding))
    written = (copies + int((padding < given.num_grouped).sum())) * width * given.out.element_size()
    return tables * blocks + used * width * given.rows.element_size(), written


def scatter_weighted_bytes(given: Any) -> tuple[int, int]:
    """Return what ``scatter_weighted_kernel`` reads and writes."""
    count, width, counts, partners = given.num_rows, given.width, given.edges.diff(), given.partners
    copies, used = int(counts.sum()), int((counts > 0).sum())
    padding = given.edges[:0] if given.padding is None else given.padding
    cleared = copies + int((padding < given.num_grouped).sum())
    read = 8 * (2 * count + copies + len(padding)) + copies * given.weights.element_size()
    read += used * width * given.rows.element_size()
    written = cleared * width * given.out.element_size()
    if partners is not None:
        read += copies * width * partners.element_size()
        written += cleared * given.dots.element_size()
    return read, written


def weigh_bytes(given: Any) -> tuple[int, int]:
    """Return what ``weigh_kernel`` reads and writes."""
    count, real, width, partners = len(given.is_real), int(given.is_real.sum()), given.width, given.partners
    read = count + real * (width * given.rows.element_size() + given.weights.element_size())
    written = (count if given.clears else real) * width * given.out.element_size()
    if partners is not None:
        read += real * width * partners.element_size()
        written += count * given.dots.element_size()
    return read, written


def sum_bags_bytes(given: Any) -> tuple[int, int]:
    """Return what ``sum_bags_kernel`` reads and writes. Each block of columns reads the members of its bag."""
    count, width = given.out.shape
    members, blocks = int(given.edges[-1] - given.edges[0]), -(-width // given.block)
    tables = 16 * count + members * (8 + (0 if given.weights is None else given.weights.element_size()))
    written = count * width * given.out.element_size() + (0 if given.cleared is None else given.cleared.nbytes)
    return tables * blocks + members * width * given.rows.element_size(), written


def quantise_bytes(given: Any) -> tuple[int, int]:
    """Return what ``quantise_kernel`` reads and writes. Each block of columns reads the places of its row."""
    tables, used, copies = _copied(given, len(given.rows))
    row = given.width + given.width // given.size * given.scales.element_size()
    return tables + used * given.width * given.rows.element_size(), copies * row


def expand_bytes(given: Any) -> tuple[int, int]:
    """Return what ``expand_kernel`` reads and writes."""
    tables, used, copies = _copied(given, given.num_rows)
    scales = given.width // given.size * given.scales.element_size()
    if given.padding is not None:
        tables += 8 * len(given.padding) * -(-given.width // (given.size * given.count))
        copies += int((given.padding < given.num_grouped).sum())
    out = given.width * given.out.element_size() + (0 if given.out_scales is None else scales)
    return tables + used * (given.width + scales), copies * out


def expand_weighted_bytes(given: Any) -> tuple[int, int]:
    """Return what ``expand_weighted_kernel`` reads and writes: codes and scales instead of rows."""
    read, written = scatter_weighted_bytes(SimpleNamespace(**{**vars(given), "rows": given.codes}))
    blocks = -(-given.width // given.size) * given.scales.element_size()
    return read + int((given.edges.diff() > 0).sum()) * blocks, written


def _copied(given: Any, count: int) -> tuple[int, int, int]:
    """Return the bytes that a kernel reads of ``places`` and ``edges``, the rows that it reads, and their copies."""
    if given.places is None:
        return 0, count, count
    counts, blocks = given.edges.diff(), -(-given.width // (given.size * given.count))
    used, copies = int((counts > 0).sum()), int(counts.sum())
    return 8 * (2 * count + copies) * blocks, used, copies
