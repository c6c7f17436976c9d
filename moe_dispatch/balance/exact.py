"""``balance="exact"``: give every rank the same number of rows, with a plan that no host has to compute.

Experts stay on their home rank, and busy experts get copies in the spare expert slots of other ranks. The plan is the
alias method in closed form: ranks are sorted by load, and cumulative sums say how many rows each rank takes over, and
from which rank. A rank takes over rows of one other rank only, so ``E / P`` spare slots are enough for any routing.

For example, with loads 9, 2 and 1 and a cap of 4, ranks 1 and 2 take 2 and 3 rows over from rank 0.

All operators have fixed shapes, so a CUDA graph can capture the plan. E experts, P ranks, M = E / P, S spare slots of a
rank, T rows, K ids per row. Blocks are the units of the plan: ``pad_multiple`` rows of one expert.

Source: the alias method of Vose (1991), as in MoonEP; its parallel construction of Huebschle-Schneider and Sanders.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch._slots import Placement
from moe_dispatch.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.balance.slot_table import counts_and_turns
from moe_dispatch.communication import to_device

EXACT = "exact"
"""Name of this planner in a config."""


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactPlacement(Placement):
    """The copies of experts of one dispatch, planned on the device.

    Slots are numbered as in ``ExpertPlacement``: the first M slots of a rank hold its own experts, and the others are
    its spare slots.

    Attributes:
        copies_PS: int64 (P, S), the expert in each spare slot of each rank, or E for an empty slot.
        num_experts: E.
    """

    copies_PS: Tensor
    num_experts: int

    def read(self) -> ExpertPlacement:
        """Return the placement on the host. A host sync."""
        copies = self.copies_PS.masked_fill(self.copies_PS == self.num_experts, EMPTY).tolist()
        own = self.num_experts // len(copies)
        slots = ((*range(rank * own, (rank + 1) * own), *of_rank) for rank, of_rank in enumerate(copies))
        return ExpertPlacement(self.num_experts, tuple(slots))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactPlan:
    """An exact plan as seen from one rank.

    Attributes:
        placement: The copies, equal on all ranks.
        ends_EP: int64 (E, P). Inclusive sums, over the receiving ranks, of this rank's rows for each expert. None if
            all rows go home.
        slots_EP: int64 (E, P), the number of the expert slot that holds an expert on a rank. Entries of ranks that do
            not hold the expert are not used. (E, 1) if all rows go home.
        experts_L: int64 (M + S,), the expert in each slot of this rank, or E for an empty slot.
        left_out: int64 (), the number of copies that were not made because they would have had fewer than ``min_rows``
            rows; None if there is no such limit.
        loads_P: int64 (P,), the rows of each rank's experts; None where ``left_out`` is.
        kernels: The module ``triton_plan`` if it made the plan.
    """

    placement: ExactPlacement
    ends_EP: Tensor | None
    slots_EP: Tensor
    experts_L: Tensor
    left_out: Tensor | None = None
    loads_P: Tensor | None = None
    kernels: Any = None

    def slots_of(self, ids_TK: Tensor, turns_TK: Tensor | None = None) -> Tensor:
        """Replace expert ids by numbers of expert slots: int64 (T, K), and -1 for -1. No host sync.

        In the order of rows, the first ids of an expert go to the first rank that takes rows of this rank, and so on.

        Args:
            ids_TK: The ids that were counted for the plan.
            turns_TK: For each id, the number of equal ids before it, if this is known.
        """
        if self.kernels is not None and turns_TK is not None:
            found: Tensor = self.kernels.slots_of(self.ends_EP, self.slots_EP, ids_TK, turns_TK)
            return found
        experts_TK, ends_EP = ids_TK.clamp(min=0), self.ends_EP
        found_TK = experts_TK
        if ends_EP is not None:
            # The rows of all experts, one expert after the other, on one line with enough room for each.
            room, num_experts = ids_TK.numel() + 1, len(ends_EP)
            begin_E1 = torch.arange(0, num_experts * room, room, device=ids_TK.device).unsqueeze(1)
            if turns_TK is None:
                _, turns_TK = counts_and_turns(ids_TK, num_experts)
            row_TK = torch.add(turns_TK, experts_TK, alpha=room)
            found_TK = torch.searchsorted((ends_EP + begin_E1).flatten(), row_TK, right=True)
            found_TK.clamp_(max=ends_EP.numel() - 1)  # of -1, which is no expert
        return torch.where(ids_TK < 0, -1, self.slots_EP.flatten()[found_TK])

    def to(self, device: torch.device) -> ExactPlan:
        """Return the plan for ids on a device. The placement stays where it is."""
        ends_EP = None if self.ends_EP is None else to_device(self.ends_EP, device)
        slots_EP, experts_L = to_device(self.slots_EP, device), to_device(self.experts_L, device)
        return dataclasses.replace(self, ends_EP=ends_EP, slots_EP=slots_EP, experts_L=experts_L)


@final
class ExactPlanner:
    """Plan the copies of experts from the rows that each rank has for each expert.

    The numbers that do not depend on the rows are made once, here.

    Args:
        num_experts: E.
        num_ranks: P.
        rank: This rank.
        spare: S. With ``S >= E / P`` the bound holds for every routing. With fewer slots, each rank keeps the copies
            that can take most rows over, and the rows of the others stay at home.
        bound: Rows of the busiest rank divided by the mean at which copying stops; 1.0 is exact.
        pad_multiple: Rows of a block. Loads are balanced after the padding of experts.
        ranks_per_node: Number of consecutive ranks that share a node. A rank's rows go to itself first, then to its
            node.
        min_rows: Fewest rows for which a copy is made.
        device: Device of the counts.
        kernels: The module ``triton_plan``, to plan by kernels without ``min_rows``; None plans by operators of torch.
            With more than 4096 experts, operators of torch plan too.

    Attributes:
        min_rows: Fewest rows for which a copy is made.
        nothing: The plan without a copy.
    """

    def __init__(
        self,
        num_experts: int,
        num_ranks: int,
        rank: int,
        *,
        spare: int,
        bound: float = 1.0,
        pad_multiple: int = 1,
        ranks_per_node: int | None = None,
        min_rows: int = 0,
        device: torch.device | str = "cpu",
        kernels: Any = None,
    ) -> None:
        self._experts, self._size, self._rank, self._own = num_experts, num_ranks, rank, num_experts // num_ranks
        self._spare, self._bound, self._block, self.min_rows = spare, bound, pad_multiple, min_rows
        per_node = ranks_per_node or num_ranks
        self._per_node = per_node if 1 < per_node < num_ranks else None
        self._kernels: Any = kernels if kernels is not None and num_experts <= kernels.LARGEST else None
        self._bound_or_none = None if bound == 1.0 else torch.tensor(bound, dtype=torch.float64, device=device)
        ranks, experts = torch.arange(num_ranks, device=device), torch.arange(num_experts, device=device)
        slots = self._own + spare
        self._ranks, self._last = ranks, num_ranks - 1
        self._is_home_EP = (experts // self._own).unsqueeze(1) == ranks
        home_P1E = torch.where(self._is_home_EP.t(), ranks.unsqueeze(1) * slots + experts % self._own, 0)
        self._home_slots = torch.nn.functional.pad(home_P1E, (0, 1))
        self._copy_slots_PS = ranks.unsqueeze(1) * slots + self._own + torch.arange(spare, device=device)
        self._tie_E = num_experts - 1 - experts
        self._own_experts = experts[rank * self._own : (rank + 1) * self._own]
        self.nothing = ExactPlan(
            # On the CPU, so that nobody waits to see that it is empty.
            placement=ExactPlacement(
                copies_PS=torch.full((num_ranks, spare), num_experts, device="cpu"), num_experts=num_experts
            ),
            ends_EP=None,
            slots_EP=(experts // self._own * slots + experts % self._own).unsqueeze(1),
            experts_L=torch.cat([self._own_experts, experts.new_full((spare,), num_experts)]),
        )

    def __call__(self, counts_PE: Tensor) -> ExactPlan:
        """Return the plan for int64 (P, E) rows of each rank for each expert. No host sync; equal on all ranks."""
        if self._kernels is not None:
            return self._by(self._kernels, counts_PE)
        total_E = counts_PE.sum(0)
        blocks_E = total_E if self._block == 1 else (total_E + (self._block - 1)) // self._block
        copied_EP = self._copied(blocks_E.view(self._size, self._own))
        left_out = None
        if self.min_rows:
            is_few_EP = (copied_EP > 0) & (copied_EP * self._block < self.min_rows)
            copied_EP, left_out = copied_EP.masked_fill(is_few_EP, 0), is_few_EP.sum()
        reach_EP = copied_EP
        if self._spare < self._own:  # a rank whose other shares have no slot may take what is left at home instead
            at_home_E1 = (blocks_E - copied_EP.sum(1)).unsqueeze(1)
            reach_EP = torch.minimum(copied_EP + at_home_E1, copied_EP.sum(0)) * (copied_EP > 0)
        # Keep the S experts of which each rank can take most. Equal ones are told apart by their expert.
        kept_PS = torch.add(self._tie_E, reach_EP.t(), alpha=self._experts).topk(self._spare, dim=1).indices
        if self._spare < self._own:
            copied_EP = self._refilled(blocks_E, copied_EP.t(), kept_PS)
        if self._spare < self._own or self.min_rows:
            copied_EP = self._relieving(blocks_E, copied_EP)
        kept_PS = torch.where(copied_EP.t().gather(1, kept_PS) > 0, kept_PS, self._experts)
        home_E = blocks_E - copied_EP.sum(1)
        blocks_EP = torch.where(self._is_home_EP, home_E.unsqueeze(1), copied_EP)
        demand_EP = _differences(torch.minimum(blocks_EP.cumsum(1) * self._block, total_E.unsqueeze(1)))
        slots_PE = self._home_slots.scatter(1, kept_PS, self._copy_slots_PS)
        return ExactPlan(
            placement=ExactPlacement(copies_PS=kept_PS, num_experts=self._experts),
            ends_EP=self._mine(counts_PE.t(), demand_EP).cumsum(1),
            slots_EP=slots_PE[:, : self._experts].t().contiguous(),
            experts_L=torch.cat([self._own_experts, kept_PS[self._rank]]),
            left_out=left_out,
            loads_P=None if left_out is None else demand_EP.sum(0),
        )

    def _by(self, kernels: Any, counts_PE: Tensor) -> ExactPlan:
        copies_PS, ends_EP, slots_EP, experts_L = kernels.plan(
            counts_PE,
            self._rank,
            spare=self._spare,
            bound=self._bound_or_none,
            pad_multiple=self._block,
            per_node=self._per_node or self._size,
        )
        return ExactPlan(
            placement=ExactPlacement(copies_PS=copies_PS, num_experts=self._experts),
            ends_EP=ends_EP,
            slots_EP=slots_EP,
            experts_L=experts_L,
            kernels=kernels,
        )

    def counts_and_turns(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Do what ``slot_table.counts_and_turns`` does."""
        if self._kernels is None:
            return counts_and_turns(ids_TK, self._experts)
        found: tuple[Tensor, Tensor] = self._kernels.counts_and_turns(ids_TK, self._experts)
        return found

    def on_host(self, counts_PE: Tensor) -> tuple[ExactPlan, bool]:
        """Return the plan for counts on the CPU; quickly, if no rank has enough rows above the bound for a copy.

        Also return whether rows stay above the bound because copies would have had fewer than ``min_rows`` rows.
        """
        load_P = counts_PE.sum(0).view(self._size, self._own).sum(1)
        surplus = int(load_P.max()) - self._bound * int(load_P.sum()) / self._size
        if surplus >= max(self.min_rows, 1) or self._block > 1:
            plan = self(counts_PE)
            has_copies = bool((plan.placement.copies_PS < self._experts).any())
            return plan if has_copies else self.nothing, bool(plan.left_out)
        return self.nothing, surplus >= 1

    def _copied(self, blocks_PM: Tensor) -> Tensor:
        """Return the blocks of each expert that each rank takes over from the home of the expert, int64 (E, P).

        Ranks are sorted: first those with room, most room first; then the others, most excess first. X are the
        inclusive sums of excess, and R those of room. The room of a rank, as an interval below R, is filled by the
        donor whose interval below X it starts in. A donor that gave more than its excess is filled up by the next one.
        """
        load_P = blocks_PM.sum(1)
        total = load_P.sum()
        if self._bound == 1.0:
            cap_P = total // self._size + (self._ranks < total % self._size)
        else:
            cap_P = (total.double() * self._bound / self._size).ceil().long()
        balance_P = load_P - cap_P
        has_room = balance_P < 0
        order = torch.where(has_room, balance_P, torch.iinfo(torch.int64).max - balance_P).argsort(stable=True)
        balance, has_room, load = balance_P[order], has_room[order], load_P[order]
        excess = balance.clamp(min=0)
        gone = excess.cumsum(0)  # X
        taken = torch.minimum((excess - balance).cumsum(0), gone[-1])  # R
        room = _differences(taken)
        dry = torch.searchsorted(taken, gone).clamp_(max=self._last)  # the rank at which a donor has given its excess
        lack = (taken[dry] - gone) * (excess > 0)  # it gave so much more
        amount = torch.where(has_room, room, lack)
        start = torch.where(has_room, taken - room, gone)
        donor = torch.searchsorted(gone, start, right=True).clamp_(max=self._last)
        # All blocks on one line: rank after rank, and on each rank the busy experts last, so that these are copied.
        sorted_PM, index_PM = blocks_PM[order].sort(dim=1, stable=True)
        high_E1 = sorted_PM.flatten().cumsum(0).unsqueeze(1)
        low_E1 = high_E1 - sorted_PM.view(-1, 1)
        kept = load.cumsum(0) - excess - lack  # where the blocks that a donor gives begin
        begin = (kept - gone + excess)[donor] + start
        overlap_EP = torch.minimum(high_E1, begin + amount) - torch.maximum(low_E1, begin)
        experts_E1 = torch.add(index_PM, order.unsqueeze(1), alpha=self._own).view(-1, 1)
        result = torch.empty_like(overlap_EP)
        result[experts_E1, order] = overlap_EP.clamp_(min=0)
        return result

    def _refilled(self, blocks_E: Tensor, copied_PE: Tensor, kept_PS: Tensor) -> Tensor:
        """Return the blocks of the copies that were kept, (E, P). Some shares may have had no slot.

        A rank then takes more of the first expert that it kept instead, as far as blocks of it are still at home.
        """
        rows_PS = copied_PE.gather(1, kept_PS)
        kept_PE = torch.zeros_like(copied_PE).scatter_(1, kept_PS, rows_PS)
        lost_P1 = (copied_PE - kept_PE).sum(1, keepdim=True)
        wanted_PE = torch.zeros_like(kept_PE).scatter_(1, kept_PS[:, :1], lost_P1)
        at_home_E = blocks_E - kept_PE.sum(0)
        return kept_PE.t() + _differences(torch.minimum(wanted_PE.t().cumsum(1), at_home_E.unsqueeze(1)))

    def _relieving(self, blocks_E: Tensor, copied_EP: Tensor) -> Tensor:
        """Return the copied blocks; without those of busy ranks, if the busiest rank would have more than at home.

        A busy rank takes blocks in return for those that it gives away, but some of its own may have got no copy.
        """
        load_P = blocks_E.view(self._size, self._own).sum(1)
        after_P = load_P - copied_EP.sum(1).view(self._size, self._own).sum(1) + copied_EP.sum(0)
        is_busy_P = load_P * self._size > load_P.sum()
        return copied_EP * ~((after_P.max() > load_P.max()) & is_busy_P)

    def _mine(self, supply_EP: Tensor, demand_EP: Tensor) -> Tensor:
        """Return how many rows of each expert this rank sends to each rank, int64 (E, P). Sums over ranks are exact.

        Own rows come first, then those of the node, then the others. What a rank has left and what a rank still needs
        are intervals on one line for each expert; the rows that travel are their overlap.
        """
        own_EP = torch.minimum(supply_EP, demand_EP)
        supply_EP, demand_EP = supply_EP - own_EP, demand_EP - own_EP
        flow_EP = own_EP * (self._ranks == self._rank)
        if self._per_node is not None:
            shape = (self._experts, self._size // self._per_node, self._per_node)
            supply, demand = supply_EP.view(shape), demand_EP.view(shape)
            ends = torch.stack([supply, demand]).cumsum(-1)
            ends = torch.minimum(ends, ends[..., -1:].amin(0))  # what the node can keep
            inside, needed = _differences(ends)
            node, place = divmod(self._rank, self._per_node)
            begin, end = ends[0, :, node, place] - inside[:, node, place], ends[0, :, node, place]
            of_node = _overlap(begin, end, ends[1, :, node] - needed[:, node], ends[1, :, node])
            first = node * self._per_node
            flow_EP = flow_EP + torch.nn.functional.pad(of_node, (first, self._size - first - self._per_node))
            supply_EP, demand_EP = (supply - inside).flatten(1), (demand - needed).flatten(1)
        sent, received = supply_EP.cumsum(1), demand_EP.cumsum(1)
        end = sent[:, self._rank]
        return flow_EP + _overlap(end - supply_EP[:, self._rank], end, received - demand_EP, received)


def exact(counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int, bound: float = 1.0) -> ExpertPlacement:
    """Return the placement of an exact plan, as a ``Planner`` does. A dispatch also splits the rows among the copies.

    Args:
        counts: int64 (P, E) or (E,), as in ``Planner``.
        home: As in ``Planner``.
        ranks_per_node: Not used: the copies do not depend on it.
        bound: Rows of the busiest rank divided by the mean at which copying stops; at least 1.
    """
    size, own = home.num_ranks, home.num_experts // home.num_ranks
    planner = ExactPlanner(home.num_experts, size, 0, spare=home.slots_per_rank - own, bound=bound)
    totals = counts.long().view(-1, home.num_experts)
    rows_PE = totals if len(totals) == size else torch.nn.functional.pad(totals, (0, 0, 0, size - 1))
    return planner(rows_PE).placement.read()


def exact_rows(num_experts: int, num_ranks: int, *, tokens: int, top_k: int, bound: float, pad_multiple: int) -> int:
    """Return the most rows of any rank, padding included, for any routing of up to ``tokens`` rows on each rank.

    With ``bound`` 1 it is ``tokens * top_k`` and at most ``E / P * (pad_multiple - 1) + pad_multiple`` rows of padding.
    """
    blocks = (num_ranks * tokens * top_k + num_experts * (pad_multiple - 1)) // pad_multiple
    return math.ceil(blocks * bound / num_ranks) * pad_multiple


def _differences(sums: Tensor) -> Tensor:
    """Undo a cumulative sum over the last dimension."""
    return torch.diff(sums, prepend=sums.new_zeros(()).expand(*sums.shape[:-1], 1))


def _overlap(low_E: Tensor, high_E: Tensor, lows_EP: Tensor, highs_EP: Tensor) -> Tensor:
    """Return the length of the overlap of one interval of each expert with intervals of ranks, (E, P)."""
    both = torch.minimum(high_E.unsqueeze(1), highs_EP) - torch.maximum(low_E.unsqueeze(1), lows_EP)
    return both.clamp_(min=0)
