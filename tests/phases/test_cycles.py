"""Cycles of train, release, destroy and rebuild groups, evaluate and train, on four processes and each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_dispatch_testing import run_processes
from tests.phases.cycles import CASES, RANKS, check, compare


@pytest.mark.parametrize(
    ("cases", "cycles"),
    [
        pytest.param(["alltoall", "hybridep"], 2, id="2 cycles"),
        pytest.param([*CASES], 3, id="every backend", marks=pytest.mark.slow),
    ],
)
def test_cycles_change_no_loss_and_leave_nothing(cases: list[str], cycles: int, tmp_path: Path) -> None:
    for found in run_processes(compare, RANKS, cases, cycles, str(tmp_path)):
        check(found)
