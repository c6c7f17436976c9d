"""``deepep``: DeepEP's buffers send each row once to each rank that owns one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moe_dispatch.backends.base import (
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Route,
    Sizes,
    WireDtype,
)
from moe_dispatch.backends.capacity import Capacity, capacity_of
from moe_dispatch.backends.deep_ep import elastic_driver as elastic
from moe_dispatch.backends.deep_ep import normal_driver as normal
from moe_dispatch.backends.deep_ep.driver import Handle, Payload, RankMajorDriver, RankMajorRows
from moe_dispatch.backends.deep_ep.elastic_driver import ElasticDriver
from moe_dispatch.backends.deep_ep.library import Library, find_library, openable, probed, report_open
from moe_dispatch.backends.deep_ep.normal_driver import NormalDriver
from moe_dispatch.backends.rank_major import RankMajorRoute, arrive
from moe_dispatch.backends.volume import SentBytes, Volume, payload
from moe_dispatch.backends.wire import from_float8, row_format, to_float8
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation import Permutation, SlotIndex
from moe_dispatch.probing import Rejected, Usable

Release = Literal["v1.2.1", "v2-2.1.0"]


@final
class DeepEPOptions(BackendOptions):
    """Options of ``deepep``.

    Attributes:
        num_sms: Number of streaming multiprocessors that the kernels may use, even. None is the library's default.
        deterministic: For v2: whether the rows of a source rank arrive in their order, for which the library sorts
            them. v1 always keeps this order. With False, rows stay in the order of their arrival, which differs from
            run to run. Graph-safe mode needs False with ``expand`` and across nodes, because there the sort reads the
            device.
        expand: For v2: whether the library itself delivers expert-major rows, padded on the device. There is no
            backward then.
        allocate_on_comm_stream: Whether tensors received with ``async_op=True`` belong to the library's communication
            stream.
        ranks_per_node: Number of consecutive ranks of the group that share a node. None detects it by host name. v1
            needs whole nodes. v2 offers float8 only within a node.
        emulate: Whether to run on the emulation of ``deep_ep``, on CPU tensors. True emulates v1.2.1; the name of a
            release emulates that release.
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
        return "v1.2.1" if self.emulate is True else self.emulate or None

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> DeepEPOptions:
        if self.expand and self.allocate_on_comm_stream:
            raise ConfigError(
                "backend 'deepep': allocate_on_comm_stream is for async_op, and expand has no async_op. Leave one out."
            )
        return self

    def probe(self) -> Usable | Rejected:
        return probed(self._probe)

    def _probe(self) -> Usable | Rejected:
        found = self._library()
        if isinstance(found, Rejected):
            return found
        features = ("v2", "compact", "expand") if _is_v2(found) else ("v1", "normal mode")
        return Usable(version=found.version, features=features + (("emulated",) if found.emulated else ()))

    def constraints(self, shape: MoEShape) -> Constraints:
        library, ranks_per_node = self._library(), self.ranks_on_a_node(shape)
        if isinstance(library, Rejected):  # only for tables: before any other use, ``probe`` refuses
            return normal.constraints("cuda", shape, ranks_per_node)
        if _is_v2(library):
            return elastic.constraints(
                library.device, shape, ranks_per_node, expand=self.expand, deterministic=self.deterministic
            )
        if self.expand:
            raise ConfigError(
                f"Backend 'deepep': expand needs v2 (ElasticBuffer), got {library.version}. Leave expand out, or "
                "install v2."
            )
        return normal.constraints(library.device, shape, ranks_per_node)

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
        on_its_stream = self.allocate_on_comm_stream
        driver: RankMajorDriver
        if _is_v2(library):
            driver = ElasticDriver(
                library,
                context,
                num_sms=self.num_sms,
                deterministic=self.deterministic,
                on_its_stream=on_its_stream,
            )
        else:
            driver = NormalDriver(library, context, num_sms=self.num_sms, on_its_stream=on_its_stream)
        source = "detected" if self.ranks_per_node is None else "configured"
        nodes = self.ranks_on_a_node(context.shape)
        report_open(self.name, library, context.communicator, f"{nodes} ranks per node ({source}), {driver.buffers}")
        return DeepEP(context, driver, expand=self.expand)

    def ranks_on_a_node(self, shape: MoEShape) -> int:
        """Return the number of consecutive ranks that share a node: the option, else as detected, else all ranks."""
        return self.ranks_per_node or shape.ranks_per_node or shape.ep_size

    def _library(self) -> Library | Rejected:
        found = find_library(self.release)
        if isinstance(found, Rejected) or _is_v2(found):
            return found
        if not hasattr(found.module, "Buffer"):
            return Rejected(f"deep_ep {found.version} has neither Buffer nor ElasticBuffer")
        return normal.lacking(found) or found


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepEPRoute(RankMajorRoute):
    """The route of a dispatch whose rows arrived by source rank.

    The library sends rows to experts in bfloat16 or float8, and everything else in bfloat16.
    """

    driver: RankMajorDriver
    permutation: Permutation
    handle: Handle
    index: SlotIndex
    wire_dtype: WireDtype | None

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
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpandedRoute(Route):
    """The route of a dispatch in which the library itself delivered expert-major rows. It has no backward."""

    driver: RankMajorDriver
    handle: Handle

    def send(self, rows_TD: Tensor) -> Tensor:
        rows = self.driver.send_again(rows_TD.bfloat16().contiguous(), self.handle)
        return unpack(rows, rows_TD.dtype).to(rows_TD.dtype)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        weighted_RD = rows_RD if weights_R is None else rows_RD * weights_R.unsqueeze(1)
        rows_TD, _ = self.driver.combine(weighted_RD.bfloat16().contiguous(), None, self.handle)
        return rows_TD.to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("constraints say that it is not differentiable")

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("constraints say that it is not differentiable")


@final
class DeepEP(Backend):
    """DeepEP v1 (``Buffer``, normal mode) or v2 (``ElasticBuffer``), whichever is installed.

    A row arrives once on each rank that needs it, ordered by source rank. moe-dispatch then copies rows to their
    experts, pads them and applies the weights. Weights travel and are returned in float32.

    Cost: one host sync per dispatch, and none in ``again=``, combine or a backward. In graph-safe mode there is none at
    all, but as many rows as in the worst case are delivered, ``ep_size * max_tokens_per_rank``.

    Source: DeepEP v1.2.1 and main of 2026-07 (2.1.0).
    """

    collective_close = True

    def __init__(self, context: BackendContext, driver: RankMajorDriver, *, expand: bool) -> None:
        super().__init__(context)
        self.driver = driver
        self._expand = expand

    def reserve(self, sizes: Sizes) -> None:
        if sizes.group_max_rows is not None:
            self.driver.reserve(sizes.group_max_rows)

    def close(self) -> None:
        self.driver.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        if self._expand:
            return self._dispatch_expanded(rows_TD, ids_TK, weights_TK, sizes.capacity)
        arrived = self._send(rows_TD, ids_TK, weights_TK, asynchronously=False)
        return self._grouped(rows_TD, weights_TK, arrived, sizes.capacity)

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> Callable[[], Arrived]:
        if self._expand:
            return super().dispatch_async(rows_TD, ids_TK, weights_TK, sizes)
        arriving = self._send(rows_TD, ids_TK, weights_TK, asynchronously=True)
        return lambda: self._grouped(rows_TD, weights_TK, arriving, sizes.capacity)

    def _send(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool) -> RankMajorRows:
        shape, most_rows = self.context.shape, self.context.most_rows
        # In graph-safe mode: as many rows as all ranks together can send. In eager mode the library counts the rows.
        worst_rows = shape.ep_size * most_rows if shape.graph_safe and most_rows is not None else None
        return self.driver.send(
            pack(rows_TD, shape.wire_dtype),
            ids_TK.contiguous(),
            weights_TK.float().contiguous(),
            asynchronously=asynchronously,
            worst_rows=worst_rows,
        )

    def _grouped(
        self, rows_TD: Tensor, weights_TK: Tensor, arrived: RankMajorRows, capacity: Capacity | None
    ) -> Arrived:
        arrived.wait()  # v2 puts its rows in order here
        ids_SK = arrived.ids_SK if capacity is None else arrived.known_ids_SK
        route = DeepEPRoute(
            driver=self.driver,
            permutation=self.context.permutation_on(rows_TD.device),
            handle=arrived.handle,
            index=self.context.group(ids_SK, arrived.weights_SK, capacity, counts=arrived.counts),
            wire_dtype=self.context.shape.wire_dtype,
        )
        rows_SD, weights_SK = unpack(arrived.payload, rows_TD.dtype), arrived.weights_SK.to(weights_TK.dtype)
        return arrive(route, rows_SD, weights_SK, rows_TD.dtype)

    def _dispatch_expanded(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity | None
    ) -> Arrived:
        assert isinstance(self.driver, ElasticDriver)
        sent = self.driver.send_expanded(
            rows_TD.bfloat16().contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous()
        )
        real_L = sent.real_counts_L.long()
        return Arrived(
            rows=sent.rows_RD.to(rows_TD.dtype),
            weights=sent.weights_R.to(weights_TK.dtype),
            tokens_per_expert=real_L + -real_L % self.context.shape.pad_multiple,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=tuple(sent.padded_counts) if capacity is None else None,
            route=ExpandedRoute(driver=self.driver, handle=sent.handle),
            demand=None if capacity is None else torch.stack([real_L.sum(), real_L.new_zeros(())]),
        )


def pack(rows_TD: Tensor, wire: WireDtype | None) -> Payload:
    """Convert rows to the form that the library takes."""
    return to_float8(rows_TD) if wire == "float8_e4m3fn" else rows_TD.bfloat16().contiguous()


def unpack(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Return the rows that the library delivered: bfloat16 rows as they are, float8 rows in ``dtype``."""
    return payload if isinstance(payload, Tensor) else from_float8(*payload, dtype)


def _is_v2(library: Library) -> bool:
    return hasattr(library.module, "ElasticBuffer")
