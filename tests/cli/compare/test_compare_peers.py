"""``compare`` with peers, several cases, and a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.config import DispatcherConfig
from moe_dispatch_testing.rank_context import LayerCall
from moe_dispatch_tools.compare import measurement, peers
from moe_dispatch_tools.compare.command import make_workloads
from moe_dispatch_tools.compare.contenders import Peer, RowFunction, run_layer
from moe_dispatch_tools.compare.display import draw
from moe_dispatch_tools.compare.floor import Floor
from moe_dispatch_tools.compare.measurement import PHASES, Variant
from moe_dispatch_tools.compare.workload import Workload, make_material
from tests.cli.compare.test_compare import asked, compared, outcome, written
from tests.cli.conftest import Command
from tests.cli.test_command import start
from tests.ranks import run_ranks


def few(*, ranks: int = 2, tokens: str = "8", mode: str = "eager") -> list[str]:
    shape = ["--ranks", str(ranks), "--tokens", tokens, "--mode", mode]
    return [*shape, "--steps", "1", "--rounds", "2", "--dtype", "float32"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path, pad_multiple=1)


def test_floor_computes_the_layer_and_sends_as_few_bytes(command: Command, config: str) -> None:
    report = compared(command, "-b", "alltoall,floor", config, "--dtype", "float32,bfloat16", "--routing", "skewed")
    assert [(case["dtype"], case["tokens"]) for case in report["cases"]] == [
        ("float32", [16, 16]),
        ("bfloat16", [16, 16]),
    ]
    for case in report["cases"]:
        ours, _, floor = case["outcomes"]
        assert floor["agrees"]
        assert floor["bytes_sent"] == ours["bytes_sent"]
        assert (floor["mode"], floor["overhead_ms"], floor["rows_padded"]) == ("eager", 0, None)
        assert ours["overhead_ms"] is not None


class Halving(Peer):
    """Planted: a peer that loses half."""

    def __init__(self, config: DispatcherConfig, group: Any) -> None:
        super().__init__(config, group)
        self.floor = Floor(config, group)

    def prepare(self, call: LayerCall) -> None:
        self.floor.prepare(call)

    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        return self.floor.layer(call, experts) / 2


def test_wrong_peer_is_seen(command: Command, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: SimpleNamespace(origin="here"))
    monkeypatch.setitem(peers.PEERS, "torchtitan", Halving)
    monkeypatch.delitem(peers.PEERS, "transformers")
    report = compared(command, "-b", "alltoall", "--peers", config, "--mode", "eager", status=1)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall", "floor", "torchtitan"]
    assert outcome(report, "torchtitan")["from_reference"]["y"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.usefixtures("no_peers")
def test_missing_peers_are_named(command: Command, config: str) -> None:
    answer = command("compare", "--peers", config, "-b", "alltoall", *few())
    assert answer.status == 0
    assert "torchtitan is left out, not installed: torchtitan, spmd_types, tyro, triton. In " in answer.out
    assert re.search(r"transformers is left out, not installed: transformers\. In .*'\.\[bench\]'\.", answer.out)


@pytest.mark.parametrize("wrong", [("--routing", "duplicates"), ("--dtype", "float64"), ("--expert-width", "8")])
def test_peers_refuse_what_only_ours_can(wrong: tuple[str, ...], command: Command, config: str) -> None:
    report = compared(command, "-b", "alltoall,floor", config, "--mode", "eager", *wrong, status=1)
    assert outcome(report, "alltoall")["agrees"]
    assert "floor needs float32 or bfloat16, tokens that each name top_k" in outcome(report, "floor")["refused"]


def test_floor_makes_its_memory_before_the_clock_starts() -> None:
    def body(group: Any) -> bool:
        config = DispatcherConfig(num_experts=4, top_k=2, hidden_size=32)
        step = make_material(Workload(equal=True), config, rank=group.rank(), ranks=2).steps[0]
        call, floor = step.call(torch.device("cpu")), Floor(config, group)
        floor.prepare(call)
        run_layer(floor, call, lambda: None)
        first, second = (floor.timed(call, lambda: None) for _ in range(2))
        return first.data_ptr() == second.data_ptr()

    assert run_ranks(body, 2) == [True, True]


def test_without_a_config_there_are_sizes(command: Command) -> None:
    report = asked(command, *few(), "--set", "num_experts=4", "--set", "top_k=2", "--set", "hidden_size=32")
    assert (report["config"]["num_experts"], report["config"]["hidden_size"]) == (4, 32)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall"]


def test_small_capacity_drops_rows_and_is_no_failure(command: Command, config: str) -> None:
    tight = "alltoall+capacity_factor=0.5"
    answer = command("compare", "-b", f"alltoall,{tight}", config, *few(tokens="32"), "--routing", "skewed")
    assert answer.status == 0, answer
    assert re.search(rf" {re.escape(tight)} +graph-safe .* dropped rows", answer.out)


def test_every_combination_is_a_case() -> None:
    workloads, ranks = make_workloads(tokens="8,16,8", dtype="float32,bfloat16", routing="uniform,skewed")
    assert len({(one.tokens, one.dtype, one.routing) for one in workloads}) == len(workloads) == 8
    assert ranks == 4


def test_cases_are_printed_as_they_end(command: Command, config: str) -> None:
    """A rank fails in the second case; the first case is there all the same."""
    answer = command("compare", "-b", "tests.cli.planted:Raising", config, *few(ranks=1, tokens="8,16"))
    assert (answer.status, answer.error) == (2, "Error: a rank of 1: planted in dispatch\n")
    assert "ok     all agree with the reference" in answer.out


def times(scale: float) -> dict[str, Any]:
    """Return the results of two ranks in two rounds, of 1, 2 and 3 times the scale; one of them is the slowest."""
    ranks = [[[scale, 0.0, 2 * scale, 3 * scale, of], [scale, 0.0, 2 * scale, 3 * scale, of]] for of in (5.0, 7.0)]
    ranks[0][0][3] = 0.0
    found = measurement._empty(Variant(label=f"{scale:g}", mode="eager")) | {"received": [2, 4]}
    outcomes = [found | {"rounds": rounds, "peak_bytes": 3 + rank} for rank, rounds in enumerate(ranks)]
    outcomes[1] |= {"received": [6, 4], "from_reference": {**found["from_reference"], "x": 0.25}}
    return measurement._joined(outcomes, 0.1)


def test_ranks_are_joined_by_the_slowest_and_the_furthest() -> None:
    joined = times(2.0)
    assert joined["milliseconds"] == {
        **{"dispatch": 2.0, "experts": 0.0, "combine": 4.0, "backward": 6.0},
        **{"total": 12.0, "processor": 7.0},
    }
    assert (joined["agrees"], joined["from_reference"]["x"], joined["peak_bytes"]) == (False, 0.25, 4)
    assert (joined["peak_rows"], joined["imbalance"]) == (6, 1.25)


def test_picture_has_the_totals_of_the_table(tmp_path: Path) -> None:
    """They are medians too, so the medians of the phases do not add up to them: 10 and 14, but 12 and 11."""
    medians = {"a": (4.0, 2.0, 1.0, 5.0, 10.0), "b": (3.0, 2.0, 1.0, 5.0, 14.0)}
    outcomes = [
        {
            "backend": name,
            "mode": "eager",
            "rounds": [[1.0]],
            "milliseconds": dict(zip((*PHASES, "total"), of, strict=True)),
        }
        for name, of in medians.items()
    ]
    draw([{"case": "a case", "outcomes": outcomes}], tmp_path / "compare.svg")
    labels = re.findall(r">(\d\d\.\d)<", (tmp_path / "compare.svg").read_text())
    assert labels == ["10.0", "14.0"]


@pytest.mark.slow
def test_command_starts_ranks_counts_their_syncs_measures_memory_and_draws(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    process = start(
        "compare", "-b", "alltoall,floor", config, *few(mode="eager,graph-safe"), "--picture", str(picture), "--json"
    )
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    report = json.loads(out)
    assert outcome(report, "alltoall")["host_syncs"] >= 1
    assert outcome(report, "alltoall", "graph-safe")["host_syncs"] == 0
    for one in report["cases"][0]["outcomes"]:
        assert one["peak_bytes"] >= 2 * 8 * 64 * 4, "what it gives and what it got"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
