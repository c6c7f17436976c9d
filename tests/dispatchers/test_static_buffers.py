"""What users may do with a buffer of fixed size, and what ranks and groups must agree on around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends.base import Arrived
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.errors import StateError
from moe_dispatch_testing import run_ranks
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, TOP_K, small_config

TOKENS = 12


def config(backend: str, **fields: Any) -> DispatcherConfig:
    return small_config(backend, graph_safe=True, max_tokens_per_rank=TOKENS, **fields)


def inputs(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """As many rows as fit, so the last of them is real; a few slots go nowhere, so there is slack."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, NUM_EXPERTS, (TOKENS, TOP_K), generator=generator)
    ids[:3, 0] = -1
    return x, ids, torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()


def test_a_step_of_two_expert_parallel_groups_is_rerun_by_both() -> None:
    """Rank 0 overflows; rank 1, a group of its own, does not. Each step ends in an all-reduce of both."""

    def body(world: dist.ProcessGroup) -> tuple[list[float], float]:
        dispatcher = build_dispatcher(config("local", capacity_factor=0.5, on_overflow="raise"))
        x, ids, weights = inputs(0)
        ids = ids if world.rank() == 0 else torch.full_like(ids, -1)
        totals: list[float] = []

        def step() -> float:
            sent = dispatcher.dispatch(x.detach(), Routing(ids, weights.detach()))
            total = dispatcher.combine(sent.rows, sent).sum()
            world.allreduce([total]).wait()
            totals.append(float(total))
            return totals[-1]

        return totals, dispatcher.retry_on_overflow(step, group=world, headroom=1)

    first, second = run_ranks(body, 2)
    assert first == second
    totals, last = first
    assert len(totals) == 2
    assert totals[0] != totals[1] == last


def test_the_largest_headroom_counts() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        dispatcher = build_dispatcher(config("alltoall", capacity_factor=0.25, on_overflow="drop"), group)
        x, ids, weights = inputs(group.rank())
        dispatcher.dispatch(x, Routing(ids, weights))
        dispatcher.grow(headroom=1 + group.rank())
        return dispatcher.plan(like=x).sizes.capacity

    first, second = run_ranks(body, 2)
    assert first == second
    assert first.rows > 0.25 * TOKENS * TOP_K


def test_the_first_call_is_refused_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated that would belong to the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match=r"run a call once before a CUDA graph captures it"):
        Meter(2).prepare(torch.device("cuda"))


def test_counters_stay_where_they_are() -> None:
    """A graph writes to the tensors that it was captured with."""
    meter, device = Meter(2), torch.device("cpu")
    meter.prepare(device)
    before = meter._counters[device]
    arrived = Arrived(
        rows=torch.empty(4, 1),
        weights=torch.empty(4),
        tokens_per_expert=torch.tensor([2, 2]),
        real_tokens_per_expert=torch.tensor([1, 2]),
        tokens_per_expert_list=None,
        route=None,  # type: ignore[arg-type]
        demand=torch.tensor([4, 1]),
    )
    valid_T = torch.tensor([True, False])
    departed: Any = SimpleNamespace(valid_T=valid_T, experts_L=None, placement=None, outcome=torch.tensor(2))
    meter.record(arrived, departed)
    assert [tensor.tolist() for tensor in before] == [[1, 2], [1, 0], 1, [4, 1, 2], [0], 0]
    assert (meter.tokens(), meter.masked, meter.needs()) == (([1, 2], 1), 1, [4, 1, 2])
    meter.forget_invalid_ids()
    assert before[3].tolist() == meter.needs() == [4, 1, 0]
