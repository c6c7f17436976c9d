"""What a call of v2's ElasticBuffer is made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch.testing.emulation.arguments import value_or
from moe_dispatch.testing.emulation.elastic.handle import EPHandle
from moe_dispatch.testing.emulation.elastic.sizes import DEVICE_SMS
from moe_dispatch.testing.emulation.events import ElasticEventOverlap, EventHandle
from moe_dispatch.testing.emulation.refusals import elastic_assert

HPP = "csrc/elastic/buffer.hpp"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """SMs, events and streams: checked, and without effect on results where nothing runs beside anything."""

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
class Sent:
    """What a rank hands to dispatch: rows (T, D), scale packs (T, S), ids and weights (T, K), counters (L,)."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    stats: Tensor | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What dispatch is to do with the rows."""

    num_max_tokens_per_rank: int
    num_experts: int
    expert_alignment: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    col_major_sf: bool

    @staticmethod
    def of(
        handle: EPHandle | None,
        *,
        default_num_max_tokens_per_rank: int,
        num_max_tokens_per_rank: int | None,
        num_experts: int | None,
        expert_alignment: int | None,
        do_cpu_sync: bool | None,
        do_handle_copy: bool,
        do_expand: bool,
        do_zero_padding: bool,
        col_major_sf: bool,
    ) -> Form:
        """Defaults from the handle, with which what is given must agree, or from the buffer (elastic.py:937-960)."""
        if handle is not None:
            assert do_cpu_sync is None or not do_cpu_sync, "Cannot do CPU sync with cached handle"
            do_cpu_sync = False
            num_max_tokens_per_rank = value_or(num_max_tokens_per_rank, handle.num_max_tokens_per_rank)
            num_experts = value_or(num_experts, handle.num_experts)
            expert_alignment = value_or(expert_alignment, handle.expert_alignment)
            of_handle = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
            assert (num_experts, expert_alignment, num_max_tokens_per_rank) == of_handle
        if num_experts is None:
            raise TypeError("dispatch(): incompatible function arguments: num_experts must be an int, got None")
        return Form(
            num_max_tokens_per_rank=value_or(num_max_tokens_per_rank, default_num_max_tokens_per_rank),
            num_experts=num_experts,
            expert_alignment=value_or(expert_alignment, 1),
            do_handle_copy=do_handle_copy,
            do_cpu_sync=True if do_cpu_sync is None else do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            col_major_sf=col_major_sf,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Received:
    """What dispatch gives back, in the order of arrival."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle

    def sort(self, form: Form, event: ElasticEventOverlap, *, is_cached: bool) -> None:
        """By source rank and token: now; or, of a call that is still under way there, when the caller waits for it."""
        sort = functools.partial(
            self.handle.deterministic_sort,
            form.do_cpu_sync,
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
