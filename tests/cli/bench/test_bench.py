"""``bench``: that its numbers are those of what ran, and how it answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from moe_dispatch import Dispatcher
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_tools import console
from moe_dispatch_tools.bench import command as bench
from moe_dispatch_tools.bench import measurement, request
from moe_dispatch_tools.bench.contenders import ByHand, Contender, Experts, identity_experts, run_layer
from moe_dispatch_tools.bench.costs import Seconds, Timing, time_in_turn
from moe_dispatch_tools.bench.display import draw
from moe_dispatch_tools.bench.floor import Floor
from moe_dispatch_tools.bench.results import CaseResult, Measured, Results, Start, load_results
from moe_dispatch_tools.bench.workload import Case, Shape, Tokens, draw_tokens
from moe_dispatch_tools.pictures import Bar, Panel, save_panels
from tests.cli.conftest import Command
from tests.cli.test_command import start

TINY = ("--ranks", "2", "--tokens", "16", "--hidden", "32", "--experts", "4", "--top-k", "2", "--iterations", "3")
ONE = (*TINY, "--dtype", "float32", "--routing", "balanced")
SHAPE = Shape(tokens=16, hidden=32, experts=4, top_k=2)
pytestmark = pytest.mark.usefixtures("peak_of_threads")
KEYS = "format suite machine iterations left_out starts"
START_KEYS = "cases overheads"
CASE_KEYS = "case contenders floor_bytes"
MEASURED_KEYS = "timing bytes_sent peak_bytes error dropped"
MACHINE_KEYS = "date|processor|cores|gpus|ranks on|system|packages|allocator"


def benched(command: Command, *arguments: str) -> dict[str, Any]:
    """Return the results of the only start."""
    answer = command("bench", *arguments, "--json")
    assert answer.status == 0, answer
    results = json.loads(answer.out)
    assert list(results) == KEYS.split()
    assert list(results["machine"]) == MACHINE_KEYS.split("|")
    start: dict[str, Any]
    (start,) = results["starts"]
    return start


def test_json_has_its_keys(command: Command) -> None:
    results = benched(command, *ONE, "-c", "alltoall")
    assert list(results) == START_KEYS.split()
    (case,) = results["cases"]
    assert list(case) == CASE_KEYS.split()
    assert case["case"] == {
        "shape": {"tokens": 16, "hidden": 32, "experts": 4, "top_k": 2},
        **{"dtype": "float32", "routing": "balanced", "ranks": 2},
    }
    assert list(case["contenders"]["alltoall"]) == MEASURED_KEYS.split()
    assert list(case["contenders"]["alltoall"]["bytes_sent"]) == ["dispatch", "combine", "backward"]


def test_bytes_are_those_of_the_collectives(command: Command) -> None:
    results = benched(command, *ONE, "-c", "alltoall,allgather")
    (case,) = results["cases"]
    rows = [_rows_to_the_other(rank) for rank in (0, 1)]
    assert case["floor_bytes"] == sum(rows) / 2 * (32 * 4 + 6 * 2)
    sent = case["contenders"]["alltoall"]["bytes_sent"]
    assert sent["combine"] == sum(rows) / 2 * 32 * 4, "a sum for each row that came"
    gathered = case["contenders"]["allgather"]["bytes_sent"]
    assert gathered["combine"] == 16 * 32 * 4, "half of both ranks' rows"
    assert sent["dispatch"] < gathered["dispatch"]
    agreement = 8 * (2 * 7 + 1 + 4)  # seven integers of each rank, invalid ids, slots of each expert
    assert gathered["backward"] == gathered["combine"] + gathered["dispatch"] - agreement - 16 * 2 * 2, "and no ids"


def _rows_to_the_other(rank: int) -> int:
    ids_TK = draw_tokens(SHAPE, "balanced", torch.float32, rank).ids_TK
    return int((ids_TK // 2 == 1 - rank).any(1).sum())


def test_floor_and_backend_by_hand_do_the_same_work(command: Command) -> None:
    """Their results are checked like any other's; what they send is what must be sent."""
    results = benched(command, *TINY, "-c", "alltoall,by-hand,floor")
    assert {(case["case"]["dtype"], case["case"]["routing"]) for case in results["cases"]} == {
        (dtype, routing) for dtype in ("float32", "bfloat16") for routing in ("balanced", "skewed")
    }
    for case in results["cases"]:
        ours, by_hand, floor = case["contenders"].values()
        assert by_hand["bytes_sent"] == floor["bytes_sent"] == ours["bytes_sent"]
        assert by_hand["error"] == ours["error"] > 0
        assert 0 < floor["error"] < (1e-5 if case["case"]["dtype"] == "float32" else 2.5e-2)


def test_a_balanced_contender_computes_the_same(command: Command) -> None:
    """Rows go to copies, whose experts are told apart by their numbers."""
    balanced = "alltoall+spare_experts_per_rank=1+balance=least_loaded"
    results = benched(command, *TINY, "--dtype", "float32", "--routing", "skewed", "-c", f"alltoall,{balanced}")
    (case,) = results["cases"]
    contender, plain = case["contenders"][balanced], case["contenders"]["alltoall"]
    assert 0 < contender["error"] < 1e-6
    assert contender["bytes_sent"]["dispatch"] != plain["bytes_sent"]["dispatch"]
    answer = command("bench", *ONE, "-c", "alltoall+balance=most_loaded")
    assert answer.status == 2
    assert "Unknown planner 'most_loaded'" in answer.error


def test_by_hand_calls_the_backend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the dispatcher was called")

    monkeypatch.setattr(Dispatcher, "dispatch", refuse)
    monkeypatch.setattr(Dispatcher, "combine", refuse)

    def body(group: dist.ProcessGroup) -> bool:
        contender = ByHand(SHAPE, group)
        outcome = run_layer(contender, draw_tokens(SHAPE, "balanced", torch.float32, group.rank()), identity_experts)
        contender.close()
        return bool(outcome.y_TD.any())

    assert run_ranks(body, 2) == [True, True]


def test_floor_does_not_touch_fresh_memory() -> None:
    """Its results are in the memory that it made before, so that only passes and collectives are timed."""

    def body(group: dist.ProcessGroup) -> list[set[int]]:
        contender, tokens = Floor(SHAPE, group), draw_tokens(SHAPE, "skewed", torch.float32, group.rank())
        runs = [run_layer(contender, tokens, identity_experts) for _ in range(2)]
        return [{run.y_TD.data_ptr(), run.grad_x_TD.data_ptr()} for run in runs]

    for first, second in run_ranks(body, 2):
        assert first == second


def test_picture_has_no_empty_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[bool] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.extend(axes.axison for axes in self.axes))
    panel = Panel(title="one", bars=(Bar(label="alltoall", parts=(1.0,), low=0.5, high=1.5, note="1 ms"),))
    save_panels([panel] * 3, ["dispatch"], tmp_path / "bench.png", xlabel="ms", title="three")
    assert drawn == [True, True, True, False]


def test_picture_has_one_scale_and_bars_as_long_as_the_totals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Time per token, so that 16 and 1600 tokens can be compared; the numbers beside are whole times."""

    def case(tokens: int, *totals: float) -> CaseResult:
        runs = tuple(
            Seconds(dispatch=0.1 * all, combine=0.3 * all, backward=0.6 * all, total=all, processor=all)
            for all in totals
        )
        shape = replace(SHAPE, tokens=tokens)
        return CaseResult(
            case=Case(shape=shape, dtype="float32", routing="balanced", ranks=2),
            contenders={"alltoall": Measured(timing=Timing(cold=runs[0], runs=runs))},
        )

    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: kept.append(self))
    measured = (case(16, 0.001, 0.002, 0.009), case(1600, 0.01, 0.02, 0.03))
    results = Results(suite="layer", machine={}, iterations=3, starts=(Start(cases=measured),))
    draw(results, tmp_path / "bench.png")
    first, second = kept[0].axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] > 1e6 * 0.0055 / 16, "the upper quartile"
    for axes, total, tokens, note in ((first, 0.002, 16, "2.0 ms"), (second, 0.02, 1600, "20.0 ms")):
        widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
        assert sum(widths) == pytest.approx(1e6 * total / tokens)
        assert [text.get_text() for text in axes.texts] == [note]
    (line,) = first.lines
    assert torch.as_tensor(line.get_xdata()).tolist() == pytest.approx([1e6 * 0.0015 / 16, 1e6 * 0.0055 / 16])
    assert measured[0].contenders["alltoall"].timing.totals.iqr == pytest.approx(0.004)


@final
class Sleeper(Contender):
    """Seconds of each phase, ten times as long on rank 1."""

    def __init__(self, rank: int, dispatch: float, combine: float, backward: float) -> None:
        self.dispatch, self.combine, self.backward = (
            seconds * (10 if rank == 1 else 1) for seconds in (dispatch, combine, backward)
        )

    def layer(self, x_TD: Tensor, weights_TK: Tensor, tokens: Tokens, experts: Experts) -> Tensor:
        time.sleep(self.dispatch)
        y_TD = experts(x_TD, lambda: tokens.ids_TK) * weights_TK.sum()
        y_TD.register_hook(lambda grad_TD: time.sleep(self.backward))
        time.sleep(self.combine)
        return y_TD


def test_phases_are_those_of_the_slowest_rank() -> None:
    tokens = draw_tokens(SHAPE, "balanced", torch.float32, 0)

    def rank(group: dist.ProcessGroup) -> dict[str, Timing]:
        sleepers: dict[str, Contender] = {
            "forward": Sleeper(group.rank(), 0.02, 0.01, 0.0),
            "backward": Sleeper(group.rank(), 0.0, 0.0, 0.03),
        }
        return time_in_turn(sleepers, tokens, 2, group)

    first, second = run_ranks(rank, 2)
    assert first == second, "alike on all ranks"
    assert len(first["forward"].runs) == 2
    for run in (first["forward"].cold, *first["forward"].runs):
        assert run.dispatch >= 0.2
        assert 0.1 <= run.combine < 0.2
        assert run.backward < 0.1
        assert run.total == pytest.approx(run.dispatch + run.combine + run.backward)
        assert run.processor < 0.2, "nobody works while asleep"
    assert all(run.backward >= 0.3 > run.dispatch + run.combine for run in first["backward"].runs)


def test_wrong_contender_is_no_result(command: Command) -> None:
    halved = "tests.cli.planted:Halved"
    answer = command("bench", *ONE, "-c", f"alltoall,{halved}")
    assert answer.status == 2
    assert "halved" not in answer.out
    wrong = f"Error: {halved} and the dense result: y_TD must agree within 1e-05 of its terms' magnitude, got 0.5"
    assert answer.error.startswith(wrong)


def test_peer_is_told_or_refused_where_it_is_not_installed(command: Command, no_peers: None) -> None:
    answer = command("bench", *ONE)
    assert answer.status == 0
    assert "torchtitan is left out, not installed: torchtitan, spmd_types, tyro, triton. In " in answer.out
    assert re.search(
        r"transformers is left out, not installed: transformers\. In .* pip install -e '\.\[bench\]'\.", answer.out
    )
    assert re.search(r"^ alltoall +[\d.]+", answer.out, re.MULTILINE)
    named = command("bench", *ONE, "-c", "alltoall,transformers")
    assert named.status == 2
    assert "the packages of 'transformers' must be installed, got no transformers. In " in named.error


def test_tables_say_what_the_file_says(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    answer = command(
        *("bench", *TINY, "--dtype", "float32", "-c", "allgather,alltoall+reduction=exact"),
        *("--starts", "1", "--save", str(file)),
    )
    assert answer.status == 0, answer.error
    results = load_results(file).joined
    assert [result.case.routing for result in results.cases] == ["balanced", "skewed"]
    for result in results.cases:
        gather, exact = result.contenders.values()
        assert f"\n{result.case}\n" in answer.out
        ratio = exact.timing.warm.total / gather.timing.warm.total
        assert re.search(
            rf"^ alltoall\+reduction=exact .* {1e3 * exact.timing.warm.total:.1f} +{1e3 * exact.timing.totals.iqr:.1f}"
            rf" .* {ratio:.2f} ",
            answer.out,
            re.MULTILINE,
        )
        assert re.search(rf"^ {result.case.routing} .* {ratio:.2f} *$", answer.out, re.MULTILINE), "the summary"
        assert gather.all_bytes is not None
        assert exact.all_bytes is not None
        assert f" {exact.all_bytes / gather.all_bytes:.2f} " in answer.out
    assert f"wrote {file}" in answer.out


@pytest.mark.parametrize("suite", ["layer", "growth", "overhead"])
def test_cases_are_printed_as_they_end(suite: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank fails in the second case; the first case is there all the same."""
    names = {"layer": "_everything", "growth": "_times_only", "overhead": "_overheads"}
    measured = getattr(measurement, names[suite])

    def failing(case: Case, *rest: Any) -> Any:
        if case.shape.tokens == 32:
            raise ArithmeticError("planted in the second case")
        return measured(case, *rest)

    monkeypatch.setattr(measurement, names[suite], failing)
    monkeypatch.setattr(request, "GROWTH", {"tokens": (16, 32)})
    monkeypatch.setattr(request, "GROWTH_RANKS", ())
    tokens = ("--tokens", "16" if suite == "growth" else "16,32", "--iterations", "1")
    answer = command("bench", suite, *ONE, "-c", "alltoall", *tokens)
    assert answer.status == 2
    assert "planted in the second case" in answer.error
    assert "float32, balanced: 16 tokens" in answer.out
    assert re.search(r"\balltoall +[\d.]+", answer.out)


def test_bar_is_down_while_a_case_is_printed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar would stand in the middle of a table."""
    events: list[str] = []

    @contextmanager
    def progress(label: str, *, visible: bool) -> Iterator[Callable[[int, int], None]]:
        events.append("up")
        yield lambda done, of: None
        events.append("down")

    monkeypatch.setattr(console, "progress", progress)
    monkeypatch.setattr(bench, "show_case", lambda *case, first: events.append("case"))
    assert command("bench", *ONE, "--tokens", "8,16", "--iterations", "1", "-c", "alltoall").status == 0
    assert events == ["up", "down", "case", "up", "down", "case", "up", "down"]


def test_graph_safe_stands_beside_eager_and_tells_what_it_dropped(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "CAPACITY_FACTORS", (0.5, "worst"))
    (case,) = benched(command, "graph-safe", *ONE)["cases"]
    found = case["contenders"]
    assert {name: measured["dropped"] for name, measured in found.items()} == {
        "alltoall": False,
        "alltoall, capacity 0.5": True,
        "alltoall, capacity worst": False,
    }
    tight, worst = found["alltoall, capacity 0.5"], found["alltoall, capacity worst"]
    assert tight["error"] is None
    assert 0 < worst["error"] < 1e-5
    assert worst["bytes_sent"]["combine"] == 16 * 32 * 4, "as many rows as a pair can have"
    assert tight["bytes_sent"]["combine"] < worst["bytes_sent"]["combine"]
    assert "dropped rows" in command("bench", "graph-safe", *ONE).out


def test_growth_goes_along_one_axis_at_a_time(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "GROWTH", {"tokens": (8, 16), "experts": (3, 8)})
    monkeypatch.setattr(request, "GROWTH_RANKS", (1, 2, 4))
    answer = command("bench", "growth", *ONE, "-c", "alltoall,allgather")
    rows = re.findall(r"^ (\d+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) +[\d.]+ *$", answer.out, re.MULTILINE)
    assert [row[:3] for row in rows] == [
        ("2", "8", "4"),
        ("2", "16", "4"),
        ("2", "16", "8"),
        ("1", "16", "4"),
        ("4", "16", "4"),
    ]
    assert "3 experts, top-2, 2 ranks is left out: 3 experts cannot be divided among 2 ranks" in answer.out


def test_overhead_is_measured_alone_and_together(command: Command) -> None:
    results = benched(command, "overhead", *ONE, "-c", "alltoall", "--iterations", "1")
    assert [result["case"]["ranks"] for result in results["overheads"]] == [1, 2]
    assert results["cases"] == []
    cost = results["overheads"][0]["contenders"]["alltoall"]
    assert 0 < cost["fastest_in_place_ms"] <= cost["in_place_ms"]
    refused = command("bench", "overhead", *ONE, "-c", "allgather", "--iterations", "1")
    assert refused.status == 2
    assert "collectives must be all-to-alls, got allreduce_. Leave out the contender" in refused.error


@pytest.mark.slow
def test_command_starts_ranks_measures_memory_and_draws(tmp_path: Path) -> None:
    picture, file = tmp_path / "bench.png", tmp_path / "bench.json"
    process = start("bench", *ONE, "-c", "alltoall", "--starts", "1", "--picture", str(picture), "--save", str(file))
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, ""), error
    assert out.startswith("date: ")
    found = load_results(file).joined.cases[0].contenders["alltoall"]
    assert found.peak_bytes is not None
    assert found.peak_bytes >= 2 * 16 * 32 * 4, "what it gives and what it got"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(out.splitlines()) < 40
