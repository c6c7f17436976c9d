"""Cycles of train, release, destroy and rebuild groups, evaluate and train, on four processes and each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_dispatch_testing import run_processes
from tests.phases.cycles import CASES, RANKS, compare


@pytest.mark.parametrize(
    ("cases", "cycles"),
    [
        pytest.param(["alltoall", "hybridep"], 2, id="2 cycles"),
        pytest.param([*CASES], 50, id="50 cycles", marks=pytest.mark.slow),
    ],
)
def test_cycles_change_no_loss_and_leave_nothing(cases: list[str], cycles: int, tmp_path: Path) -> None:
    for found in run_processes(compare, RANKS, cases, cycles, str(tmp_path)):
        for case, of_case in found.items():
            assert of_case["equal"], case
            assert len(set(of_case["keys"])) == 1, case
            held = of_case["held"]
            assert all(each == held[0] for each in held[1:]), (case, held[0], held[-1])
            assert held[0]["channels"] == 0
            assert {after for _, after in of_case["memory"]} == {0}
            assert len({before for before, _ in of_case["memory"][1:]}) == 1, case
