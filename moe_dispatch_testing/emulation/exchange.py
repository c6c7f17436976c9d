"""The exchanges of the emulated buffers: rows of any dtype, and a check that all ranks are in the same call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.permutation.strides import dense
from moe_dispatch_testing.emulation.refusals import EmulatedHang, require


@final
@dataclass(kw_only=True, slots=True)
class Entry:
    """The values that a rank tells the other ranks at the entrance of a call. They must be representable in JSON.

    Attributes:
        same: Values that must be equal on all ranks, by name.
        told: Value for the other ranks.
        everyone: ``told`` of every rank, by rank. It is filled in when the block ends.
    """

    same: dict[str, Any] = field(default_factory=dict)
    told: Any = None
    everyone: list[Any] = field(default_factory=list)


@final
class RankExchange:
    """Collectives on CPU tensors, outside autograd. They run on any ProcessGroup, or on one rank without a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._communicator = Communicator(group)
        self.rank = self._communicator.rank
        self.size = self._communicator.size
        self._label = "emulation"

    @contextmanager
    def entrance(self, where: str) -> Iterator[Entry]:
        """Run the block, which checks the arguments of this rank, and then exchange values with the other ranks.

        Without the exchange, a rank could wait for ever for a peer that makes another call.

        Raises:
            EmulatedHang: The ranks are in different calls, they differ in ``same``, or a peer raised inside its block.
                The peer itself raises its own error.
        """
        entry = Entry()
        self._label = f"emulated {where}"
        try:
            yield entry
        except Exception as error:
            self._meet({"where": where, "refused": f"{type(error).__name__}: {error}"})
            raise
        met = self._meet({"where": where, "same": entry.same, "told": entry.told})
        _raise_if_they_would_wait(where, met)
        entry.everyone = [one["told"] for one in met]

    def _meet(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return self._communicator.gather_json(value, label=self._label)

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send ``parts[p]`` to rank p. Return by rank the rows that every rank sent here.

        All parts of all ranks have the same dtype, and the same sizes after dim 0.

        Cost: two collectives.
        """
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        row_bytes = shape.numel() * dtype.itemsize
        out_splits = self._counts([part.shape[0] * row_bytes for part in parts])
        payload = torch.cat([_as_bytes(part) for part in parts])
        received = torch.empty(sum(out_splits), dtype=torch.uint8)
        in_splits = [part.shape[0] * row_bytes for part in parts]
        self._communicator.all_to_all(received, payload, out_splits, in_splits, label=self._label).wait()
        return [_from_bytes(piece, shape, dtype) for piece in received.split(out_splits)]

    def _counts(self, sent: list[int]) -> list[int]:
        everyone = torch.empty(self.size * self.size, dtype=torch.int64)
        self._communicator.all_gather(everyone, torch.tensor(sent), label=self._label)
        received: list[int] = everyone.view(self.size, self.size)[:, self.rank].tolist()
        return received

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather ``tensor`` of every rank, by rank. The numbers of rows may differ. Cost: two collectives."""
        return self.rows([tensor] * self.size)

    def barrier(self, where: str) -> None:
        """Wait until all ranks are in the call ``where``. Raise EmulatedHang if a rank is in another call."""
        with self.entrance(where):
            pass


def _raise_if_they_would_wait(where: str, met: list[dict[str, Any]]) -> None:
    refused = {rank: one["refused"] for rank, one in enumerate(met) if "refused" in one}
    if refused:
        rank, said = next(iter(refused.items()))
        raise EmulatedHang(f"{where}: the real library would wait here for rank {rank}, which raised {said}")
    calls = [one["where"] for one in met]
    if len(set(calls)) > 1:
        raise EmulatedHang(f"{where}: every rank must be in the same call, got {calls} by rank.")
    for name in met[0]["same"]:
        values = [one["same"].get(name) for one in met]
        if any(value != values[0] for value in values):
            raise EmulatedHang(f"{where}: every rank must pass the same {name}, got {values} by rank.")


def require_one_dispatch(where: str, everyone: list[list[list[int]]]) -> None:
    """Compare the rows that each rank sends, by rank, with the rows that the handles of its peers wait for."""
    sent, awaited = ([told[which] for told in everyone] for which in (0, 1))
    by_sender = [list(column) for column in zip(*awaited, strict=True)]
    rule = f"{where}: the handles of all ranks must come from one dispatch, got rows {sent} to send and {by_sender}"
    require(sent == by_sender, f"{rule} to wait for", EmulatedHang)


def _as_bytes(rows: Tensor) -> Tensor:
    return dense(rows.detach()).flatten().view(torch.uint8)


def _from_bytes(payload: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    rows = payload.numel() // max(1, shape.numel() * dtype.itemsize)
    return payload.clone().view(dtype).reshape(rows, *shape)
