"""``deepep``: DeepEP's buffers send each row once to each rank that owns one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    WireDtype,
)
from moe_dispatch.backends.capacity import capacity_of
from moe_dispatch.backends.deep_ep import elastic_driver as elastic
from moe_dispatch.backends.deep_ep import normal_driver as normal
from moe_dispatch.backends.deep_ep.buffers import Handle
from moe_dispatch.backends.deep_ep.driver import Payload, RankMajorDriver, RankMajorRows
from moe_dispatch.backends.deep_ep.elastic_driver import ElasticDriver
from moe_dispatch.backends.deep_ep.library import Library, find_library, openable, probed, report_open
from moe_dispatch.backends.deep_ep.normal_driver import NormalDriver
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.volume import SentBytes, Volume, payload
from moe_dispatch.backends.wire import from_float8, row_format, to_float8
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.probing import Rejected, Usable
from moe_dispatch.types import Capacity, Sizes

Release = Literal["v1.2.1", "v2-2.1.0", "v2.5.0"]
# The function that waits for the rows, the dtypes of rows and weights to return, and the capacity.
_Sent = tuple[Callable[[], RankMajorRows | Arrived], torch.dtype, torch.dtype, Capacity | None]


@final
class DeepEPOptions(BackendOptions):
    """Options of ``deepep``.

    Attributes:
        num_sms: Number of streaming multiprocessors that the kernels may use, even. None is the library's default.
        deterministic: For v2 and V2.5: whether the rows of a source rank arrive in their order, for which the library
            sorts them. v1 always keeps this order. With False, rows stay in the order of their arrival, which differs
            from run to run. Graph-safe mode needs False with ``expand`` and across nodes, because there the sort reads
            the device.
        expand: For v2 and V2.5: whether the library itself delivers expert-major rows, padded on the device, and adds
            the expert rows of a token up. That saves the copies to experts and back. The library then rounds the
            weighted rows to bfloat16 before it adds them.
        allocate_on_comm_stream: Whether tensors received with ``async_op=True`` belong to the library's communication
            stream.
        ranks_per_node: Number of consecutive ranks of the group that share a node. None detects it by host name. v1
            needs whole nodes. v2 and V2.5 offer float8 only within a node.
        emulate: Whether to run on the emulation of ``deep_ep``, on CPU tensors. True emulates the newest release; the
            name of a release emulates that release.
    """

    name = "deepep"

    num_sms: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    deterministic: bool = True
    expand: bool = False
    allocate_on_comm_stream: bool = False
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    emulate: bool | Release = False

    @property
    def release(self) -> str | None:
        """Name of the release to emulate; None for the installed library."""
        return "v2.5.0" if self.emulate is True else self.emulate or None

    def probe(self) -> Usable | Rejected:
        def features(library: Library) -> tuple[str, ...]:
            variant = elastic.variant_of(library)
            return ("v1", "normal mode") if variant is None else (variant, "compact", "expand")

        return probed(self._library, features)

    def constraints(self, shape: MoEShape) -> Constraints:
        library, ranks_per_node = self._library(), self.ranks_on_a_node(shape)
        device, variant = "cuda", "v2.5"  # only for tables: before any other use, ``probe`` refuses
        if isinstance(library, Library):
            device, variant = library.device, elastic.variant_of(library) or "v1"
        if variant != "v1":
            return elastic.constraints(device, variant, shape, ranks_per_node, self)
        if self.expand:
            raise ConfigError("Backend 'deepep': expand needs v2 or V2.5, got v1. Leave expand out, or install V2.5.")
        return normal.constraints(device, shape, ranks_per_node)

    def capacity(self, shape: MoEShape) -> Capacity:
        capacity = capacity_of(shape)
        return replace(capacity, buffer_rows=elastic.expanded_rows(shape)) if self.expand else capacity

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        wire: WireDtype = shape.wire_dtype or "bfloat16"
        there, back = (row_format(dtype, shape.hidden_size, form) for form in (wire, "bfloat16"))
        dtypes = (there.wire_dtype, back.wire_dtype)
        return payload(volume, out_bytes=there.nbytes, back_bytes=back.nbytes, row_dtypes=dtypes)

    def open(self, context: BackendContext) -> Backend:
        library = openable(self.name, self._library(), context.communicator)
        driver_class = NormalDriver if elastic.variant_of(library) is None else ElasticDriver
        driver: RankMajorDriver = driver_class(library, context, self)
        source = "detected" if self.ranks_per_node is None else "configured"
        nodes = self.ranks_on_a_node(context.shape)
        report_open(self.name, library, context.communicator, f"{nodes} ranks per node ({source}), {driver.buffers}")
        return DeepEP(context, driver)

    def ranks_on_a_node(self, shape: MoEShape) -> int:
        """Return the number of consecutive ranks that share a node: the option, else as detected, else all ranks."""
        return self.ranks_per_node or shape.ranks_per_node or shape.ep_size

    def _library(self) -> Library | Rejected:
        found = find_library(self.release)
        if isinstance(found, Rejected):
            return found
        if elastic.variant_of(found) is not None:
            return elastic.lacking(found) or found
        if not hasattr(found.module, "Buffer"):
            return Rejected(f"deep_ep {found.version} has neither EPBuffer, ElasticBuffer nor Buffer")
        return normal.lacking(found) or found


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepEPRoute(RankMajorRoute):
    """The route of a dispatch whose rows arrived by source rank.

    The library sends rows to experts in bfloat16 or float8, and everything else in bfloat16.
    """

    context: BackendContext
    driver: RankMajorDriver
    handle: Handle
    index: SlotIndex

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        yield unpack(self.driver.send_again(pack(rows_TD, wire), self.handle), rows_TD.dtype)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        sums_SD = rows_RD.new_empty(self.index.num_rows, rows_RD.shape[1], dtype=torch.bfloat16)
        self.permutation.reduce(rows_RD, self.index, weights_R, sums_SD)
        values_SK = None if values_R is None else self.index.to_slots(values_R).float()
        rows_TD, values_TK = self.driver.combine(sums_SD, values_SK, self.handle)
        if values_R is None or values_TK is None:
            return rows_TD.to(rows_RD.dtype), None
        return rows_TD.to(rows_RD.dtype), values_TK.to(values_R.dtype)


@final
class DeepEP(Backend):
    """DeepEP V2.5 (``EPBuffer``), v2 (``ElasticBuffer``) or v1 (``Buffer``, normal mode), whichever is installed.

    A row arrives once on each rank that needs it, ordered by source rank. moe-dispatch then copies rows to their
    experts, pads them and applies the weights. Weights travel and are returned in float32.

    Cost: one host sync per dispatch, and none in ``again=``, combine or a backward. In graph-safe mode there is none at
    all, but as many rows as in the worst case are delivered, ``ep_size * max_tokens_per_rank``.

    Source: DeepEP v1.2.1, main of 2026-07 (2.1.0) and main of 2026-09 (2.5.0).
    """

    collective_close = True

    def __init__(self, context: BackendContext, driver: RankMajorDriver) -> None:
        super().__init__(context)
        self.driver = driver

    def reserve(self, sizes: Sizes) -> None:
        if sizes.group_max_rows is not None:
            self.driver.reserve(sizes.group_max_rows)

    def close(self) -> None:
        self.driver.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.finish(self._start(rows_TD, ids_TK, weights_TK, sizes, asynchronously=False))

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> _Sent:
        return self._start(rows_TD, ids_TK, weights_TK, sizes, asynchronously=True)

    def _start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, *, asynchronously: bool
    ) -> _Sent:
        """Send the rows, and return what ``finish`` needs."""
        shape, most_rows = self.context.shape, self.context.most_rows
        arriving = self.driver.send(
            pack(rows_TD, shape.wire_dtype),
            ids_TK.contiguous(),
            weights_TK.float().contiguous(),
            asynchronously=asynchronously,
            # In graph-safe mode: as many rows as all ranks together can send. In eager mode the library counts them.
            worst_rows=shape.ep_size * most_rows if shape.graph_safe and most_rows is not None else None,
        )
        return arriving, rows_TD.dtype, weights_TK.dtype, sizes.capacity

    def finish(self, started: _Sent) -> Arrived:
        """Wait for the rows. Copy rank-major rows to their experts; expanded rows are there already."""
        arriving, dtype, weights_dtype, capacity = started
        arrived = arriving()
        if isinstance(arrived, Arrived):
            return replace(arrived, rows=arrived.rows.to(dtype), weights=arrived.weights.to(weights_dtype))
        ids_SK = arrived.ids_SK if capacity is None else arrived.known_ids_SK
        route = DeepEPRoute(
            context=self.context,
            driver=self.driver,
            handle=arrived.handle,
            index=self.context.group(ids_SK, arrived.weights_SK, capacity, counts=arrived.counts),
        )
        return arrive(route, unpack(arrived.payload, dtype), arrived.weights_SK.to(weights_dtype), dtype)


def pack(rows_TD: Tensor, wire: WireDtype | None) -> Payload:
    """Convert rows to the form that the library takes."""
    return to_float8(rows_TD) if wire == "float8_e4m3fn" else rows_TD.bfloat16().contiguous()


def unpack(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Return the rows that the library delivered: bfloat16 rows as they are, float8 rows in ``dtype``."""
    return payload if isinstance(payload, Tensor) else from_float8(*payload, dtype)
