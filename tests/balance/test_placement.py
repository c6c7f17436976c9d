"""ExpertPlacement: its constructors, its file, and placements that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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


def test_contiguous() -> None:
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


FILES = {
    "p0.json": "{",
    "p1.json": "[1]",
    "p2.json": '{"num_experts": 2}',
    "p3.json": '{"moe_dispatch_placement": 2, "num_experts": 1, "slots": [[0]]}',
    "p4.json": '{"moe_dispatch_placement": 1, "num_experts": "1", "slots": [[0]]}',
    "p5.json": '{"moe_dispatch_placement": 1, "num_experts": 2, "slots": [[0]]}',
    "deep.json": "[" * 100_000 + "]" * 100_000,
    "digits.json": "1" * 5000,
}


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        (ExpertPlacement, (4, ((0, 1), (2, -1))), r"every expert must have a slot, got none for 3 of 4 experts"),
        (ExpertPlacement, (24, (range(12), (*range(1, 12), -1))), r"for 12, 13, .*, 19 and 4 more of 24 experts"),
        (ExpertPlacement, (3, ((0, 1, 1), (2, -1, -1))), r"hold an expert once, got expert 1 in slots 1 and 2 of rank"),
        (ExpertPlacement, (5, ((0, 1), (2, 3))), r"lie in 1\.\.4, the number of slots \(2 ranks x 2\), got 5"),
        (ExpertPlacement, (0, ((-1,),)), r"num_experts must lie in 1\.\.1.*got 0"),
        (ExpertPlacement, (4, ((0, 1, 2), (3,))), r"same number of slots, got 3 on rank 0 and 1 on rank 1"),
        (ExpertPlacement, (2, ((0, 1), (2, -1))), r"ids in -1\.\.1, got 2 in slot 0 of rank 1"),
        (ExpertPlacement, (2, ((0, 1), (-2, -1))), r"ids in -1\.\.1, got -2 in slot 0 of rank 1"),
        (ExpertPlacement, (2, ()), r"at least one rank with one slot, got \(\)"),
        (ExpertPlacement, (2, ((), ())), r"at least one rank with one slot, got \(\(\), \(\)\)"),
        (ExpertPlacement, (2, (0, 1)), r"slots must be a list of ids for each rank, got \(0, 1\)"),
        (ExpertPlacement, (2, (("a",),)), r"slots must be a list of ids for each rank"),
        (ExpertPlacement, (2, ((0, float("inf")),)), r"slots must be a list of ids for each rank, got \(\(0, inf\),\)"),
        (ExpertPlacement, (2, ((0, 1.5),)), r"slots must be a list of ids for each rank, got \(\(0, 1.5\),\)"),
        (ExpertPlacement.contiguous, (6, 4), r"num_experts \(6\) must be divisible by num_ranks \(4\)"),
        (partial(ExpertPlacement.contiguous, spare=-1), (4, 2), r"spare must be at least 0, got -1"),
        (
            partial(ExpertPlacement.from_slots, num_experts=3, num_ranks=2),
            ([0, 1, 2],),
            r"the number of slots \(3\) must be divisible by num_ranks \(2\)",
        ),
        (ExpertPlacement.load, ("p0.json",), r"p0\.json: the file must be JSON"),
        (ExpertPlacement.load, ("p1.json",), r"p1\.json: .* must hold .* with moe_dispatch_placement 1, got list"),
        (ExpertPlacement.load, ("p2.json",), r"got \['num_experts'\]"),
        (ExpertPlacement.load, ("p3.json",), r"must have format 1, got format 2, of a newer moe-dispatch\. Upg"),
        (ExpertPlacement.load, ("p4.json",), r"must be an integer, got '1'"),
        (ExpertPlacement.load, ("p5.json",), r"p5\.json: ExpertPlacement: num_experts"),
        (ExpertPlacement.load, ("deep.json",), r"deep\.json: the file must be JSON, got .*recursion"),
        (ExpertPlacement.load, ("digits.json",), r"digits\.json: the file must be JSON, got .*digits"),
        (ExpertPlacement, (10**5000, ((0,),)), r"num_experts must lie in 1\.\.1, .* got an integer of thousands"),
        (ExpertPlacement, (1, ((10**5000,),)), r"ids in -1\.\.0, got an integer of thousands of digits in slot 0"),
        (ExpertPlacement.load, ("missing.json",), r"cannot read .*missing\.json: No such file"),
        (COPIES.save, ("missing/p.json",), r"cannot write"),
    ],
)
def test_placements_and_files_that_cannot_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], arguments: Any, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        call(*arguments)
