"""``deepep``: rows travel through DeepEP's buffers, each once per rank that owns one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, final

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
    Sizes,
    WireDtype,
)
from moe_dispatch.backends.capacity import Capacity, capacity_of
from moe_dispatch.backends.deep_ep import elastic, normal
from moe_dispatch.backends.deep_ep.elastic import ElasticTransport
from moe_dispatch.backends.deep_ep.library import Library, find_library, never_raising, openable, report_open
from moe_dispatch.backends.deep_ep.normal import NormalTransport
from moe_dispatch.backends.deep_ep.transport import Delivery, Payload, Transport, Way
from moe_dispatch.backends.rank_major import Route, arrive, arrive_statically, bring_home, send_again
from moe_dispatch.backends.volume import Volume, Wire, payload
from moe_dispatch.backends.wire import from_float8, row_format, to_float8
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation import Permutation, SlotIndex, group_slots
from moe_dispatch.probing import Rejected, Usable

Release = Literal["v1.2.1", "v2-2.1.0"]


@final
class DeepEPOptions(BackendOptions):
    """Options of ``deepep``.

    Attributes:
        num_sms: streaming multiprocessors its kernels may use, an even number; None is the library's default.
        deterministic: v2: rows of a source rank in their order, which it sorts for; v1 always keeps it. False leaves
            them in the order they happened to arrive in, another in every run; graph-safe mode needs that with
            ``expand`` and across nodes, where the sort reads the device.
        expand: v2: the library delivers expert-major rows itself, padded on the device. It has no backward.
        allocate_on_comm_stream: with ``async_op=True``, received tensors belong to its communication stream.
        ranks_per_node: consecutive ranks of the group that share a node; None detects it by host name. v1 needs whole
            nodes; v2 only offers float8 within one.
        emulate: run on the emulation of ``deep_ep``, on CPU tensors: True for v1.2.1, or the name of a release.
    """

    num_sms: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    deterministic: bool = True
    expand: bool = False
    allocate_on_comm_stream: bool = False
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    emulate: bool | Release = False

    @property
    def release(self) -> str | None:
        """What to emulate; None for the installed library."""
        return "v1.2.1" if self.emulate is True else self.emulate or None

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> DeepEPOptions:
        if self.expand and self.allocate_on_comm_stream:
            raise ConfigError(
                "backend 'deepep': allocate_on_comm_stream is for async_op, which expand cannot do. Leave one out."
            )
        return self


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepEPRoute(Route):
    """Both ways through the library; what it carries is bfloat16, or float8 on the way out."""

    transport: Transport
    permutation: Permutation
    way: Way
    index: SlotIndex
    wire_dtype: WireDtype | None

    @contextmanager
    def spread(self, rows_TD: Tensor, wire: WireDtype | None, *, label: str) -> Iterator[Tensor]:
        yield unpack(self.transport.send_again(pack(rows_TD, wire), self.way), rows_TD.dtype)

    def collect(
        self, rows_RD: Tensor, weights_R: Tensor | None, values_R: Tensor | None, *, label: str
    ) -> tuple[Tensor, Tensor | None]:
        sums_SD = rows_RD.new_empty(self.index.num_rows, rows_RD.shape[1], dtype=torch.bfloat16)
        self.permutation.reduce(rows_RD, self.index, weights_R, sums_SD)
        values_SK = None if values_R is None else self.index.to_slots(values_R).float()
        rows_TD, values_TK = self.transport.sum_at_home(sums_SD, values_SK, self.way)
        if values_R is None or values_TK is None:
            return rows_TD.to(rows_RD.dtype), None
        return rows_TD.to(rows_RD.dtype), values_TK.to(values_R.dtype)


@final
class DeepEP(Backend):
    """DeepEP v1 (``Buffer``, normal mode) or v2 (``ElasticBuffer``), whichever is installed.

    Rows arrive rank-major and once per rank; spreading them over experts, weighting and padding are this library's.
    Weights travel and are returned in float32. Cost: one host sync per dispatch, and none in ``again=``, combine or a
    backward; in graph-safe mode none at all, and rows for the worst case arrive: ``ep_size * max_tokens_per_rank``.
    Source: DeepEP v1.2.1 and main of 2026-07 (2.1.0).
    """

    name = "deepep"
    Options = DeepEPOptions
    collective_close = True

    def __init__(self, context: BackendContext, options: BackendOptions) -> None:
        super().__init__(context, options)
        self._transport: Transport | None = None

    @classmethod
    @never_raising
    def probe(cls, options: BackendOptions) -> Usable | Rejected:
        found = _library(options)
        if isinstance(found, Rejected):
            return found
        features = ("v2", "compact", "expand") if _is_v2(found) else ("v1", "normal mode")
        return Usable(version=found.version, features=features + (("emulated",) if found.emulated else ()))

    @classmethod
    def constraints(cls, shape: MoEShape, options: BackendOptions) -> Constraints:
        assert isinstance(options, DeepEPOptions)
        library = _library(options)
        if isinstance(library, Rejected):  # for tables: where it is to be used, probe has refused it
            return normal.constraints("cuda", shape, _ranks_per_node(shape, options))
        if _is_v2(library):
            return elastic.constraints(
                library.device,
                shape,
                _ranks_per_node(shape, options),
                expand=options.expand,
                deterministic=options.deterministic,
            )
        if options.expand:
            raise ConfigError(
                f"Backend 'deepep': expand needs v2 (ElasticBuffer), got {library.version}. Leave expand out, or "
                "install v2."
            )
        return normal.constraints(library.device, shape, _ranks_per_node(shape, options))

    @classmethod
    def capacity(cls, shape: MoEShape, options: BackendOptions) -> Capacity:
        assert isinstance(options, DeepEPOptions)
        capacity = capacity_of(shape)
        return replace(capacity, buffer_rows=elastic.expanded_rows(shape)) if options.expand else capacity

    @classmethod
    def wire_bytes(cls, shape: MoEShape, options: BackendOptions, volume: Volume, dtype: torch.dtype) -> Wire:
        wire: WireDtype = shape.wire_dtype or "bfloat16"
        there, back = (row_format(dtype, shape.hidden_size, form) for form in (wire, "bfloat16"))
        return payload(volume, out_bytes=there.nbytes, back_bytes=back.nbytes)

    def open(self) -> None:
        options, shape, comm = self._options, self.context.shape, self.context.communicator
        library = openable("deepep", _library(options), comm)
        if _is_v2(library):
            self._transport = ElasticTransport(
                library,
                shape,
                comm,
                num_sms=options.num_sms,
                deterministic=options.deterministic,
                on_its_stream=options.allocate_on_comm_stream,
                most_rows=self.context.most_rows,
            )
        else:
            self._transport = NormalTransport(
                library, shape, comm, num_sms=options.num_sms, on_its_stream=options.allocate_on_comm_stream
            )
        source = "detected" if options.ranks_per_node is None else "configured"
        nodes = _ranks_per_node(shape, options)
        report_open("deepep", library, comm, f"{nodes} ranks per node ({source}), {self._transport.buffers}")

    @property
    def _options(self) -> DeepEPOptions:
        assert isinstance(self.options, DeepEPOptions)
        return self.options

    @property
    def transport(self) -> Transport:
        """The open library."""
        assert self._transport is not None
        return self._transport

    def reserve(self, sizes: Sizes) -> None:
        if sizes.group_max_rows is not None:
            self.transport.reserve(sizes.group_max_rows)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        if self._options.expand:
            return self._dispatch_expanded(rows_TD, ids_TK, weights_TK, sizes.capacity)
        delivery = self._send(rows_TD, ids_TK, weights_TK, asynchronously=False)
        return self._arrived(rows_TD, weights_TK, delivery, sizes.capacity)

    def dispatch_async(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes
    ) -> Callable[[], Arrived]:
        if self._options.expand:
            return super().dispatch_async(rows_TD, ids_TK, weights_TK, sizes)
        delivery = self._send(rows_TD, ids_TK, weights_TK, asynchronously=True)
        return lambda: self._arrived(rows_TD, weights_TK, delivery, sizes.capacity)

    def _send(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool) -> Delivery:
        payload = pack(rows_TD.detach(), self.context.shape.wire_dtype)
        weights_TK = weights_TK.detach().float().contiguous()
        return self.transport.send(
            payload,
            ids_TK.contiguous(),
            weights_TK,
            asynchronously=asynchronously,
            worst_rows=self._worst_rows,
        )

    @property
    def _worst_rows(self) -> int | None:
        """Rows that every rank sends to one; None where it is counted how many do."""
        shape, most_rows = self.context.shape, self.context.most_rows
        return shape.ep_size * most_rows if shape.graph_safe and most_rows is not None else None

    def _arrived(self, rows_TD: Tensor, weights_TK: Tensor, delivery: Delivery, capacity: Capacity | None) -> Arrived:
        pad_multiple = self.context.shape.pad_multiple
        delivery.wait()  # v2 puts its rows in order only then
        received = (unpack(delivery.payload, rows_TD.dtype), delivery.weights_SK.to(weights_TK.dtype))
        if capacity is not None:
            index = self.context.group_statically(delivery.known_ids_SK, delivery.weights_SK, capacity)
            return arrive_statically(rows_TD, weights_TK, self._route(rows_TD, delivery, index), received)
        route = self._route(rows_TD, delivery, group_slots(delivery.ids_SK, delivery.counts, pad_multiple))
        return arrive(rows_TD, weights_TK, route, received, delivery.counts, pad_multiple)

    def _route(self, rows_TD: Tensor, delivery: Delivery, index: SlotIndex) -> DeepEPRoute:
        return DeepEPRoute(
            transport=self.transport,
            permutation=self.context.permutation_on(rows_TD.device),
            way=delivery.way,
            index=index,
            wire_dtype=self.context.shape.wire_dtype,
        )

    def _dispatch_expanded(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, capacity: Capacity | None
    ) -> Arrived:
        assert isinstance(self.transport, ElasticTransport)
        sent = self.transport.send_expanded(
            rows_TD.bfloat16().contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous()
        )
        real_L = sent.real_counts_L.long()
        return Arrived(
            rows=sent.rows_RD.to(rows_TD.dtype),
            weights=sent.weights_R.to(weights_TK.dtype),
            tokens_per_expert=real_L + -real_L % self.context.shape.pad_multiple,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=tuple(sent.padded_counts) if capacity is None else None,
            state=sent.way,
            demand=None if capacity is None else torch.stack([real_L.sum(), real_L.new_zeros(())]),
        )

    def dispatch_again(self, rows_TD: Tensor, state: Any) -> Tensor:
        if not isinstance(state, Way):
            return send_again(rows_TD, state)
        payload = self.transport.send_again(rows_TD.bfloat16().contiguous(), state)
        return unpack(payload, rows_TD.dtype).to(rows_TD.dtype)

    def combine(self, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        if not isinstance(state, Way):
            return bring_home(rows_RD, weights_R, state, weighted=weighted)
        weighed_RD = rows_RD * weights_R.unsqueeze(1) if weighted else rows_RD
        rows_TD, _ = self.transport.sum_at_home(weighed_RD.bfloat16().contiguous(), None, state)
        return rows_TD.to(rows_RD.dtype)


def pack(rows_TD: Tensor, wire: WireDtype | None) -> Payload:
    """Rows as the library takes them."""
    return to_float8(rows_TD) if wire == "float8_e4m3fn" else rows_TD.bfloat16().contiguous()


def unpack(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Rows as they came: bfloat16, or ``dtype`` where they were float8."""
    return payload if isinstance(payload, Tensor) else from_float8(*payload, dtype)


def _library(options: BackendOptions) -> Library | Rejected:
    assert isinstance(options, DeepEPOptions)
    found = find_library(options.release)
    if isinstance(found, Rejected) or _is_v2(found):
        return found
    if not hasattr(found.module, "Buffer"):
        return Rejected(f"deep_ep {found.version} has neither Buffer nor ElasticBuffer")
    return normal.lacking(found) or found


def _is_v2(library: Library) -> bool:
    return hasattr(library.module, "ElasticBuffer")


def _ranks_per_node(shape: MoEShape, options: DeepEPOptions) -> int:
    return options.ranks_per_node or shape.ranks_per_node or shape.ep_size
