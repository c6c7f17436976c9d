"""What tests of plans share: routings that leave nothing out, a run of them, and a plan of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.dispatchers import Metrics
from moe_dispatch_testing import Ranks, allow_host_syncs, count_collectives
from moe_dispatch_testing.scenario import ROUTINGS
from moe_dispatch_tools.names import parse_backend
from moe_dispatch_tools.plan.forecast import forecast
from moe_dispatch_tools.plan.models import Model
from moe_dispatch_tools.plan.routing import RoutingSource, recorded_routing

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 4, 128, 24
RANKS = Ranks()
# What a plan tells of, of all that is counted.
LABELS = ("counts", "dispatch", "combine", "combine.backward", "dispatch.backward", "balance")


def config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, **fields})


def mixed_ids(size: int, seed: int = 0) -> list[Tensor]:
    """Of each rank: another number of rows, skewed, with slots that go nowhere and experts named twice."""
    found = []
    for rank in range(size):
        kind = ("skewed", "partly_nowhere", "duplicates", "uniform")[rank % 4]
        generator = torch.Generator().manual_seed(100 * seed + rank)
        found.append(ROUTINGS[kind](TOKENS - 2 * rank, TOP_K, EXPERTS, generator))
    return found


def run(
    given: DispatcherConfig, ids: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16
) -> list[tuple[Metrics, int]]:
    """One dispatch, combine and their backwards: each rank's metrics, and the bytes of its collectives as seen."""

    def body(group: dist.ProcessGroup) -> tuple[Metrics, int]:
        mine = ids[group.rank()]
        with allow_host_syncs():
            dispatcher = build_dispatcher(given, group)
            x = torch.randn(len(mine), given.hidden_size).to(dtype).requires_grad_()
            weights = torch.rand(mine.shape).requires_grad_()
        with count_collectives() as seen:
            sent = dispatcher.dispatch(x, Routing(mine, weights))
            dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics(), seen.nbytes

    return RANKS.run(body, len(ids))


def plan_of(
    given: DispatcherConfig,
    size: int,
    source: RoutingSource,
    backend: str,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Any:
    """Plan backends. Other names are of ``forecast`` and of its model."""
    return forecast(
        Model(name="test", config=given.replace(backend="auto"), layers=more.pop("layers", 1), dtype=dtype),
        source,
        ep_size=size,
        nodes=more.pop("nodes", 1),
        backends=[parse_backend(name) for name in backend.split(",")],
        **more,
    )


def recorded(*dispatches: Sequence[Tensor]) -> RoutingSource:
    return recorded_routing(dispatches, "a test")
