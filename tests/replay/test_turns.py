"""Rollouts of several turns: tables against an engine whose route of a position follows from the tokens up to it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import THD
from moe_dispatch.errors import InputError
from moe_dispatch.replay import RoutingTable, Turn

LAYERS, TOP_K, EXPERTS = 2, 3, 16


def route(tokens: list[int]) -> list[list[int]]:
    """What the router of a causal model chooses for the last of these tokens, in each layer."""
    drawn = random.Random(hashlib.sha256(bytes(tokens)).digest())
    return [drawn.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]


def routes(tokens: list[int], start: int = 0, end: int | None = None) -> Tensor:
    """Routes of the positions from ``start`` to ``end``, by default to the last but one."""
    end = len(tokens) - 1 if end is None else end
    found = [route(tokens[: position + 1]) for position in range(start, end)]
    return torch.tensor(found, dtype=torch.int64).view(-1, LAYERS, TOP_K)


def check(table: RoutingTable, name: str, tokens: list[int], known: set[int]) -> None:
    """Compare the entries of a sequence with the engine's, position by position."""
    assert table.lengths[name] == len(tokens)
    for position, found in enumerate(table.entries(name).tolist()):
        expected = route(tokens[: position + 1]) if position in known else [[-2] * TOP_K] * LAYERS
        assert found == expected, position


def as_sglang(tokens: list[int], computed: int) -> Turn:
    """All routes of the request, in each turn."""
    return Turn(tokens, routes(tokens))


def as_sglang_from(tokens: list[int], computed: int) -> Turn:
    """With ``routed_experts_start_len``, as slime and miles set it: the routes that no turn has had."""
    return Turn(tokens, routes(tokens, computed).numpy().astype("int32"), start=computed)


def as_strands(tokens: list[int], computed: int) -> Turn:
    """From the last token of the turn before."""
    start = max(0, computed - 1)
    return Turn(tokens, routes(tokens, start), start=start)


def as_vllm(tokens: list[int], computed: int) -> Turn:
    """Routes of the prompt and of the response."""
    prompt = (computed + len(tokens)) // 2
    return Turn(tokens, (routes(tokens, 0, prompt), routes(tokens, prompt)))


def as_vllm_without_prefix(tokens: list[int], computed: int) -> Turn:
    """Without the blocks of four tokens that were cached."""
    cached = computed // 4 * 4
    return Turn(tokens, routes(tokens, cached), start=cached)


def with_holes(tokens: list[int], computed: int) -> Turn:
    """-1 where the engine took the cache of another machine."""
    ids = routes(tokens)
    ids[:computed] = -1
    return Turn(tokens, ids)


ENGINES: list[Callable[[list[int], int], Turn]] = [
    as_sglang,
    as_sglang_from,
    as_strands,
    as_vllm,
    as_vllm_without_prefix,
    with_holes,
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(4))
def test_turns_of_an_engine_are_joined(engine: Callable[[list[int], int], Turn], seed: int) -> None:
    drawn = random.Random(seed)
    turns, tokens, computed = [], list[int](), 0
    for _ in range(4):
        tokens = tokens + [drawn.randrange(250) for _ in range(drawn.randrange(2, 7))]  # of the user or a tool
        tokens = tokens + [drawn.randrange(250) for _ in range(drawn.randrange(1, 5))]  # generated
        turns.append(engine(tokens, computed))
        computed = len(tokens) - 1
    whole = [*tokens, 7, 8]  # a tool answered, and nothing was generated afterwards
    cut = tokens[: len(tokens) - 3]  # the trainer's limit of length
    sequences = {"whole": (whole, turns), "cut": (torch.tensor(cut), turns), "failed": (tokens, [])}
    table = RoutingTable.from_turns(sequences, num_experts=EXPERTS)
    check(table, "whole", whole, set(range(len(tokens) - 1)))
    check(table, "cut", cut, set(range(len(cut))))  # the route of its last token is known
    check(table, "failed", tokens, set())
    ids = table.cut(THD([0, len(whole)]), ["whole"]).routing_for(1)
    assert ids[-3:].tolist() == [[-2] * TOP_K] * 3  # which the router chooses


@pytest.mark.parametrize("engine", ENGINES)
def test_branches_know_what_they_share(engine: Callable[[list[int], int], Turn]) -> None:
    """A chat template leaves the reasoning of an earlier turn out, so the second turn is a branch."""
    first = [1, 2, 3, 90, 91, 4, 5]
    second = [1, 2, 3, 4, 5, 6, 60, 61]
    third = [*second, 9, 90]
    turns = [engine(first, 0), engine(second, 3), engine(third, 7)]
    table = RoutingTable.from_turns({"a": (first, turns[:1]), "b": (third, turns)}, num_experts=EXPERTS)
    check(table, "a", first, set(range(6)))
    check(table, "b", third, set(range(9)))
    # A start beyond what the branch shares leaves a gap.
    late = Turn(second, routes(second, 6), start=6)
    table = RoutingTable.from_turns({"b": (second, [turns[0], late])}, num_experts=EXPERTS)
    check(table, "b", second, {0, 1, 2, 6})


def test_a_shift_by_one_token_that_fits_by_chance_is_refused() -> None:
    """The rows of both turns fill the sequence exactly, and all but two would belong to the token before."""
    first, second = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]
    padded = torch.cat([routes(first), routes(first)[:1]])  # NeMo-RL fills the route of the last token up
    parts = padded, routes(second, 4)
    assert sum(map(len, parts)) == len(second) - 1
    with pytest.raises(InputError, match=r"from start \(0\) to the last but one \(2\), 3 in all, got 4 in turn 0 of"):
        RoutingTable.from_turns({"a": (second, [Turn(first, parts[0]), Turn(second, parts[1], 4)])}, num_experts=16)
    # The request began with a token that the trainer left out.
    shifted = Turn([0, *second], routes([0, *second], 1), start=1)
    with pytest.raises(InputError, match=r"share its tokens up to start \(1\) .* got 0 tokens that turn 0 of sequence"):
        RoutingTable.from_turns({"a": (second, [shifted])}, num_experts=EXPERTS)
    # The engine ignores the start that it was asked for, and returns all routes.
    turns = [Turn(first, routes(first)), Turn(second, routes(second), 3)]
    with pytest.raises(InputError, match=r"from start \(3\) to the last but one \(5\), 3 in all, got 6 in turn 1 of"):
        RoutingTable.from_turns({"a": (second, turns)}, num_experts=EXPERTS)


def test_overlaps_must_agree_but_for_the_order_of_slots() -> None:
    first, second = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]
    again = routes(second)
    table = RoutingTable.from_turns(
        {"a": (second, [Turn(first, routes(first)), Turn(second, again.flip(2))])}, num_experts=EXPERTS
    )
    assert torch.equal(table.entries("a")[:5].sort(2).values, again.sort(2).values)
    again[2, 1, 0] = next(expert for expert in range(EXPERTS) if expert not in again[2, 1])
    turns = [Turn(first, routes(first)), Turn(second, again)]
    with pytest.raises(
        InputError, match=r"overlap, their routes must agree.*of turn 1 of sequence 'a' at position 2, in layer 1 of"
    ):
        RoutingTable.from_turns({"a": (second, turns)}, num_experts=EXPERTS)
    turns[1] = Turn(second, again[3:], start=3)  # the way that the message names
    check(RoutingTable.from_turns({"a": (second, turns)}, num_experts=EXPERTS), "a", second, set(range(5)))


TOKENS = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sequences", "told"),
    [
        ({"a": (TOKENS, [])}, "at least one sequence must have a turn"),
        ({"a": ([[1, 2]], [Turn(TOKENS, routes(TOKENS))])}, r"tokens must be integers \(n,\), .* in sequence 'a'"),
        ({"a": (TOKENS, [Turn([1.0, 2.0], routes([1, 2]))])}, r"float32 \(2,\) in turn 0 of sequence 'a'"),
        ({"a": ([], [Turn(TOKENS, routes(TOKENS))])}, "one at least"),
        ({"a": (TOKENS, [Turn(TOKENS, routes(TOKENS), -1)])}, r"from start \(-1\)"),
        ({"a": (TOKENS, [Turn(TOKENS, routes(TOKENS)[:, 0])])}, r"got torch.int64 \(3, 3\) for turn 0 of sequence 'a'"),
        (
            {"a": (TOKENS, [Turn(TOKENS, routes(TOKENS)), Turn(TOKENS, routes(TOKENS)[:, :1])])},
            r"same layers and top_k, got \(2, 3\) in turn 0 of sequence 'a' and \(1, 3\) in turn 1",
        ),
        ({"a": (TOKENS, [Turn(TOKENS, routes(TOKENS) + 16)])}, r"ids must lie in -1..15"),
        ({"a": (TOKENS, [Turn(TOKENS, torch.zeros(3, 2, 3, dtype=torch.uint8))])}, "must name different experts"),
    ],
)
def test_refused(sequences: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        RoutingTable.from_turns(sequences, num_experts=EXPERTS)
