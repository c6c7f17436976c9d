"""ExpertPlacement: its constructors, its file, and placements that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.errors import ConfigError

COPIES = ExpertPlacement(4, ((0, 1, 2), (2, 3, -1)))


def test_numbers() -> None:
    assert (COPIES.num_ranks, COPIES.slots_per_rank, COPIES.num_slots) == (2, 3, 6)
    assert COPIES.slots_of_expert == ((0,), (1,), (2, 3), (4,))
    assert ExpertPlacement.contiguous(4, 2, spare=1).slots == ((0, 1, -1), (2, 3, -1))
    assert ExpertPlacement.contiguous(3, 1).slots == ((0, 1, 2),)


def test_flat_slots() -> None:
    flat = [0, 1, 2, 2, 3, -1]
    for experts in (flat, tuple(flat), torch.tensor(flat)):
        assert ExpertPlacement.from_slots(experts, num_experts=4, num_ranks=2) == COPIES


def test_lists_become_tuples() -> None:
    """A placement is a key of dictionaries, and nobody changes it later."""
    lists: Any = [[0, 1, 2], [2, 3, -1]]
    placement = ExpertPlacement(4, lists)
    lists[0][0] = 3
    assert placement == COPIES
    assert hash(placement) == hash(COPIES)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    COPIES.save(path)
    assert ExpertPlacement.load(path) == COPIES
    assert json.loads(path.read_text()) == {
        "moe_dispatch_placement": 1,
        "num_experts": 4,
        "slots": [[0, 1, 2], [2, 3, -1]],
    }


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ExpertPlacement(4, ((0, 1), (2, -1))), r"every expert must have a slot, got none for 3 of 4 experts"),
        (lambda: ExpertPlacement(24, (range(12), (*range(1, 12), -1))), r"for 12, 13, .*, 19 and 4 more of 24 experts"),  # type: ignore[arg-type]
        (lambda: ExpertPlacement(3, ((0, 1, 1), (2, -1, -1))), r"once, got expert 1 in slots 1 and 2 of rank"),
        (lambda: ExpertPlacement(5, ((0, 1), (2, 3))), r"lie in 1\.\.4, the number of slots \(2 ranks x 2\), got 5"),
        (lambda: ExpertPlacement(0, ((-1,),)), r"num_experts must lie in 1\.\.1.*got 0"),
        (lambda: ExpertPlacement(4, ((0, 1, 2), (3,))), r"same number of slots, got 3 on rank 0 and 1 on rank 1"),
        (lambda: ExpertPlacement(2, ((0, 1), (2, -1))), r"ids in -1\.\.1, got 2 in slot 0 of rank 1"),
        (lambda: ExpertPlacement(2, ((0, 1), (-2, -1))), r"ids in -1\.\.1, got -2 in slot 0 of rank 1"),
        (lambda: ExpertPlacement(2, ()), r"at least one rank with one slot, got \(\)"),
        (lambda: ExpertPlacement(2, ((), ())), r"at least one rank with one slot, got \(\(\), \(\)\)"),
        (lambda: ExpertPlacement(2, (0, 1)), r"slots must be a list of ids for each rank, got \(0, 1\)"),  # type: ignore[arg-type]
        (lambda: ExpertPlacement(2, (("a",),)), r"slots must be a list of ids for each rank"),  # type: ignore[arg-type]
        (lambda: ExpertPlacement(2, ((0, float("inf")),)), r"a list of ids for each rank, got \(\(0, inf\),\)"),  # type: ignore[arg-type]
        (lambda: ExpertPlacement(2, ((0, 1.5),)), r"a list of ids for each rank, got \(\(0, 1.5\),\)"),  # type: ignore[arg-type]
        (lambda: ExpertPlacement(10**5000, ((0,),)), r"lie in 1\.\.1, .* got an integer of thousands"),
        (
            lambda: ExpertPlacement(1, ((10**5000,),)),
            r"ids in -1\.\.0, got an integer of thousands of digits in slot 0",
        ),
        (lambda: ExpertPlacement.contiguous(6, 4), r"num_experts \(6\) must be divisible by num_ranks \(4\)"),
        (lambda: ExpertPlacement.contiguous(4, 2, spare=-1), r"spare must be at least 0, got -1"),
        (
            lambda: ExpertPlacement.from_slots([0, 1, 2], num_experts=3, num_ranks=2),
            r"the number of slots \(3\) must be divisible by num_ranks \(2\)",
        ),
    ],
)
def test_placements_that_cannot_work_are_refused(make: Callable[[], ExpertPlacement], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"p\.json: the file must be JSON"),
        ("[1]", r"p\.json: .* must hold .* with moe_dispatch_placement 1, got list"),
        ('{"num_experts": 2}', r"got \['num_experts'\]"),
        (
            '{"moe_dispatch_placement": 2, "num_experts": 1, "slots": [[0]]}',
            r"must have format 1, got format 2, of a ne",
        ),
        ('{"moe_dispatch_placement": 1, "num_experts": "1", "slots": [[0]]}', r"must be an integer, got '1'"),
        ('{"moe_dispatch_placement": 1, "num_experts": 2, "slots": [[0]]}', r"p\.json: ExpertPlacement: num_experts"),
        ("[" * 100_000 + "]" * 100_000, r"the file must be JSON, got .*recursion"),
        ("1" * 5000, r"the file must be JSON, got .*digits"),
        (None, r"cannot read .*p\.json: No such file"),
    ],
    ids=range(9),
)
def test_files_that_are_no_placements_are_refused(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        ExpertPlacement.load(path)
    with pytest.raises(ConfigError, match="cannot write"):
        COPIES.save(tmp_path / "missing" / "p.json")
