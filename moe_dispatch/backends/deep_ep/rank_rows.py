"""``deepep``, whatever the release: each row is sent once to each rank that owns one of its experts.

Rows arrive rank-major, that is ordered by source rank. Combine sends one sum per arrived row back the same way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext
from moe_dispatch.backends.deep_ep.buffers import Handle, LibraryBackend
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.wire import Encoded
from moe_dispatch.communication import read_host
from moe_dispatch.errors import StateError, shown
from moe_dispatch.permutation.index import count_experts
from moe_dispatch.permutation.strides import dense
from moe_dispatch.types import Capacity, Sizes

if TYPE_CHECKING:
    from moe_dispatch.capabilities.quantised.formats import Quantised

# Rows as the library takes them: bfloat16 (T, D), or float8_e4m3fn (T, D) with scales of 4 bytes (T, D/128). A float32
# is the scale of 128 columns. An int32 holds the e8m0 scales of four blocks of 32 columns.
Payload = Tensor | tuple[Tensor, Tensor]


@final
class RankMajorRows(NamedTuple):
    """The rows that one dispatch brought to this rank.

    Attributes:
        payload: (S, D), ordered by source rank, then by row of the source rank.
        ids_SK: Local expert ids, int64; -1 for experts of other ranks, for slots without an expert, and behind the rows
            that arrived.
        weights_SK: float32 (S, K).
        counts: Number of rows of each local expert, on the host; empty if the host did not wait for the counts.
        handle: Handle of this dispatch, for combine and the backwards.
    """

    payload: Payload
    ids_SK: Tensor
    weights_SK: Tensor
    counts: Sequence[int]
    handle: Handle


# The function that waits for the rows, the dtypes of rows and weights to return, and the capacity.
_Sent = tuple[Callable[[], RankMajorRows | Arrived], torch.dtype, torch.dtype, Capacity | None]


class DeepEP(LibraryBackend):
    """DeepEP V2.5 (``EPBuffer``), v2 (``ElasticBuffer``) or v1 (``Buffer``, normal mode), whichever is installed.

    A row arrives once on each rank that needs it, ordered by source rank. moe-dispatch then copies rows to their
    experts, pads them and applies the weights. Weights travel and are returned in float32.

    A subclass calls one buffer class. It defines ``make`` and the abstract methods here, none of which is
    differentiable.

    Cost: one host sync per dispatch, two in the first or with ``debug``, none in ``again=``, combine or a backward.
    In graph-safe mode there is none at all, but as many rows as in the worst case are delivered, ``ep_size *
    max_tokens_per_rank``.

    Source: DeepEP v1.2.1, main of 2026-07 (2.1.0) and main of 2026-09 (2.5.0).
    """

    name = "deepep"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._compared: list[bool] = []  # not empty once a list of counts was compared with rows

    def check(self, sizes: Sizes) -> None:
        """Raise ConfigError if the library cannot make a dispatch here."""

    @abstractmethod
    def send(
        self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, worst_rows: int | None, *, overlaps: bool
    ) -> Callable[[], RankMajorRows | Arrived]:
        """Send each row once to each rank that owns at least one of its experts.

        Args:
            payload: The rows, (T, D).
            ids_TK: int64 (T, K), global expert ids.
            weights_TK: float32 (T, K).
            worst_rows: Largest number of rows that all ranks together can send to one rank. The result then has S =
                ``worst_rows``, however many rows arrive, and the host waits for no count. None: the host reads the
                number of rows that arrive, which is S.
            overlaps: Whether to return before the rows have arrived. The library then keeps memory of the call from
                reuse until its streams have passed, and in the capture of a CUDA graph until the capture ends. If
                False, the current stream itself waits for the rows.

        Returns:
            A function that makes the current stream wait for the payload, and returns the rows. It is called once. If
            the library itself delivers expert-major rows, the result is complete but for the dtypes.
        """

    @abstractmethod
    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        """Send other rows the way of an earlier dispatch, without an exchange of counts or a host sync."""

    @abstractmethod
    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Send rows back to the ranks that they came from, and add the rows that belong to one source row.

        Args:
            rows_SD: bfloat16 (S, D). They are added in float32 and rounded once.
            values_SK: float32 (S, K), values that are sent back and added like the rows; None for no values.
            handle: Handle of the dispatch.

        Returns:
            The summed rows, (T, D), and the summed values, (T, K), or None.
        """

    @final
    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.finish(self._send(rows_TD, ids_TK, weights_TK, sizes, overlaps=False))

    @final
    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> _Sent:
        return self._send(rows_TD, ids_TK, weights_TK, sizes, overlaps=True)

    def _send(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, *, overlaps: bool) -> _Sent:
        shape, most_rows = self.context.shape, self.context.most_rows
        # In graph-safe mode: as many rows as all ranks together can send. In eager mode the library counts them.
        worst_rows = shape.ep_size * most_rows if shape.graph_safe and most_rows is not None else None
        self.check(sizes)
        payload, weights32_TK = pack(rows_TD, shape.wire_dtype), weights_TK.float().contiguous()
        arriving = self.send(payload, ids_TK.contiguous(), weights32_TK, worst_rows, overlaps=overlaps)
        return arriving, rows_TD.dtype, weights_TK.dtype, sizes.capacity

    @final
    def finish(self, started: _Sent) -> Arrived:
        """Wait for the rows. Copy rank-major rows to their experts; expanded rows are there already."""
        arriving, dtype, weights_dtype, capacity = started
        arrived = arriving()
        if isinstance(arrived, Arrived):
            rows_RD, weights_R = arrived.rows, arrived.weights.to(weights_dtype)
            if not self.context.shape.quantised:
                rows_RD = rows_RD.to(dtype) if isinstance(rows_RD, Tensor) else rows_RD.decoded(dtype)
            return replace(arrived, rows=rows_RD, weights=weights_R)
        payload, ids_SK, weights_SK, counts, handle = arrived
        if capacity is None:
            self.require_counts(counts, lambda: count_experts(ids_SK, self.context.shape.num_local_experts))
        index = self.context.group(ids_SK, weights_SK, capacity, counts=counts)
        route = DeepEPRoute(context=self.context, backend=self, handle=handle, index=index)
        return arrive(route, unpack(payload), weights_SK.to(weights_dtype), dtype)

    @final
    def require_counts(self, counts: Sequence[int], count: Callable[[], Tensor]) -> None:
        """Compare the library's list of rows with the rows themselves: always under ``debug``, else until rows arrive.

        The list decides where rows go. A list that means something else would bring rows to wrong experts.

        Args:
            counts: Number of rows of each local expert, as the library lists them on the host.
            count: Function that counts the rows on the device, int64 (L,).

        Raises:
            StateError: They differ. Raised on this rank only: telling the others would take an exchange in each call.
        """
        if self.context.debug or not self._compared:
            found = read_host(count())
            if found != list(counts):
                raise StateError(
                    f"Backend {self.name!r}: deep_ep must list the rows that each expert gets, got the list "
                    f"{shown(list(counts))} for {shown(found)} rows on rank {self.context.communicator.rank}, so rows "
                    "would reach wrong experts. Install another version of deep_ep."
                )
            if any(found):
                self._compared[:] = [True]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepEPRoute(RankMajorRoute):
    """The route of a dispatch whose rows arrived by source rank.

    The library sends rows to experts in bfloat16 or float8, and everything else in bfloat16.
    """

    backend: DeepEP
    handle: Handle

    def spread(self, rows_TD: Tensor, wire: str | None, *, label: str) -> Tensor | Encoded:
        return unpack(self.backend.send_again(pack(rows_TD, wire), self.handle))

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        sums_SD = rows_RD.new_empty(self.index.num_rows, rows_RD.shape[1], dtype=torch.bfloat16)
        self.permutation.reduce(rows_RD, self.index, weights_R, sums_SD)
        values_SK = None if values_R is None else self.index.to_slots(values_R).float()
        rows_TD, values_TK = self.backend.combine(sums_SD, values_SK, self.handle)
        if values_R is None or values_TK is None:
            return rows_TD.to(rows_RD.dtype), None
        return rows_TD.to(rows_RD.dtype), values_TK.to(values_R.dtype)


def pack(rows_TD: Tensor, wire: str | None) -> Payload:
    """Convert rows to the form that the library takes."""
    if wire is None or wire == "bfloat16":
        return rows_TD.bfloat16().contiguous()
    from moe_dispatch.capabilities.quantised.formats import FORMATS, quantise  # noqa: PLC0415 - bfloat16 rows do not need it

    values, scales = quantise(rows_TD, FORMATS[wire])
    return values, scales if scales.dtype == torch.float32 else dense(scales).view(torch.int32)


def unpack(payload: Payload) -> Tensor | Quantised:
    """Return the rows that the library delivered, as ``RankMajorRoute.spread`` does."""
    if isinstance(payload, Tensor):
        return payload
    from moe_dispatch.capabilities.quantised.formats import Quantised  # noqa: PLC0415 - bfloat16 rows do not need it

    values, scales = payload
    return Quantised(values, scales if scales.dtype == torch.float32 else dense(scales).view(torch.float8_e8m0fnu))
