"""Every collective of the library, in one place, with the bytes it sends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor


@final
class Communicator:
    """A process group, or a single rank without one, and a count of the bytes sent to other ranks.

    The ProcessGroup's own methods are called rather than the functions of torch.distributed: these add 20 to 50 us of
    Python a call, and some are being renamed. ``bytes_sent`` counts by label, on the host, without a sync.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def _count(self, label: str, nbytes: int) -> None:
        self.calls[label] += 1
        self.bytes_sent[label] += nbytes

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], *, label: str
    ) -> dist.Work | None:
        """Rows of ``inp`` to the ranks, by ``in_splits`` along dim 0; started, not awaited. None without a group."""
        rows, nbytes = inp.shape[0], inp.nbytes
        self._count(label, nbytes - nbytes // rows * in_splits[self.rank] if rows else 0)
        if self.group is None:
            out.copy_(inp)
            return None
        return self.group.alltoall_base(out, inp, list(out_splits), list(in_splits))

    def all_gather(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """``inp`` of every rank, stacked along dim 0 of ``out`` by rank."""
        self._count(label, inp.nbytes * (self.size - 1))
        if self.group is None:
            out.copy_(inp)
            return
        self.group._allgather_base(out, inp).wait()

    def reduce_scatter(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """Sum of ``inp`` over ranks, of which rank r gets the r-th part along dim 0."""
        self._count(label, inp.nbytes - inp.nbytes // self.size)
        if self.group is None:
            out.copy_(inp)
            return
        self.group._reduce_scatter_base(out, inp, dist.ReduceScatterOptions()).wait()

    def max(self, values: Sequence[int], *, label: str) -> list[int]:
        """Elementwise maximum over ranks of host integers. Cost: one all-reduce, and a host sync if on a GPU."""
        self._count(label, 2 * 8 * len(values) * (self.size - 1) // self.size)  # as a ring all-reduce does it
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=control_device(self.group))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.group.allreduce([tensor], options).wait()
        return read_host(tensor)

    def touch(self, device: torch.device) -> None:
        """A collective of one element, which makes the group's communicator for that device."""
        if self.group is not None:
            self.group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()

    def gather_json(self, value: Any, *, label: str) -> list[Any]:
        """``value`` of every rank, by rank. Cost: two collectives; for building and reporting, not for a step."""
        if self.group is None:
            return [value]
        payload = json.dumps(value).encode()
        (longest,) = self.max([len(payload)], label=label)
        device = control_device(self.group)
        mine = torch.tensor(list(payload.ljust(longest)), dtype=torch.uint8, device=device)
        everyone = torch.empty(longest * self.size, dtype=torch.uint8, device=device)
        self.all_gather(everyone, mine, label=label)
        return [json.loads(bytes(part)) for part in everyone.view(self.size, longest).tolist()]

    def gather_bytes(self, payload: Tensor, *, label: str) -> list[Tensor] | None:
        """``payload`` of every rank on rank 0, by rank; None on the others.

        Args:
            payload: uint8 on the CPU, of any length.
            label: to count by.

        Cost: two collectives; rank 0 holds P times the longest. For reporting, not for a step.
        """
        if self.group is None:
            return [payload]
        lengths: list[int] = self.gather_json(len(payload), label=label)
        device = control_device(self.group)
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        mine[: len(payload)] = payload
        everyone = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else []
        self._count(label, mine.nbytes if self.rank else 0)
        self.group.gather([everyone] if everyone else [], [mine], dist.GatherOptions()).wait()
        return [part[:length].cpu() for part, length in zip(everyone, lengths, strict=True)] if everyone else None


def device_types(group: dist.ProcessGroup | None) -> set[str]:
    """The types of devices whose tensors a group can exchange; without a group, any: none is named."""
    return set() if group is None else {device.type for device in group._device_types}


def device_of(group: dist.ProcessGroup | None, preferred: torch.device) -> torch.device:
    """Where ranks exchange rows: the preferred device if the group has a backend for it, else one it has."""
    kinds = device_types(group)
    return preferred if not kinds or preferred.type in kinds else torch.device(sorted(kinds)[0])


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small host values are exchanged: the CPU if the group has a CPU backend, so that no GPU is made to wait."""
    kinds = device_types(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])


def read_host(tensor: Tensor) -> list[Any]:
    """Values of a tensor on the host. In a verb nothing else reads a device: each call is a host sync on a GPU."""
    result: list[Any] = tensor.tolist()
    return result
