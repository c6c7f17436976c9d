"""What a call of v1's Buffer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch.testing.emulation.events import EventHandle
from moe_dispatch.testing.emulation.refusals import host_assert

CPP = "csrc/deep_ep.cpp"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchrony:
    """The arguments about streams and events. They move work in time, and on a CPU change nothing but these checks."""

    has_previous_event: bool
    async_finish: bool
    allocate: bool

    def check(self, line: int) -> None:
        allowed = not self.allocate or (self.has_previous_event and self.async_finish)
        host_assert(allowed, "previous_event.has_value() and async", f"{CPP}:{line}")

    def event(self) -> EventHandle | None:
        return EventHandle() if self.async_finish else None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sent:
    """What a rank hands to dispatch: rows (T, D), float8 scales (T, D/128), ids and weights (T, K)."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]

    @property
    def num_scales(self) -> int:
        return 0 if self.scales is None else self.scales.shape[1]

    def layout(self) -> list[object]:
        """What all ranks must share for their queues to lie at the same places."""
        return [str(self.x.dtype), self.x.shape[1], self.num_topk, self.num_scales]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipients:
    """Who gets what: counts int32 (P,), (nodes,) or None and (E,); bool (T, P)."""

    tokens_per_rank: Tensor
    tokens_per_rdma_rank: Tensor | None
    tokens_per_expert: Tensor
    is_token_in_rank: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Received:
    """What dispatch gives back."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    tokens_per_expert_list: list[int]
    handle: tuple[Tensor, ...]
