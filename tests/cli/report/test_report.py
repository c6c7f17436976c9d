"""The page on a trace or a run: whole in itself, and its numbers are those that the ranks measured."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.errors import TraceError
from moe_dispatch_tools.report.command import render, write_report
from moe_dispatch_tools.report.sections import counts_of, run_content, trace_content
from moe_dispatch_tools.traces import RunLog, Trace
from tests.cli.conftest import Command
from tests.dispatchers.layer import Group, on_ranks, random_rows, small_config

STEPS, LAYERS = 3, ("layers.0 <mlp>", "layers.1 & more")
OF_TRACE = ["Expert load over steps", "Imbalance over steps", "Padding", "Bytes between ranks"]
SECTIONS = [*OF_TRACE, "Overflow"]
ROOM: dict[str, Any] = {"graph_safe": {"capacity_factor": 0.6, "on_overflow": "drop"}, "max_tokens_per_rank": 30}


@cache
def report_of(source: Path) -> tuple[str, dict[str, list[Sequence[Any]]]]:
    """The page, and the rows of each of its tables by caption; the first row has the headings."""
    if source.is_dir():
        content = run_content(source.name, RunLog.load(source))
    else:
        content = trace_content(source.name, Trace.load(source))
    tables = [table for section in content["sections"] for table in section["tables"]]
    return render(content), {table["caption"]: [table["headings"], *table["rows"]] for table in tables}


def page_of(source: Path) -> str:
    return report_of(source)[0]


def tables_of(source: Path) -> dict[str, list[Sequence[Any]]]:
    return report_of(source)[1]


def headings(page: str) -> list[str]:
    return re.findall("<h2[^>]*>(.*?)</h2>", page)


def given(step: int, rank: int, config: DispatcherConfig) -> tuple[Tensor, Routing, Rows]:
    """Uneven in everything: ranks, experts, tokens; the last two rows are no tokens. Rank 1 has none in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 0 if (step, rank) == (1, 1) else 11 + 2 * step + 3 * rank
    popular = torch.arange(config.num_experts) / 3
    ids = (torch.randn(rows, config.num_experts, generator=generator) - popular).topk(config.top_k).indices
    ids[::4, 1] = -1
    ids[1::4, 1] = ids[1::4, 0]
    dtype = torch.float32 if config.wire is None else torch.bfloat16
    x = random_rows(rows, config.hidden_size, seed=rank, dtype=dtype).requires_grad_()
    return x, Routing(ids, torch.rand(rows, config.top_k, generator=generator).requires_grad_()), Rows(max(rows - 2, 0))


def run(config: DispatcherConfig, folder: Path, size: int, placed: ExpertPlacement | None = None) -> list[Metrics]:
    """Record a trace and a log of dispatches, combines and their backwards. Return the metrics of each rank."""

    def body(group: Group) -> Metrics:
        layers = [build_dispatcher(config, group, name=name) for name in LAYERS]
        if placed is not None:
            layers[0].place(placed)
        with Trace.record(layers[0], folder / "run.safetensors"), RunLog.record(layers[0], folder / "run-17") as log:
            for step in range(STEPS):
                for dispatcher in layers:
                    sent = dispatcher.dispatch(*given(step, 0 if group is None else group.rank(), config))
                    dispatcher.combine(sent.rows, sent).sum().backward()
                log.step()
        return layers[0].metrics()

    return on_ranks(body, size)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, two layers, three steps, with room for too few rows."""
    folder = tmp_path_factory.mktemp("recorded")
    run(small_config(pad_multiple=16, **ROOM), folder, 2)
    return folder


@pytest.mark.parametrize(("name", "expected"), [("run.safetensors", OF_TRACE), ("run-17", SECTIONS)])
def test_page_is_whole_in_itself(name: str, expected: list[str], recorded: Path) -> None:
    page = page_of(recorded / name)
    assert headings(page) == expected
    assert not re.search("<(script|link|iframe|object|base|form)|http", page)
    targets = re.findall(r'(?:src|href)="(.{0,26})', page)
    assert set(targets) == {"data:image/svg+xml;base64,"}
    assert len(re.findall(r'alt="[^"]{50,}"', page)) == len(targets)


SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 30}
CONFIGS: dict[str, tuple[DispatcherConfig, int]] = {
    "alltoall wide": (small_config(num_experts=32, top_k=4, hidden_size=128, wire="float8_e4m3fn"), 2),
    "alltoall_by_node": (small_config({"name": "alltoall_by_node"}, pad_multiple=4), 4),
    "alltoall graph-safe": (small_config(pad_multiple=4, **SAFE), 2),
    "alltoall balanced": (small_config(balance={"name": "least_loaded", "spare_experts_per_rank": 2}), 4),
    "allgather static": (small_config("allgather", pad_multiple=4, row_counts="static", max_tokens_per_rank=30), 4),
    "hybridep": (small_config({"name": "hybridep", "emulate": True}, hidden_size=512, wire="bfloat16"), 2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("two_hosts")
def test_padding_and_bytes_are_those_measured(name: str, tmp_path: Path) -> None:
    config, size = CONFIGS[name]
    metrics = run(config, tmp_path, size)
    trace = Trace.load(tmp_path / "run.safetensors")
    counts, traffic = counts_of(trace)
    received = [int(of.real_tokens_per_expert.sum()) for of in metrics]
    assert counts.received_CP.sum(0).tolist() == received, "balanced runs are planned again, row by row"
    for rank, of in enumerate(metrics):
        told = {cause: int(of_CP[:, rank].sum()) for cause, of_CP in counts.padding_CP.items()}
        assert (told["for ranks"], told["for experts"]) == (of.rows_padded["rank"], of.rows_padded["expert"])
        assert (told["left out"], told["masked"]) == (of.rows_skipped["cut"], of.rows_skipped["masked"])
    assert traffic is not None
    if traffic.payload_only:
        return
    sent = {label: of.sum(0).tolist() for label, of in traffic.sent_CP.items()}
    assert sent == {label: [of.bytes_sent.get(label, 0) for of in metrics] for label in sent}


def test_tables_of_a_trace_have_the_numbers(tmp_path: Path) -> None:
    metrics = run(small_config(pad_multiple=16), tmp_path, 2)
    tables = tables_of(tmp_path / "run.safetensors")
    tokens_CE = counts_of(Trace.load(tmp_path / "run.safetensors"))[0].tokens_CE
    tokens = tokens_CE[1::2]
    heads, *rows = tables[f"Rows per expert, {LAYERS[1]}"]
    assert heads == ("expert", "rows", "of the mean", "per step", "min", "max")
    assert [(row[1], row[5]) for row in rows] == [*zip(tokens.sum(0).tolist(), tokens.amax(0).tolist(), strict=True)]
    imbalance = tables["Load of the busiest, divided by the mean load"][1]
    largest = (tokens_CE.amax(1) / tokens_CE.double().mean(1)).max()
    assert (imbalance[0], imbalance[2]) == (LAYERS[0], pytest.approx(float(largest)))
    of_run = tables_of(tmp_path / "run-17")["Load of the busiest, divided by the mean load"]
    assert of_run == tables["Load of the busiest, divided by the mean load"], "by layer, so that nothing averages out"
    labels, *sent = tables["MB per step to other ranks"]
    for rank, of in enumerate(metrics):
        nbytes = [of.bytes_sent.get(label, 0) / STEPS / 1e6 for label in labels[1:-1]]
        assert sent[rank][1:] == pytest.approx([*nbytes, sum(nbytes)])


def test_a_balanced_run_tells_what_it_saved(tmp_path: Path) -> None:
    run(small_config(balance={"name": "least_loaded", "spare_experts_per_rank": 2}), tmp_path, 2)
    for name in ("run.safetensors", "run-17"):
        assert re.search(r"would have got [\d.]+ times the mean", page_of(tmp_path / name))
        row = tables_of(tmp_path / name)["Load of the busiest, divided by the mean load"][1]
        assert row[4] < row[7]


def test_a_placed_run_has_the_rows_of_its_ranks(tmp_path: Path) -> None:
    """A trace has no placement, so only the log knows it."""
    placement = ExpertPlacement(8, ((0, 4, 5, -1, -1), (1, 6, 7, 2, 3)))
    metrics = run(small_config(balance={"name": "manual", "spare_experts_per_rank": 1}), tmp_path, 2, placement)
    received = RunLog.load(tmp_path / "run-17").received_SP.sum(0).tolist()
    assert received == [int(of.real_tokens_per_expert.sum()) for of in metrics]
    assert "Experts were placed on other ranks." in page_of(tmp_path / "run-17")
    assert "Experts were placed on other ranks." not in page_of(tmp_path / "run.safetensors")


def test_tables_of_a_run_have_the_numbers_of_the_log(recorded: Path) -> None:
    page, tables, log = page_of(recorded / "run-17"), tables_of(recorded / "run-17"), RunLog.load(recorded / "run-17")
    for name in LAYERS:
        rows = tables[f"Rows per expert, {name}"][1:]
        assert [row[1] for row in rows] == log.layer_tokens[name].sum(0).tolist()
    real, padding = int(log.tokens_SE.sum()), int(log.rows["expert"].sum())
    assert f"{100 * padding / (real + padding):.1f} % of all rows." in page
    by_rank = tables["Padding rows by rank"]
    assert by_rank[0] == ("rank", "left out", "masked", "for ranks", "for experts")
    assert [row[4] for row in by_rank[1:]] == [*log.rows["expert"].sum(0).tolist(), padding]
    sent = tables["MB per step to other ranks"]
    assert sent[0] == ("rank", *log.sent, "total")
    assert sent[-1][-1] == pytest.approx(sum(float(of.sum()) for of in log.sent.values()) / STEPS / 1e6)
    assert log.needed_SP is not None
    assert log.room_S is not None
    most, first = int(log.needed_SP.max()), int((log.needed_SP.amax(1) > log.room_S).nonzero()[0])
    need, pairs = tables["Largest need of a dispatch"][1:]
    assert (need[0], need[1], *need[3:]) == ("rows of a rank's experts", most, 36, first)
    assert pairs[0] == "rows from a rank to a rank"
    assert f"A graph_safe.capacity_factor of {most / 60:.3f} would have been enough" in page
    assert "Rows beyond the capacity were dropped, and the loads above do not count them." in page


def test_small_and_eager_runs(tmp_path: Path) -> None:
    """One rank: nothing to send. Nothing can overflow."""
    run(small_config("local", pad_multiple=4), tmp_path, 1)
    page = page_of(tmp_path / "run-17")
    assert headings(page) == OF_TRACE, "nothing can overflow"
    assert "No bytes between ranks were counted." in page
    assert tables_of(tmp_path / "run-17")["Padding rows by rank"][-1][:2] == ("all", 2 * 2 * STEPS)
    dispatcher = build_dispatcher(DispatcherConfig(backend="local", num_experts=1, top_k=1, hidden_size=4))
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        dispatcher.dispatch(random_rows(0, 4), Routing(torch.zeros(0, 1, dtype=torch.int64), torch.ones(0, 1)))
    empty = page_of(tmp_path / "empty.safetensors")
    assert headings(empty) == OF_TRACE
    assert not re.search('alt="[^"]*padding', empty), "a plot of no padding shows nothing"


def test_a_crash_and_long_runs(recorded: Path, tmp_path: Path) -> None:
    """A column of a picture stands for several steps, and tables have every step."""
    directory = shutil.copytree(recorded / "run-17", tmp_path / "run")
    cut = (directory / "rank1.jsonl").read_text().splitlines(keepends=True)[:-1]
    (directory / "rank1.jsonl").write_text("".join(cut))
    told = "Ranks ended after different numbers of steps, from 2 to 3. This page has the 2 steps"
    assert told in page_of(directory)
    one, repeats = RunLog.load(recorded / "run-17"), 1000 // STEPS + 1

    def repeated(value: Any) -> Any:
        if isinstance(value, dict) and value and isinstance(next(iter(value.values())), Tensor):
            return {name: repeated(of) for name, of in value.items()}
        return value.repeat(repeats, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value

    load = run_content("long", RunLog(**{name: repeated(getattr(one, name)) for name in one.__slots__}))["sections"][0]
    assert load["text"] == ["A column of a picture is the sum of 3 steps. The tables count single steps."]
    assert "over 1002 steps" in load["pictures"][0]
    assert [row[1] for row in load["tables"][0]["rows"]] == (one.layer_tokens[LAYERS[0]].sum(0) * repeats).tolist()


def test_command(recorded: Path, tmp_path: Path, command: Command) -> None:
    answer = command("report", str(recorded / "run-17"), "--out", str(tmp_path / "out"))
    assert (answer.status, answer.out) == (0, f"{tmp_path / 'out' / 'index.html'}\n")
    assert "<title>Counts of run-17</title>" in Path(answer.out.strip()).read_text(encoding="utf-8")
    assert "<title>Routing of run.safetensors</title>" in page_of(recorded / "run.safetensors")


def test_what_cannot_be_reported_or_written(recorded: Path, tmp_path: Path) -> None:
    """What is wrong with a trace or a log is told as where it is loaded."""
    with RunLog.record(build_dispatcher(small_config("local")), tmp_path / "run"):
        pass
    with pytest.raises(TraceError, match=r"must hold a step of every rank, got 0 steps\. Call step\(\) at least once"):
        write_report(tmp_path / "run", tmp_path / "out")
    with pytest.raises(TraceError, match=r"metrics\.jsonl must be an existing file, got no file\. Check the path\."):
        write_report(tmp_path / "metrics.jsonl", tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"index\.html cannot be written: .*\. Use another directory\."):
        write_report(recorded / "run.safetensors", tmp_path / "file" / "report")
