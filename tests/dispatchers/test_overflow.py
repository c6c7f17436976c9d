"""At capacity, one above and far above: what is dropped, in both directions, and who hears of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import CapacityError
from tests.dispatchers.dropping import Load, collected, expect_same, expected, load, run_layer, safe_config
from tests.dispatchers.layer import NUM_EXPERTS, TOP_K, Group, expert_weights, on_ranks, raises_everywhere, random_rows

WEIGHTS = expert_weights(dtype=torch.float64)
TOKENS = {1: (8,), 4: (8, 5, 0, 3), 8: (8, 1, 0, 6, 8, 2, 0, 3)}
HOW_FAR = {"at": lambda needed: needed, "one above": lambda needed: needed - 1, "far above": lambda needed: needed // 3}


def room(demand: tuple[int, int], bound: str, how_far: str) -> dict[str, int]:
    rows, pair_rows = (max(HOW_FAR[how_far](needed), 1) for needed in demand)
    return {**({} if bound == "pair" else {"rows": rows}), **({} if bound == "rows" else {"pair_rows": pair_rows})}


def kept_counts(mine: Load, kept: set[Any]) -> list[int]:
    return [sum(slot[2] == expert for slot in kept) for expert in range(8)]


def run_all(config: DispatcherConfig, mine: Load) -> list[Any]:
    """What each rank came to, and what it was told at the end."""

    def body(group: Group) -> tuple[Any, Any]:
        dispatcher = build_dispatcher(config, group)
        result = run_layer(dispatcher, mine, WEIGHTS, group)
        try:
            return result, dispatcher.check()
        except CapacityError as error:
            return result, error

    return on_ranks(body, mine.size)


def run_dropping(backend: str, mine: Load, room: dict[str, int], **fields: Any) -> None:
    """Dispatch with so much room, and hold everything against the reference."""
    results = run_all(safe_config(backend, size=mine.size, **room, **fields), mine)
    rows, pair_rows = mine.demand()
    kept = mine.kept(room.get("rows", rows), room.get("pair_rows"))
    assert torch.cat([result[4] for result, _ in results]).tolist() == kept_counts(mine, kept)
    expect_same(collected([result for result, _ in results]), expected(mine, kept, WEIGHTS))
    for _, needed in results:
        assert (needed.rows, needed.overflowed) == (rows, len(kept) < len(mine.slots()))
        assert needed.pair_rows == (pair_rows if backend == "alltoall" else 0)


# A backend, the ranks, which of its two bounds are finite, how much is missing, and what is routed.
DROPS = [
    ("local", 1, "rows", "at", "skewed"),
    ("local", 1, "rows", "one above", "ties"),
    ("local", 1, "rows", "far above", "holes"),
    ("alltoall", 1, "both", "one above", "signs"),
    ("allgather", 4, "rows", "at", "holes"),
    ("allgather", 4, "rows", "one above", "close"),
    ("allgather", 4, "rows", "far above", "skewed"),
    ("alltoall", 4, "rows", "far above", "skewed"),
    ("alltoall", 4, "pair", "at", "skewed"),
    ("alltoall", 4, "pair", "one above", "ties"),
    ("alltoall", 4, "pair", "far above", "holes"),
    ("alltoall", 4, "both", "one above", "skewed"),
    ("alltoall", 4, "both", "one above", "signs"),
    ("alltoall", 4, "both", "far above", "holes"),
    ("alltoall", 8, "both", "far above", "skewed"),
]


@pytest.mark.parametrize(("backend", "size", "bound", "how_far", "kind"), DROPS)
def test_the_lightest_are_dropped(backend: str, size: int, bound: str, how_far: str, kind: str) -> None:
    mine = load(TOKENS[size], kind)
    run_dropping(backend, mine, room(mine.demand(), bound, how_far), pad_multiple=4 if kind == "holes" else 1)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float8_e4m3fn"])
def test_who_is_dropped_does_not_depend_on_the_wire(wire_dtype: str) -> None:
    """Weights travel whole, whatever rows travel in."""
    mine, hidden = load(TOKENS[4]), 128
    config = safe_config("alltoall", size=4, rows=9, pair_rows=4, wire_dtype=wire_dtype, hidden_size=hidden)

    def body(group: Group) -> Tensor:
        rank = group.rank()
        dispatcher = build_dispatcher(config, group)
        sent = dispatcher.dispatch(random_rows(TOKENS[4][rank], hidden), Routing(mine.ids[rank], mine.weights[rank]))
        dispatcher.close()
        return sent.real_tokens_per_expert

    assert torch.cat(on_ranks(body, 4)).tolist() == kept_counts(mine, mine.kept(9, 4))


@pytest.mark.parametrize(
    ("backend", "size", "bound", "how_far"),
    [
        ("local", 1, "rows", "one above"),
        ("allgather", 4, "rows", "one above"),
        ("alltoall", 4, "pair", "one above"),
        ("alltoall", 4, "both", "at"),
        ("alltoall", 4, "both", "far above"),
    ],
)
def test_raise_is_heard_on_all_ranks_alike(backend: str, size: int, bound: str, how_far: str) -> None:
    """``load`` overflows the first ranks only, and on allgather and alltoall the others must hear of it."""
    mine = load(TOKENS[size])
    fits = room(mine.demand(), bound, how_far)
    told = [told for _, told in run_all(safe_config(backend, size=size, on_overflow="raise", **fits), mine)]
    if how_far == "at":
        assert [required.overflowed for required in told] == [False] * size
        return
    rows, pair_rows = mine.demand()
    let_through = size * fits.get("pair_rows", 8) * min(TOP_K, NUM_EXPERTS // size)
    texts = [f"at most {min(fits['rows'], let_through)} rows"] if "rows" in fits else []
    texts += [f"and {fits['pair_rows']} rows to each rank", f" and {pair_rows} (pair_rows "] if bound != "rows" else []
    raises_everywhere(told, CapacityError, f"got {rows} (capacity_factor ", *texts, "Results since then lack rows.")
    assert len(set(map(str, told))) == 1


def test_one_rank_overflows_alone() -> None:
    """Only rank 2 has tokens, all for the experts of rank 3."""
    nothing = torch.empty(0, 2, dtype=torch.int64)
    ids, weights = torch.tensor([[6, 7]] * 8), torch.arange(16).view(8, 2) / 64
    mine = Load((nothing, nothing, ids, nothing), (nothing.float(), nothing.float(), weights, nothing.float()))
    assert mine.demand() == (16, 8)
    for backend in ("allgather", "alltoall"):
        run_dropping(backend, mine, {"rows": 5})
    run_dropping("alltoall", mine, {"pair_rows": 3})


def test_equal_weights_are_dropped_from_the_end() -> None:
    """So many that a sort which is not stable would show."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]]).repeat(50, 1)
    mine = Load((ids, ids), (torch.full((150, 2), 0.5),) * 2)
    assert mine.kept(350) == set(list(mine.slots())[:350])
    assert mine.kept(600, 100) == {slot for slot in mine.slots() if slot[1] < 100}
    for backend in ("allgather", "alltoall"):
        run_dropping(backend, mine, {"rows": 350}, max_tokens_per_rank=150)
    run_dropping("alltoall", mine, {"pair_rows": 100}, max_tokens_per_rank=150)


def test_a_weight_that_is_no_number_is_seen_rather_than_dropped() -> None:
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.5, 0.75], [float("nan"), 0.25]])
    y = run_layer(build_dispatcher(safe_config("local", rows=1)), Load((ids,), (weights,)), WEIGHTS, None)[0]
    assert y[1].isnan().all()
    assert not y[0].any()
