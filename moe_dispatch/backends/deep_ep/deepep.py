"""``deepep``: DeepEP's buffers send each row once to each rank that owns one of its experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, final

import torch
from pydantic import Field

from moe_dispatch.backends.base import BackendContext, Constraints, MoEShape
from moe_dispatch.backends.capacity import capacity_of
from moe_dispatch.backends.deep_ep import deepep_v1, deepep_v2
from moe_dispatch.backends.deep_ep.deepep_v1 import NormalDeepEP
from moe_dispatch.backends.deep_ep.deepep_v2 import ElasticDeepEP
from moe_dispatch.backends.deep_ep.library import Library, LibraryOptions
from moe_dispatch.backends.deep_ep.rank_rows import DeepEP
from moe_dispatch.backends.footprint import deep_ep
from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.plug_ins import Rejected
from moe_dispatch.types import Capacity, Sizes

Release = Literal["v1.2.1", "v2-2.1.0", "v2.5.0", "uccl-da914a2", "rocm-92b4ae1"]


@final
class DeepEPOptions(LibraryOptions):
    """Options of ``deepep``.

    Attributes:
        num_sms: Number of streaming multiprocessors that the kernels may use, even. None is the library's default.
        deterministic: For v2 and V2.5: whether the rows of a source rank arrive in their order, for which the library
            sorts them. v1 always keeps this order. With False, rows stay in the order of their arrival, which differs
            from run to run: activation checkpointing then needs ``keep_routes`` or ``use_reentrant=True``. Graph-safe
            mode needs False with ``expand`` and across nodes, because there the sort reads the device.
        expand: For v2 and V2.5: whether the library itself delivers expert-major rows, padded on the device, and adds
            the expert rows of a token up. That saves the copies to experts and back. The library then rounds the
            weighted rows to bfloat16 before it adds them.
        allocate_on_comm_stream: Whether tensors received with ``async_op=True`` belong to the library's communication
            stream.
        ranks_per_node: Number of consecutive ranks of the group that share a node. None detects it by host name. v1
            needs whole nodes. v2 and V2.5 offer float8 only within a node.
        gin_within_node: For v2 and V2.5: whether the buffers of a group within one node use NCCL's GIN, which needs
            network cards that GPUs drive. Across nodes they always do.
        prefetch_weights: For V2.5 in graph-safe mode, with all ranks in one NVLink domain: whether ``SlotWeights``
            fetches the weights of copies of ``balance="exact"`` with ``lb_prefetch_weights``, which sends only those
            that are needed. Gradients travel all-to-all.
        emulate: Whether to run on the emulation of ``deep_ep``, on CPU tensors. True emulates the newest release; the
            name of a release emulates that release.
    """

    name = "deepep"

    num_sms: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    deterministic: bool = True
    expand: bool = False
    allocate_on_comm_stream: bool = False
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    gin_within_node: bool = False
    prefetch_weights: bool = False
    emulate: bool | Release = False

    @property
    def release(self) -> str | None:
        return "v2.5.0" if self.emulate is True else self.emulate or None

    def features(self, library: Library) -> tuple[str, ...]:
        variant = deepep_v2.variant_of(library)
        return ("v1", "normal mode") if variant is None else (variant, "compact", "expand")

    def lacking(self, library: Library) -> str | None:
        if deepep_v2.variant_of(library) is not None:
            return deepep_v2.lacking(library)
        if not hasattr(library.module, "Buffer"):
            return f"{library.named} has neither EPBuffer, ElasticBuffer nor Buffer"
        return deepep_v1.lacking(library)

    def constraints(self, shape: MoEShape) -> Constraints:
        library, ranks_per_node = self.library(), self.ranks_on_a_node(shape)
        device, variant = "cuda", "v2.5"  # only for tables: before any other use, ``probe`` refuses
        if isinstance(library, Library):
            device, variant = library.device, deepep_v2.variant_of(library) or "v1"
        if self.prefetch_weights and not (variant == "v2.5" and ranks_per_node >= shape.ep_size and shape.graph_safe):
            raise ConfigError(
                "Backend 'deepep': prefetch_weights needs V2.5, all ranks in one NVLink domain, and graph_safe=True, "
                f"got {variant}, {ranks_per_node} of {shape.ep_size} ranks on a node, and graph_safe="
                f"{shape.graph_safe}. Leave prefetch_weights out."
            )
        if isinstance(library, Rejected) or variant != "v1":
            return deepep_v2.constraints(device, variant, shape, ranks_per_node, self)
        if self.expand:
            raise ConfigError("Backend 'deepep': expand needs v2 or V2.5, got v1. Leave expand out, or install V2.5.")
        return deepep_v1.constraints(library, shape, ranks_per_node)

    def capacity(self, shape: MoEShape) -> Capacity:
        capacity = capacity_of(shape)
        return replace(capacity, buffer_rows=deepep_v2.expanded_rows(shape)) if self.expand else capacity

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return super().footprint(shape, sizes, rows, dtype) if self.expand else deep_ep(shape, sizes, rows)

    def open_with(self, library: Library, context: BackendContext) -> DeepEP:
        cls = NormalDeepEP if deepep_v2.variant_of(library) is None else ElasticDeepEP
        backend: DeepEP = cls(library, context, self)
        source = "detected" if self.ranks_per_node is None else "configured"
        backend.details = f"{self.ranks_on_a_node(context.shape)} ranks per node ({source}), {backend.details}"
        return backend

    def ranks_on_a_node(self, shape: MoEShape) -> int:
        """Return the number of consecutive ranks that share a node: the option, else as detected, else all ranks."""
        return self.ranks_per_node or shape.ranks_per_node or shape.ep_size
