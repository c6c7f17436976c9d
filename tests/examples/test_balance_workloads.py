"""The comparison on eight workloads: equal results on all sides, and a busiest rank within the bound of exact plans."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import balance_workloads
from balance_workloads import SIDES, WORKLOADS, Step
from moe_dispatch_testing import run_ranks

RANKS = 2
TINY: dict[str, Any] = {"ranks": RANKS, "experts": 8, "top_k": 2, "hidden": 8, "inner": 8, "tokens": 48}
GIVEN = argparse.Namespace(**TINY, spare=None, min_rows=0, steps=3, seed=0)


def measure(workload: str, given: argparse.Namespace = GIVEN) -> list[tuple[Step, ...]]:
    of_ranks = run_ranks(lambda group: balance_workloads.measure(group, workload, given), RANKS)
    return list(zip(*of_ranks, strict=True))


def expect_bounds(steps: list[tuple[Step, ...]]) -> None:
    for step in steps:
        for side in SIDES:
            if side.startswith("exact"):
                rows = [of_rank[side]["rows"] for of_rank in step]
                assert max(rows) <= math.ceil(float(side.split()[1]) * sum(rows) / RANKS), side


@pytest.mark.parametrize("workload", WORKLOADS)
def test_sides_agree_and_exact_plans_keep_their_bound(workload: str) -> None:
    steps = measure(workload)
    assert len(steps) == GIVEN.steps
    for step in steps:
        for side in SIDES:
            assert max(of_rank[side]["error"] for of_rank in step) < 1e-5, side
            assert sum(of_rank[side]["rows"] for of_rank in step) == RANKS * TINY["tokens"] * TINY["top_k"]
    expect_bounds(steps)
    uneven = workload not in ("W0_balanced", "W4_source_ragged")
    assert (max(balance_workloads.busiest(steps, "none")) > 1.1) == uneven
    copies = {side: sum(step[0][side]["copies"] for step in steps) for side in SIDES}
    assert copies["none"] == 0
    assert copies["exact 1.0"] >= copies["exact 1.25"]
    for side in SIDES:
        moved = sum(of_rank[side]["moved"] for step in steps for of_rank in step)
        assert moved == copies[side] * 3 * 2 * TINY["hidden"] * TINY["inner"] * 4  # fetched twice, and a gradient


def test_the_bound_fails_for_a_side_without_balancing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, "exact 1.25", {})
    with pytest.raises(AssertionError, match=r"exact 1\.25"):
        expect_bounds(measure("W2_hot_rank"))


def test_a_wrong_gradient_is_an_error() -> None:
    right = [torch.ones(3, 2), torch.tensor([4.0, 8.0])]
    assert balance_workloads.largest_error(right, right) == 0
    assert balance_workloads.largest_error([right[0], torch.tensor([4.0, 7.0])], right) == 1 / 8


@pytest.mark.parametrize("workload", WORKLOADS)
def test_tokens_do_not_depend_on_the_ranks(workload: str) -> None:
    """Ranks share the tokens of a step, each row names different experts, and each workload is what its text says."""
    for step in range(10):
        ids, _, x = balance_workloads.draw(workload, 0, step, GIVEN)
        others = argparse.Namespace(**{**TINY, "ranks": 4, "tokens": 24})
        assert torch.equal(ids, balance_workloads.draw(workload, 0, step, others)[0])
        shares = [balance_workloads.share_of_rank(rank, workload, step, GIVEN) for rank in range(RANKS)]
        assert torch.equal(torch.cat([routing.topk_ids for _, routing in shares]), ids)
        assert torch.equal(torch.cat([of_rank for of_rank, _ in shares]), x)
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert [len(of_rank) for of_rank, _ in shares] == ([24, 72] if workload == "W4_source_ragged" else [48, 48])
        rows = torch.bincount(ids.flatten(), minlength=8)
        hot = {"W2_hot_rank": 0, "W3_spread_hot_experts": 0, "W6_rotating_hotspot": step // 4}
        if workload == "W7_burst" and step == 5:
            hot[workload] = 0
        if workload in hot:
            assert rows.argmax() == hot[workload]
            assert rows.max() > 2 * rows.float().mean()
        elif workload != "W1_hot_expert_set":
            assert rows.max() < 2.5 * rows.float().mean()
        assert (rows.min() == 0) == (workload == "W5_zero_expert_rank")


def test_table_and_picture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = (
        "--ranks 2 --experts 8 --hidden 8 --inner 8 --tokens 32 --steps 2 --workloads W2_hot_rank W5_zero_expert_rank"
    )
    picture = tmp_path / "workloads.svg"
    monkeypatch.setattr(sys, "argv", ["balance_workloads.py", *sizes.split(), "--picture", str(picture)])
    balance_workloads.main()
    _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [cell[:2] for cell in cells] == [
        [workload, side] for workload in ("W2_hot_rank", "W5_zero_expert_rank") for side in SIDES
    ]
    ratios = {tuple(cell[:2]): float(cell[2].split(",")[0]) for cell in cells}
    assert ratios["W5_zero_expert_rank", "none"] == 2
    assert ratios["W5_zero_expert_rank", "exact 1.0"] == 1
    assert "busiest rank / mean" in picture.read_text(encoding="utf-8")
