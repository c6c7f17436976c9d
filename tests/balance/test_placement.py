"""ExpertPlacement: its constructors, its file, and placements that cannot work."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("num_experts", "slots", "told"),
    [
        (4, ((0, 1), (2, -1)), r"every expert must have a slot, got none for 3 of 4 experts"),
        (24, (tuple(range(12)), (*range(1, 12), -1)), r"got none for 12, 13, .*, 19 and 4 more of 24 experts"),
        (3, ((0, 1, 1), (2, -1, -1)), r"a rank must hold an expert once, got expert 1 in slots 1 and 2 of rank 0"),
        (5, ((0, 1), (2, 3)), r"num_experts must lie in 1\.\.4, the number of slots \(2 ranks x 2\), got 5"),
        (0, ((-1,),), r"num_experts must lie in 1\.\.1.*got 0"),
        (4, ((0, 1, 2), (3,)), r"same number of slots, got 3 on rank 0 and 1 on rank 1"),
        (2, ((0, 1), (2, -1)), r"ids in -1\.\.1, got 2 in slot 0 of rank 1"),
        (2, ((0, 1), (-2, -1)), r"ids in -1\.\.1, got -2 in slot 0 of rank 1"),
        (2, (), r"at least one rank with one slot, got \(\)"),
        (2, ((), ()), r"at least one rank with one slot, got \(\(\), \(\)\)"),
        (2, (0, 1), r"slots must be a list of ids for each rank, got \(0, 1\)"),
        (2, (("a",),), r"slots must be a list of ids for each rank"),
    ],
)
def test_placements_that_cannot_work_are_refused(num_experts: int, slots: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ExpertPlacement(num_experts, slots)


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_experts \(6\) must be divisible by num_ranks \(4\)"):
        ExpertPlacement.contiguous(6, 4)
    with pytest.raises(ConfigError, match="spare must be at least 0, got -1"):
        ExpertPlacement.contiguous(4, 2, spare=-1)
    with pytest.raises(ConfigError, match=r"the number of slots \(3\) must be divisible by num_ranks \(2\)"):
        ExpertPlacement.from_slots([0, 1, 2], num_experts=3, num_ranks=2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"p\.json: the file must be JSON"),
        ("[1]", r"p\.json: the file must hold .* with moe_dispatch_placement 1, got list"),
        ('{"num_experts": 2}', r"got \['num_experts'\]"),
        ('{"moe_dispatch_placement": 2, "num_experts": 1, "slots": [[0]]}', r"with moe_dispatch_placement 1"),
        ('{"moe_dispatch_placement": 1, "num_experts": "1", "slots": [[0]]}', r"must be an integer, got '1'"),
        ('{"moe_dispatch_placement": 1, "num_experts": 2, "slots": [[0]]}', r"p\.json: ExpertPlacement: num_experts"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        ExpertPlacement.load(path)


def test_paths_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json: No such file"):
        ExpertPlacement.load(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot write"):
        COPIES.save(tmp_path / "missing" / "p.json")
