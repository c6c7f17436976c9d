"""``compare`` of a layer with and without balancing: the results agree, and loads are those that a plan predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_tools.compare import contenders
from tests.cli.compare.test_compare import asked, outcome, written
from tests.cli.conftest import Command
from tests.dispatchers.layer import small_config
from tests.traces.recorded import record_batches

BALANCED = "alltoall+balance=least_loaded"
EXACTLY = ("--mode", "eager", "--dtype", "float32")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path, spare_experts_per_rank=1, hidden_size=16, pad_multiple=1)


def test_loads_are_measured(command: Command, config: str) -> None:
    shape = ["--ranks", "2", "--tokens", "64", "--steps", "2", "--routing", "last_expert", "--expert-width", "8"]
    report = asked(command, "-b", f"alltoall,{BALANCED}", config, *shape, *EXACTLY)
    plain, balanced = outcome(report, "alltoall"), outcome(report, BALANCED)
    assert report["cases"][0]["agree"]
    # All 64 + 56 rows name an expert of rank 1. With a copy, each rank keeps its own rows.
    assert (plain["imbalance"], plain["peak_rows"], plain["bytes_sent"]["experts"]) == (2, 120, 0)
    assert (balanced["imbalance"], balanced["peak_rows"]) == (pytest.approx(64 / 60), 64)
    assert balanced["bytes_sent"]["experts"] == 3 * 16 * 8 * 4, "the weights of one expert travel"


def test_exact_balance_needs_no_other_field(command: Command, tmp_path: Path) -> None:
    shape = ["--ranks", "2", "--tokens", "1024", "--steps", "1", "--routing", "last_expert"]
    names = "alltoall,alltoall+balance=exact"
    report = asked(command, "-b", names, written(tmp_path, hidden_size=16, pad_multiple=1), *shape)
    plain, balanced = outcome(report, "alltoall"), outcome(report, "alltoall+balance=exact")
    assert report["cases"][0]["agree"]
    assert (plain["imbalance"], balanced["imbalance"]) == (2, 1)
    assert plain["bytes_sent"]["experts"] == 0 < balanced["bytes_sent"]["experts"], "weights travel"


def test_a_trace_is_balanced_as_it_was_routed(command: Command, tmp_path: Path) -> None:
    """Ids named twice, ids of -1, a rank without tokens, lengths that only a device knew."""
    path = tmp_path / "run.safetensors"
    run_ranks(lambda group: record_batches(group, path, small_config("alltoall", pad_multiple=4)), 2)
    file = written(tmp_path, num_experts=8, hidden_size=16, pad_multiple=4, spare_experts_per_rank=2)
    shape = ["--trace", path, "--expert-width", "8", "--steps", "6", *EXACTLY]
    report = asked(command, "-b", f"alltoall,{BALANCED}", file, *shape)
    assert report["cases"][0]["agree"]
    plain, balanced = outcome(report, "alltoall"), outcome(report, BALANCED)
    assert plain["bytes_sent"]["experts"] == 0 < balanced["bytes_sent"]["experts"]
    assert balanced["peak_rows"] <= plain["peak_rows"]


def test_weights_in_wrong_slots_are_seen(command: Command, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the weights of a rank's slots are in the opposite order."""

    class Wrong(SlotWeights):  # type: ignore[misc]
        def fetch(self, sent: Any, *stacked: Any) -> Any:
            landed, weights = super().fetch(sent, *stacked)
            return landed, tuple(weight.flip(0) for weight in weights)

    monkeypatch.setattr(contenders, "SlotWeights", Wrong)
    shape = ["--ranks", "2", "--tokens", "16", "--steps", "1", "--expert-width", "8", *EXACTLY]
    assert not asked(command, "-b", BALANCED, config, *shape, status=1)["cases"][0]["agree"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare", "-b", BALANCED], "balance needs spare_experts_per_rank"),
        (["compare", "-b", f"{BALANCED}x+spare_experts_per_rank=1"], "Unknown planner 'least_loadedx'"),
        (["plan", "--tokens", "8", "-b", BALANCED], f"backend '{BALANCED}': balance: Extra inputs are not permitted"),
    ],
)
def test_wrong_fields_are_refused(arguments: list[str], told: str, command: Command, tmp_path: Path) -> None:
    answer = command(*arguments, written(tmp_path))
    assert (answer.status, answer.out) == (2, "")
    assert told in answer.error
