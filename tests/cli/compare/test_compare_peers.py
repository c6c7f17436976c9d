"""``compare`` with peers, several cases and starts, an earlier run, and a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from moe_dispatch.config import DispatcherConfig
from moe_dispatch_testing.rank_context import Call
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_tools.compare import peers
from moe_dispatch_tools.compare.command import make_workloads
from moe_dispatch_tools.compare.contenders import Peer, RowFunction, run_layer
from moe_dispatch_tools.compare.display import draw
from moe_dispatch_tools.compare.floor import Floor
from moe_dispatch_tools.compare.results import (
    FORMAT,
    NEEDED_STARTS,
    CaseResult,
    VariantResult,
    against,
    join,
    ratio_interval,
    verdict_of,
)
from moe_dispatch_tools.compare.workload import Workload, make_material
from tests.cli.compare.test_compare import compared, outcome, written
from tests.cli.conftest import Command
from tests.cli.test_command import start

FEW = ("--ranks", "2", "--tokens", "8", "--steps", "1", "--rounds", "2", "--mode", "eager", "--dtype", "float32")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path, pad_multiple=1)


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)


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
        assert (floor["mode"], floor["overhead_ms"], floor["rows_padded"]) == ("eager", 0, {})
        assert ours["overhead_ms"] is not None


class Halving(Peer):
    """Planted: a peer that loses half."""

    def __init__(self, config: DispatcherConfig, group: Any) -> None:
        super().__init__(config, group)
        self.floor = Floor(config, group)

    def prepare(self, call: Call) -> None:
        self.floor.prepare(call)

    def layer(self, call: Call, experts: RowFunction) -> Tensor:
        return self.floor.layer(call, experts) / 2


def test_wrong_peer_is_seen(command: Command, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: SimpleNamespace(origin="here"))
    monkeypatch.setitem(peers.PEERS, "torchtitan", Halving)
    monkeypatch.delitem(peers.PEERS, "transformers")
    report = compared(command, "-b", "alltoall", "--peers", config, "--mode", "eager", status=1)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall", "floor", "torchtitan"]
    assert outcome(report, "torchtitan")["from_reference"]["y"] == pytest.approx(0.5, rel=0.05)


def test_missing_peers_are_named(command: Command, config: str, no_peers: None) -> None:
    answer = command("compare", "--peers", config, "-b", "alltoall", *FEW)
    assert answer.status == 0
    assert "torchtitan is left out, not installed: torchtitan, spmd_types, tyro, triton. In " in answer.out
    assert re.search(r"transformers is left out, not installed: transformers\. In .*'\.\[bench\]'\.", answer.out)


@pytest.mark.parametrize("wrong", [("--routing", "duplicates"), ("--dtype", "float64")])
def test_peers_refuse_what_only_ours_can(wrong: tuple[str, ...], command: Command, config: str) -> None:
    report = compared(command, "-b", "alltoall,floor", config, "--mode", "eager", *wrong, status=1)
    assert outcome(report, "alltoall")["agrees"]
    assert "floor needs float32 or bfloat16, and tokens that each name top_k" in outcome(report, "floor")["refused"]


def test_floor_makes_its_memory_before_the_clock_starts() -> None:
    def body(group: Any) -> bool:
        config = DispatcherConfig(num_experts=4, top_k=2, hidden_size=32)
        step = make_material(Workload(equal=True), config, rank=group.rank(), ranks=2).steps[0]
        call, floor = step.call(torch.device("cpu")), Floor(config, group)
        floor.prepare(call)
        run_layer(floor, call, lambda: None)
        y = floor.timed(call, lambda: None)
        return y.data_ptr() == floor._way.buffers["y"].data_ptr()

    assert run_ranks(body, 2) == [True, True]


def test_without_a_config_there_are_sizes(command: Command) -> None:
    answer = command("compare", *FEW, "--experts", "4", "--top-k", "2", "--hidden", "32", "--json")
    report = json.loads(answer.out)
    assert (report["config"]["num_experts"], report["config"]["hidden_size"]) == (4, 32)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall"]


def test_small_capacity_drops_rows_and_is_no_failure(command: Command, config: str) -> None:
    tight = "alltoall+capacity_factor=0.5"
    answer = command("compare", "-b", f"alltoall,{tight}", config, *FEW, "--routing", "skewed", "--tokens", "32")
    assert answer.status == 0, answer
    assert re.search(rf" {re.escape(tight)} +graph-safe .* dropped rows", answer.out)


def test_every_combination_is_a_case() -> None:
    workloads, ranks = make_workloads(tokens="8,16,8", dtype="float32,bfloat16", routing="uniform,skewed")
    assert len({(one.tokens, one.dtype, one.routing) for one in workloads}) == len(workloads) == 8
    assert ranks == 4


def test_cases_are_printed_as_they_end(command: Command, config: str) -> None:
    """A rank fails in the second case; the first case is there all the same."""
    raising = "tests.cli.planted:RaisingAbove8"
    answer = command("compare", "-b", raising, config, *FEW, "--tokens", "8,16", "--ranks", "1")
    assert (answer.status, answer.error) == (2, "Error: a rank of 1: planted above 8 tokens\n")
    assert "ok     all agree with the reference" in answer.out


def variant(*starts: float, backend: str = "alltoall", nbytes: float = 6.0) -> VariantResult:
    """Return a result with one round of 1, 2 and 3 times the number in each start."""
    return VariantResult(
        backend=backend,
        mode="eager",
        from_reference=dict.fromkeys(("y", "x", "weights", "experts"), starts[0]),
        bytes_sent={"dispatch": nbytes},
        peak_bytes=int(starts[0]),
        starts=tuple(((scale, 0.0, 2 * scale, 3 * scale, scale),) for scale in starts),
    )


def case(*variants: VariantResult) -> CaseResult:
    return CaseResult(workload=Workload(), tolerance=1.0, transport="gloo", tokens=(8, 8), variants=variants)


def saved(*variants: VariantResult) -> dict[str, Any]:
    config = DispatcherConfig(num_experts=4, top_k=2, hidden_size=32)
    machine = {"date": "2026-01-01", "processor": f"of {variants[0].peak_bytes} MHz"}
    return {"format": FORMAT, "machine": machine, "cases": [case(*variants).document(config)]}


@pytest.mark.parametrize(
    ("factor", "starts", "verdict"),
    [
        (2.0, NEEDED_STARTS, "slower"),
        (0.5, NEEDED_STARTS, "faster"),
        (1.0, NEEDED_STARTS, "no difference seen"),
        (2.0, 1, "cannot say: 1 of 6 starts"),
    ],
)
def test_verdict_on_an_earlier_run(factor: float, starts: int, verdict: str) -> None:
    scales = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    now = saved(variant(*(factor * scale for scale in scales[:starts])), variant(*scales[:starts], backend="floor"))
    found = against(now, saved(variant(*scales, nbytes=3.0)))
    (ratio,) = found["ratios"]
    assert (ratio["backend"], ratio["verdict"]) == ("alltoall", verdict)
    assert ratio["over"]["bytes"] == 2.0
    if starts > 1:
        assert ratio["over"]["total"] == ratio["over"]["backward"] == factor
        assert ratio["interval"][0] <= factor <= ratio["interval"][1]
    assert found["changed"] == ({} if factor == 1 else {"processor": ("of 10 MHz", f"of {int(10 * factor)} MHz")})


def test_equal_code_is_rarely_called_different() -> None:
    """One start in ten takes 1.5 times as long, and starts scatter by 10 %."""
    generator = torch.Generator().manual_seed(0)
    shape = (200, 2, NEEDED_STARTS)
    times = (0.1 * torch.randn(shape, generator=generator)).exp()
    times = torch.where(torch.rand(shape, generator=generator) < 0.1, 1.5 * times, times)
    same = [verdict_of(ratio_interval(now, then)) for now, then in times.tolist()]
    assert same.count("no difference seen") >= 0.93 * len(same)
    slower = [verdict_of(ratio_interval([1.5 * time for time in now], then)) for now, then in times.tolist()]
    assert slower.count("slower") >= 0.85 * len(slower)


def test_starts_are_joined() -> None:
    (joined,) = join([case(variant(2.0)), case(variant(4.0)), case(variant(3.0))]).variants
    assert joined.milliseconds == {
        **{"dispatch": 3.0, "experts": 0.0, "combine": 6.0, "backward": 9.0},
        **{"total": 18.0, "processor": 3.0},
    }
    assert (len(joined.starts), joined.peak_bytes, joined.from_reference["y"]) == (3, 4, 4.0)


def test_ratio_is_of_each_round_and_overhead_is_above_the_floor() -> None:
    slow, floor = variant(3.0, 8.0), variant(1.0, 2.0)
    assert slow.ratio(floor)[0] == 3.5
    assert slow.overhead(floor) == 12.0


def test_saved_run_is_compared_with_the_next(command: Command, config: str, tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    answer = command("compare", "-b", "alltoall", config, *FEW, "--starts", "2", "--save", str(file))
    assert answer.status == 0, answer
    assert f"wrote {file}\n-      starts: 2. A verdict of --against needs 6 or more: --starts" in answer.out
    found = json.loads(command("compare", "-b", "alltoall", config, *FEW, "--against", str(file), "--json").out)
    assert len(outcome(found, "alltoall")["starts"]) == 2, "as many as the file has"
    (ratio,) = found["against"]["ratios"]
    assert ratio["over"]["bytes"] == 1
    shown = command("compare", "-b", "alltoall", config, *FEW, "--against", str(file), "--starts", "1").out
    assert re.search(r"^ alltoall +eager .* cannot say: 1 of 6 starts *$", shown, re.MULTILINE)
    other = command("compare", "-b", "allgather", config, *FEW, "--against", str(file))
    assert (other.status, other.out) == (2, "")
    assert re.match("Error: --against must share a case and a backend .* alltoall, eager in 8 experts", other.error)
    for text in ("not JSON", "[]", '{"format": "moe-dispatch bench 2"}'):
        file.write_text(text)
        refused = command("compare", "-b", "alltoall", config, *FEW, "--against", str(file))
        assert re.match(
            "Error: --against must be a file that compare --save wrote, got .*json' .(JSON|its format)", refused.error
        )


def test_several_starts_under_torchrun_are_refused(
    command: Command, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = command("compare", "-b", "alltoall", config, "--starts", "2")
    assert (answer.status, answer.out) == (2, "")
    assert re.match("Error: --starts must be 1 under torchrun, .* only once, got 2. Leave it out, or", answer.error)


def test_bars_are_as_long_as_the_medians(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: kept.append(self))
    draw([case(variant(1.0), variant(2.0, backend="floor"))] * 2, tmp_path / "compare.png")
    assert len(kept[0].axes) == 2
    for axes in kept[0].axes:
        widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
        assert widths == [1.0, 2.0, 0.0, 0.0, 2.0, 4.0, 3.0, 6.0]


@pytest.mark.slow
def test_command_measures_memory_and_draws(config: str, tmp_path: Path) -> None:
    picture, file = tmp_path / "compare.png", tmp_path / "compare.json"
    process = start("compare", "-b", "alltoall,floor", config, *FEW, "--picture", str(picture), "--save", str(file))
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    for one in json.loads(file.read_text())["cases"][0]["outcomes"]:
        assert one["peak_bytes"] >= 2 * 8 * 64 * 4, "what it gives and what it got"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
