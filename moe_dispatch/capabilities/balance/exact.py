"""``balance="exact"``: give every rank the same number of rows, with a plan that no host has to compute.

Experts stay on their home rank, and busy experts get copies in the spare expert slots of other ranks. The plan is the
alias method in turns: in each turn, the rank with the fewest rows is filled up by the rank with the most, which may
then need rows itself. So a rank takes over rows of one other rank only, and ``E / P`` spare slots are enough for any
routing. A donor gives its largest expert to the rank that still takes most, again and again, so copies are few.

For example, with loads 9, 2 and 1 and a cap of 4, ranks 2 and 1 take 3 and 2 rows over from rank 0.

There are three ways to the same plan, bit by bit: lists of the host for eager mode, kernels of Triton, and operators of
torch where there is no Triton. The last two have fixed shapes, so a CUDA graph can capture them. E experts, P ranks,
M = E / P, S spare slots of a rank, T rows, K ids per row. Blocks are the units of the plan: ``pad_multiple`` rows of
one expert.

Source: the alias method of Vose (1991), in the order of turns that MoonEP plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.capabilities.balance.slot_table import counts_and_turns
from moe_dispatch.communication import to_device
from moe_dispatch.seams.slots import Placement

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
        num_copies: Number of copies on this rank. A tensor, int64 (), if the device plans.
        left_out: Number of copies that were not made because they would have had fewer than ``min_rows`` rows. 0 if the
            device plans.
        loads_P: int64 (P,), the rows of each rank's experts; None if ``left_out`` is 0.
        kernels: The module ``triton_plan`` if it made the plan.
    """

    placement: ExactPlacement
    ends_EP: Tensor | None
    slots_EP: Tensor
    experts_L: Tensor
    num_copies: Tensor | int
    left_out: int = 0
    loads_P: Tensor | None = None
    kernels: Any = None

    def slots_of(self, ids_TK: Tensor, turns: Any = None) -> Tensor:
        """Replace expert ids by numbers of expert slots: int64 (T, K), and -1 for -1. No host sync.

        In the order of rows, the first ids of an expert go to the first rank that takes rows of this rank, and so on.

        Args:
            ids_TK: The ids that were counted for the plan.
            turns: The second result of ``ExactPlanner.counts_and_turns``, if it has counted these ids.
        """
        if self.kernels is not None and turns is not None:
            found: Tensor = self.kernels.slots_of(self.ends_EP, self.slots_EP, ids_TK, turns)
            return found
        experts_TK, ends_EP = ids_TK.clamp(min=0), self.ends_EP
        found_TK = experts_TK
        if ends_EP is not None:
            # The rows of all experts, one expert after the other, on one line with enough room for each.
            room, num_experts = ids_TK.numel() + 1, len(ends_EP)
            begin_E1 = torch.arange(0, num_experts * room, room, device=ids_TK.device).unsqueeze(1)
            turns_TK = counts_and_turns(ids_TK, num_experts)[1] if turns is None else turns
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
        min_rows: Fewest rows for which the host makes a copy.
        device: Device of the counts.
        kernels: The module ``triton_plan``, to plan by kernels; None plans by operators of torch. With more than 4096
            ranks, or experts of a rank, operators of torch plan too.
        alike: Whether all ranks bring the same rows, and each sends to a copy its share of what the copy gets from all,
            as in a dry run.

    Attributes:
        min_rows: Fewest rows for which the host makes a copy.
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
        alike: bool = False,
    ) -> None:
        self._alike = alike
        self._experts, self._size, self._rank, self._own = num_experts, num_ranks, rank, num_experts // num_ranks
        self._spare, self._bound, self._block, self.min_rows = spare, bound, pad_multiple, min_rows
        per_node = ranks_per_node or num_ranks
        self._per_node = per_node if 1 < per_node < num_ranks else None
        self._kernels: Any = kernels if kernels and max(num_ranks, self._own) <= kernels.LARGEST else None
        self._bound_or_none = None if bound == 1.0 else torch.tensor(bound, dtype=torch.float64, device=device)
        ranks, experts = torch.arange(num_ranks, device=device), torch.arange(num_experts, device=device)
        slots = self._own + spare
        self._ranks, self._home_E = ranks, experts // self._own
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
            num_copies=0,
        )

    def __call__(self, counts_PE: Tensor) -> ExactPlan:
        """Return the plan for int64 (P, E) rows of each rank for each expert. No host sync; equal on all ranks.

        Every copy is made, also with few rows. Cost: three launches by Triton. By operators of torch, about 25 for each
        rank and 10 for each expert of a rank.
        """
        if self._kernels is not None:
            return self._by(self._kernels, counts_PE)
        total_E = counts_PE.sum(0)
        blocks_E = total_E if self._block == 1 else (total_E + (self._block - 1)) // self._block
        copied_EP = self._copied(blocks_E.view(self._size, self._own))
        if self._spare < self._own:
            copied_EP = self._relieving(blocks_E, copied_EP)
        # Equal copies are told apart by their expert.
        kept_PS = torch.add(self._tie_E, copied_EP.t(), alpha=self._experts).topk(self._spare, dim=1).indices
        kept_PS = torch.where(copied_EP.t().gather(1, kept_PS) > 0, kept_PS, self._experts)
        demand_EP = self._demand(total_E, blocks_E, copied_EP, self._is_home_EP)
        ends_EP = self._mine(counts_PE.t(), demand_EP).cumsum(1)
        return self._plan(kept_PS, ends_EP, (kept_PS[self._rank] < self._experts).sum())

    def _plan(self, kept_PS: Tensor, ends_EP: Tensor, num_copies: Tensor | int, **told: Any) -> ExactPlan:
        """Return a plan. ``kept_PS`` has the copies on each rank, or E."""
        slots_PE = self._home_slots.scatter(1, kept_PS, self._copy_slots_PS)
        return ExactPlan(
            placement=ExactPlacement(copies_PS=kept_PS, num_experts=self._experts),
            ends_EP=ends_EP,
            slots_EP=slots_PE[:, : self._experts].t().contiguous(),
            experts_L=torch.cat([self._own_experts, kept_PS[self._rank]]),
            num_copies=num_copies,
            **told,
        )

    def _by(self, kernels: Any, counts_PE: Tensor) -> ExactPlan:
        copies_PS, ends_EP, slots_EP, experts_L, num_copies = kernels.plan(
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
            num_copies=num_copies,
            kernels=kernels,
        )

    def counts_and_turns(self, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Do what ``slot_table.counts_and_turns`` does. Only ``ExactPlan.slots_of`` knows the form of the turns."""
        if self._kernels is None:
            return counts_and_turns(ids_TK, self._experts)
        found: tuple[Tensor, Any] = self._kernels.counts_and_turns(ids_TK, self._experts)
        return found

    def on_host(self, counts_PE: Tensor) -> tuple[ExactPlan, bool]:
        """Return the plan for counts on the CPU; quickly, if no rank has enough rows above the bound for a copy.

        Also return whether rows stay above the bound because copies would have had fewer than ``min_rows`` rows.
        """
        total_E = counts_PE.sum(0)
        load_P = total_E.view(self._size, self._own).sum(1)
        surplus = int(load_P.max()) - self._bound * int(load_P.sum()) / self._size
        if surplus < max(self.min_rows, 1) and self._block == 1:
            return self.nothing, surplus >= 1
        plan = self.host_plan(counts_PE)
        return plan, plan.left_out > 0

    def host_plan(self, counts_PE: Tensor) -> ExactPlan:
        """Return the plan for counts on the CPU, without copies that would have fewer than ``min_rows`` rows.

        Cost: a step of Python for each copy and each pair of ranks; 0.5 to 0.8 ms for 64 ranks and 256 experts on one
        core.
        """
        total_E, size, own, spare = counts_PE.sum(0), self._size, self._own, self._spare
        blocks = [-(-total // self._block) for total in total_E.tolist()]
        loads = [sum(blocks[begin : begin + own]) for begin in range(0, self._experts, own)]
        copies = taken_over(blocks, loads, self._bound, spare)
        left_out = len(copies)
        copies = [copy for copy in copies if copy[2] * self._block >= self.min_rows]
        left_out -= len(copies)
        if left_out or spare < own:
            copies = _relieving(copies, loads, own)
        if not copies:
            return dataclasses.replace(self.nothing, left_out=left_out)
        experts, ranks, moved = torch.tensor(copies, device="cpu").unbind(1)
        some_N, rows = experts.unique(return_inverse=True)  # rows of the others stay at home
        copied_NP = torch.zeros(len(some_N), size, dtype=torch.int64, device="cpu").index_put_((rows, ranks), moved)
        demand_NP = self._demand(
            total_E[some_N], torch.tensor(blocks, device="cpu")[some_N], copied_NP, self._is_home_EP[some_N]
        )
        ends_EP = torch.where(self._ranks >= self._home_E.unsqueeze(1), counts_PE[self._rank].unsqueeze(1), 0)
        ends_EP[some_N] = self._mine(counts_PE[:, some_N].t(), demand_NP).cumsum(1)
        kept = [list[int]() for _ in range(size)]
        for expert, rank, _ in copies:
            kept[rank].append(expert)
        kept_PS = torch.tensor(
            [[*of_rank, *[self._experts] * (spare - len(of_rank))] for of_rank in kept], device="cpu"
        )
        loads_P = None
        if left_out:
            at_home_P = total_E.index_fill(0, some_N, 0).view(size, own).sum(1)
            loads_P = at_home_P + demand_NP.sum(0)
        return self._plan(kept_PS, ends_EP, len(kept[self._rank]), left_out=left_out, loads_P=loads_P)

    def _copied(self, blocks_PM: Tensor) -> Tensor:
        """Do what ``taken_over`` does, in a fixed number of steps. Return the blocks of each copy, int64 (E, P)."""
        load_P, size = blocks_PM.sum(1), self._size
        total = load_P.sum()
        if self._bound == 1.0:
            cap_P = total // size + (self._ranks < total % size)
        else:
            cap_P = (total.double() * self._bound / size).ceil().long()
        balance_P = load_P - cap_P
        slack, quotas_PP = -balance_P.sum(), blocks_PM.new_zeros(size, size)  # of each taker, by donor
        for _ in range(size - 1):
            (excess, donor), (lack, taker) = balance_P.max(0), balance_P.min(0)
            excess = excess.clamp(min=0)
            room = torch.where(excess > 0, -lack, 0)
            spared = torch.minimum((room - excess).clamp(min=0), slack)
            slack, quota = slack - spared, room - spared
            quotas_PP.view(-1).scatter_add_(0, (donor * size + taker).view(1), quota.view(1))
            balance_P = balance_P.scatter_add(0, torch.stack([donor, taker]), torch.stack([-quota, room]))
        left_PM, copied_PMP = blocks_PM.clone(), blocks_PM.new_zeros(size, self._own, size)
        number_PP = torch.zeros_like(quotas_PP)
        for _ in range(size + self._own - 1):
            (quota_P1, taker_P1), (left_P1, expert_P1) = quotas_PP.max(1, keepdim=True), left_PM.max(1, keepdim=True)
            moved_P1 = torch.minimum(quota_P1, left_P1)
            copied_PMP.flatten(1).scatter_add_(1, expert_P1 * size + taker_P1, moved_P1)
            left_PM.scatter_add_(1, expert_P1, -moved_P1)
            quotas_PP.scatter_add_(1, taker_P1, -moved_P1)
            if self._spare < self._own:
                number_PP.scatter_add_(1, taker_P1, torch.ones_like(moved_P1))
                quotas_PP.masked_fill_(number_PP >= self._spare, 0)
        return copied_PMP.flatten(0, 1)

    def _demand(self, total_E: Tensor, blocks_E: Tensor, copied_EP: Tensor, is_home_EP: Tensor) -> Tensor:
        """Return the rows of each expert that each rank gets, int64 (E, P), or those of some experts."""
        blocks_EP = torch.where(is_home_EP, (blocks_E - copied_EP.sum(1)).unsqueeze(1), copied_EP)
        return _differences(torch.minimum(blocks_EP.cumsum(1) * self._block, total_E.unsqueeze(1)))

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
        if self._alike:
            return _differences(demand_EP.cumsum(1) // self._size)
        own_EP = torch.minimum(supply_EP, demand_EP)
        supply_EP, demand_EP = supply_EP - own_EP, demand_EP - own_EP
        flow_EP = own_EP * (self._ranks == self._rank)
        if self._per_node is not None:
            shape = (len(supply_EP), self._size // self._per_node, self._per_node)
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


def taken_over(blocks: Sequence[int], loads: Sequence[int], bound: float, spare: int) -> list[tuple[int, int, int]]:
    """Choose the copies. Return the expert, the rank and the blocks of each; those on one rank with the largest first.

    Args:
        blocks: Blocks of each expert.
        loads: Blocks of each rank.
        bound: As in ``ExactPlanner``.
        spare: S. A rank that has filled its slots takes nothing more.
    """
    own, num_ranks, total = len(blocks) // len(loads), len(loads), sum(loads)
    whole, rest = divmod(total, num_ranks) if bound == 1 else (math.ceil(total * bound / num_ranks), 0)
    balances = [(load - whole - (rank < rest), rank) for rank, load in enumerate(loads)]
    slack = -sum(balance for balance, _ in balances)
    donors = [(-balance, rank) for balance, rank in balances if balance > 0]
    takers = [(balance, rank) for balance, rank in balances if balance < 0]
    heapify(donors)
    heapify(takers)
    quotas = defaultdict[int, list[tuple[int, int]]](list)  # numbers in heaps are negative: their first is the largest
    while donors:
        (excess, donor), (room, taker) = heappop(donors), heappop(takers)
        # With a bound above 1 there is more room than excess. So much of it may stay empty.
        spared = min(max(excess - room, 0), slack)
        slack -= spared
        heappush(quotas[donor], (room + spared, taker))
        left = room + spared - excess
        if left:
            heappush(donors if left > 0 else takers, (-left if left > 0 else left, donor))
    found, used = [], [0] * num_ranks
    for donor, wanted in quotas.items():
        left_at_home = [(-blocks[expert], expert) for expert in range(donor * own, (donor + 1) * own)]
        heapify(left_at_home)
        while wanted:
            (quota, taker), (rows, expert) = wanted[0], left_at_home[0]
            moved = max(quota, rows)
            found.append((expert, taker, -moved))
            used[taker] += 1
            heapreplace(left_at_home, (rows - moved, expert))
            if quota < moved and used[taker] < spare:
                heapreplace(wanted, (quota - moved, taker))
            else:
                heappop(wanted)
    return found


def _relieving(copies: list[tuple[int, int, int]], loads: Sequence[int], own: int) -> list[tuple[int, int, int]]:
    """Do for lists what the method of this name does."""
    after = list(loads)
    for expert, rank, moved in copies:
        after[expert // own] -= moved
        after[rank] += moved
    if max(after) <= max(loads):
        return copies
    return [copy for copy in copies if loads[copy[1]] * len(loads) <= sum(loads)]


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
    return planner.host_plan(rows_PE).placement.read()


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
