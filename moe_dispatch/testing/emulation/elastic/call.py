"""The arguments and results of a call of v2's ElasticBuffer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.sizes import DEVICE_SMS
from moe_dispatch.testing.emulation.events import ElasticEventOverlap, EventHandle
from moe_dispatch.testing.emulation.refusals import elastic_assert

HPP = "csrc/elastic/buffer.hpp"
DISPATCH, COMBINE = "ElasticBuffer.dispatch", "ElasticBuffer.combine"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The arguments about SMs, events and streams. On a CPU they are checked, and have no other effect."""

    num_sms: int
    previous_event: EventHandle | None
    previous_event_before_epilogue: EventHandle | None
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool

    def check(self, verb: str) -> None:
        for event in (self.previous_event, self.previous_event_before_epilogue):
            if event is not None and not isinstance(event, EventHandle):
                raise TypeError(
                    f"{verb}(): incompatible function arguments: an event must be an EventHandle, got {event}"
                )
        elastic_assert(self.num_sms > 0, "num_sms > 0", f"{HPP}:{728 if verb == 'dispatch' else 1198}")
        allowed = self.previous_event is None or self.allocate_on_comm_stream
        elastic_assert(allowed, "allocate_on_comm_stream", f"{HPP}:540")
        known = "num_sms <= jit::device_runtime->get_num_sms()"
        elastic_assert(self.num_sms <= DEVICE_SMS, known, f"{HPP}:979")

    def event(self) -> EventHandle | None:
        return EventHandle() if self.async_with_compute_stream else None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DispatchInput:
    """The tensors that a rank passes to dispatch: rows (T, D), scales (T, S), ids and weights (T, K), counters (L,)."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    stats: Tensor | None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CombineInput:
    """The tensors that a rank passes to combine: rows (R, D), weights (R, K) or (R,), and up to two biases (T, D)."""

    x: Tensor
    topk_weights: Tensor | None
    biases: list[Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The arguments of dispatch about sizes and about the layout of the result."""

    num_max_tokens_per_rank: int
    num_experts: int
    expert_alignment: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    col_major_sf: bool


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Received:
    """The result of dispatch, in the order of arrival."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle

    def sort(self, options: Options, event: ElasticEventOverlap, *, is_cached: bool) -> None:
        """Sort the rows by source rank and token. In an asynchronous call, sort them when the caller waits for it."""
        sort = functools.partial(
            self.handle.deterministic_sort,
            options.do_cpu_sync,
            is_cached,
            self.x,
            self.sf,
            self.topk_idx,
            self.topk_weights,
            None,
        )
        if event.event is None:
            sort()
        else:
            event.register_hook_after_wait(sort)
