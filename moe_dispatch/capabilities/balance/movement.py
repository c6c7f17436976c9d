"""Which expert weights travel under a placement, seen from one rank. Index arithmetic without an exchange.

The home of an expert is the rank that owns its parameters: rank e // M, whatever the placement says. Weights of several
tensors travel side by side, as rows of W numbers for each expert. Gradients of copies take the way back.

E experts, P ranks, M = E / P experts whose home is this rank, B rows of the buffer with the weights of slots, S spare
slots of a rank, W numbers of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.balance.exact import ExactPlacement
from moe_dispatch.capabilities.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.permutation import accumulation_dtype


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Movement:
    """The moves of one rank, planned on the host.

    Experts are numbers in 0..M-1 among the experts whose home is this rank.

    Attributes:
        num_own: M.
        num_slots: B.
        apart: Whether the buffer has only weights of other ranks, in the order of their arrival. Experts then run on
            this rank's own parameters as they are.
        sent: The experts to send, by destination rank and then by slot of the receiver.
        rows_in: Number of weights to receive from each rank.
        rows_out: Number of weights to send to each rank.
        moves: Whether any rank sends anything.
        received: The slots of the weights that arrive, in the order of their arrival. This tensor and the following
            are int64 on the device of the weights, and empty if ``apart``.
        own: Slots of this rank that hold own experts, and these experts.
        empty: Slots that hold no expert.
    """

    num_own: int
    num_slots: int
    apart: bool
    sent: tuple[int, ...]
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    moves: bool
    received: Tensor
    own: tuple[Tensor, Tensor]
    empty: Tensor

    def departing(self, own: Sequence[Tensor]) -> Tensor:
        """Return the weights to send, (N, W). ``own`` are the parameters of this rank."""
        if not self.sent:
            return side_by_side([weight[:0] for weight in own])
        return torch.cat([weight[expert].flatten() for expert in self.sent for weight in own]).view(len(self.sent), -1)

    def fill(self, buffer_BW: Tensor, own: Sequence[Tensor], received_NW: Tensor) -> None:
        """Write the weights of all slots. ``own`` are the parameters of this rank; not called if ``apart``."""
        slots, experts = self.own
        buffer_BW[slots] = side_by_side([weight.index_select(0, experts) for weight in own])
        buffer_BW[self.received] = received_NW
        buffer_BW[self.empty] = 0

    def outgoing(self, grads_BW: Tensor) -> Tensor:
        """Return the gradients that go home."""
        return grads_BW if self.apart else grads_BW.index_select(0, self.received)

    def own_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of own experts, (M, ...), out of those of the slots; not called if ``apart``."""
        slots, experts = self.own
        return [
            grad.new_zeros(self.num_own, *grad.shape[1:]).index_copy_(0, experts, grad.index_select(0, slots))
            for grad in grads
        ]

    def collect(self, own: Sequence[Tensor], home_NW: Tensor) -> Sequence[Tensor]:
        """Add the gradients of the copies of each expert to that of the expert, rank by rank, and round once.

        Args:
            own: Gradients of this rank's own experts, (M, ...); zero for experts that it does not hold.
            home_NW: Gradients of copies on other ranks, in the order of ``sent``.

        Returns:
            The gradients of this rank's experts, (M, ...).
        """
        if not self.sent:
            return own
        sums = [grad.clone() for grad in own]
        for sum_, copies in zip(sums, apart(home_NW, own), strict=True):
            for expert in set(self.sent):
                wide = sum_[expert].to(accumulation_dtype(sum_.dtype))  # a view, if it is as wide already
                for copy, copied in zip(copies, self.sent, strict=True):
                    if copied == expert:
                        wide += copy
                sum_[expert] = wide
        return sums


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StaticMovement:
    """The moves of a placement that only the device knows, in fixed shapes.

    Every rank sends S weights to every rank, and the receiver takes those that it needs.

    Attributes:
        rank: This rank.
        num_own: M.
        num_slots: B, which is M + S.
        copies_PS: The expert in each spare slot of each rank, as in ``ExactPlacement``.
        sent: The experts to send, by destination rank and slot. Where the expert has another home, any expert travels.
        rows_in: Number of weights to receive from each rank.
        rows_out: Number of weights to send to each rank.
        received: For each spare slot, the row that arrives for it.
        from_home_PS1: For each rank, whether the weights of the spare slots are from there.
        copies_PM: For each rank and own expert, the row of the copy's gradient among those that come home.
        is_copied_PM1: Whether there is such a copy.
    """

    rank: int
    num_own: int
    num_slots: int
    copies_PS: Tensor
    sent: Tensor
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    received: Tensor
    from_home_PS1: Tensor
    copies_PM: Tensor
    is_copied_PM1: Tensor

    moves: ClassVar[bool] = True
    apart: ClassVar[bool] = False

    def departing(self, own: Sequence[Tensor]) -> Tensor:
        """Return the weights to send, (P * S, W)."""
        return side_by_side([weight.index_select(0, self.sent) for weight in own])

    def fill(self, buffer_BW: Tensor, own: Sequence[Tensor], received_NW: Tensor) -> None:
        """Write the weights of all slots. Empty slots get any weights."""
        side_by_side(own, out=buffer_BW[: self.num_own])
        torch.index_select(received_NW, 0, self.received, out=buffer_BW[self.num_own :])

    def outgoing(self, grads_BW: Tensor) -> Tensor:
        """Return the gradients that go home, (P * S, W): zeros where a copy has another home."""
        return torch.where(self.from_home_PS1, grads_BW[self.num_own :], 0).flatten(0, 1)

    def own_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of own experts, (M, ...), out of those of the slots."""
        return [grad[: self.num_own] for grad in grads]

    def collect(self, own: Sequence[Tensor], home_NW: Tensor) -> Sequence[Tensor]:
        """Add the gradients of the copies of each expert, in the order of a sum over one dimension, and round once."""
        by_rank = home_NW.index_select(0, self.copies_PM.flatten()).view(*self.copies_PM.shape, -1)
        by_rank = torch.where(self.is_copied_PM1, by_rank, 0)
        by_rank[self.rank] = side_by_side(own)
        return apart(by_rank.sum(0, dtype=accumulation_dtype(home_NW.dtype)).to(home_NW.dtype), own)


def static_movement(placement: ExactPlacement, rank: int) -> StaticMovement:
    """Return the moves of one rank. No host sync."""
    copies_PS, experts = placement.copies_PS, placement.num_experts
    size, spare = copies_PS.shape
    own, ranks = experts // size, torch.arange(size, device=copies_PS.device)
    home_S = (copies_PS[rank] // own).clamp_(max=size - 1)
    hits_PSM = copies_PS.unsqueeze(2) == torch.arange(rank * own, (rank + 1) * own, device=copies_PS.device)
    is_copied_PM, slot_PM = hits_PSM.max(1)
    return StaticMovement(
        rank=rank,
        num_own=own,
        num_slots=own + spare,
        copies_PS=copies_PS,
        sent=(copies_PS - rank * own).clamp_(0, own - 1).flatten(),
        rows_in=(spare,) * size,
        rows_out=(spare,) * size,
        received=torch.add(torch.arange(spare, device=home_S.device), home_S, alpha=spare),
        from_home_PS1=(copies_PS[rank] // own == ranks.unsqueeze(1)).unsqueeze(2),
        copies_PM=torch.add(slot_PM, ranks.unsqueeze(1), alpha=spare),
        is_copied_PM1=is_copied_PM.unsqueeze(2),
    )


@lru_cache(maxsize=64)
def movement_of(placement: ExpertPlacement, rank: int, device: torch.device) -> Movement:
    """Return the moves of one rank. Ranks agree on the order of an exchange: by rank, then by slot of the receiver."""
    own = placement.num_experts // placement.num_ranks
    return _movement(placement.slots, placement.slots[rank], own, rank, device)


def movement_apart(placement: ExactPlacement, rank: int, device: torch.device) -> Movement:
    """Return the moves of one rank to the spare slots, if own experts run on this rank's own parameters.

    ``placement`` is on the CPU.
    """
    empty = placement.num_experts
    copies = [[EMPTY if expert == empty else expert for expert in of_rank] for of_rank in placement.copies_PS.tolist()]
    used = [expert for expert in copies[rank] if expert != EMPTY]
    return _movement(copies, used, placement.num_experts // len(copies), rank, device, apart=True)


def _movement(
    held: Sequence[Sequence[int]],
    mine: Sequence[int],
    own: int,
    rank: int,
    device: torch.device,
    *,
    apart: bool = False,
) -> Movement:
    """Return the moves of one rank, from the experts that every rank holds, and those in the slots of the buffer."""

    def index(numbers: Iterable[int]) -> Tensor:
        return torch.tensor([] if apart else list(numbers), dtype=torch.int64, device=device)

    homes = [EMPTY if expert == EMPTY else expert // own for expert in mine]
    sent = [
        [] if holder == rank else [expert - rank * own for expert in experts if expert // own == rank and expert >= 0]
        for holder, experts in enumerate(held)
    ]
    kept = [slot for slot, home in enumerate(homes) if home == rank]
    received = [slot for home in range(len(held)) if home != rank for slot in range(len(mine)) if homes[slot] == home]
    return Movement(
        num_own=own,
        num_slots=len(mine),
        apart=apart,
        sent=tuple(expert for experts in sent for expert in experts),
        rows_in=tuple(0 if home == rank else homes.count(home) for home in range(len(held))),
        rows_out=tuple(map(len, sent)),
        moves=any(
            expert != EMPTY and expert // own != holder for holder, experts in enumerate(held) for expert in experts
        ),
        received=index(received),
        own=(index(kept), index(mine[slot] - rank * own for slot in kept)),
        empty=index(slot for slot, home in enumerate(homes) if home == EMPTY),
    )


def side_by_side(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return the entries of all tensors side by side, (N, W)."""
    parts = [tensor.unsqueeze(-1).flatten(1) for tensor in tensors]  # a tensor (N,) has one column
    return parts[0] if len(parts) == 1 and out is None else torch.cat(parts, 1, out=out)


def apart(both_NW: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Undo ``side_by_side`` without a copy: return the part of each tensor."""
    parts = both_NW.split([tensor.shape[1:].numel() for tensor in like], 1)
    return tuple(part.view(len(part), *tensor.shape[1:]) for part, tensor in zip(parts, like, strict=True))
