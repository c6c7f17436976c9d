"""What ``alltoall`` really sends: each row once to each other rank that needs it, and six bytes per slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch_testing import count_collectives
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config

EXPERTS, SLOTS, ROWS, SIZE = 16, 8, 50, 4


def _routing(rank: int) -> Routing:
    way = random_routing(ROWS, seed=rank, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::6, :3] = -1
    way.topk_ids[::7] = -1
    return way


def _pairs(source: int, to: int) -> int:
    """Rows of ``source`` that go to ``to``."""
    ids = _routing(source).topk_ids
    return int(((ids >= 0) & (ids // (EXPERTS // SIZE) == to)).any(1).sum())


# Of x and of the wire, hidden size; bytes of a row there and back, and of its gradient.
WIRES: list[tuple[torch.dtype, dict[str, Any], int, int, int, int]] = [
    (torch.float32, {}, 64, 4 * 64, 4 * 64, 4 * 64),
    (torch.bfloat16, {}, 64, 2 * 64, 2 * 64, 2 * 64),
    (torch.float32, {"wire_dtype": "bfloat16"}, 64, 2 * 64, 2 * 64, 2 * 64),
    (torch.bfloat16, {"wire_dtype": "float8_e4m3fn"}, 128, 128 + 4, 2 * 128, 2 * 128),
    (torch.bfloat16, {"wire_dtype": "mxfp8"}, 128, 128 + 4, 2 * 128, 2 * 128),
    (torch.bfloat16, {"wire_dtype": "mxfp8", "grad_wire_dtype": "mxfp8"}, 128, 128 + 4, 2 * 128, 128 + 4),
]


@pytest.mark.parametrize(("dtype", "fields", "hidden", "row", "row_back", "row_grad"), WIRES)
def test_bytes_are_those_of_distinct_pairs(
    dtype: torch.dtype, fields: dict[str, Any], hidden: int, row: int, row_back: int, row_grad: int
) -> None:
    """In order: counts, dispatch, combine, backwards of combine and dispatch. What stays on its rank costs nothing."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(
            small_config(hidden_size=hidden, num_experts=EXPERTS, top_k=SLOTS, **fields), group
        )
        way = _routing(group.rank())
        x, weights = random_rows(ROWS, hidden, dtype=dtype).requires_grad_(), way.topk_weights.requires_grad_()
        with count_collectives() as seen:
            sent = dispatcher.dispatch(x, Routing(way.topk_ids, weights))
            dispatcher.combine(sent.rows, sent).sum().backward()
        found = [call.nbytes for call in seen.calls]
        told = dispatcher.metrics().bytes_sent
        assert found[1:] == [told[name] for name in ("dispatch", "combine", "combine.backward", "dispatch.backward")]
        return found

    for rank, (counts, there, back, grad_back, grad_there) in enumerate(on_ranks(body, SIZE)):
        others = set(range(SIZE)) - {rank}
        pairs, arrived = sum(_pairs(rank, other) for other in others), sum(_pairs(other, rank) for other in others)
        assert counts == (SIZE - 1) * (1 + EXPERTS // SIZE) * 8
        assert there == pytest.approx(pairs * (row + 6 * SLOTS), rel=0.05)
        assert back == arrived * row_back
        assert grad_back == pairs * row_grad
        assert grad_there == pytest.approx(arrived * (row_back + 4 * SLOTS), rel=0.05)
