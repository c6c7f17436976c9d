"""Packets of ``alltoall`` by kernels: rows get their places while counts travel, and then each goes to all its packets.

``backend.ByOperators`` does the same by operators of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor

from moe_dispatch.backends.base import BackendContext
from moe_dispatch.backends.wire import PacketFormat

if TYPE_CHECKING:
    from moe_dispatch.backends.alltoall.backend import Targets


@final
class ByKernels:
    """The counts and packets of one dispatch, as ``backend.ByOperators`` has them.

    Args:
        context: Context of the backend.
        targets: What rows are sent to.
        ids_TK: As in ``Backend.start``.
        mark: As in ``Backend.start``.
        counts: The table of counts, if the targets of rows are no ranks. By default the kernel counts too.
    """

    ready = None

    def __init__(
        self,
        context: BackendContext,
        targets: Targets,
        ids_TK: Tensor,
        mark: Tensor | None,
        counts: Tensor | None = None,
    ) -> None:
        self._context, size = context, context.shape.ep_size
        self._permutation = context.permutation_of(ids_TK)
        send_places = self._permutation.send_places
        assert send_places is not None
        if counts is None:
            self.counts = ids_TK.new_zeros((1 + 2 * size) * targets.width)
            to_ranks = self.counts.view(-1, targets.width)[1 : 1 + size]
            self._places = send_places(ids_TK, targets.per_target, targets.count, counts=to_ranks, mark=mark)
        else:
            self.counts, self._places = counts, send_places(ids_TK, targets.per_target, targets.count)

    def pack(self, form: PacketFormat, rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """Keep the rows: kernels write them when the number of packets is known."""
        self._form, self._rows_TD, self._slots = form, rows_TD, (weights_TK, ids_TK)

    def outgoing(self, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tables of the leg, and its packets, from their number."""
        tables, packets = lend_packets(self._context, self._places, self._form.stride, count)
        self._form.scatter(self._permutation, self._rows_TD, self._slots, tables, packets)
        return tables, packets


def lend_packets(
    context: BackendContext, places: tuple[Tensor, ...], stride: int, count: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Cut the tables of ``send_places`` to ``count`` rows. Return them, and memory for the packets."""
    source_B, member_B, cu_T = places
    return (source_B[:count], member_B[:count], cu_T), context.workspace.lend(count, stride, device=source_B.device)
