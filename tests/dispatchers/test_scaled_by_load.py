"""What two pages say: of experts that scale by their load, and of sums that float16 cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, Routing, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, Group, local_part, on_ranks, random_rows, small_config

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "chunks": {"chunks": 3},
    "copies": {"balance": {"name": "exact", "min_rows": 0}},
    "graph-safe": {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": 12},
}


def _load(everyone: list[Tensor]) -> Tensor:
    return torch.bincount(torch.cat(everyone).flatten(), minlength=NUM_EXPERTS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_weights_scale_by_the_load_of_the_whole_batch(backend: str, way: str) -> None:
    """Counts of a dispatch would scale otherwise in chunks, and with copies of the busy expert."""
    matrices = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = [torch.stack([torch.zeros(12, dtype=torch.int64), 1 + torch.arange(12) % 6], 1) + rank for rank in range(2)]
    load = _load(ids).clamp(min=1).sqrt()

    def body(group: Group) -> list[int]:
        rank, seen = group.rank(), list[int]()
        x, weights, own = random_rows(12, seed=rank), torch.rand(12, 2), local_part(matrices, group)
        dispatcher = build_dispatcher(small_config(backend, **WAYS[way]), group)

        def run(sent: Dispatched, matrices_LDD: Tensor = own) -> Tensor:
            seen.append(int(sent.real_tokens_per_expert.max()))
            return sent.grouped_mm(sent.rows, matrices_LDD)

        routing = Routing(ids[rank], weights / load[ids[rank]])
        if way == "chunks":
            y = run_in_chunks(dispatcher, run, x, routing)
        elif "balance" in WAYS[way]:
            landed, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), run, own)
            y = dispatcher.combine(outputs, landed)
        else:
            sent = dispatcher.dispatch(x, routing)
            y = dispatcher.combine(run(sent), sent)
        wanted = torch.einsum("td,tkdh,tk->th", x, matrices[ids[rank]], weights / load[ids[rank]])
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        return seen

    most = max(map(max, on_ranks(body, 2)))
    assert (most == int(_load(ids).max())) == (way == "eager"), "elsewhere experts see counts of a chunk or a slot"


@pytest.mark.parametrize(
    ("backend", "fields", "fits"),
    [
        ("alltoall", {}, False),
        ("alltoall", {"wire": "bfloat16"}, True),
        ({"name": "alltoall", "reduction": "exact"}, {}, True),
        ("allgather", {}, True),
    ],
    ids=str,
)
def test_a_partial_sum_that_float16_cannot_hold(backend: Any, fields: dict[str, Any], fits: bool) -> None:
    """Rank 0's experts add up to 80,000, and those of rank 1 to -32,000; the total is 48,000."""

    def body(group: Group) -> Tensor:
        dispatcher = build_dispatcher(small_config(backend, top_k=4, **fields), group)
        routing = Routing(torch.tensor([[0, 1, 4, 5]]), torch.tensor([[1.0, 1.0, -0.4, -0.4]]))
        sent = dispatcher.dispatch(torch.full((1, HIDDEN), 40_000.0, dtype=torch.float16), routing)
        return dispatcher.combine(sent.rows, sent)

    for y in on_ranks(body, 2):
        assert torch.isinf(y).all() != fits
        if fits:
            torch.testing.assert_close(y.float(), torch.full((1, HIDDEN), 48_000.0), rtol=1e-2, atol=0)
