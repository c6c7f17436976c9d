"""Planners compute a placement from the rows that experts get. This module also finds planners by name.

``expected_rows`` is the measure of a placement: the rows that each rank gets under it.

A planner is a pure function, so ranks that call it with the same counts get the same placement. It costs no exchange.
Other packages declare a planner as an entry point of the group ``moe_dispatch.planners``, which is experimental.

Sources: ``eplb`` follows the published expert-parallel load balancer of DeepSeek (pack groups to nodes, copy experts,
pack copies to ranks). ``least_loaded`` has the aim of least-loaded expert parallelism (arXiv 2601.17111): move few
experts until no rank is far above the mean.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.balance.exact import exact
from moe_dispatch.capabilities.balance.placement import EMPTY, ExpertPlacement
from moe_dispatch.errors import ConfigError, did_you_mean, shown
from moe_dispatch.seams.extension_points import declared, derives, load_declared, takes
from moe_dispatch.seams.slots import MANUAL

if TYPE_CHECKING:
    from moe_dispatch.capabilities.balance.options import PlannerOptions

ENTRY_POINT_GROUP = "moe_dispatch.planners"
_BOUND = 1.05  # busiest rank over mean


class Planner(Protocol):
    """The signature of a planner."""

    def __call__(self, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
        """Return a placement with as many ranks, slots per rank and experts as ``home``.

        Args:
            counts: (P, E), the rows of each rank for each expert. Or (E,), if each rank has the same share of them.
            home: Placement of the experts without copies. Its empty slots are the spare ones.
            ranks_per_node: Number of consecutive ranks that share a node.
        """
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The rows that experts get, by expert.

    Attributes:
        by_rank: Rows of each rank for each expert, (E, P).
        by_node: Rows of each node for each expert, (E, number of nodes).
        totals: Rows of all ranks for each expert, (E,).
        ranks_per_node: Number of consecutive ranks that share a node.
    """

    by_rank: list[list[float]]
    by_node: list[list[float]]
    totals: list[float]
    ranks_per_node: int


def demand_of(counts: Tensor, placement: ExpertPlacement, ranks_per_node: int) -> Demand:
    """Check the counts, and add them up.

    Args:
        counts: (P, E), the rows of each rank for each expert. Or (E,), if each rank has the same share of them.
        placement: A placement for P ranks and E experts.
        ranks_per_node: Number of consecutive ranks that share a node.

    Raises:
        ConfigError: The counts or the nodes do not fit the placement, or a count is negative or not finite.
    """
    ranks, experts = placement.num_ranks, placement.num_experts
    if tuple(counts.shape) not in ((ranks, experts), (experts,)):
        raise ConfigError(
            f"planner: counts must have shape ({ranks}, {experts}) or ({experts},), got {tuple(counts.shape)}. "
            "Count the rows of each rank for each expert."
        )
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigError(
            f"planner: ranks_per_node must divide the number of ranks ({ranks}), got {ranks_per_node}. "
            "Use the number of ranks, if all ranks share a node."
        )
    rows = counts.detach().to("cpu", torch.float64)
    if not bool(((rows >= 0) & rows.isfinite()).all()):
        raise ConfigError(
            f"planner: counts must be finite and at least 0, got {rows.min().item()} to {rows.max().item()}. "
            "Count rows."
        )
    if rows.dim() == 1:
        rows = (rows / ranks).expand(ranks, experts)
    return Demand(
        by_rank=rows.t().tolist(),
        by_node=rows.reshape(-1, ranks_per_node, experts).sum(1).t().tolist(),
        totals=rows.sum(0).tolist(),
        ranks_per_node=ranks_per_node,
    )


def expert_shares(demand: Demand, expert: int, ranks: Sequence[int]) -> Mapping[int, float]:
    """Return the rows of an expert that each of the ranks with a copy gets.

    A rank sends rows to its own copy; without one, to the copies on its node in equal parts; without these, to all
    copies in equal parts.
    """
    size, by_rank, by_node = demand.ranks_per_node, demand.by_rank[expert], demand.by_node[expert]
    if len(ranks) == 1:
        return {ranks[0]: demand.totals[expert]}
    on_node: dict[int, list[int]] = {}
    for rank in ranks:
        on_node.setdefault(rank // size, []).append(rank)
    elsewhere = (demand.totals[expert] - sum(by_node[node] for node in on_node)) / len(ranks)
    shares = {}
    for node, members in on_node.items():
        rest = (by_node[node] - sum(by_rank[rank] for rank in members)) / len(members)
        for rank in members:
            shares[rank] = by_rank[rank] + rest + elsewhere
    return shares


def rank_loads(demand: Demand, placement: ExpertPlacement) -> list[float]:
    """Return the rows that each rank gets."""
    loads = [0.0] * placement.num_ranks
    for expert, slots in enumerate(placement.slots_of_expert):
        for rank, share in expert_shares(demand, expert, [slot // placement.slots_per_rank for slot in slots]).items():
            loads[rank] += share
    return loads


def expected_rows(counts: Tensor, placement: ExpertPlacement, *, ranks_per_node: int) -> Tensor:
    """Return the rows that each rank is expected to get, float64 (P,).

    Args:
        counts: (P, E), the rows of each rank for each expert. Or (E,), if each rank has the same share of them.
        placement: A placement for P ranks and E experts.
        ranks_per_node: Number of consecutive ranks that share a node.

    Raises:
        ConfigError: The counts or the nodes do not fit the placement.
    """
    return torch.tensor(rank_loads(demand_of(counts, placement, ranks_per_node), placement), dtype=torch.float64)


def eplb(
    counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int, num_groups: int | None = None
) -> ExpertPlacement:
    """Fill every slot so that all ranks get nearly the same number of rows. For placements that stay for many steps.

    Whole groups of experts are packed to nodes first. Then busy experts get copies on their node, and the copies are
    packed to its ranks. Experts leave their home ranks, so nearly all weights move once.

    The packing counts the rows of all ranks together. But a rank sends rows to its own copies, so if only few ranks
    have rows, their own copies would get most of them. Where the busiest rank would get fewer rows at home, or by
    ``least_loaded``, that placement is the result. With ``num_groups``, only home is tried.

    Args:
        counts: (P, E) or (E,), as in ``Planner``.
        home: As in ``Planner``. Only its sizes, and the order of its slots, are used.
        ranks_per_node: As in ``Planner``.
        num_groups: Number of groups of consecutive experts that stay together on a node, as routers with limited groups
            need it; None for single experts. If nodes cannot get equally many groups, nodes are ignored.

    Raises:
        ConfigError: The counts, the nodes or the groups do not fit the placement.

    Cost: about P * slots_per_rank * log(P * slots_per_rank) steps on the host; 12 to 17 ms for 64 ranks and 256
    experts on one core.
    """
    demand = demand_of(counts, home, ranks_per_node)
    groups = home.num_experts if num_groups is None else num_groups
    if groups < 1 or home.num_experts % groups:
        raise ConfigError(
            f"eplb: num_groups must divide the number of experts ({home.num_experts}), got {num_groups}. "
            "Use the number of groups of the router."
        )
    num_nodes = home.num_ranks // ranks_per_node
    if groups % num_nodes:
        num_nodes = 1
    size = home.num_ranks // num_nodes
    ranks: list[list[int]] = []
    for experts in _pack_groups(demand.totals, groups, num_nodes):
        copies = _copy_experts(demand.totals, experts, size, home.slots_per_rank)
        ranks += _pack_copies(demand.totals, copies, size, home.slots_per_rank)
    found = [_placement_of(home, ranks), home]
    if num_groups is None:
        found.append(least_loaded(counts, home, ranks_per_node=ranks_per_node))
    return _best(demand, found)


def _pack_groups(totals: Sequence[float], num_groups: int, num_nodes: int) -> list[list[int]]:
    """Give each node equally many groups, the busiest group first and to the node with the fewest rows."""
    size = len(totals) // num_groups
    groups = [range(start, start + size) for start in range(0, len(totals), size)]
    rows = [sum(totals[expert] for expert in group) for group in groups]
    room, experts_of = num_groups // num_nodes, [list[int]() for _ in range(num_nodes)]
    nodes = [(0.0, node, 0) for node in range(num_nodes)]
    for group in sorted(range(num_groups), key=lambda group: -rows[group]):
        taken, node, held = heapq.heappop(nodes)
        experts_of[node] += groups[group]
        if held + 1 < room:
            heapq.heappush(nodes, (taken + rows[group], node, held + 1))
    return experts_of


def _copy_experts(totals: Sequence[float], experts: Sequence[int], ranks: int, slots: int) -> dict[int, int]:
    """Return the number of copies of each expert of a node: the next copy is of the expert with the busiest copies."""
    copies = dict.fromkeys(experts, 1)
    busiest = [(-totals[expert], expert) for expert in experts]
    heapq.heapify(busiest)
    for _ in range(ranks * slots - len(experts)):
        while busiest and copies[busiest[0][1]] == ranks:  # it has a copy on every rank of the node
            heapq.heappop(busiest)
        if not busiest:
            break
        expert = busiest[0][1]
        copies[expert] += 1
        heapq.heapreplace(busiest, (-totals[expert] / copies[expert], expert))
    return copies


def _pack_copies(totals: Sequence[float], copies: dict[int, int], ranks: int, slots: int) -> list[list[int]]:
    """Give each copy to the rank with the fewest rows, the busiest copy first. Then swap copies while this helps."""
    share = {expert: totals[expert] / number for expert, number in copies.items()}
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    room = [(0.0, rank) for rank in range(ranks)]  # a heap of the ranks with a free slot
    for expert in sorted(copies, key=lambda expert: (-share[expert], expert)):
        # Near the end, fewer ranks may have room than the expert has copies. Then a slot stays empty.
        chosen = [heapq.heappop(room)[1] for _ in range(min(copies[expert], len(room)))]
        share[expert] = totals[expert] / len(chosen)
        for rank in chosen:
            held[rank].append(expert)
            loads[rank] += share[expert]
            if len(held[rank]) < slots:
                heapq.heappush(room, (loads[rank], rank))
    _swap(held, loads, share)
    return held


def _swap(held: list[list[int]], loads: list[float], share: dict[int, float]) -> None:
    """Swap copies of the busiest rank with smaller ones of ranks with few rows, while the busiest rank loses rows."""
    for _ in range(2 * len(held)):
        busiest = max(range(len(held)), key=loads.__getitem__)
        best, found = loads[busiest] * (1 - 1e-9), None
        for other in heapq.nsmallest(8, range(len(held)), key=loads.__getitem__):
            smaller = sorted((share[expert], expert) for expert in {*held[other]} - {*held[busiest]})
            excess = (loads[busiest] - loads[other]) / 2
            for mine in sorted({*held[busiest]} - {*held[other]}):
                # The two ranks would be equal after a swap for a copy of this share, so the best is next to it.
                place = bisect.bisect(smaller, (share[mine] - excess,))
                for size, theirs in smaller[max(0, place - 1) : place + 1]:
                    moved = share[mine] - size
                    worst = max(loads[busiest] - moved, loads[other] + moved)
                    if worst < best:
                        best, found = worst, (other, mine, theirs, moved)
        if found is None:
            return
        other, mine, theirs, moved = found
        held[busiest][held[busiest].index(mine)] = theirs
        held[other][held[other].index(theirs)] = mine
        loads[busiest] -= moved
        loads[other] += moved


def _best(demand: Demand, placements: Sequence[ExpertPlacement]) -> ExpertPlacement:
    """Return the placement whose busiest rank gets the fewest rows, and the first one of equal ones."""
    return min(placements, key=lambda placement: max(rank_loads(demand, placement)))


def _placement_of(home: ExpertPlacement, ranks: Sequence[Sequence[int]]) -> ExpertPlacement:
    """Return the placement of the experts of each rank. An expert that stays on its rank stays in its slot."""
    slots = []
    for before, experts in zip(home.slots, ranks, strict=True):
        staying = set(before).intersection(experts)
        new = iter(sorted(set(experts) - staying))
        slots.append(tuple(expert if expert in staying else next(new, EMPTY) for expert in before))
    return ExpertPlacement(home.num_experts, tuple(slots))


def least_loaded(
    counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int, bound: float = _BOUND
) -> ExpertPlacement:
    """Copy or move few experts into spare slots, until the busiest rank has at most ``bound`` times the mean rows.

    For a placement per micro-batch. Most experts stay at home, so few weights travel. Copies share the rows of their
    expert evenly, so few spare slots may not suffice for the bound. Then the result is the best placement that was
    found, which is never worse than ``home``.

    Args:
        counts: (P, E) or (E,), as in ``Planner``.
        home: As in ``Planner``.
        ranks_per_node: As in ``Planner``.
        bound: Busiest rank over mean at which copying stops; at least 1.

    Raises:
        ConfigError: The counts or the nodes do not fit the placement, or ``bound`` is below 1.

    Cost: about P * slots_per_rank steps on the host for each copy; 7 to 10 ms for 64 ranks and 256 experts on one core.
    """
    if not bound >= 1:
        raise ConfigError(f"least_loaded: bound must be at least 1, got {bound}. Use 1.05.")
    demand = demand_of(counts, home, ranks_per_node)
    search = _Search(demand, home, bound * sum(demand.totals) / home.num_ranks)
    while search.improve():
        pass
    search.bring_home(home)
    return _best(demand, [home, _placement_of(home, search.held)])


class _Search:
    """The state of ``least_loaded``: which experts each rank holds, and how many rows it gets.

    Attributes:
        held: Experts of each rank.
    """

    def __init__(self, demand: Demand, home: ExpertPlacement, limit: float) -> None:
        self.held = [[expert for expert in of_rank if expert != EMPTY] for of_rank in home.slots]
        self._demand, self._limit, self._slots = demand, limit, home.slots_per_rank
        self._ranks_of = [[slot // home.slots_per_rank for slot in slots] for slots in home.slots_of_expert]
        self._loads = rank_loads(demand, home)
        self._shares = [expert_shares(demand, expert, ranks) for expert, ranks in enumerate(self._ranks_of)]

    def improve(self) -> bool:
        """Copy or move one expert away from a rank above the limit. False if there is none, or if nothing helps."""
        above = [rank for rank, load in enumerate(self._loads) if load > self._limit]
        return any(self._relieve(rank) for rank in sorted(above, key=self._loads.__getitem__, reverse=True))

    def _relieve(self, busy: int) -> bool:
        """Copy or move the expert of a rank with which the fewest rows stay above the limit. False if nothing helps."""
        loads = self._loads
        by_load = sorted((r for r in range(len(loads)) if len(self.held[r]) < self._slots), key=loads.__getitem__)
        found: tuple[float, int, list[int]] | None = None
        for expert in self.held[busy]:
            ranks = self._ranks_of[expert]
            target = next((rank for rank in by_load if rank not in ranks), None)
            if target is None:
                continue
            for holders in ([*ranks, target], [*(rank for rank in ranks if rank != busy), target]):
                after = self._after(expert, holders)
                saved = sum(self._above(loads[rank]) - self._above(load) for rank, load in after.items())
                if saved > 1e-9 * self._limit and (found is None or saved > found[0]):
                    found = saved, expert, holders
        if found is None:
            return False
        self._set(*found[1:])
        return True

    def bring_home(self, home: ExpertPlacement) -> None:
        """Take back the copies that became needless: without them, no rank gets more rows than the busiest has now."""
        worst = max(self._limit, *self._loads)
        for rank, of_rank in enumerate(home.slots):
            for expert in of_rank:
                for away in [] if expert == EMPTY else [other for other in self._ranks_of[expert] if other != rank]:
                    left = [other for other in self._ranks_of[expert] if other != away] or [rank]
                    fits = rank not in left or rank in self._ranks_of[expert] or len(self.held[rank]) < self._slots
                    if fits and max(self._after(expert, left).values()) <= worst:
                        self._set(expert, left)

    def _above(self, load: float) -> float:
        return max(0.0, load - self._limit)

    def _after(self, expert: int, ranks: Sequence[int]) -> dict[int, float]:
        """Return the rows of the ranks that hold the expert, before or after, if ``ranks`` hold it."""
        before, after = self._shares[expert], expert_shares(self._demand, expert, ranks)
        return {
            rank: self._loads[rank] - before.get(rank, 0) + after.get(rank, 0) for rank in before.keys() | after.keys()
        }

    def _set(self, expert: int, ranks: list[int]) -> None:
        for rank, load in self._after(expert, ranks).items():
            self._loads[rank] = load
        for rank in self._ranks_of[expert]:
            self.held[rank].remove(expert)
        for rank in ranks:
            self.held[rank].append(expert)
        self._ranks_of[expert], self._shares[expert] = ranks, expert_shares(self._demand, expert, ranks)


_BUILT_IN: dict[str, Planner] = {"eplb": eplb, "exact": exact, "least_loaded": least_loaded}


def is_built_in(name: str) -> bool:
    """Return whether a planner is one of this package."""
    return name in _BUILT_IN


def known_planners() -> list[str]:
    """Return the names of all planners, sorted. No package is imported for this."""
    return sorted({*_BUILT_IN, *_declared_planners()})


def check_planner(name: str) -> None:
    """Raise an error if no planner has this name. No package is imported for this.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in known_planners():
        known = known_planners()
        raise ConfigError(
            f"Unknown planner {shown(name)}. Known planners: {', '.join(known)}.{did_you_mean(name, [*known, MANUAL])}"
        )


def load_entry_point(name: str) -> Any:
    """Return what was declared as a planner: a function, or a class of options whose objects are called as one.

    Raises:
        ConfigError: The name is unknown, the package of the planner fails to import, or its object is no planner.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    check_planner(name)
    from moe_dispatch.capabilities.balance.options import PlannerOptions  # noqa: PLC0415 - it imports this module

    return load_declared(
        _declared_planners()[name],
        "Planner",
        must_be="a function of (counts, home, *, ranks_per_node) or a subclass of moe_dispatch.balance.PlannerOptions",
        fits=lambda found: (
            derives(found, PlannerOptions) if isinstance(found, type) else takes(found, None, None, ranks_per_node=1)
        ),
        others=sorted(_BUILT_IN),
    )


def load_planner(name: str) -> Planner:
    """Return a planner by name, with the defaults of its options.

    Raises:
        ConfigError: The name is unknown, or the package of the planner fails to import.
    """
    found = load_entry_point(name)
    planner: Planner = found(name=name) if isinstance(found, type) else found
    return planner


def run_planner(
    planner: str | PlannerOptions, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int
) -> ExpertPlacement:
    """Run a planner, and check its result.

    Args:
        planner: Name of the planner, or its options.
        counts: As in ``Planner``.
        home: As in ``Planner``.
        ranks_per_node: As in ``Planner``.

    Raises:
        ConfigError: The name is unknown; or the planner raises, or returns no placement or one of other sizes.
    """
    name, function = (planner, load_planner(planner)) if isinstance(planner, str) else (planner.name, planner)
    try:
        found: Any = function(counts, home, ranks_per_node=ranks_per_node)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a planner of another package may raise anything
        raise ConfigError(
            f"Planner {name!r} must return a placement, but it raised {type(error).__name__}: {error}. "
            "Correct the planner."
        ) from error
    if not isinstance(found, ExpertPlacement):
        raise ConfigError(
            f"Planner {name!r} must return an ExpertPlacement, got {type(found).__name__}. Correct the planner."
        )
    sizes, expected = (
        f"{placed.num_experts} experts on {placed.num_ranks} ranks with {placed.slots_per_rank} slots each"
        for placed in (found, home)
    )
    if sizes != expected:
        raise ConfigError(
            f"Planner {name!r} must return a placement of {expected}, got one of {sizes}. Correct the planner."
        )
    return found


def _declared_planners() -> dict[str, EntryPoint]:
    return declared(ENTRY_POINT_GROUP, built_in=_BUILT_IN)
