"""Counting the collectives that really happen, with their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.testing.operators import run_in_sight


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that this thread started: the operator's name, and the bytes this rank sends to others.

    An all-reduce counts as a reduce-scatter and an all-gather: twice its bytes, without the own part.
    """

    op: str
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a block, in order."""

    calls: list[Collective] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes to other ranks, in all."""
        return sum(call.nbytes for call in self.calls)

    @property
    def counts(self) -> Counter[str]:
        """How often each operator was called."""
        return Counter(call.op for call in self.calls)


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """See every collective that this thread starts, backward included, below any library: as operators of torch.

    Those inside this library's own operators are seen too. Names are without
    namespace and decoration, so ``c10d::alltoall_base_`` is "alltoall_base" and its functional twin
    "all_to_all_single". Cost: some tens of microseconds per operator of any kind.

    With torch 2.13 such a mode leaks references to the process group: its threads may outlive it and abort the process
    at exit. A ``dist.barrier()`` before ``dist.destroy_process_group()`` lets them finish.
    """
    seen = Collectives()
    with _Watch(seen):
        yield seen


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Collectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _SIZES:
            values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            nbytes = _SIZES[namespace](name, values | kwargs)
            if nbytes is not None:
                self.seen.calls.append(Collective(name.strip("_"), nbytes))
        return run_in_sight(self, func, args, kwargs)


def _eager_bytes(name: str, values: dict[str, Any]) -> int | None:
    """Of ``c10d::*``."""
    if "process_group" not in values:
        return None
    group = dist.ProcessGroup.unbox(values["process_group"])
    if name == "alltoall_base_":
        return _all_to_all_bytes(values["input"], values["input_split_sizes"], group)
    tensors = values.get("input_tensors", values.get("input_tensor", values.get("input", values.get("tensors"))))
    return _bytes(name.strip("_").removesuffix("_base"), tensors, group)


def _functional_bytes(name: str, values: dict[str, Any]) -> int | None:
    """Of ``_c10d_functional::*``."""
    if "group_name" not in values:
        return None
    group = dist.distributed_c10d._resolve_process_group(values["group_name"])
    if name == "all_to_all_single":
        return _all_to_all_bytes(values["input"], values["input_split_sizes"], group)
    plain = name.strip("_").removesuffix("_into_tensor").removesuffix("_tensor").replace("all_", "all")
    return _bytes(plain, values.get("input", values.get("inputs")), group)


_SIZES: dict[str, Callable[[str, dict[str, Any]], int | None]] = {
    "c10d": _eager_bytes,
    "_c10d_functional": _functional_bytes,
    "_c10d_functional_autograd": _functional_bytes,
}


def _bytes(name: str, tensors: Any, group: dist.ProcessGroup) -> int:
    """Bytes that one rank sends to others.

    Raises:
        NotImplementedError: a collective that nobody has counted yet; better than a wrong number.
    """
    flat, others, size = _flat(tensors), group.size() - 1, group.size()
    nbytes = sum(tensor.nbytes for tensor in flat)
    if name == "alltoall":
        return nbytes - flat[group.rank()].nbytes
    shares = {
        "allgather": nbytes * others,
        "gather": nbytes if group.rank() else 0,
        "allreduce": 2 * nbytes * others // size,
        "reduce_scatter": nbytes * others // size,
        "broadcast": nbytes,
        "barrier": 0,
        "send": nbytes,
        "recv": 0,
    }
    if name not in shares:
        raise NotImplementedError(f"count_collectives: {name!r} is not counted. Add how many bytes it sends.")
    return shares[name]


def _all_to_all_bytes(tensor: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> int:
    row = prod(tensor.shape[1:]) * tensor.itemsize
    kept = splits[group.rank()] if splits else len(tensor) // group.size()
    return (len(tensor) - kept) * row


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors or () for tensor in _flat(part)]
