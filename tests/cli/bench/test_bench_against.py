"""``bench --against``: this run beside an earlier one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_dispatch_tools.bench.command import SAVED_STARTS
from moe_dispatch_tools.bench.comparison import changed_environment, ratios
from moe_dispatch_tools.bench.costs import Seconds, Timing
from moe_dispatch_tools.bench.overhead import Overhead
from moe_dispatch_tools.bench.results import CaseResult, Measured, OverheadResult, Results, Start, load_results
from moe_dispatch_tools.bench.workload import Case, Shape
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


def results(*starts: dict[str, Measured]) -> Results:
    """Return the results of one case, with the measurements of each start."""
    return Results(
        suite="layer",
        machine=MACHINE,
        iterations=3,
        starts=tuple(
            Start(cases=(CaseResult(case=CASE, contenders=contenders, floor_bytes=50.0),)) for contenders in starts
        ),
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
        ((80.0, 90.0, 85.0), None, "cannot say: 3 of 4 starts"),
        ((80.0,), None, "cannot say: 1 of 4 starts"),
    ],
)
def test_verdict_follows_from_the_medians_of_the_starts(
    now: tuple[float, ...], interval: tuple[float, float] | None, verdict: str
) -> None:
    """However many runs a start has: all runs of the earlier side are below 1.5, except for its medians."""

    def side(medians: tuple[float, ...]) -> Results:
        return results(
            *({"alltoall": measured(*(median / 9,) * 5, *(median,) * 2, *(9 * median,) * 5)} for median in medians)
        )

    for turned in (False, True):
        sides = side(now), side((4.0, 1.0, 2.0, 3.0))
        (ratio,) = ratios(*(reversed(sides) if turned else sides))
        if interval is None:
            assert (ratio.interval, ratio.verdict) == (None, verdict)
        else:
            low, high = interval
            assert ratio.interval == pytest.approx((1 / high, 1 / low) if turned else interval)
            opposite = {"slower": "faster", "faster": "slower"}
            assert ratio.verdict == (opposite.get(verdict, verdict) if turned else verdict)


def test_starts_are_joined_by_their_medians() -> None:
    """Each start is its median run; memory and errors are the largest."""
    starts = [
        measured(1.0, 2.0, 9.0, cold=5.0, peak=7),
        measured(4.0, cold=3.0, peak=9),
        measured(3.0, cold=4.0, peak=8),
    ]
    joined = results(*({"a": start} for start in starts)).joined.cases[0].contenders["a"]
    assert joined.timing == Timing(cold=seconds(4.0), runs=(seconds(2.0), seconds(4.0), seconds(3.0)))
    assert joined.timing.warm == seconds(3.0)
    assert (joined.peak_bytes, joined.all_bytes) == (9, 400.0)
    (ratio,) = ratios(results(*({"a": start} for start in starts)), results({"a": measured(6.0)}))
    assert ratio.over["total"] == 0.5


def test_overheads_of_starts_are_joined_by_their_medians() -> None:
    def start(median: float, in_place: float | None) -> Start:
        cost = Overhead(
            median_ms=median, fastest_ms=1.0, processor_ms=1.0, in_place_ms=in_place, fastest_in_place_ms=None
        )
        return Start(overheads=(OverheadResult(case=CASE, contenders={"a": cost}),))

    starts = (start(1.0, 8.0), start(5.0, None), start(2.0, 4.0))
    (joined,) = Results(suite="overhead", machine=MACHINE, iterations=1, starts=starts).joined.overheads
    cost = joined.contenders["a"]
    assert (cost.median_ms, cost.in_place_ms, cost.fastest_in_place_ms) == (2.0, 6.0, None)


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
        return Results(suite="overhead", machine=MACHINE, iterations=1, starts=(Start(overheads=(case,)),))

    (ratio,) = ratios(run(9.0, 2.0), run(3.0, 4.0))
    assert (ratio.over, ratio.interval, ratio.verdict) == ({"overhead": 0.5}, None, "")
    (ratio,) = ratios(run(9.0, None), run(3.0, None))
    assert ratio.over == {"overhead": 3.0}


def test_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    contenders = {"alltoall": measured(2.0, 1.0, nbytes=None), "torchtitan": measured(1.0)}
    earlier = results(contenders, {**contenders, "alltoall": measured(4.0, 3.0)})
    assert load_results(Path(written(tmp_path, earlier))) == earlier


def test_file_of_format_1_is_one_start(tmp_path: Path) -> None:
    """Format 1 had no starts. Its cases and overheads were at the top."""
    one = results({"alltoall": measured(2.0, 1.0)})
    document = one.document()
    (start,) = document.pop("starts")
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**document, "format": "moe-dispatch bench 1", **start}))
    assert load_results(path) == one


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
    assert re.search(r"^ alltoall +(0\.00 +){6}4\.00 +- +cannot say: 1 of 4 starts *$", told, re.MULTILINE), told
    assert "The two runs have 1 and 1 starts. A verdict needs 4 of each (--starts)." in re.sub(r"\s+", " ", told)
    assert "allgather" not in told
    as_json = json.loads(command("bench", *ASKED, "-c", "alltoall", "--against", then, "--json").out)
    (ratio,) = as_json["against"]["ratios"]
    total = as_json["starts"][0]["cases"][0]["contenders"]["alltoall"]["timing"]["runs"][0]["total"]
    assert ratio["over"]["total"] == total / 6e6
    assert ratio["over"]["peak"] == 4.0
    assert (ratio["interval"], ratio["verdict"]) == (None, "cannot say: 1 of 4 starts")
    assert as_json["against"]["changed"]["processor"]["then"] == "an old one"


@pytest.mark.parametrize(
    ("arguments", "saved", "starts"),
    [
        ([], None, 1),
        (["--save", "new.json"], None, SAVED_STARTS),
        (["--save", "new.json", "--quick"], None, 1),
        (["--save", "new.json", "--starts", "2"], None, 2),
        (["--against", "earlier.json"], 3, 3),
        (["--against", "earlier.json", "--save", "new.json"], 3, SAVED_STARTS),
        (["--against", "earlier.json", "--starts", "4"], 3, 4),
    ],
)
def test_number_of_starts_by_default(
    arguments: list[str],
    saved: int | None,
    starts: int,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each start has ranks of its own, and the file holds each start."""
    monkeypatch.chdir(tmp_path)
    number = 0

    def on_ranks(body: object, size: int, heard: Callable[[CaseResult], None]) -> None:
        nonlocal number
        number += 1
        heard(CaseResult(case=CASE, contenders={"alltoall": measured(float(number))}, floor_bytes=50.0))

    monkeypatch.setattr("moe_dispatch_tools.bench.command.on_ranks", on_ranks)
    if saved is not None:
        written(tmp_path, results(*[{"alltoall": measured(1.0)}] * saved))
    answer = command("bench", *ASKED, "-c", "alltoall", *arguments)
    assert (answer.status, number) == (0, starts), answer
    for start in range(1, starts):
        assert f"start {start} of {starts}: {CASE}: alltoall {6e3 * start:.1f} ms\n" in answer.out
    assert answer.out.count(f"\n{CASE}\n") == 1
    assert (f"of {starts} starts" in answer.out) == (starts > 1)
    if "--save" in arguments:
        kept = load_results(tmp_path / "new.json").starts
        assert [start.cases[0].contenders["alltoall"].timing.warm.total for start in kept] == [
            6.0 * number for number in range(1, starts + 1)
        ]
        told = f"starts: {starts}. A verdict of --against needs 4 or more: --starts"
        assert (told in answer.out) == (starts < 4)


def test_several_starts_under_torchrun_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = command("bench", *ASKED, "-c", "alltoall", "--starts", "2")
    assert (answer.status, answer.out) == (2, "")
    assert re.match("Error: --starts must be 1 under torchrun, .* only once, got 2. Leave it out, or", answer.error)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not JSON", r"--against must be a file that bench --save wrote, got '.*earlier.json' \(JSON: Expecting value"),
        ('{"agree": true}', r"--against must be a file that bench --save wrote, got .* \(suite: Field required"),
        ("[]", r"--against must be a file that bench --save wrote, got .* \(JSON: Input should be a dictionary"),
        ('{"format": "moe-dispatch bench 0"}', r"--against must be .*\(format: Input should be 'moe-dispatch bench 2'"),
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
    monkeypatch.setattr("moe_dispatch_tools.bench.command.on_ranks", None)
    then = written(tmp_path, results({"alltoall": measured(1.0)}))
    answer = command("bench", *ASKED, "-c", "alltoall", "--against", then, *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error
