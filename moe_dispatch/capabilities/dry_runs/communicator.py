"""The communicator of a dry run: what the other ranks would send if they did what this rank does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, StateError


@final
class DryRun(Communicator):
    """A communicator on torch's fake process group, whose collectives leave their results unwritten.

    Here every rank is a copy of this one: it sends to each rank what this rank sends to it, and brings to a sum, a
    maximum or an all-gather what this rank brings. So counts and shapes are those of ranks with equal routing. What
    other ranks' experts would return is not known: it is zeros, or rows of this rank's experts.
    """

    dry_run = True

    def hold(self, group: dist.ProcessGroup | None) -> None:
        """Use a group from now on."""
        super().hold(group)
        self._is_wrapped = True  # so that ``_maker_of`` is asked for each collective

    @property
    def library_group(self) -> dist.ProcessGroup | None:
        """Refuse to give the group to a library, whose kernels would wait for ranks that are not there."""
        raise ConfigError(
            "A library cannot exchange rows in a dry run on torch's fake process group. Use backend alltoall or "
            "allgather."
        )

    def _maker_of(self, name: str) -> Any:
        return _Copies(self.rank, self.size)

    def max_and_sum(self, values: Sequence[int], sums: Sequence[Tensor], *, label: str) -> list[int]:
        """Return the values, which are the same on all ranks, and the sums over all ranks."""
        found = super().max_and_sum([0] * len(values), sums, label=label)
        return [*values, *found[len(values) :]]


@final
class _Copies:
    """The collectives of a rank whose peers do what it does. They copy, and complete at once."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def alltoall_base(
        self, out: Tensor, inp: Tensor, rows_in: Sequence[int], rows_out: Sequence[int], options: object
    ) -> _Copies:
        """Receive from each rank what this rank sends to itself, cut or filled with zeros to the number of rows."""
        mine, counts = inp.split([*rows_out])[self._rank], torch.tensor([*rows_in], device=out.device)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=len(out))
        places = torch.arange(len(out), device=out.device) - starts
        torch.index_select(
            torch.cat([mine, mine.new_zeros(1, *mine.shape[1:])]), 0, places.clamp_(max=len(mine)), out=out
        )
        return self

    def _allgather_base(self, out: Tensor, inp: Tensor, options: object) -> _Copies:
        out.view(self._size, *inp.shape).copy_(inp)
        return self

    def _reduce_scatter_base(self, out: Tensor, inp: Tensor, options: object) -> _Copies:
        torch.mul(inp.view(self._size, *out.shape)[self._rank], self._size, out=out)
        return self

    def allreduce(self, tensors: Sequence[Tensor], options: dist.AllreduceOptions) -> _Copies:
        """Multiply sums by the number of ranks. A maximum is that of this rank."""
        if options.reduceOp == dist.ReduceOp(dist.ReduceOp.SUM):
            for tensor in tensors:
                tensor.mul_(self._size)
        return self

    def broadcast(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> _Copies:
        """Leave the tensors of the source as they are.

        Raises:
            StateError: Another rank is the source.
        """
        if options.rootRank != self._rank:
            raise StateError(
                f"A dry run on torch's fake process group receives nothing from rank {options.rootRank}. Make its "
                f"values on rank {self._rank} too, or run as rank {options.rootRank}."
            )
        return self

    def gather(self, out: Sequence[Sequence[Tensor]], inp: Sequence[Tensor], options: object = None) -> _Copies:
        """Copy the tensor of this rank for each rank."""
        for parts in out:
            for part in parts:
                part.copy_(inp[0])
        return self

    def wait(self) -> None:
        """Return at once."""
