"""The page on a run: its numbers are those of the log, whatever the log lacks is told, and a browser shows it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, Rows, build_dispatcher
from moe_dispatch.dispatchers import RequiredCapacity
from moe_dispatch.errors import TraceError
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_tools.report.command import write_report
from moe_dispatch_tools.report.load_sections import Timeline
from moe_dispatch_tools.report.run_page import run_page
from moe_dispatch_tools.traces import RunLog, Trace
from tests.cli.conftest import Command
from tests.cli.report.test_report import BROWSER, Outline, contrast, luminance, numbers, seen
from tests.dispatchers.layer import Group, random_routing, random_rows, small_config

STEPS = 6
ROOM: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 30, "capacity_factor": 0.75, "on_overflow": "drop"}
SECTIONS = [
    "Expert load over steps",
    "Imbalance over steps",
    "Padding by cause",
    "Bytes by rank and collective",
    "Overflow",
]


def log_run(group: Group, directory: Path, **fields: Any) -> RequiredCapacity | None:
    """Experts grow uneven; two rows of each rank are no tokens."""
    rank = 0 if group is None else group.rank()
    backend = "local" if group is None else "alltoall"
    dispatcher = build_dispatcher(small_config(backend, pad_multiple=4, **fields), group, name="layers <all>")
    with RunLog.record(dispatcher, directory) as log:
        for step in range(STEPS):
            rows = 10 + 2 * rank + step
            way = random_routing(rows, seed=10 * step + rank)
            ids = way.topk_ids // (1 + step // 3)
            x = random_rows(rows).requires_grad_()
            sent = dispatcher.dispatch(x, Routing(ids, way.topk_weights), Rows(num_real=rows - 2))
            dispatcher.combine(sent.rows, sent).sum().backward()
            log.step()
    return dispatcher.required_capacity() if fields else None


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logged") / "run-17"
    run_ranks(lambda group: log_run(group, directory, **ROOM), 2)
    return directory


@pytest.fixture(scope="module")
def page(logged: Path) -> Path:
    return write_report(logged, logged.parent / "report")


@pytest.fixture(scope="module")
def outline(page: Path) -> Outline:
    return Outline(page.read_text(encoding="utf-8"))


def test_page_is_whole_in_itself_and_described(outline: Outline) -> None:
    assert outline.headings == SECTIONS
    assert len(outline.pictures) == len(SECTIONS)
    assert all(len(alt) > 50 for alt in outline.pictures)
    assert not outline.tags.keys() & {"script", "link", "iframe", "img", "object", "base", "form"}
    assert [name for name, count in Counter(outline.ids).items() if count > 1] == []
    for target in outline.targets:
        assert target.startswith("data:image/png;base64,") or target[1:] in outline.ids, target


def test_tables_have_the_numbers_of_the_log(logged: Path, outline: Outline) -> None:
    run = RunLog.load(logged)
    rows = outline.tables["Rows per expert, all dispatchers"][1:]
    assert [int(row[1]) for row in rows] == run.tokens_SE.sum(0).tolist()
    (caption,) = [caption for caption in outline.tables if caption.startswith("Padding rows of all ranks")]
    real, padding = int(run.tokens_SE.sum()), int(run.rows["expert"].sum())
    assert f"{100 * padding / (real + padding):.1f} % of all rows at experts" in caption
    causes = {row[0]: numbers(row[1:]) for row in outline.tables[caption][1:]}
    assert causes["masked"] == [2 * 2 * STEPS, 4]
    assert causes["for experts"][0] == padding
    by_rank = outline.tables["Padding rows by rank"]
    assert by_rank[0] == ["rank", "cut", "masked", "for ranks", "for experts"]
    assert [int(row[4]) for row in by_rank[1:]] == run.rows["expert"].sum(0).tolist()
    sent = outline.tables["kB per step to other ranks, by collective"]
    assert sent[0] == ["rank", *run.sent, "total"]
    for rank, row in enumerate(sent[1:3]):
        kilobytes = [float(counts[:, rank].sum()) / STEPS / 1e3 for counts in run.sent.values()]
        assert numbers(row[1:]) == pytest.approx([*kilobytes, sum(kilobytes)], rel=1e-3)
    assert sent[3][0] == "all"
    assert numbers(sent[3][-1:])[0] == pytest.approx(
        sum(float(of.sum()) for of in run.sent.values()) / STEPS / 1e3, 1e-3
    )


def test_overflow_is_that_of_the_dispatcher(tmp_path: Path) -> None:
    needed = run_ranks(lambda group: log_run(group, tmp_path / "run", **ROOM), 2)[0]
    assert needed is not None
    assert needed.overflowed
    page = write_report(tmp_path / "run", tmp_path).read_text(encoding="utf-8")
    table = Outline(page).tables["Largest need of a dispatch"]
    run = RunLog.load(tmp_path / "run")
    assert run.needed_SP is not None
    first = int((run.needed_SP.amax(1) > 45).nonzero()[0])
    assert 0 < first < STEPS
    assert table[1] == ["rows of a rank's experts", str(needed.rows), "0", "45", str(first)]  # 0.75 * 30 * top-2
    assert table[2] == ["rows from a rank to a rank", str(needed.pair_rows), "1", "30", "-"]
    assert f"A capacity_factor of {needed.capacity_factor:.3f} would have been enough" in page
    assert "Rows beyond the capacity were dropped, and the loads above do not count them." in page
    roomy = {**ROOM, "capacity_factor": "worst", "on_overflow": None}
    run_ranks(lambda group: log_run(group, tmp_path / "roomy", **roomy), 2)
    assert "No rows were dropped." in write_report(tmp_path / "roomy", tmp_path).read_text(encoding="utf-8")


def test_a_run_of_one_rank_in_eager_mode(tmp_path: Path) -> None:
    log_run(None, tmp_path / "run")
    page = write_report(tmp_path / "run", tmp_path).read_text(encoding="utf-8")
    assert Outline(page).headings == SECTIONS
    assert "No bytes between ranks were counted." in page
    assert "Nothing can overflow in eager mode" in page
    assert f"The dispatchers left out {2 * STEPS} padding rows" in page


def test_a_crash_is_told(logged: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(logged, tmp_path / "run")
    cut = (directory / "rank1.jsonl").read_text().splitlines(keepends=True)[:-2]
    (directory / "rank1.jsonl").write_text("".join(cut))
    page = write_report(directory, tmp_path).read_text(encoding="utf-8")
    few = STEPS - 2
    told = f"Ranks ended after different numbers of steps, from {few} to {STEPS}. This page has the {few} steps"
    assert told in page


def test_long_runs_are_drawn_in_blocks(logged: Path) -> None:
    """No picture has more columns than pixels, tables have every step, and the axis counts steps."""
    one = RunLog.load(logged)
    repeats = 1000 // STEPS + 1
    long: dict[str, Any] = {
        name: value.repeat(repeats, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value
        for name in one.__slots__
        for value in [getattr(one, name)]
    }
    long["rows"] = {cause: counts.repeat(repeats, 1) for cause, counts in one.rows.items()}
    long["sent"] = {label: counts.repeat(repeats, 1) for label, counts in one.sent.items()}
    page = run_page("long", RunLog(**long))
    assert "A column of a picture is the sum of 3 steps. The tables count single steps." in page
    assert len(page) < 300_000
    assert "over 1002 steps" in page
    assert page.count(">900</text>") == 4, "all axes of steps go on as far"
    rows = Outline(page).tables["Rows per expert, all dispatchers"][1:]
    assert [numbers(row[1:2])[0] for row in rows] == (one.tokens_SE.sum(0) * repeats).tolist()


def test_blocks_hold_every_step_once() -> None:
    steps = torch.arange(1000)
    timeline = Timeline(
        names=["a"], ep_size=1, layer_C=torch.zeros_like(steps), step_C=steps, tokens_CE=steps.unsqueeze(1)
    )
    assert (timeline.stride, len(timeline.blocks(steps))) == (3, 334)
    assert torch.equal(torch.cat(timeline.blocks(steps)), steps)


def test_command_takes_directories(logged: Path, tmp_path: Path, command: Command) -> None:
    """Where there is a trace beside it, the log."""
    directory = shutil.copytree(logged, tmp_path / "run-17")
    with Trace.record(build_dispatcher(small_config("local")), directory / "run.safetensors"):
        pass
    answer = command("report", str(directory), "--out", str(tmp_path / "out"))
    assert (answer.status, answer.out) == (0, f"{tmp_path / 'out' / 'index.html'}\n")
    assert "<title>Run run-17</title>" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_directory_with_a_trace(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(small_config("local"))
    directory = tmp_path / "traces"
    for name in ("one", "two"):
        with Trace.record(dispatcher, directory / f"{name}.safetensors"):
            dispatcher.dispatch(random_rows(4), random_routing(4))
        if name == "one":
            page = write_report(directory, tmp_path).read_text(encoding="utf-8")
            assert "<title>Routing of one.safetensors</title>" in page
    told = r"traces must hold the log of a run \(rank0\.jsonl and so on\) or one trace, got one\.safetensors, two\.safe"
    with pytest.raises(TraceError, match=told):
        write_report(directory, tmp_path)


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"or one trace, got neither\. Name the directory that RunLog\.record wrote"):
        write_report(tmp_path / "empty", tmp_path)
    with RunLog.record(build_dispatcher(small_config("local")), tmp_path / "run"):
        pass
    with pytest.raises(
        TraceError, match=r"run must hold a step of every rank, got 0 steps\. Call step\(\) at least once"
    ):
        write_report(tmp_path / "run", tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (Debian: chromium-headless-shell)")
@pytest.mark.parametrize("dark", [True, False])
def test_browser_of_a_phone_shows_it(page: Path, tmp_path: Path, dark: bool) -> None:
    view = seen(page, tmp_path, width=390, dark=dark)
    if view["width"] != 390:
        pytest.skip(f"this Chromium has windows of {view['width']} pixels only, asked for 390")
    assert view["dark"] == dark
    assert (luminance(view["paper"]) < 0.05) == dark
    assert view["wide"] <= 390, "nothing makes the page scroll sideways"
    assert len(view["pictures"]) == len(SECTIONS)
    for left, right, height in view["pictures"]:
        assert 0 <= left < right <= 390
        assert right - left > 330, "a picture uses the width there is"
        assert height > 80
    assert view["size"] >= 10, "pixels of the smallest text"
    assert contrast(view["paper"], view["ink"]) > 7
    assert view["fills"] == [view["ink"]], "pictures write in the page's colour"
    assert view["loaded"] == []
