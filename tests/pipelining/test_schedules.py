"""Every schedule of torch's pipelines, on every backend in every mode, against float64 in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from moe_dispatch_testing import run_processes
from tests.pipelining.table import (
    CELLS,
    MICRO_BATCHES,
    MODES,
    OTHERS,
    REPEATED,
    SCHEDULES,
    TOKENS,
    TOP_K,
    Cell,
    run_cells,
)

BACKENDS, NAMES = [*OTHERS], [*MODES]


def runs_always(cell: Cell) -> bool:
    schedule, backend, mode = cell
    return (SCHEDULES.index(schedule) + BACKENDS.index(backend) + NAMES.index(mode)) % 3 == 0


FIRST = [cell for cell in CELLS if runs_always(cell)]
REST = [cell for cell in CELLS if not runs_always(cell)]


def computed(cells: list[Cell]) -> list[dict[Cell, Any]]:
    return run_processes(run_cells, 4, cells, timeout=timedelta(seconds=120))


@pytest.fixture(scope="module")
def first() -> list[dict[Cell, Any]]:
    """Processes start once for all cells."""
    return computed([*FIRST, REPEATED])


@pytest.fixture(scope="module")
def rest() -> list[dict[Cell, Any]]:
    return computed(REST)


def check(ranks: list[dict[Cell, Any]], cell: Cell) -> None:
    schedule, _, mode = cell
    limit = 0.1 if mode == "8 bits" else 1e-5
    for number, found in enumerate(ranks):
        result = found.get(cell, "an earlier cell has failed")
        assert isinstance(result, dict), f"rank {number}: {result}"
        assert len(result["far"]) == 4 * len(result["runs"])
        assert max(result["far"].values()) < limit, result["far"]
        # A block runs twice for each micro-batch with a checkpoint. In the first step torch runs it once more to learn
        # shapes, with a backward but on the first stage; dispatchers count none of it.
        kept = mode.startswith("kept")
        assert result["runs"] == [1 + kept + (1 + (kept and each > 0)) / MICRO_BATCHES for each in result["stages"]]
        assert result["total"] == sum(result["rows"])
        allowed = {"weights", "weights.backward"} if mode.startswith("exact") else set()
        assert set(result["for weights"]) <= allowed, result["for weights"]
    layers = 2 if schedule in ("GPipe", "1F1B") else 4
    unrouted = MICRO_BATCHES * TOP_K * len(TOKENS)  # row 1 of the second layer
    rows = sum(sum(found[cell]["rows"]) for found in ranks)
    assert rows == layers * MICRO_BATCHES * sum(TOKENS) * TOP_K - unrouted


@pytest.mark.parametrize("cell", FIRST, ids="-".join)
def test_schedule(first: list[dict[Cell, Any]], cell: Cell) -> None:
    check(first, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", REST, ids="-".join)
def test_schedule_in_another_mode(rest: list[dict[Cell, Any]], cell: Cell) -> None:
    check(rest, cell)


def test_exchanges_in_the_pass_for_weights_are_counted(first: list[dict[Cell, Any]]) -> None:
    """Torch's checkpoint repeats a block there, with its exchanges, and the count that is 0 elsewhere shows it."""
    for found in first:
        result = found[REPEATED]
        assert max(result["far"].values()) < 1e-5
        assert result["for weights"].keys() >= {"dispatch", "combine"}, result
        assert max(result["runs"]) > 3


def test_cells_that_always_run() -> None:
    """Each schedule runs with each backend, and each mode with a schedule that splits the backward."""
    assert {(schedule, backend) for schedule, backend, _ in FIRST} >= {(s, b) for s in SCHEDULES for b in OTHERS}
    assert {mode for schedule, _, mode in FIRST if schedule in SCHEDULES[3:]} == {*MODES}
