"""Forecast the dispatches of a model on a cluster that need not exist: rows, bytes, buffers and overflows.

The figures are counted over dispatches of a recorded routing, or over simulated dispatches of a random routing. A
forecast is plain data. Dimensions are those of ``moe_dispatch_tools.loads``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.capacity import CapacityFactor, balanced_rows, capacity_of
from moe_dispatch.backends.registry import known_backends, probed
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_max_rows, shape_of
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError
from moe_dispatch.seams.plug_ins import Usable
from moe_dispatch_tools.loads import Loads, count_loads, count_traffic, padded_rows
from moe_dispatch_tools.names import NamedBackend
from moe_dispatch_tools.placements import count_copies, in_slots, rows_of_experts
from moe_dispatch_tools.plan.models import Model
from moe_dispatch_tools.plan.routing import Dispatch, RoutingSource

# Collectives of the forward. All other collectives belong to the backward.
FORWARD = ("balance", "counts", "dispatch", "dispatch.within_node", "combine", "combine.within_node")
_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)
# Releases to plan if deep_ep is not installed. This package emulates them, so it knows their rules.
_RELEASES = {"deepep": ("v1.2.1", "v2.5.0"), "hybridep": ("hybridep-746",)}
_AGREED_INTEGERS = 9  # int64 with which dispatchers agree on row counts
_MOST_LOADS = 2**22  # numbers of rows, one for each rank and expert, which a plan keeps for each dispatch
_RANKS_PER_NODE = 8  # if the number of nodes is not given


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dispatches:
    """Counted dispatches of a config on a group.

    Attributes:
        config: Config of the dispatcher.
        shape: Sizes of the group. Its experts are the expert slots.
        loads: Counts of the dispatches by expert slot. The rows of a copy belong to the rank of the copy.
        experts_CPE: Rows of each rank for each expert.
        dtypes: Dtype of the rows of each dispatch.
        placements: Placement of the experts in each dispatch; empty without spare expert slots.
    """

    config: DispatcherConfig
    shape: MoEShape
    loads: Loads
    experts_CPE: Tensor
    dtypes: Sequence[torch.dtype]
    placements: Sequence[ExpertPlacement] = ()

    @classmethod
    def count(
        cls, config: DispatcherConfig, shape: MoEShape, dispatches: Iterable[Dispatch], dtypes: Sequence[torch.dtype]
    ) -> Dispatches:
        """Count dispatches. With spare slots, the planner of the config places the experts of each.

        Args:
            config: Config.
            shape: Sizes of the group with this config.
            dispatches: Expert ids of each rank in each dispatch.
            dtypes: Dtype of the rows of each dispatch, or one dtype of all.
        """
        used: list[ExpertPlacement] = []
        if config.spare_slots(shape.ep_size):
            dispatches = in_slots(dispatches, config, shape, used)
        loads = count_loads(dispatches, shape)
        experts_CPE = rows_of_experts(loads.experts_CPE, used) if used else loads.experts_CPE
        dtypes = [*dtypes] * len(loads.rows_CP) if len(dtypes) == 1 else dtypes
        return cls(config=config, shape=shape, loads=loads, experts_CPE=experts_CPE, dtypes=dtypes, placements=used)

    @property
    def capacity_shape(self) -> MoEShape:
        """Sizes for capacities: with the row limit of the config, or else the largest number of rows of a rank."""
        most = self.shape.max_tokens_per_rank or max(int(self.loads.rows_CP.max()), 1)
        return dataclasses.replace(self.shape, max_tokens_per_rank=most)


def figure(values_CP: Tensor) -> dict[str, float]:
    """Summarise a number that each rank has in each dispatch: its mean, and the extremes of all."""
    values_CP = values_CP.double()
    return {"expected": float(values_CP.mean()), "low": float(values_CP.min()), "high": float(values_CP.max())}


def check_request(
    model: Model,
    source: RoutingSource,
    *,
    tokens: int | None,
    ep_size: int,
    nodes: int | None,
    backends: Sequence[NamedBackend],
) -> tuple[int, int]:
    """Check the arguments of ``forecast`` before it counts, which takes long. Return ``tokens`` and ``nodes``.

    Raises:
        ConfigError: Two numbers do not fit each other, for any backend; or there is no such backend or option.
    """
    config, nodes = model.config, nodes or ep_size // math.gcd(ep_size, _RANKS_PER_NODE)
    if source.tokens is not None and tokens is not None:
        raise ConfigError("plan: a recorded routing decides the rows of a rank. Leave out --tokens.")
    tokens = tokens or source.tokens or config.max_tokens_per_rank
    if tokens is None:
        raise ConfigError("plan: the number of rows of a rank is not given. Give --tokens, or set max_tokens_per_rank.")
    if ep_size % nodes:
        raise ConfigError(
            f"plan: ep ({ep_size}) must be divisible by nodes ({nodes}). Give the number of nodes of one group."
        )
    if config.max_tokens_per_rank is not None and tokens > config.max_tokens_per_rank:
        raise ConfigError(
            f"plan: a rank must bring at most max_tokens_per_rank ({config.max_tokens_per_rank}) rows, got {tokens}. "
            "Raise max_tokens_per_rank, or plan fewer tokens."
        )
    if ep_size * config.num_experts > _MOST_LOADS:
        raise ConfigError(
            f"plan: ep ({ep_size}) times num_experts ({config.num_experts}) must be at most {_MOST_LOADS}. Plan fewer "
            "ranks or experts."
        )
    shape_of(config, ep_size, ep_size // nodes)
    for named in backends:
        _loaded(named)
    return tokens, nodes


def forecast(
    model: Model,
    source: RoutingSource,
    *,
    tokens: int | None = None,
    ep_size: int,
    nodes: int | None = None,
    backends: Sequence[NamedBackend],
) -> dict[str, Any]:
    """Make a plan. It starts no ranks and allocates no buffers.

    Args:
        model: Sizes and config.
        source: Routing.
        tokens: Rows that a rank brings to a dispatch; None for the recorded routing, or for ``max_tokens_per_rank``.
        ep_size: Ranks in the group. Consecutive ranks share a node.
        nodes: Nodes of the group; None for 8 ranks per node.
        backends: Backends to plan.

    Returns:
        Plain data. All rows and bytes belong to one rank and one micro-batch. With spare expert slots, rows are counted
        by slot: those of a copy belong to the rank of the copy.

    Raises:
        ConfigError: As for ``check_request``.
    """
    tokens, nodes = check_request(model, source, tokens=tokens, ep_size=ep_size, nodes=nodes, backends=backends)
    config = model.config
    shape = shape_of(config, ep_size, ep_size // nodes)
    home = dataclasses.replace(shape, num_experts=config.num_experts)  # without spare expert slots

    @functools.cache
    def counted(per_node: int) -> Dispatches:
        near = ep_size // nodes if ep_size % min(per_node, ep_size) else min(per_node, ep_size)
        of_nodes = dataclasses.replace(shape, ranks_per_node=near)
        return Dispatches.count(config, of_nodes, source.dispatches(home, tokens), [model.dtype])

    found = counted(ep_size // nodes)
    loads = found.loads
    fields = ("num_experts", "top_k", "hidden_size", "max_tokens_per_rank")
    return {
        "model": {
            "name": model.name,
            **{field: getattr(config, field) for field in fields},
            **{field: config.canonical[field] for field in ("balance", "wire", "graph_safe")},
            "spare_experts_per_rank": config.spare_slots(ep_size),
            "balance_promise": config.balance_promise(ep_size),
            "num_groups": model.groups and model.groups.num_groups,
            "topk_groups": model.groups and model.groups.topk_groups,
            "pad_multiple": config.pad_multiple_rows,
            "layers": model.layers,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "cluster": {"ep_size": ep_size, "nodes": nodes, "ranks_per_node": ep_size // nodes},
        "rows_per_rank": tokens,
        "routing": source.text,
        "dispatches": len(loads.rows_CP),
        "simulated": source.tokens is None,
        "received": figure(loads.received_CP),
        "busiest_rank": figure(loads.received_CP.amax(1)),
        "expert_padding": figure(loads.expert_padding_CP(shape.pad_multiple)),
        "busiest_expert": figure(found.experts_CPE.sum(1).amax(1)),
        "backends": [
            plan for named in backends for plan in _backend_plans(named, counted, ep_size // nodes, model.layers)
        ],
        "needed_factor": int(loads.received_CP.max()) / balanced_rows(found.capacity_shape),
        "capacities": capacity_plans(found),
        "copies": figure(torch.tensor([[count_copies(placed)] for placed in found.placements] or [[0]])),
        "expert_bytes": model.expert_bytes,
    }


def _backend_plans(
    named: NamedBackend, counted: Callable[[int], Dispatches], per_node: int, layers: int
) -> Iterator[dict[str, Any]]:
    """Plan a backend if its library is installed, and else the known releases of its library.

    ``counted`` returns the dispatches for a number of ranks per node: ``per_node``, if no option of the backend has it.

    All numbers of a plan are None if the backend refuses the config, and its bytes if it cannot say them.

    """
    empty = ("rows_per_rank", "rank_padding", "row_multiple", "buffers", "sent", "row_dtypes", "forward")
    plan = {"name": named.label, "rules": "", "refused": None, **dict.fromkeys((*empty, "backward", "between_nodes"))}
    plan["payload_only"] = None
    loaded = _loaded(named)
    if isinstance(loaded, str):
        yield plan | {"refused": loaded}
        return
    cls, spec, options = loaded
    found = counted(getattr(options, "ranks_per_node", None) or per_node)
    try:
        config = found.config.replace(backend=spec)
    except ConfigError as error:  # an option that does not fit the config
        yield plan | {"refused": str(error)}
        return
    verdict = probed(options)
    if isinstance(verdict, Usable):
        yield plan | {"rules": verdict.version} | _numbers(options, config, found, layers)
        return
    absent = f"not usable here: {verdict.reason}"
    for release in _RELEASES.get(cls.name, ()):
        rules = options.model_copy(update={"emulate": release})
        told = {
            "name": f"{named.label} {release.removeprefix(cls.name + '-')}",
            "rules": f"rules of {release}; {absent}",
        }
        yield plan | told | _numbers(rules, config, found, layers, devices=frozenset({"cuda"}))
    if cls.name not in _RELEASES:
        yield plan | {"refused": absent}


def _loaded(named: NamedBackend) -> tuple[type[BackendOptions], dict[str, Any], BackendOptions] | str:
    """Return the options class of a backend, the value for a config, and the options; or why it cannot be loaded.

    Raises:
        ConfigError: There is no such backend or option, by an error of the user.
    """
    try:
        cls = named.load()
        return cls, named.spec(), cls.model_validate(named.options)
    except (BackendUnavailableError, ConfigError) as error:
        # One that is installed is listed with the reason, whatever its package has done. A typing error is the user's.
        if isinstance(error, ConfigError) and (named.options or named.where not in known_backends()):
            raise
        return str(error)


def _numbers(
    options: BackendOptions,
    config: DispatcherConfig,
    found: Dispatches,
    layers: int,
    **needed: frozenset[str],
) -> dict[str, Any]:
    """Count the rows, buffers and bytes of one backend, or return why it is refused."""
    shape, loads = found.shape, found.loads
    try:
        needs = dataclasses.replace(options.constraints(shape), **{**config.constraints.given(), **needed})
        check_group(config, options.name, shape, needs)
        if config.graph_safe:
            check_buffers(options.name, options.capacity(shape))
        check_max_rows(f"Backend {options.name!r}", needs.padded(int(loads.rows_CP.max())), needs)
    except MoEDispatchError as error:
        return {"refused": str(error)}
    padded_CP = padded_rows(loads.rows_CP, needs, config)
    numbers = {
        "rows_per_rank": figure(padded_CP),
        "rank_padding": figure(padded_CP - loads.rows_CP),
        "row_multiple": needs.row_multiple,
        "buffers": _buffers(found, options, needs, int(padded_CP.max())),
    }
    traffic = count_traffic(options, shape, loads, padded_CP, found.dtypes)
    if traffic is None:
        return numbers
    # Bytes of the counts that each rank sends to another, so that all plan the same placement.
    counts = 0 if not config.plans_placements else 8 * (config.num_experts + 1)
    nothing_CP = torch.zeros_like(padded_CP, dtype=torch.float64)
    sent_CP = traffic.sent_CP | ({"balance": nothing_CP + counts * (shape.ep_size - 1)} if counts else {})
    forward_CP = sum((of for label, of in sent_CP.items() if label in FORWARD), nothing_CP)
    backward_CP = sum((of for label, of in sent_CP.items() if label not in FORWARD), nothing_CP)
    once, far = _agreement_bytes(config, shape, needs), shape.ep_size - (shape.ranks_per_node or shape.ep_size)
    return numbers | {
        "sent": {label: figure(nbytes_CP) for label, nbytes_CP in sent_CP.items()},
        "row_dtypes": traffic.row_dtypes,
        "forward": figure(layers * forward_CP + once),
        "backward": figure(layers * backward_CP),
        "between_nodes": layers * (traffic.between_nodes + counts * far),
        "payload_only": traffic.payload_only,
    }


def _agreement_bytes(config: DispatcherConfig, shape: MoEShape, needs: Constraints) -> int:
    """Return the bytes that a rank sends to agree on the row counts of a micro-batch, on a group of one device."""
    agrees = needs.equal_rows or needs.group_max
    if not agrees or config.graph_safe or config.row_counts_policy not in ("agree", "check"):
        return 0
    integers = _AGREED_INTEGERS
    if needs.counts_with_sizes and not config.plans_placements:  # those of each rank, and sums of counts
        integers = _AGREED_INTEGERS * shape.ep_size + 1 + shape.num_experts
    return 2 * 8 * integers * (shape.ep_size - 1) // shape.ep_size


def _buffers(found: Dispatches, options: BackendOptions, needs: Constraints, rows: int) -> dict[str, dict[str, float]]:
    """Return bytes by purpose: the buffers of graph-safe mode, or the rows of the experts in eager mode."""
    shape, dtype = found.shape, found.dtypes[0]
    if shape.graph_safe:
        assert shape.max_tokens_per_rank is not None
        sizes = dataclasses.replace(needs.sizes(shape.max_tokens_per_rank), capacity=options.capacity(shape))
        buffers = options.footprint(shape, sizes, rows, dtype)
        return {purpose: dict.fromkeys(("expected", "low", "high"), size) for purpose, size in buffers.items()}
    rows_CP = found.loads.received_CP + found.loads.expert_padding_CP(shape.pad_multiple)
    return {"rows": figure(rows_CP * (shape.hidden_size * dtype.itemsize))}


def capacity_plans(found: Dispatches) -> list[dict[str, Any]]:
    """Plan capacity factors of graph-safe mode, among them that of the config; none if dispatches plan placements.

    Returns:
        For each factor: the rows of a rank, the rows and bytes of the buffer, which has room for expert padding, the
        share of dispatches that overflow, the share of rows that are dropped, and ``pair_rows`` of ``alltoall`` for the
        same factor with its share of dispatches.
    """
    if found.config.plans_placements:
        return []
    own, plans = found.shape.capacity_factor, []
    listed: list[CapacityFactor] = [*sorted({*_FACTORS, *([] if own == "worst" else [own])}), "worst"]
    received_CP, most_pair_C = found.loads.received_CP, found.loads.pairs_CPP.amax((1, 2))
    for factor in listed:
        shape = dataclasses.replace(found.capacity_shape, capacity_factor=factor)
        capacity = capacity_of(shape)
        pair_rows = capacity_of(dataclasses.replace(shape, capacity_factor="worst"), pair_factor=factor).pair_rows
        dropped_C = (received_CP - capacity.rows).clamp(min=0).sum(1)
        plans.append(
            {
                "factor": factor,
                "rows": capacity.rows,
                "buffer_rows": capacity.buffer_rows,
                "buffer_bytes": capacity.buffer_rows * shape.hidden_size * found.dtypes[0].itemsize,
                "overflow": float((dropped_C > 0).double().mean()),
                "dropped": int(dropped_C.sum()) / max(int(received_CP.sum()), 1),
                "pair_rows": pair_rows,
                "pair_overflow": float((most_pair_C > (pair_rows or 0)).double().mean()),
            }
        )
    return plans
