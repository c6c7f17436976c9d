"""``nccl_ep``: NVIDIA's NCCL EP, through transformer-engine, sends each row once to each rank that needs it.

This module has the options, the backend, which makes the library's group, and the route of one dispatch.

Source: transformer-engine 2.20.2, pytorch/ep.py and common/include/transformer_engine/ep.h; nccl-extensions 44d2de0,
nccl_ep.
"""

from __future__ import annotations

import logging
import math
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from moe_dispatch.backends.base import Arrived, Backend, BackendContext, BackendOptions, Constraints, MoEShape, Route
from moe_dispatch.backends.capacity import GraphSafeSupport, worst_rows
from moe_dispatch.backends.footprint import expert_major
from moe_dispatch.backends.nccl_ep import library
from moe_dispatch.backends.nccl_ep.exchange import Exchange
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import WireSupport
from moe_dispatch.communication import raise_alike, read_host
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.permutation.index import round_up, running_total
from moe_dispatch.seams.plug_ins import Rejected, Usable
from moe_dispatch.types import Capacity, Sizes

logger = logging.getLogger("moe_dispatch")

_ROWS_MULTIPLE = 64  # as Megatron rounds the bound of the rows of a rank
_MOST_RANKS = 64  # by the release notes of NCCL EP
_MOST_LOCAL_EXPERTS = 256  # its kernels assert it
_NEGATIVE_ZERO = -(1 << 31)  # the bits of float32 -0.0
_NOWHERE = _NEGATIVE_ZERO + 1  # those of -1.4e-45, the number next to it
# The open backend that made the group of a library. The library has one group for a process.
_holders: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[NcclEP], list[bool]]] = weakref.WeakKeyDictionary()


@final
class NcclEPOptions(BackendOptions):
    """Options of ``nccl_ep``.

    Attributes:
        num_sms: Most streaming multiprocessors that the kernels may use. None is the library's default.
    """

    name = "nccl_ep"

    num_sms: Annotated[int, Field(ge=1)] | None = None

    def probe(self) -> Usable | Rejected:
        found = library.find_library()
        return found if isinstance(found, Rejected) else Usable(version=found.version)

    def constraints(self, shape: MoEShape) -> Constraints:
        pad, found = shape.pad_multiple, library.find_library()
        if pad & (pad - 1):
            raise ConfigError(
                f"Backend 'nccl_ep': pad_multiple must be a power of two, got {pad}. Use {1 << pad.bit_length()}, or "
                "another backend."
            )
        return Constraints(
            group_max=True,
            # A rank without rows brings one that names no expert, because nothing says that the library takes none.
            min_rows=1,
            hidden_multiple=8,  # rows are copied in 16 bytes
            dtypes=frozenset({torch.bfloat16}),
            devices=frozenset({"cuda" if isinstance(found, Rejected) else found.device}),
            group_sizes=frozenset(range(2, _MOST_RANKS + 1)),
            group_sizes_hint='Use "local" on one rank, or "deepep" on more than 64.',
            max_local_experts=_MOST_LOCAL_EXPERTS,
            pads_experts=True,
            counts_with_sizes=True,
            wire=WireSupport(dtypes=frozenset({"bfloat16"})),
            graph_safe=GraphSafeSupport(drop_order="position"),
        )

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        """Count the rows only, each sent once to each rank that needs it. The library sends ids and weights too."""
        there, back = volume.pairs_out * 2 * shape.hidden_size, volume.pairs_in * 2 * shape.hidden_size
        return SentBytes(
            sent={"dispatch": there, "combine": back, "combine.backward": there, "dispatch.backward": back},
            payload_only=True,
            once_per_node=True,
            row_dtypes=(torch.bfloat16, torch.bfloat16),
        )

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return expert_major(shape, sizes, rows, values=4 * rows * shape.top_k)

    def open(self, context: BackendContext) -> Backend:
        found = library.find_library()
        assert isinstance(found, library.EPLibrary)
        backend, problem = None, None
        try:
            if found.device == "cuda":
                _check_group(context.communicator.library_group)
            backend = NcclEP(found, context, self.num_sms)
        except ConfigError as error:  # what is in the way may be on this rank only
            problem = error
        try:
            raise_alike(context.communicator, problem, label="group")
        except Exception:
            if backend is not None:  # the error keeps it alive
                del _holders[found.ep]
            raise
        assert backend is not None
        if context.communicator.rank == 0:
            told = found.version, context.communicator.size
            logger.info("backend 'nccl_ep': transformer-engine %s, %d ranks.", *told)
        return backend


@final
class NcclEP(Backend):
    """NCCL EP, of which a process has one group, for one set of sizes.

    The library's group is made for the largest number of rows of any rank, and its kernels trap if a rank brings more.
    So ``reserve`` makes it anew when the ranks agree on more. The group for more rows is up to an eighth larger than it
    must be, so that it is not made anew for each step that is a little longer.

    In eager mode the library reads the number of arriving rows on the host, and allocates them. In graph-safe mode the
    buffers hold ``Capacity.buffer_rows`` rows. The library drops the last expert-major rows if more are needed, and if
    more different tokens arrive at the rank than the buffer has rows, the last of these tokens. It says how many rows
    were needed with padding. So after a drop the demand is the smallest that is possible, and one ``grow`` is enough.

    A slot with the id -1 goes nowhere. The header of the library promises nothing about such ids; all of its kernels
    that read ids skip those below 0. If a version does otherwise, an eager dispatch raises on the rank of the expert:
    with a plan because such a slot has a weight that no other has, and without one because more rows arrive than the
    ranks have counted. In graph-safe mode nothing is read on the host. There combine takes the output of such a row for
    0; with ``weights="experts"``, the expert multiplies it by the weight, -1.4e-45.

    Cost: a host sync per eager dispatch, in the library, and another if sizes come without the ranks' counts; none in
    combine. ``send`` (``again=``) exchanges the ids again, and in eager mode has the library's host sync. A backward
    has none, unless the group was made anew since its dispatch: then the dispatch is repeated. In graph-safe mode there
    is none at all.
    """

    collective_close = True

    def __init__(self, found: library.EPLibrary, context: BackendContext, num_sms: int | None) -> None:
        super().__init__(context)
        self.ep, self._num_sms = found.ep, num_sms
        self._rows, self._capacity = 0, None if not context.shape.graph_safe else 0
        self._made_group = [False]  # a list, because it outlives the backend
        self.group_number = 0
        self.is_open = True
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), requires_grad=True)
        self._hold()

    def _hold(self) -> None:
        """Note that this backend makes the library's group.

        Raises:
            ConfigError: Another dispatcher, or another user of the library, has made a group.
        """
        reference, made_group = _holders.get(self.ep) or (None, [False])
        holder = None if reference is None else reference()
        if holder is not None:
            same = holder.context.communicator.group is self.context.communicator.group
            what = "other settings" if same else "another group"
            raise ConfigError(
                "Backend 'nccl_ep': NCCL EP has one group and one set of sizes in a process, and a dispatcher with "
                f"{what} has it. Close that one; if it was dropped without close(), build one with its config and "
                "group again, and close that. Or give both the same config and group."
            )
        if made_group[0]:
            self.ep.ep_finalize()  # the backend that made it is gone, because building it failed on another rank
            made_group[0] = False
        self._refuse_foreign_group()
        _holders[self.ep] = weakref.ref(self), self._made_group

    def _refuse_foreign_group(self) -> None:
        if not self._made_group[0] and self.ep.is_ep_bootstrapped():
            raise ConfigError(
                "Backend 'nccl_ep': another user of transformer_engine.pytorch.ep has bootstrapped NCCL EP in this "
                "process. Call ep_finalize() on every rank before, or use another backend."
            )

    def reserve(self, sizes: Sizes) -> None:
        """Make the library's group anew if it is too small for these sizes. Collective if it does."""
        shape, rows = self.context.shape, max(sizes.group_max_rows or 1, 1)
        capacity = None if sizes.capacity is None else sizes.capacity.buffer_rows
        if rows <= self._rows and capacity == self._capacity:
            return
        bound = self._bound(rows)
        if capacity is not None:
            bound = min(bound, capacity)
            if capacity < rows:
                raise ConfigError(
                    "Backend 'nccl_ep': the buffer of a rank's experts must hold at least the rows that a rank brings, "
                    f"{rows}, got {capacity}. Raise graph_safe.capacity_factor to "
                    f"{math.ceil(1000 / shape.top_k) / 1000} or more."
                )
        self._refuse_foreign_group()
        if self._made_group[0]:
            logger.info("backend 'nccl_ep': the group for %d rows per rank is made anew, for %d.", self._rows, bound)
            self._finalize()
        self.ep.ep_bootstrap(
            self.context.communicator.library_group,
            num_experts=shape.num_experts,
            max_tokens_per_rank=bound,
            hidden_dim=shape.hidden_size,
            num_topk=shape.top_k,
            recv_capacity_per_rank=capacity,
            max_num_sms=self._num_sms or 0,
            # It costs a pass over the buffer in each dispatch, so not where nothing can overflow.
            drop_on_overflow=sizes.capacity is not None and sizes.capacity.rows < worst_rows(shape),
        )
        self._rows, self._capacity, self._made_group[0] = bound, capacity, True
        self.group_number += 1

    def _bound(self, rows: int) -> int:
        """Return the number of rows of a rank for which a group for ``rows`` rows is made.

        It has steps of an eighth to a sixteenth: 64, 128, ..., 1024, 1152, ..., 2048, 2304.
        """
        bound = round_up(rows, max(_ROWS_MULTIPLE, (1 << (rows - 1).bit_length()) >> 4))
        most = self.context.most_rows
        return bound if most is None else min(bound, round_up(max(rows, most), _ROWS_MULTIPLE))

    def _finalize(self) -> None:
        """Release the library's group when no kernel uses the memory of another rank any more."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if not self.context.communicator.is_gone:
            self.context.communicator.max([0], label="group")
        self.ep.ep_finalize()
        self._made_group[0] = False

    def memory_held(self) -> int:
        """Return the bytes of the rows that the library's group has room for, which the library does not tell."""
        shape = self.context.shape
        rows = self._rows * shape.ep_size if self._made_group[0] else 0
        return super().memory_held() + rows * shape.hidden_size * torch.bfloat16.itemsize

    def close(self) -> None:
        """Release the group of the library, which must be gone before the process group is. Collective."""
        if not self.is_open:
            return
        self.is_open, self.group_number = False, self.group_number + 1
        try:
            if self._made_group[0]:
                self._finalize()
        finally:
            del _holders[self.ep]

    def make_buffer(self, device: torch.device) -> Any:
        """Make the library's buffer of one dispatch."""
        shape = self.context.shape
        return self.ep.EpBuffer(
            shape.top_k,
            self._rows,
            shape.hidden_size,
            shape.num_local_experts,
            recv_capacity_per_rank=self._capacity,
            alignment=shape.pad_multiple,
            device=device,
        )

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        """Send each row once to each rank that needs it, and copy it there to its experts.

        The library returns the rows of each expert by source rank, then by row, then zero padding; their weights, which
        are exactly the bits that were sent, and +0.0 on padding; and the number of rows of each expert. Versions
        differ in whether this number has the padding, so it is rounded up.
        """
        pad, capacity = self.context.shape.pad_multiple, sizes.capacity
        exchange = Exchange(self, ids_TK)
        rows_RD, weights_R = exchange.dispatch(rows_TD.bfloat16().contiguous(), _marked(weights_TK, ids_TK))
        padded_L = (exchange.buffer.tokens_per_expert + (pad - 1)) // pad * pad
        bits_R = weights_R.view(torch.int32)
        is_real_R = bits_R != 0
        real_L = running_total(is_real_R).index_select(0, running_total(padded_L)).diff()
        total = exchange.buffer.total_recv_tokens
        return Arrived(
            rows=rows_RD.to(rows_TD.dtype),
            weights=(weights_R + 0.0).to(weights_TK.dtype),  # -0.0 becomes 0.0 again
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=None if capacity is not None else self._counted(padded_L, weights_R, sizes),
            route=NcclEPRoute(context=self.context, exchange=exchange, is_token_R=is_real_R & (bits_R != _NOWHERE)),
            demand=None if capacity is None else self._demand(real_L, total, capacity),
        )

    def _counted(self, padded_L: Tensor, weights_R: Tensor, sizes: Sizes) -> tuple[int, ...]:
        """Return the padded rows of each expert on the host, and check that those rows arrived, and no others."""
        shape, rank = self.context.shape, self.context.communicator.rank
        counted, mine = sizes.tokens_per_expert, slice(rank * shape.num_local_experts, None)
        strays, arrived = 0, len(weights_R)
        if counted is None:
            is_stray_R = weights_R.view(torch.int32) == _NOWHERE
            *on_host, strays = read_host(torch.cat([padded_L, is_stray_R.sum(0, keepdim=True)]))
        else:
            on_host = [round_up(count, shape.pad_multiple) for count in counted[mine][: shape.num_local_experts]]
        if strays or sum(on_host) != arrived:
            raise StateError(
                f"Backend 'nccl_ep': the experts of rank {rank} must get {sum(on_host)} rows, padding included, got "
                f"{arrived}, {strays} of them of slots with the id -1. The library sends other slots than the ranks "
                "asked for. Run self_test(), and use another backend until it passes."
            )
        return tuple(on_host)

    def _demand(self, real_L: Tensor, total: Tensor, capacity: Capacity) -> Tensor:
        """Return the demand of ``Arrived.demand``, int64 (2,).

        It exceeds ``capacity.rows`` exactly if rows were dropped. The library tells the rows that were needed with
        padding. At most ``pad_multiple - 1`` rows of each expert were padding.
        """
        shape, arrived, total = self.context.shape, real_L.sum(), total.view(())
        least = (total - shape.num_local_experts * (shape.pad_multiple - 1)).clamp(min=capacity.rows + 1)
        dropped = total > capacity.buffer_rows
        needed = torch.where(dropped, torch.maximum(least, arrived + 1), arrived.clamp(max=capacity.rows))
        return torch.stack([needed, torch.zeros_like(needed)])


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NcclEPRoute(Route):
    """The exchange of one dispatch, and which of its rows are tokens, bool (R,): no padding, and no id of -1."""

    context: BackendContext
    exchange: Exchange
    is_token_R: Tensor

    def send(self, rows_TD: Tensor) -> Tensor:
        return self.exchange.send(rows_TD.bfloat16().contiguous()).to(rows_TD.dtype)

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        weighted_RD = rows_RD
        if weights_R is not None:
            weigh = self.context.permutation_of(rows_RD).weigh
            weighted_RD, _ = weigh(rows_RD, weights_R, lambda: self.is_token_R, torch.bfloat16, clears=True)
        return self.exchange.combine(weighted_RD.bfloat16().contiguous()).to(rows_RD.dtype)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sent_R = (
            torch.zeros_like(self.is_token_R, dtype=torch.float32) if grad_R is None else grad_R.float().contiguous()
        )
        grad_TD, grad_TK = self.exchange.dispatch_backward(grad_RD.bfloat16().contiguous(), sent_R)
        return grad_TD.to(grad_RD.dtype), None if grad_R is None else grad_TK.to(grad_R.dtype)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        arrived_RD = self.exchange.combine_backward(grad_TD.bfloat16().contiguous(), len(self.is_token_R))
        if weights_R is None:
            return arrived_RD.to(grad_TD.dtype), None
        return self.context.permutation_of(arrived_RD).weigh(
            arrived_RD, weights_R, lambda: self.is_token_R, grad_TD.dtype, partners_RD=rows_RD, clears=True
        )


def _check_group(group: dist.ProcessGroup | None) -> None:
    """Refuse a group that is not over NCCL, whose communicator the library borrows, or is on another device."""
    backend: Any = None
    if group is not None:
        with suppress(RuntimeError):  # the group has no backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
    if group is None or not hasattr(backend, "_comm_ptr"):
        found = "None" if group is None else "one without CUDA" if backend is None else type(backend).__name__
        raise ConfigError(
            f"Backend 'nccl_ep' needs a process group over NCCL, whose communicator it borrows, got {found}. Pass "
            'group=, made by init_process_group("nccl").'
        )
    bound, current = group.bound_device_id, torch.cuda.current_device()
    if bound is not None and bound.index != current:
        raise ConfigError(
            f"Backend 'nccl_ep': the library runs on the current device, which must be that of the group, {bound}, got "
            f"cuda:{current}. Call torch.cuda.set_device before."
        )


def _marked(weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Return float32 weights that tell the receiver what a row is, for the library moves them bit by bit.

    +0.0 becomes -0.0, which is no padding. The weight of a slot that goes nowhere becomes ``_NOWHERE``, and no other
    weight does.
    """
    bits_TK = weights_TK.float().contiguous().view(torch.int32)
    bits_TK = torch.where((bits_TK == 0) | (bits_TK == _NOWHERE), _NEGATIVE_ZERO, bits_TK)
    return torch.where(ids_TK < 0, _NOWHERE, bits_TK).view(torch.float32)
