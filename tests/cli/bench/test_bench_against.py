"""``bench --against``: this run beside an earlier one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe_dispatch.cli.bench.costs import Seconds, Timing
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.results import (
    CaseResult,
    Measured,
    OverheadResult,
    Results,
    changed_environment,
    load_results,
    ratios,
)
from moe_dispatch.cli.bench.workload import Case, Shape
from tests.cli.conftest import Command

CASE = Case(shape=Shape(tokens=16, hidden=32, experts=4, top_k=2), dtype="float32", routing="balanced", ranks=2)
ASKED = (
    *("--ranks", "2", "--tokens", "16", "--hidden", "32", "--experts", "4", "--top-k", "2"),
    *("--dtype", "float32", "--routing", "balanced", "--iterations", "1"),
)
pytestmark = pytest.mark.usefixtures("peak_of_threads")
MACHINE = {"date": "2026-01-01", "processor": "an old one", "packages": "torch 2.13.0"}


def seconds(scale: float) -> Seconds:
    return Seconds(dispatch=scale, combine=2 * scale, backward=3 * scale, total=6 * scale, processor=scale)


def measured(*runs: float, cold: float = 1.0, nbytes: float | None = 100.0, peak: int | None = 1000) -> Measured:
    return Measured(
        timing=Timing(cold=seconds(cold), runs=tuple(map(seconds, runs))),
        bytes_sent=None if nbytes is None else {"dispatch": 100.0, "combine": nbytes, "backward": 2 * nbytes},
        peak_bytes=peak,
        error=0.0,
    )


def results(contenders: dict[str, Measured], case: Case = CASE) -> Results:
    return Results(
        suite="layer",
        machine=MACHINE,
        iterations=3,
        cases=(CaseResult(case=case, contenders=contenders, floor_bytes=50.0),),
    )


def written(folder: Path, earlier: Results) -> str:
    path = folder / "earlier.json"
    path.write_text(json.dumps(earlier.document()))
    return str(path)


def test_ratios_are_now_over_then_of_medians() -> None:
    then = results({"alltoall": measured(2.0, 1.0, 3.0, cold=4.0), "torchtitan": measured(1.0)})
    now = results({"alltoall": measured(0.5, 0.4, 9.0, cold=2.0, nbytes=150.0, peak=500), "allgather": measured(1.0)})
    (ratio,) = ratios(now, then)
    assert (ratio.case, ratio.contender) == (CASE, "alltoall")
    quarter = dict.fromkeys(("dispatch", "combine", "backward", "total"), 0.25)
    assert ratio.over == pytest.approx({**quarter, "cold": 0.5, "bytes": 550 / 400, "peak": 0.5})


@pytest.mark.parametrize(
    ("now", "interval", "verdict"),
    [
        ((8.0, 9.0, 8.5, 9.5), (2.0, 9.5), "slower"),
        ((3.0, 5.0, 2.0, 4.0), (0.5, 5.0), "no difference seen"),
        ((0.5, 0.9, 0.6, 0.7), (0.125, 0.9), "faster"),
        ((80.0, 90.0, 85.0), None, "too few runs to tell"),
    ],
)
def test_verdict_follows_from_the_runs(
    now: tuple[float, ...], interval: tuple[float, float] | None, verdict: str
) -> None:
    then = measured(*((4.0, 1.0, 2.0, 3.0) if interval else (4.0, 1.0, 2.0)))
    (ratio,) = ratios(results({"alltoall": measured(*now)}), results({"alltoall": then}))
    assert ratio.interval == pytest.approx(interval)
    assert ratio.verdict == verdict


def test_phases_add_up_to_the_total() -> None:
    """They are those of the run in the middle; medians of each phase alone would add up to 8, beside a total of 9."""
    parts = [(1.0, 5.0, 3.0), (2.0, 1.0, 7.0), (4.0, 2.0, 2.0)]
    runs = [
        Seconds(
            dispatch=dispatch, combine=combine, backward=backward, total=sum((dispatch, combine, backward)), processor=1
        )
        for dispatch, combine, backward in parts
    ]
    warm = Timing(cold=runs[0], runs=tuple(runs)).warm
    assert (warm.dispatch, warm.combine, warm.backward, warm.total) == (1.0, 5.0, 3.0, 9.0)
    even = Timing(cold=runs[0], runs=(*runs, runs[1])).warm
    assert even.total == even.dispatch + even.combine + even.backward == 9.5


def test_what_one_run_does_not_know_has_no_ratio() -> None:
    (ratio,) = ratios(results({"a": measured(1.0, nbytes=None)}), results({"a": measured(1.0, peak=None)}))
    assert "bytes" not in ratio.over
    assert "peak" not in ratio.over
    assert ratio.over["total"] == 1.0


def test_overheads_are_compared_in_place_where_both_are() -> None:
    def run(median: float, in_place: float | None) -> Results:
        cost = Overhead(
            median_ms=median, fastest_ms=1.0, processor_ms=1.0, in_place_ms=in_place, fastest_in_place_ms=in_place
        )
        case = OverheadResult(case=CASE, contenders={"a": cost})
        return Results(suite="overhead", machine=MACHINE, iterations=1, overheads=(case,))

    (ratio,) = ratios(run(9.0, 2.0), run(3.0, 4.0))
    assert (ratio.over, ratio.interval, ratio.verdict) == ({"overhead": 0.5}, None, "")
    (ratio,) = ratios(run(9.0, None), run(3.0, None))
    assert ratio.over == {"overhead": 3.0}


def test_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    earlier = results({"alltoall": measured(2.0, 1.0, nbytes=None), "torchtitan": measured(1.0)})
    assert load_results(Path(written(tmp_path, earlier))) == earlier


def test_facts_that_changed_are_told_but_not_the_date() -> None:
    now = {"date": "2026-02-02", "processor": "a new one", "packages": "torch 2.13.0", "cores": "2"}
    assert changed_environment(now, MACHINE) == {
        "processor": ("an old one", "a new one"),
        "cores": ("not recorded", "2"),
    }


def test_command_tells_ratios_to_a_doctored_file(command: Command, tmp_path: Path) -> None:
    then = written(tmp_path, results({"alltoall": measured(1e6, nbytes=1e9, peak=250_000)}))
    answer = command("bench", *ASKED, "-c", "allgather,alltoall", "--against", then)
    assert answer.status == 0, answer.error
    told = answer.out[answer.out.index("against a run of 2026-01-01") :]
    assert re.search("processor was an old one, is .+", told)
    assert re.search(r"^ alltoall +(0\.00 +){6}4\.00 +- +too few runs to tell *$", told, re.MULTILINE), told
    assert "allgather" not in told
    as_json = json.loads(command("bench", *ASKED, "-c", "alltoall", "--against", then, "--json").out)
    (ratio,) = as_json["against"]["ratios"]
    total = as_json["cases"][0]["contenders"]["alltoall"]["timing"]["runs"][0]["total"]
    assert ratio["over"]["total"] == total / 6e6
    assert ratio["over"]["peak"] == 4.0
    assert (ratio["interval"], ratio["verdict"]) == (None, "too few runs to tell")
    assert as_json["against"]["changed"]["processor"]["then"] == "an old one"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not JSON", r"--against must be a file that bench --save wrote, got '.*earlier.json' \(JSON: Invalid JSON"),
        ('{"agree": true}', r"--against must be a file that bench --save wrote, got .* \(suite: Field required"),
        ('{"format": "moe-dispatch bench 0"}', r"--against must be .*\(format: Input should be 'moe-dispatch bench 1'"),
    ],
)
def test_other_files_are_refused(text: str, told: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    answer = command("bench", *ASKED, "-c", "alltoall", "--against", str(file))
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error
    assert answer.error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--tokens", "8"],
            "--against must share a case and a contender with this run, got .*earlier.json', which shares none",
        ),
        (["-c", "allgather"], "--against must share .* It has, for example, alltoall in float32, balanced: 16 tokens"),
        (["overhead"], "--against must be a run of the same suite, overhead, got .* of layer. Run moe-dispatch bench"),
    ],
)
def test_run_without_anything_in_common_is_refused_before_it_starts(
    arguments: list[str], told: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_dispatch.cli.bench.command.on_ranks", None)
    then = written(tmp_path, results({"alltoall": measured(1.0)}))
    answer = command("bench", *ASKED, "-c", "alltoall", "--against", then, *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error
