"""A report on a balanced run: what it saved is what the ranks measured, and other placements are planned beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_testing.scenario import ROUTINGS
from moe_dispatch_tools.report.command import write_report
from moe_dispatch_tools.report.history import history_of
from moe_dispatch_tools.traces import RunLog, Trace
from tests.cli.report.test_report import Outline
from tests.dispatchers.layer import Group, random_rows

STEPS, RANKS, ROWS = 3, 4, 40


def recorded(folder: Path, *, placed: ExpertPlacement | None = None, **fields: object) -> list[list[int]]:
    """Record a trace and a log of skewed steps. Return the rows of the experts of each rank, by step."""
    config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=16, **fields)  # type: ignore[arg-type]

    def body(group: Group) -> list[int]:
        assert group is not None
        found, dispatcher = [], build_dispatcher(config, group, name="a")
        if placed is not None:
            dispatcher.place(placed)
        with Trace.record(dispatcher, folder / "run.safetensors"), RunLog.record(dispatcher, folder / "log") as log:
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(10 * step + group.rank())
                ids = ROUTINGS["skewed"](ROWS, 2, 8, generator)
                layout = Rows(num_real=ROWS - 3)
                sent = dispatcher.dispatch(random_rows(ROWS, 16), Routing(ids, torch.ones(ROWS, 2)), layout)
                found.append(int(sent.real_tokens_per_expert.sum()))
                log.step()
        return found

    return [list(rows) for rows in zip(*run_ranks(body, RANKS), strict=True)]


def pages(folder: Path) -> tuple[str, str]:
    """The pages about the trace and about the log."""
    sources = {"trace": folder / "run.safetensors", "run": folder / "log"}
    trace, run = (write_report(source, folder / name).read_text(encoding="utf-8") for name, source in sources.items())
    return trace, run


def test_a_balanced_run_tells_what_it_saved(tmp_path: Path) -> None:
    rows_SP = torch.tensor(recorded(tmp_path, spare_experts_per_rank=2, balance="least_loaded"))
    history, run = history_of(Trace.load(tmp_path / "run.safetensors")), RunLog.load(tmp_path / "log")
    assert history.received_CP is not None
    assert history.received_CP.equal(rows_SP), "planned again, row by row"
    assert run.received_SP.equal(rows_SP)
    balanced = (rows_SP.amax(1) / rows_SP.double().mean(1)).mean()
    home_SP = run.tokens_SE.unflatten(1, (RANKS, -1)).sum(2)
    without = (home_SP.amax(1) / home_SP.double().mean(1)).mean()
    assert balanced < 0.7 * without
    told = (
        f"The busiest rank got {balanced:.2f} times the mean on average. If every rank had computed its own experts, "
        f"it would have got {without:.2f} times the mean."
    )
    trace, log = pages(tmp_path)
    for page in (trace, log):
        assert told in page
        assert "busiest rank without placements" in page
    table = Outline(trace).tables["Busiest rank by placement, mean of all dispatchers"][1:]
    assert [row[0] for row in table] == [
        "none",
        "eplb, 1 spare, once",
        "least_loaded, 1 spare",
        "least_loaded, 2 spare, recorded",
    ]
    found = {row[0]: float(row[1]) for row in table}
    assert found["none"] == pytest.approx(float(without), abs=0.01)
    assert found["least_loaded, 2 spare, recorded"] == pytest.approx(float(balanced), abs=0.05)


def test_a_placed_run_has_the_rows_of_its_ranks(tmp_path: Path) -> None:
    """A trace has no placement, so only the log knows it."""
    placement = ExpertPlacement(8, ((0, 4, 5), (1, 6, 7), (2, 3, 0), (0, 1, -1)))
    rows_SP = torch.tensor(recorded(tmp_path, placed=placement, spare_experts_per_rank=1))
    assert RunLog.load(tmp_path / "log").received_SP.equal(rows_SP)
    trace, run = pages(tmp_path)
    assert "Experts were placed on other ranks." in run
    assert "Experts were placed on other ranks." not in trace
    assert "A trace has no placement." in trace


def test_a_run_without_placements_tells_none(tmp_path: Path) -> None:
    rows_SP = recorded(tmp_path)
    assert RunLog.load(tmp_path / "log").received_SP.tolist() == rows_SP
    assert "without placements" not in write_report(tmp_path / "log", tmp_path).read_text(encoding="utf-8")
