"""The arguments and results of a call of v2's ElasticBuffer or V2.5's EPBuffer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch_testing.emulation.elastic.handle import EPHandle
from moe_dispatch_testing.emulation.elastic.release import ElasticRelease
from moe_dispatch_testing.emulation.elastic.sizes import DEVICE_SMS
from moe_dispatch_testing.emulation.events import EventHandle

HPP = "csrc/elastic/buffer.hpp"  # of v2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The arguments about SMs, events and streams. On a CPU they are checked, and have no other effect."""

    num_sms: int
    previous_event: EventHandle | None
    previous_event_before_epilogue: EventHandle | None
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool
    defer_epilogue: bool = False

    def check(self, release: ElasticRelease, verb: str) -> None:
        for event in (self.previous_event, self.previous_event_before_epilogue):
            if event is not None and not isinstance(event, EventHandle):
                raise TypeError(
                    f"{verb}(): incompatible function arguments: an event must be an EventHandle, got {event}"
                )
        release.check(self.num_sms > 0, "num_sms > 0", f"{HPP}:{728 if verb == 'dispatch' else 1198}")
        allowed = self.previous_event is None or self.allocate_on_comm_stream
        release.check(allowed, "allocate_on_comm_stream", f"{HPP}:540")
        # In V2.5, dispatch makes this check after it has launched its kernel, and combine makes it first.
        is_async = (
            "async_with_compute_stream" if verb == "dispatch" else "not defer_epilogue or async_with_compute_stream"
        )
        source = f"csrc/buffers/ep.hpp:{773 if verb == 'dispatch' else 811}"
        release.check(not self.defer_epilogue or self.async_with_compute_stream, is_async, source)
        known = "num_sms <= jit::device_runtime->get_num_sms()"
        release.check(self.num_sms <= DEVICE_SMS, known, f"{HPP}:979")

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

    def sorting(self, options: Options, *, is_cached: bool) -> Callable[[], None]:
        """Return the function that sorts the rows by source rank and token, in place."""
        return functools.partial(
            self.handle.deterministic_sort,
            options.do_cpu_sync,
            is_cached,
            self.x,
            self.sf,
            self.topk_idx,
            self.topk_weights,
            None,
        )
