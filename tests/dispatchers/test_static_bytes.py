"""What graph-safe ``alltoall`` really sends: ``pair_rows`` rows to each rank, whatever the routing, and no counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.permutation import round_up
from moe_dispatch_testing import Collective, allow_host_syncs, count_collectives
from moe_dispatch_testing.scenario import ROUTINGS
from tests.dispatchers.dropping import safe_config
from tests.dispatchers.layer import NUM_EXPERTS, TOP_K, Group, on_ranks, random_rows

SIZE, TOKENS, HIDDEN = 4, 8, 128
KINDS = ["balanced", "skewed", "last_expert", "duplicates", "nowhere", "partly_nowhere"]


def step(kind: str, dtype: torch.dtype, **fields: Any) -> Callable[[Group], list[Collective]]:
    """Dispatch, combine and their backwards; the collectives of a rank, in order."""
    config = safe_config("alltoall", size=SIZE, hidden_size=HIDDEN, **fields)

    def body(group: Group) -> list[Collective]:
        with allow_host_syncs():
            dispatcher = build_dispatcher(config, group)
            tokens = TOKENS - 2 * group.rank()
            generator = torch.Generator().manual_seed(group.rank())
            ids = ROUTINGS[kind](tokens, TOP_K, NUM_EXPERTS, generator)
            weights = torch.rand(tokens, TOP_K, generator=generator).requires_grad_()
            x = random_rows(tokens, HIDDEN, dtype=dtype).requires_grad_()
        with count_collectives() as seen:
            sent = dispatcher.dispatch(x, Routing(ids, weights))
            dispatcher.combine(sent.rows, sent).sum().backward()
        return seen.calls

    return body


# dtype, wire; bytes of a row there and back
WIRES: list[tuple[torch.dtype, str | None, int, int]] = [
    (torch.float32, None, 4 * HIDDEN, 4 * HIDDEN),
    (torch.bfloat16, None, 2 * HIDDEN, 2 * HIDDEN),
    (torch.float32, "bfloat16", 2 * HIDDEN, 2 * HIDDEN),
    (torch.bfloat16, "float8_e4m3fn", HIDDEN + 4, 2 * HIDDEN),
]


# The width of a row does not depend on where rows go: each kind with one wire, and each wire with one kind.
@pytest.mark.parametrize(
    ("dtype", "wire", "row", "row_back", "kind", "pair_rows"),
    [
        *((*WIRES[0], kind, pair_rows) for kind, pair_rows in zip(KINDS, [1, 3, None, 3, 1, None], strict=True)),
        *((*wire, "skewed", pair_rows) for wire, pair_rows in zip(WIRES[1:], [3, 1, 3], strict=True)),
    ],
)
def test_bytes_are_those_of_the_pairs(
    dtype: torch.dtype, wire: str | None, row: int, row_back: int, kind: str, pair_rows: int | None
) -> None:
    others = (SIZE - 1) * (pair_rows or TOKENS)
    slots = TOP_K * (4 + 2)  # a float32 weight and an int16 id
    packet = round_up(row + slots + 4, 4)  # and how many slots were wanted
    packet_back = round_up(row_back + TOP_K * 4, 4)
    wanted = [others * nbytes for nbytes in (packet, row_back, row_back, packet_back)]
    for calls in on_ranks(step(kind, dtype, wire_dtype=wire, pair_rows=pair_rows), SIZE):
        assert [call.op for call in calls] == ["alltoall_base"] * 4
        assert [call.nbytes for call in calls] == wanted
