"""Many random routings: every overflow is reported, and none where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher
from tests.dispatchers.dropping import safe_config
from tests.dispatchers.layer import NUM_EXPERTS, Group, on_ranks, random_rows

T = 4


def routings(count: int, seed: int) -> Tensor:
    """(count, T, 2) ids with -1 and duplicates among them."""
    return torch.randint(-2, NUM_EXPERTS, (count, T, 2), generator=torch.Generator().manual_seed(seed)).clamp(min=-1)


def slots_of(ids: Tensor, size: int) -> Tensor:
    """(count, T, P): the experts of each rank that each row names, each once."""
    named = torch.zeros(*ids.shape[:2], NUM_EXPERTS + 1, dtype=torch.int64).scatter_(2, ids + 1, 1)[..., 1:]
    return named.view(*ids.shape[:2], size, -1).sum(3)


def reports(
    size: int, backend: str, ids: Tensor, room: tuple[int, int | None], group: Group
) -> list[tuple[int, int, bool]]:
    """What is required after each routing, each by itself."""
    dispatcher = build_dispatcher(safe_config(backend, size=size, rows=room[0], pair_rows=room[1]), group)
    channel, found = dispatcher._channel, []
    x, weights = random_rows(T), torch.rand(T, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for of_call in ids:
            channel.meter._needs.clear()
            sent = dispatcher.dispatch(x, Routing(of_call, weights))
            required = dispatcher.required_capacity()
            assert int(sent.real_tokens_per_expert.sum()) <= min(required.rows, room[0])
            found.append((required.rows, required.pair_rows, required.overflowed))
    return found


@pytest.mark.slow
def test_on_one_rank() -> None:
    ids, room = routings(1_500, 0), 6
    needed = slots_of(ids, 1).sum((1, 2)).tolist()
    found = reports(1, "local", ids, (room, None), None)
    assert found == [(count, 0, count > room) for count in needed]
    assert 300 < sum(overflowed for *_, overflowed in found) < 1_200


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "room"), [("allgather", (7, None)), ("alltoall", (7, None)), ("alltoall", (7, 3))])
def test_on_two_ranks(backend: str, room: tuple[int, int | None]) -> None:
    ids = [routings(150, seed) for seed in (1, 2)]
    slots = torch.stack([slots_of(of_rank, 2) for of_rank in ids])
    rows = slots.sum((0, 2)).amax(1).tolist()
    pairs = (slots > 0).sum(2).amax((0, 2)).tolist()
    limit = 1 << 30 if room[1] is None else room[1]
    if backend == "allgather":
        pairs = [0] * len(pairs)
    wanted = [(r, p, r > room[0] or p > limit) for r, p in zip(rows, pairs, strict=True)]

    def body(group: Group) -> list[tuple[int, int, bool]]:
        assert group is not None
        return reports(2, backend, ids[group.rank()], room, group)

    assert on_ranks(body, 2) == [wanted, wanted]
    assert 15 < sum(overflowed for *_, overflowed in wanted) < 135
