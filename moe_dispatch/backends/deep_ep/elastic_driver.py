"""The driver of ``deep_ep.ElasticBuffer``, the buffer class of v2, and of ``deep_ep.EPBuffer``, its successor in V2.5.

Source: DeepEP main of 2026-07 (2.1.0), deep_ep/buffers and csrc/elastic; main of 2026-09 (2.5.0), deep_ep/buffers/ep.py
and csrc/buffers/ep.hpp.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext, Constraints, MoEShape, WireDtype
from moe_dispatch.backends.capacity import worst_rows
from moe_dispatch.backends.deep_ep.buffers import BufferPool, Handle, ProcessSwitch
from moe_dispatch.backends.deep_ep.driver import Payload, RankMajorDriver, RankMajorRows
from moe_dispatch.backends.deep_ep.expert_major import ExpertMajorRoute
from moe_dispatch.backends.deep_ep.library import Library
from moe_dispatch.permutation import round_up, running_total
from moe_dispatch.probing import Rejected, loaded_nccl

if TYPE_CHECKING:
    from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions

logger = logging.getLogger("moe_dispatch")

_MOST_RANKS, _MOST_EXPERTS = 1024, 2048
_MOST_LOCAL_EXPERTS = {"v2": 256, "v2.5": 512}
_V25_NEEDS = {"torch": (2, 10), "NCCL": (2, 32, 3)}
_torch_deterministic: Any = torch.utils.deterministic  # type checkers do not see that this module has properties
# In deterministic mode torch fills fresh memory. The library refuses to run while it does.
_filling = ProcessSwitch(
    "torch.utils.deterministic.fill_uninitialized_memory",
    lambda: _torch_deterministic.fill_uninitialized_memory,
    lambda value: setattr(_torch_deterministic, "fill_uninitialized_memory", value),
)


def variant_of(library: Library) -> str | None:
    """Return "v2.5" or "v2" for a library that this driver can call, or None."""
    if hasattr(library.module, "EPBuffer"):
        return "v2.5"
    return "v2" if hasattr(library.module, "ElasticBuffer") else None


def lacking(library: Library) -> Rejected | None:
    """Return why the library cannot be used with the installed torch and NCCL, or None.

    V2.5 names these versions in its README, and does not check them itself.
    """
    if variant_of(library) != "v2.5" or library.emulated:
        return None
    found = {"torch": tuple(map(int, torch.__version__.split(".")[:2])), "NCCL": loaded_nccl()}
    for name, least in _V25_NEEDS.items():
        needed, seen = ".".join(map(str, least)), found[name]
        if seen is None:
            logger.warning(
                "deep_ep %s needs NCCL %s or later; which NCCL is loaded is unknown.", library.version, needed
            )
        elif seen < least:
            way_out = f'; run pip install "nvidia-nccl-cu13>={needed}" --no-deps' if name == "NCCL" else ""
            return Rejected(
                f"deep_ep {library.version} needs {name} {needed} or later, got {'.'.join(map(str, seen))}{way_out}"
            )
    return None


def constraints(device: str, variant: str, shape: MoEShape, ranks_per_node: int, options: DeepEPOptions) -> Constraints:
    """Return the constraints of versions 2.1.0 and 2.5.0.

    Its kernels are compiled for the largest number of rows of any rank, so the ranks agree on this number.
    """
    expand, within_node = options.expand, ranks_per_node >= shape.ep_size
    # No float8 across nodes: gradients are sent in bfloat16 with the handle of the dispatch, and across nodes they need
    # not be laid out as the float8 rows were.
    float8: set[WireDtype] = {"float8_e4m3fn"} if within_node and not expand else set()
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
        wire_dtypes=frozenset({"bfloat16", *float8}),
        graph_safe=not sorts_by_masks,
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


@final
class ElasticDriver(RankMajorDriver):
    """The driver of v2 and V2.5. Its buffers are made for the largest number of rows of any rank.

    In V2.5, an asynchronous dispatch defers its epilogue. The host then does not wait for the counts before the caller
    wants the rows. Every call writes into the buffer from which an epilogue reads, so deferred epilogues run before the
    next call at the latest.

    Cost of ``send``: one host sync, for the counts; none in graph-safe mode.
    """

    buffers = "buffers for the largest number of rows of any rank"

    def __init__(self, library: Library, context: BackendContext, options: DeepEPOptions) -> None:
        shape, communicator = context.shape, context.communicator
        self._shape = shape
        self._expansion: dict[str, Any] = {}
        if options.expand:
            self._expansion = {"expert_alignment": shape.pad_multiple, "do_expand": True, "do_zero_padding": True}
        self._num_sms = options.num_sms or 0  # 0 lets the library choose
        self._on_its_stream = options.allocate_on_comm_stream
        self._is_v25 = variant_of(library) == "v2.5"
        self._deferred: list[Callable[[], None]] = []
        cls = library.module.EPBuffer if self._is_v25 else library.module.ElasticBuffer

        def make(rows: int) -> Any:
            with _filling.at(False):
                return cls(
                    communicator.group,
                    num_max_tokens_per_rank=rows,
                    hidden=shape.hidden_size,
                    num_topk=shape.top_k,
                    deterministic=options.deterministic,
                    explicitly_destroy=True,
                )

        if not library.emulated:  # it takes over the group's NCCL communicator, which the first collective creates
            communicator.touch(torch.device("cuda"))
        self._ids_dtype: torch.dtype = getattr(library.module, "topk_idx_t", torch.int64)
        self._pool = BufferPool("deepep", make, most_rows=context.most_rows)

    def reserve(self, rows: int) -> None:
        self._pool.reserve(max(rows, 1))

    def send(
        self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor, *, asynchronously: bool, worst_rows: int | None
    ) -> Callable[[], RankMajorRows | Arrived]:
        """Send rows as the base class says.

        With ``worst_rows`` the library delivers P times the number of rows that its buffer has room for. That product
        equals ``worst_rows``.
        """
        pooled = self._pool.current
        buffer, on_its_stream = pooled.buffer, asynchronously and self._on_its_stream
        defers = asynchronously and self._is_v25
        with self._calling():
            result = buffer.dispatch(
                payload,
                # A handle of V2.5 keeps these ids, and refuses them after a change. The caller may change its own.
                topk_idx=ids_TK.to(self._ids_dtype, copy=self._is_v25),
                topk_weights=weights_TK,
                num_experts=self._shape.num_experts,
                num_max_tokens_per_rank=self._pool.rows,
                num_sms=self._num_sms,
                previous_event=buffer.capture() if on_its_stream else None,
                async_with_compute_stream=asynchronously,
                allocate_on_comm_stream=on_its_stream,
                do_cpu_sync=worst_rows is None,
                **self._expansion,
                **({"defer_epilogue": True} if defers else {}),
            )
        *values, event = [result] if defers else result

        def finish() -> None:
            if defers and not values:  # the epilogue waits for the counts, and copies the rows out of the buffer
                _ = pooled.buffer  # refuses if the buffer is closed
                values.extend(event.current_stream_wait())
            elif asynchronously and not defers:
                event.current_stream_wait()

        def arrived() -> RankMajorRows | Arrived:
            finish()
            received, ids_SK, weights, raw = values
            handle = Handle(pooled=pooled, raw=raw)
            if self._expansion:
                return self._expanded(received, weights, handle)
            return RankMajorRows(
                payload=received,
                ids_SK=ids_SK,
                weights_SK=weights,
                counts=raw.num_recv_tokens_per_expert_list,
                handle=handle,
                num_received=None if worst_rows is None else raw.psum_num_recv_tokens_per_scaleup_rank[-1],
            )

        if defers:
            self._deferred.append(finish)
        return arrived

    def _expanded(self, rows_RD: Tensor, weights_R: Tensor, handle: Handle) -> Arrived:
        """Return rows that the library sent to every expert that they name. It calls such rows expanded.

        Zero rows follow the rows of each expert up to the alignment. In graph-safe mode ``expanded_rows`` rows are
        delivered, and rows and weights behind the last expert's rows may hold anything.
        """
        shape, raw = self._shape, handle.raw
        real_L = raw.num_unaligned_recv_tokens_per_expert.long()
        padded_L = real_L + -real_L % shape.pad_multiple
        return Arrived(
            rows=rows_RD,
            weights=weights_R,
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=None if shape.graph_safe else tuple(raw.num_recv_tokens_per_expert_list),
            route=ExpandedRoute(driver=self, handle=handle, padded_L=padded_L, real_L=real_L, num_rows_R=len(rows_RD)),
            demand=torch.stack([real_L.sum(), real_L.new_zeros(())]) if shape.graph_safe else None,
        )

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Enter a call of the library. Before it, run the epilogues that earlier calls deferred."""
        with _filling.at(False):
            while self._deferred:
                self._deferred.pop()()
            yield

    def send_again(self, payload: Payload, handle: Handle) -> Payload:
        with self._calling():
            # num_sms must be given: the library would compute its default before it reads the handle, and fail.
            received: Payload = handle.buffer.dispatch(
                payload,
                handle=handle.raw,
                num_sms=handle.raw.num_sms,
                do_expand=handle.raw.do_expand,
                do_zero_padding=handle.raw.do_expand,
            )[0]
        return received

    def combine(self, rows_SD: Tensor, values_SK: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        with self._calling():
            rows_TD, values_TK, _ = handle.buffer.combine(rows_SD, handle.raw, topk_weights=values_SK)
        return rows_TD, values_TK

    def close(self) -> None:
        self._deferred.clear()
        self._pool.close()


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpandedRoute(ExpertMajorRoute):
    """The route of a dispatch in which the library itself delivered expert-major rows.

    Attributes:
        driver: Driver of the open library.
        handle: Handle of the dispatch.
        padded_L: int64 (L,), number of rows of each local expert with its padding.
        real_L: int64 (L,), number of rows of each local expert without its padding.
        num_rows_R: R, the number of rows.
    """

    driver: ElasticDriver
    handle: Handle
    padded_L: Tensor
    real_L: Tensor
    num_rows_R: int

    @property
    def is_real(self) -> Tensor:
        ends_L = running_total(self.padded_L)[1:]
        at_R = torch.arange(self.num_rows_R, device=ends_L.device)
        expert_R = torch.bucketize(at_R, ends_L, right=True).clamp(max=len(ends_L) - 1)
        # The real rows of an expert come first. With 2 real rows of 4, its padding starts 2 rows before its end.
        return at_R < (ends_L - (self.padded_L - self.real_L)).index_select(0, expert_R)

    def spread(self, rows_TD: Tensor) -> Tensor:
        rows_RD = self.driver.send_again(rows_TD, self.handle)
        assert isinstance(rows_RD, Tensor)
        return rows_RD

    def collect(self, rows_RD: Tensor, values_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.driver.combine(rows_RD, values_R, self.handle)
