"""``deepep`` over ``deep_ep.Buffer``, the buffer class of v1, in normal mode, and of libraries with the same class.

Source: DeepEP v1.2.1, deep_ep/buffer.py and csrc; UCCL da914a2, ep/bench/buffer.py and ep/include; ROCm/DeepEP 92b4ae1,
deep_ep/buffer.py and csrc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, Constraints, MoEShape
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.deep_ep.buffers import Handle, unfilled
from moe_dispatch.backends.deep_ep.library import PACKAGE, ROCM, UCCL, Library, parameters
from moe_dispatch.backends.deep_ep.rank_rows import DeepEP, Payload, RankMajorRows
from moe_dispatch.backends.wire import WireDtype, WireSupport
from moe_dispatch.errors import ConfigError
from moe_dispatch.types import Sizes

if TYPE_CHECKING:
    from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions

_configuring = threading.Lock()  # guards ``num_sms``, an attribute of the class ``Buffer``
_RANKS_PER_NODE = 8  # NUM_MAX_NVL_PEERS: the library takes a larger group for nodes of eight ranks each
_IN_NODE = frozenset({2, 4, 8})
# Numbers of nodes for which kernels are built, and whose group sizes have a default configuration.
_NODES = {PACKAGE: (2, 4, 8, 16, 18, 20), UCCL: (2, 3, 4, 8, 16), ROCM: (2, 4, 8, 16)}


def lacking(library: Library) -> str | None:
    """Return why a v1 is too old, or None if it has all parameters that are needed."""
    missing = {"explicitly_destroy"} - parameters(library.module.Buffer.__init__)
    missing |= {"num_worst_tokens"} - parameters(library.module.Buffer.dispatch)
    if missing:
        return f"Buffer of {library.named} lacks {', '.join(sorted(missing))}; install v1.2.1 or later"
    return None


def _wire_dtypes(is_emulated: bool) -> frozenset[WireDtype]:
    """Return the formats that rows can travel in. MI300 (gfx942) has another float8, with another bias."""
    is_rocm = torch.version.hip is not None and not is_emulated
    if is_rocm and torch.cuda.get_device_properties().gcnArchName.startswith("gfx942"):
        return frozenset({"bfloat16"})
    return frozenset({"bfloat16", "float8_e4m3fn", "mxfp8"})


def constraints(library: Library, shape: MoEShape, ranks_per_node: int) -> Constraints:
    """Return the constraints of v1.2.1 for bfloat16 rows, as its kernels check or assume them.

    UCCL-EP and ROCm/DeepEP have kernels for other numbers of nodes.

    Raises:
        ConfigError: The library has no kernels for a group with this number of ranks per node.
    """
    needed = min(shape.ep_size, _RANKS_PER_NODE)
    if ranks_per_node % needed:
        raise ConfigError(
            f"Backend 'deepep': a group of {shape.ep_size} ranks must have {needed} ranks per node, got "
            f"{ranks_per_node} per node. Use such groups, or set the option ranks_per_node if the number is wrong."
        )
    return Constraints(
        # Before commit abba6ad (2025-09-17), combine loses the tail of a row whose size is not a multiple of 256.
        hidden_multiple=256,
        max_hidden=8191,  # half a row and 8 bytes must fit into 8192 bytes
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({library.device}),
        max_top_k=32,
        group_sizes=_IN_NODE | {_RANKS_PER_NODE * nodes for nodes in _NODES[library.name]},
        max_local_experts=128,
        wire=WireSupport(dtypes=_wire_dtypes(library.emulated), gradients="can", delivers=True),
        graph_safe=GraphSafeSupport() if shape.ep_size <= _RANKS_PER_NODE else None,
        graph_safe_reason=(
            f"v1 avoids host syncs only within a node, that is with up to {_RANKS_PER_NODE} ranks, got "
            f"{shape.ep_size}; v2 avoids them across nodes too"
        ),
    )


@final
class NormalDeepEP(DeepEP):
    """``deepep`` over v1. It has one buffer, whose size depends only on the hidden size and the number of ranks.

    Cost of ``send``: one host sync, for the counts; none with ``worst_rows``.
    """

    def __init__(self, library: Library, context: BackendContext, options: DeepEPOptions) -> None:
        super().__init__(context)
        num_sms, shape, cls = options.num_sms, context.shape, library.module.Buffer
        self._class = cls
        self._ids_dtype: torch.dtype = getattr(library.module, "topk_idx_t", torch.int64)  # int32 in some builds
        self._on_its_stream = options.allocate_on_comm_stream
        with _configuring:  # a configuration takes the number of multiprocessors from the class
            before = cls.num_sms
            try:
                cls.set_num_sms(before if num_sms is None else num_sms)
                self._dispatch_config = cls.get_dispatch_config(shape.ep_size)
                self._combine_config = cls.get_combine_config(shape.ep_size)
            finally:
                cls.set_num_sms(before)
        configs = (self._dispatch_config, self._combine_config)
        sizes = (shape.hidden_size * torch.bfloat16.itemsize, shape.ep_size)
        self._bytes = [max(config.get_nvl_buffer_size_hint(*sizes) for config in configs), 0]
        self._queues = {}
        if shape.ep_size > _RANKS_PER_NODE:
            self._bytes[1] = max(config.get_rdma_buffer_size_hint(*sizes) for config in configs)
            # Across nodes a kernel needs one queue pair per multiprocessor. The library's default is 24.
            self._queues = {"num_qps_per_rank": max(24, num_sms or 0)}
        self.details = "{} bytes of NVLink and {} of RDMA buffer per rank".format(*self._bytes)
        super().reserve(Sizes(group_max_rows=1))

    def make(self, rows: int) -> Any:
        group = self.context.communicator.library_group
        return self._class(group, *self._bytes, explicitly_destroy=True, **self._queues)

    def reserve(self, sizes: Sizes) -> None:
        """Do nothing: the buffer takes any number of rows."""

    def send(
        self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, worst_rows: int | None, *, overlaps: bool
    ) -> Callable[[], RankMajorRows]:
        buffer, ids_TK, on_its_stream = self.buffer(), ids_TK.to(self._ids_dtype), overlaps and self._on_its_stream
        with unfilled():
            per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
                ids_TK, self.context.shape.num_experts
            )
            received, ids_SK, weights_SK, counts, raw, event = buffer.dispatch(
                payload,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_worst_tokens=worst_rows or 0,  # if not 0, ids behind the rows that arrive are -1
                config=self._dispatch_config,
                async_finish=overlaps,
                # Tensors allocated on the library's stream need an event that orders the current stream before it.
                previous_event=buffer.capture() if on_its_stream else None,
                allocate_on_comm_stream=on_its_stream,
            )
        handle = Handle(place=self.place, raw=raw)

        def arrived() -> RankMajorRows:
            if overlaps:
                event.current_stream_wait()
            return RankMajorRows(received, ids_SK.long(), weights_SK, counts, handle)

        return arrived

    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        with unfilled():
            received: Payload = self.buffer(handle.place).dispatch(
                payload, handle=handle.raw, config=self._dispatch_config
            )[0]
        return received

    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        with unfilled():
            rows_TD, values_TK, _ = self.buffer(handle.place).combine(
                rows_SD, handle.raw, topk_weights=values_SK, config=self._combine_config
            )
        return rows_TD, values_TK
