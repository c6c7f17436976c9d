"""Count the collectives that a block of code starts, and their bytes."""

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

from moe_dispatch_testing.operators import run_in_sight


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that this thread started: the operator's name, and the bytes that this rank sends to other ranks.

    An all-reduce counts as a reduce-scatter followed by an all-gather.
    """

    op: str
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of a block, in the order in which they started."""

    calls: list[Collective] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes that all collectives send to other ranks."""
        return sum(call.nbytes for call in self.calls)

    @property
    def counts(self) -> Counter[str]:
        """Return the number of calls by operator."""
        return Counter(call.op for call in self.calls)


@contextmanager
def count_collectives(group: dist.ProcessGroup | None = None) -> Iterator[Collectives]:
    """Record every collective that this thread starts inside the block.

    Collectives in the backward and inside this library's operators are recorded too. A collective is recorded as an
    operator of torch, whichever library calls it. Its name has no namespace and no underscore at its end:
    ``c10d::alltoall_base_`` is "alltoall_base", and the functional collective is "all_to_all_single".

    With torch 2.13 the dispatch mode leaks references to the process group, so that threads of the group may outlive it
    and abort the process at exit. A ``dist.barrier()`` before ``dist.destroy_process_group()`` lets them finish.

    Args:
        group: Group whose collectives count, or None for all groups. A control group of the same ranks is another
            group.

    Cost: some tens of microseconds for every operator of torch.
    """
    seen = Collectives()
    with _CountingMode(seen, group):
        yield seen


class _CountingMode(TorchDispatchMode):
    def __init__(self, seen: Collectives, only: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self.only = only

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _SIZES:
            values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            group = _group(values := values | kwargs)
            if group is not None and self.only in (None, group):
                self.seen.calls.append(Collective(name.strip("_"), _SIZES[namespace](name, values, group)))
        return run_in_sight(self, func, args, kwargs)


def _group(values: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the group of a collective. An operator that only waits has no group."""
    if "process_group" in values:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(values["process_group"])
        return group
    return dist.distributed_c10d._resolve_process_group(values["group_name"]) if "group_name" in values else None


def _eager_bytes(name: str, values: dict[str, Any], group: dist.ProcessGroup) -> int:
    """Return the bytes that an operator ``c10d::*`` sends."""
    if name == "alltoall_base_":
        return _all_to_all_bytes(values["input"], values["input_split_sizes"], group)
    tensors = values.get("input_tensors", values.get("input_tensor", values.get("input", values.get("tensors"))))
    return _bytes(name.strip("_").removesuffix("_base"), tensors, group)


def _functional_bytes(name: str, values: dict[str, Any], group: dist.ProcessGroup) -> int:
    """Return the bytes that an operator ``_c10d_functional::*`` sends."""
    if name == "all_to_all_single":
        return _all_to_all_bytes(values["input"], values["input_split_sizes"], group)
    plain = name.strip("_").removesuffix("_into_tensor").removesuffix("_tensor").replace("all_", "all")
    return _bytes(plain, values.get("input", values.get("inputs")), group)


_SIZES: dict[str, Callable[[str, dict[str, Any], dist.ProcessGroup], int]] = {
    "c10d": _eager_bytes,
    "_c10d_functional": _functional_bytes,
    "_c10d_functional_autograd": _functional_bytes,
}


def _bytes(name: str, tensors: Any, group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank sends to other ranks.

    Raises:
        NotImplementedError: The collective is not in the table below. A guess could be wrong.
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
        raise NotImplementedError(
            f"count_collectives: the collective {name!r} is unknown. Add the number of bytes that it sends to `shares`."
        )
    return shares[name]


def _all_to_all_bytes(tensor: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> int:
    row = prod(tensor.shape[1:]) * tensor.itemsize
    kept = splits[group.rank()] if splits else len(tensor) // group.size()
    return (len(tensor) - kept) * row


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors or () for tensor in _flat(part)]
