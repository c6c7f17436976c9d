"""The arguments and results of a call of v1's Buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_dispatch_testing.emulation.config import Config
from moe_dispatch_testing.emulation.events import EventHandle
from moe_dispatch_testing.emulation.refusals import host_assert

CPP = "csrc/deep_ep.cpp"
DISPATCH, COMBINE = "Buffer.dispatch", "Buffer.combine"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The arguments of a call that are not tensors.

    ``has_previous_event``, ``async_finish`` and ``allocate`` are about streams and events. On a CPU they are checked,
    and have no other effect.
    """

    config: Config
    has_previous_event: bool
    async_finish: bool
    allocate: bool
    expert_alignment: int = 1
    num_worst_tokens: int = 0

    def check_events(self, line: int) -> None:
        allowed = not self.allocate or (self.has_previous_event and self.async_finish)
        host_assert(allowed, "previous_event.has_value() and async", f"{CPP}:{line}")

    def event(self) -> EventHandle | None:
        return EventHandle() if self.async_finish else None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DispatchInput:
    """The tensors that a rank passes to dispatch: rows (T, D), float8 scales (T, D/128), ids and weights (T, K)."""

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

    def sizes(self) -> list[object]:
        """Return the sizes that must be the same on all ranks, because queue addresses depend on them."""
        return [str(self.x.dtype), self.x.shape[1], self.num_topk, self.num_scales]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CombineInput:
    """The tensors that a rank passes to combine: rows (R, D), weights (R, K), and up to two biases (T, D)."""

    x: Tensor
    topk_weights: Tensor | None
    biases: list[Tensor]

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_weights is None else self.topk_weights.shape[1]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DispatchLayout:
    """Flags of the ranks that each token goes to, bool (T, P), and int32 token counts by rank, node and expert."""

    tokens_per_rank: Tensor
    tokens_per_rdma_rank: Tensor | None
    tokens_per_expert: Tensor
    is_token_in_rank: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Received:
    """The received rows, by source rank and then token. Tensors that were not sent are None.

    A cached dispatch has neither a list of counts nor a handle.
    """

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    tokens_per_expert_list: list[int] | None = None
    handle: tuple[Tensor, ...] | None = None
