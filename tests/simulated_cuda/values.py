"""Values for a CUDA build of torch whose kernels write nothing: each operator also runs on the CPU.

The operator of CUDA runs first. It checks devices and dtypes, allocates, launches, copies and synchronises. Then the
operator of the CPU runs on the same memory, which is host memory, and writes the results there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from moe_dispatch_testing.host_syncs import in_new_threads
from tests.simulated_cuda import triton_values
from tests.simulated_cuda.device import note_access, note_sync, placed
from tests.simulated_cuda.traffic import note_operator

_CPU = torch.device("cpu")
_FRESH = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# Operators that compute no values, in addition to views.
_WITHOUT_VALUES = _FRESH | {
    "aten::_local_scalar_dense",  # it reads the memory itself
    "aten::_has_compatible_shallow_copy_type",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::lift_fresh",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
# Operators that read the device to know a shape or an answer. Their CUDA kernels would read what no kernel wrote.
_READ_THE_DEVICE = {
    "aten::bincount",
    "aten::equal",
    "aten::histc",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique2",
}
# Operators whose first result is the value. The others are notes for the backward, in a form of each device.
_WITH_NOTES = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"}


@final
class Findings:
    """What the operators of CUDA and of the CPU disagreed on, and the tapes of the captures that are under way.

    Attributes:
        differences: How often each operator gave another shape or dtype on CUDA than on the CPU.
        tapes: For each device with a capture under way, functions that compute the captured operators again. Ranks are
            threads with a device each, and autograd has further threads, so neither a thread nor the process will do.
    """

    def __init__(self) -> None:
        self.differences: Counter[str] = Counter()
        self.tapes: dict[int, list[Callable[[], None]]] = {}

    def note(self, again: Callable[[], None]) -> None:
        """Add a function to the tape of the current device, if a capture is under way there."""
        if self.tapes and (tape := self.tapes.get(torch.cuda.current_device())) is not None:
            tape.append(again)


@contextmanager
def simulated() -> Iterator[Findings]:
    """Give the operators of CUDA values, in this thread and in threads that are started inside."""
    findings = Findings()
    with (
        in_new_threads(lambda: _Values(findings)),
        _replayed(findings),
        triton_values.computed(findings),
        _Values(findings),
    ):
        yield findings


def on_cpu(value: Any) -> Any:
    """Return the CPU tensor on the memory of a tensor of a simulated device. Other values stay as they are."""
    if not (isinstance(value, Tensor) and value.is_cuda):
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CPU)
    shared = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=value.dtype, device=_CPU).set_(
        shared, value.storage_offset(), value.size(), value.stride()
    )


@final
class _Values(TorchDispatchMode):
    def __init__(self, findings: Findings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._findings = findings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor) and value.is_cuda]
        to_cuda = any(isinstance(value, torch.device) and value.type == "cuda" for value in flat)
        if not (tensors or to_cuda or name.startswith("c10d")):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        ):
            with self:
                return func.decompose(*args, **kwargs)
        with placed(name):
            return self._run(func, args, kwargs, tensors)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        name = func.name()
        if name.startswith("c10d"):  # the stand-in for NCCL moves the bytes
            self._findings.note(lambda: _exchanged(func, args, kwargs))
            return func(*args, **kwargs)
        if _reads_the_device(name, args, kwargs):
            note_sync(f"{name}, whose result depends on values")
            out = _computed_on_the_host(func, args, kwargs, tensors[0].device)
            note_operator(func, args, kwargs, out)
            return out
        if name in _WITHOUT_VALUES or _is_view(func):
            out = func(*args, **kwargs)
            if name in _FRESH:
                _poison(out)
            return out
        return self._run_twice(func, args, kwargs, tensors)

    def _run_twice(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        written = _written(func, args, kwargs)
        # The operator of CUDA may write by copies, and the one of the CPU must find the memory as it was.
        before = [(tensor, tensor.shape, on_cpu(tensor).clone()) for tensor in written]
        out = func(*args, **kwargs)
        for tensor, shape, value in before:
            if tensor.shape == shape and tensor.numel():
                on_cpu(tensor).copy_(value)
        again = self._again(func, args, kwargs, None if written else out)
        again()
        note_operator(func, args, kwargs, out)
        self._findings.note(again)
        results = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor) and value.is_cuda]
        for tensor in tensors:
            if not any(tensor is each for each in written):
                note_access(tensor, func.name(), writes=False)
        for tensor in {id(each): each for each in [*results, *written] if each.is_cuda}.values():
            note_access(tensor, func.name(), writes=True)
        return out

    def _again(self, func: Any, args: Any, kwargs: Any, out: Any) -> Callable[[], None]:
        """Return a function that computes the operator on the CPU: now, and in every replay of a graph."""
        given = tree_map(_for_cpu, args)
        named = {name: _for_cpu(value) for name, value in kwargs.items() if name != "pin_memory"}
        if any(argument.name == "generator" for argument in func._schema.arguments):
            named["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        results = tree_map(on_cpu, out)
        # The storages and not the tensors, which would keep autograd's graph.
        kept = [v.untyped_storage() for v in tree_flatten((args, kwargs, out))[0] if isinstance(v, Tensor)]

        def again(kept: object = kept) -> None:
            found = func(*given, **named)
            if results is not None:
                self._write(func.name(), results, found)

        return again

    def _write(self, name: str, results: Any, found: Any) -> None:
        if name in _WITH_NOTES:
            results, found = results[0], found[0]
        pairs = zip(tree_flatten(results)[0], tree_flatten(found)[0], strict=True)
        for result, value in pairs:
            if not isinstance(result, Tensor):
                continue
            if result.shape != value.shape or result.dtype != value.dtype:
                self._findings.differences[f"{name}: {_form(result)} on CUDA, {_form(value)} on the CPU"] += 1
            if result.shape == value.shape:
                result.copy_(value)


def _exchanged(func: Any, args: Any, kwargs: Any) -> None:
    """Run a collective in a replay, and wait: the wait of the capture is no operator, so the tape lacks it."""
    func(*args, **kwargs)
    torch.cuda.synchronize()


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _for_cpu(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) and value.type == "cuda" else on_cpu(value)


def _reads_the_device(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    if name == "aten::index.Tensor" or name.startswith("aten::index_put"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in _READ_THE_DEVICE


def _computed_on_the_host(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    found = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    if func.name().startswith("aten::index_put"):
        return args[0]
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, found)


def _is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs[argument.name] if argument.name in kwargs else args[position : position + 1]
            found += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return found


def _poison(out: Tensor) -> None:
    """Fill fresh memory as deterministic mode does, because its kernel writes nothing."""
    if not (out.is_cuda and out.numel() and torch.are_deterministic_algorithms_enabled()):
        return
    memory = on_cpu(out)
    if memory.is_floating_point():
        memory.fill_(float("nan"))
    else:
        memory.fill_(True if memory.dtype == torch.bool else torch.iinfo(memory.dtype).max)


@contextmanager
def _replayed(findings: Findings) -> Iterator[None]:
    """Compute in each replay of a CUDA graph what was computed during its capture."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        findings.tapes[torch.cuda.current_device()] = self.tape = []

    def capture_end(self: Any) -> None:
        del findings.tapes[torch.cuda.current_device()]
        end(self)

    def compute_again(self: Any) -> None:
        replay(self)
        with _disable_current_modes(), torch.no_grad():
            for again in self.tape:
                again()

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, compute_again
    try:
        yield
    finally:
        graph.capture_begin, graph.capture_end, graph.replay = begin, end, replay
