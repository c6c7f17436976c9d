"""``deepep`` over ``deep_ep.ElasticBuffer``, the buffer class of v2, and ``deep_ep.EPBuffer``, its successor in V2.5.

Source: DeepEP main of 2026-07 (2.1.0), deep_ep/buffers and csrc/elastic; main of 2026-09 (2.5.0), deep_ep/buffers/ep.py
and csrc/buffers/ep.hpp.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext, Constraints, MoEShape
from moe_dispatch.backends.capacity import GraphSafeSupport, worst_rows
from moe_dispatch.backends.deep_ep.buffers import Handle, environment_switch, unfilled
from moe_dispatch.backends.deep_ep.expert_major import ExpertMajorRoute
from moe_dispatch.backends.deep_ep.library import Library, lacking_nvcc, warn_once
from moe_dispatch.backends.deep_ep.rank_rows import DeepEP, Payload, RankMajorRows
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch.permutation.index import round_up, running_total
from moe_dispatch.types import Sizes
from moe_dispatch.versions import loaded_nccl

if TYPE_CHECKING:
    from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions

logger = logging.getLogger("moe_dispatch")

_MOST_RANKS, _MOST_EXPERTS = 1024, 2048
_MOST_LOCAL_EXPERTS = {"v2": 256, "v2.5": 512}
_V25_NEEDS = {"torch": (2, 10), "NCCL": (2, 32, 3)}
_V25_NVCC = (13, 1)
# Without the speed of NVLink, the library takes the fewest multiprocessors that it can, or since ff924ed all of them.
_FEWEST_SMS, _PLAUSIBLE_SMS = 4, range(5, 65)
# The library reads it whenever it makes a buffer.
_gin_is_off = environment_switch("EP_DISABLE_GIN")
# The library reads it in every call. With "1" an event keeps the tensors of its call. Otherwise the caching allocator
# does, which until the end of a capture would not reuse the memory of any layer's weights.
_events_keep_tensors = environment_switch("EP_AVOID_RECORD_STREAM")


def variant_of(library: Library) -> str | None:
    """Return "v2.5" or "v2" for a library that this driver can call, or None."""
    if hasattr(library.module, "EPBuffer"):
        return "v2.5"
    return "v2" if hasattr(library.module, "ElasticBuffer") else None


def lacking(library: Library) -> str | None:
    """Return why the library cannot be used with the installed torch, NCCL and CUDA toolkit, or None.

    V2.5 names these versions in its README, and does not check them itself.
    """
    if variant_of(library) != "v2.5" or library.emulated:
        return None
    found = {"torch": tuple(map(int, torch.__version__.split(".")[:2])), "NCCL": loaded_nccl()}
    for name, least in _V25_NEEDS.items():
        needed, seen = ".".join(map(str, least)), found[name]
        if seen is None:
            warn_once(f"deep_ep {library.version} needs NCCL {needed} or later; which NCCL is loaded is unknown.")
        elif seen < least:
            way_out = f'; run pip install "nvidia-nccl-cu13>={needed}" --no-deps' if name == "NCCL" else ""
            return f"deep_ep {library.version} needs {name} {needed} or later, got {'.'.join(map(str, seen))}{way_out}"
    # The library looks for its compiler in this order.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    nvcc = os.environ.get("EP_JIT_NVCC_COMPILER") or on_path or f"{home or '/usr/local/cuda'}/bin/nvcc"
    return lacking_nvcc(library.version, Path(nvcc), _V25_NVCC)


def constraints(device: str, variant: str, shape: MoEShape, ranks_per_node: int, options: DeepEPOptions) -> Constraints:
    """Return the constraints of versions 2.1.0 and 2.5.0.

    Its kernels are compiled for the largest number of rows of any rank, so the ranks agree on this number.
    """
    expand, within_node = options.expand, ranks_per_node >= shape.ep_size
    # The deterministic sort of the library selects by boolean masks, so the host reads from the device how many entries
    # are True. It does so for the slots of expanded rows, and for the lists of rows that are forwarded between nodes.
    sorts_by_masks = options.deterministic and (expand or not within_node)
    return Constraints(
        group_max=True,
        hidden_multiple=256,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        max_top_k=32,
        group_sizes=frozenset(range(1, _MOST_RANKS + 1)),
        max_local_experts=min(_MOST_LOCAL_EXPERTS[variant], _MOST_EXPERTS // shape.ep_size),
        pads_experts=expand,
        # Gradients are sent with the handle of the dispatch. Across nodes, rows of another dtype need not be laid out
        # as those of the dispatch.
        wire=WireSupport(dtypes=ALL_WIRES, gradients="can" if within_node else "must", delivers=True),
        carries="gather" if options.deterministic else "no",
        graph_safe=None if sorts_by_masks else GraphSafeSupport(),
        graph_safe_reason=(
            f"the library reads the device while it sorts {'expanded rows' if expand else 'rows across nodes'}; the "
            "option deterministic=False turns this sort off"
        ),
    )


def expanded_rows(shape: MoEShape) -> int:
    """Return the number of expert-major rows that the library allocates for the worst case.

    It is up to ``pad_multiple`` rows more than the worst case needs.
    """
    return round_up(worst_rows(shape) + (shape.pad_multiple - 1) * shape.num_local_experts, shape.pad_multiple)


def _refuse_recomputation() -> None:
    """Raise if activation checkpointing without ``use_reentrant`` runs this call, and will dispatch anew.

    Its backward takes the tensors of the recomputation and the handles of the first run. Without ``deterministic``,
    rows of the two arrive in different orders, so gradients would go to wrong rows.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        raise ConfigError(
            "Backend 'deepep': with the option deterministic=False rows arrive in another order when they are computed "
            "again, so checkpointing must have use_reentrant=True or context_fn=moe_dispatch.recompute.keep_routes. Or "
            "leave deterministic out."
        )


@final
class ElasticDeepEP(DeepEP):
    """``deepep`` over v2 and V2.5. Its buffers are made for the largest number of rows of any rank.

    In V2.5, a dispatch with ``async_op=True`` defers its epilogue. The host then does not wait for the counts before
    the caller wants the rows. Every call writes into the buffer from which an epilogue reads, so a deferred epilogue
    runs before the next call at the latest.

    Cost of ``send``: one host sync, for the counts; none in graph-safe mode.
    """

    details = "buffers for the largest number of rows of any rank"

    def __init__(self, library: Library, context: BackendContext, options: DeepEPOptions) -> None:
        super().__init__(context)
        self._expansion: dict[str, Any] = {}
        if options.expand:
            alignment = context.shape.pad_multiple
            self._expansion = {"expert_alignment": alignment, "do_expand": True, "do_zero_padding": True}
        self._deterministic = options.deterministic
        self._num_sms = options.num_sms or 0  # 0 lets the library choose
        self._on_its_stream = options.allocate_on_comm_stream
        self._spans_nodes = options.ranks_on_a_node(context.shape) < context.shape.ep_size
        self._uses_gin = self._spans_nodes or options.gin_within_node
        self._is_v25 = variant_of(library) == "v2.5"
        self.brings_copies = options.prefetch_weights
        self._module = library.module
        # Buffers for the weights of copies, with the memory in which they arrive. As with rows, only the last is used.
        self._pools: list[tuple[Any, Tensor]] = []
        self._class = library.module.EPBuffer if self._is_v25 else library.module.ElasticBuffer
        self._ids_dtype: torch.dtype = getattr(library.module, "topk_idx_t", torch.int64)
        self._deferred: list[Callable[[], None]] = []  # at most one
        if not library.emulated:  # it takes over the group's NCCL communicator, which the first collective creates
            context.communicator.touch(torch.device("cuda"))

    def make(self, rows: int) -> Any:
        shape = self.context.shape
        if self._uses_gin and self._buffers:
            logger.warning(
                "backend 'deepep': the buffer is outgrown, and keeps its network queues until close(). Set "
                "max_tokens_per_rank, so that the first buffer is large enough."
            )
        sizes = {"num_max_tokens_per_rank": rows, "hidden": shape.hidden_size, "num_topk": shape.top_k}
        return self._make(**sizes, deterministic=self._deterministic)

    def _make(self, **arguments: Any) -> Any:
        try:
            with nullcontext() if self._uses_gin else _gin_is_off.at("1"):
                return self._class(self.context.communicator.library_group, explicitly_destroy=True, **arguments)
        except Exception as error:
            if "GIN" not in str(error) and "GDAKI" not in str(error):
                raise
            if not self._uses_gin:
                raise ConfigError(
                    "Backend 'deepep': within a node deep_ep must do without network cards that GPUs drive (NCCL's "
                    f"GIN), got: {error}. Before pull request 630 (May 2026), v2 asks for them even with "
                    "EP_DISABLE_GIN=1. Install a later version."
                ) from error
            raise ConfigError(
                "Backend 'deepep': across nodes deep_ep needs network cards that GPUs drive themselves (NVIDIA "
                f"ConnectX with GPUDirect RDMA; NCCL calls it GIN, of type GDAKI), got: {error}. If NVLink connects "
                "all ranks, set the option ranks_per_node to their number; deep_ep is then run with EP_DISABLE_GIN=1."
            ) from error

    def check(self, sizes: Sizes) -> None:
        if not (self._deterministic or sizes.keeps_route):
            _refuse_recomputation()

    def send(
        self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, worst_rows: int | None, *, overlaps: bool
    ) -> Callable[[], RankMajorRows | Arrived]:
        """Send rows as the base class says.

        With ``worst_rows`` the library delivers P times the number of rows that its buffer has room for. That product
        equals ``worst_rows``.
        """
        buffer, place, deferred, defers = self.buffer(), self.place, self._deferred, overlaps and self._is_v25
        on_its_stream = overlaps and self._on_its_stream
        with self._calling():
            try:
                result = buffer.dispatch(
                    payload,
                    # A handle of V2.5 keeps these ids, and refuses them after a change. The caller may change its own.
                    topk_idx=ids_TK.to(self._ids_dtype, copy=self._is_v25),
                    topk_weights=weights_TK,
                    num_experts=self.context.shape.num_experts,
                    num_max_tokens_per_rank=self.rows,
                    num_sms=self._num_sms,
                    previous_event=buffer.capture() if on_its_stream else None,
                    async_with_compute_stream=overlaps,
                    allocate_on_comm_stream=on_its_stream,
                    do_cpu_sync=worst_rows is None,
                    **self._expansion,
                    **({"defer_epilogue": True} if defers else {}),
                )
            except ZeroDivisionError as error:
                raise ConfigError(
                    "Backend 'deepep': deep_ep chooses the number of multiprocessors by the speeds that ibstat and "
                    "nvidia-smi nvlink -s print, and one of these commands printed none. Repair it, or set the option "
                    "num_sms, for example to 24."
                ) from error
        *values, event = [result] if defers else result

        def epilogue() -> None:  # in V2.5 it waits for the counts, and copies the rows out of the buffer
            with unfilled():
                values.extend(event.current_stream_wait() or ())
            deferred.clear()

        def arrived() -> RankMajorRows | Arrived:
            if overlaps and not (defers and values):
                self.buffer(place)  # refuses if the buffer is closed
                epilogue()
            received, ids_SK, weights, raw = values
            handle = Handle(place=place, raw=raw)
            if raw.num_sms not in _PLAUSIBLE_SMS and not self._num_sms and self.context.shape.ep_size > 1:
                warn_once(
                    f"backend 'deepep': deep_ep uses {raw.num_sms} multiprocessors. It takes 4, or all, if nvidia-smi "
                    "nvlink -s or ibstat prints no speed. Set the option num_sms, for example to 24."
                )
            if self._expansion:
                return self._expanded(received, weights, handle)
            ids_SK = ids_SK.long()
            if worst_rows is not None:  # ids behind the rows that arrived may be anything
                at_S = torch.arange(len(ids_SK), device=ids_SK.device)
                is_here = at_S < raw.psum_num_recv_tokens_per_scaleup_rank[-1]
                ids_SK = torch.where(is_here.unsqueeze(1), ids_SK, -1)
            return RankMajorRows(received, ids_SK, weights, raw.num_recv_tokens_per_expert_list, handle)

        if defers:
            deferred.append(epilogue)
        return arrived

    def _expanded(self, payload: Payload, weights_R: Tensor, handle: Handle) -> Arrived:
        """Return rows that the library sent to every expert that they name. It calls such rows expanded.

        Zero rows follow the rows of each expert up to the alignment. In graph-safe mode ``expanded_rows`` rows are
        delivered, and rows and weights behind the last expert's rows may hold anything.
        """
        shape, raw = self.context.shape, handle.raw
        real_L = raw.num_unaligned_recv_tokens_per_expert.long()
        padded_L = real_L + -real_L % shape.pad_multiple
        if not shape.graph_safe:
            self.require_counts(raw.num_recv_tokens_per_expert_list, lambda: padded_L)
        route = ExpertMajorRoute(
            context=self.context,
            spread=partial(self.send_again, handle=handle),
            collect=partial(self.combine, handle=handle),
            is_real=partial(_real_rows, padded_L, real_L, len(weights_R)),
        )
        return Arrived(
            rows=route.arrived(payload),
            weights=weights_R,
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=None if shape.graph_safe else tuple(raw.num_recv_tokens_per_expert_list),
            route=route,
            demand=torch.stack([real_L.sum(), real_L.new_zeros(())]) if shape.graph_safe else None,
        )

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Enter a call of the library. Before it, run the epilogue that an earlier call deferred."""
        with unfilled():
            for epilogue in [*self._deferred]:
                epilogue()
            yield

    def send_again(self, payload: Payload, handle: Handle) -> Any:
        buffer, raw = self.buffer(handle.place), handle.raw
        with self._calling():
            # num_sms must be given: the library would compute its default before it reads the handle, and fail.
            return buffer.dispatch(
                payload, handle=raw, num_sms=raw.num_sms, do_expand=raw.do_expand, do_zero_padding=raw.do_expand
            )[0]

    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        buffer = self.buffer(handle.place)
        with self._calling():
            rows_TD, values_TK, _ = buffer.combine(rows_SD, handle.raw, topk_weights=values_SK)
        return rows_TD, values_TK

    def bring_copies(self, own_MW: Tensor, copies_PS: Tensor) -> Callable[[], Tensor]:
        self.buffer()  # refuses if the backend is closed
        (num_own, width), (size, spare) = own_MW.shape, copies_PS.shape
        expert_bytes, multiple = width * own_MW.itemsize, self._module.get_num_tma_alignment()
        if expert_bytes % multiple:
            raise InputError(
                "Backend 'deepep': with prefetch_weights the parameters of one expert must have a multiple of "
                f"{multiple} bytes, got {expert_bytes}. Leave prefetch_weights out."
            )
        nbytes, used = spare * expert_bytes, copies_PS < size * num_own
        with unfilled():
            if not self._pools or len(self._pools[-1][1]) < nbytes:
                plan = self._module.BufferAllocator()
                memory = plan.allocate((nbytes,), torch.uint8)
                smallest = self._module.get_num_allocation_alignment()
                buffer = self._make(num_bytes=smallest, lb_allocation_plan_or_num_bytes=plan)
                self._pools.append((buffer, memory.zero_()))  # slots that stay empty must not hold NaN
            buffer, memory = self._pools[-1]
            arriving_SW = memory[:nbytes].view(own_MW.dtype).view(spare, width)
            num_sms = self._num_sms or max(buffer.lb_get_theoretical_num_sms(), _FEWEST_SMS)
            mapping = torch.where(used, copies_PS, -1).int()
            with _events_keep_tensors.at("1"):
                event = buffer.lb_prefetch_weights(arriving_SW, own_MW, mapping, num_sms=num_sms)
        self.context.communicator.calls["weights.prefetch"] += 1

        def arrived() -> Tensor:
            event.wait()
            return arriving_SW

        return arrived

    def memory_held(self) -> int:
        return super().memory_held() + sum(self.bytes_of(buffer) for buffer, _ in self._pools)

    def close(self) -> None:
        self._deferred.clear()
        self._buffers += [buffer for buffer, _ in self._pools]
        self._pools.clear()  # their memory belongs to the buffers, which are destroyed now
        super().close()


def _real_rows(padded_L: Tensor, real_L: Tensor, num_rows: int) -> Tensor:
    """Return which of the expanded rows are no padding, bool (R,)."""
    ends_L = running_total(padded_L)[1:]
    at_R = torch.arange(num_rows, device=ends_L.device)
    expert_R = torch.bucketize(at_R, ends_L, right=True).clamp(max=len(ends_L) - 1)
    # The real rows of an expert come first. With 2 real rows of 4, its padding starts 2 rows before its end.
    return at_R < (ends_L - (padded_L - real_L)).index_select(0, expert_R)
