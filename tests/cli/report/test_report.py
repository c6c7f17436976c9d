"""The page on a trace or a run: whole in itself, and its numbers are those that the ranks measured."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.errors import TraceError
from moe_dispatch_tools.report.command import render, write_report
from moe_dispatch_tools.report.sections import counts_of, run_content
from moe_dispatch_tools.traces import RunLog, Trace
from tests.cli.conftest import Command
from tests.dispatchers.layer import Group, on_ranks, random_rows, small_config

STEPS, LAYERS = 3, ("layers.0 <mlp>", "layers.1 & more")
OF_TRACE = ["Expert load over steps", "Imbalance over steps", "Padding", "Bytes between ranks"]
SECTIONS = [*OF_TRACE, "Overflow"]
ROOM: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 30, "capacity_factor": 0.6, "on_overflow": "drop"}


@final
class Outline(HTMLParser):
    """Headings, tables by caption, descriptions of pictures, and everything that refers to something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.pictures: list[str] = []
        self.targets: list[str] = []
        self.tags: Counter[str] = Counter()
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.targets += [given[name] for name in ("href", "src") if name in given]
        if tag == "img":
            self.pictures.append(given["alt"])
        if tag in ("h2", "caption", "th", "td"):
            self._open.append("")
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "h2":
            self.headings.append(self._open.pop())
        if tag == "caption":
            self._caption = self._open.pop()
        if tag in ("th", "td"):
            self._rows[-1].append(self._open.pop())
        if tag == "table":
            self.tables[self._caption] = self._rows


def page_of(source: Path) -> tuple[str, Outline]:
    text = write_report(source, source.parent / f"page of {source.name}").read_text(encoding="utf-8")
    return text, Outline(text)


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace("\u202f", "")) for cell in cells]


def given(step: int, rank: int, config: DispatcherConfig) -> tuple[Tensor, Routing, Rows]:
    """Uneven in everything: ranks, experts, tokens; the last two rows are no tokens. Rank 1 has none in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 0 if (step, rank) == (1, 1) else 11 + 2 * step + 3 * rank
    popular = torch.arange(config.num_experts) / 3
    ids = (torch.randn(rows, config.num_experts, generator=generator) - popular).topk(config.top_k).indices
    ids[::4, 1] = -1
    ids[1::4, 1] = ids[1::4, 0]
    dtype = torch.float32 if config.wire_dtype is None else torch.bfloat16
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


@pytest.mark.parametrize(("name", "headings"), [("run.safetensors", OF_TRACE), ("run-17", SECTIONS)])
def test_page_is_whole_in_itself(name: str, headings: list[str], recorded: Path) -> None:
    text, outline = page_of(recorded / name)
    assert outline.headings == headings
    assert not outline.tags.keys() & {"script", "link", "iframe", "object", "base", "form"}
    assert outline.pictures
    assert all(len(alt) > 50 for alt in outline.pictures)
    assert all(target.startswith("data:image/svg+xml;base64,") for target in outline.targets)
    assert "http" not in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    for variable in set(re.findall(r"var\((--[\w-]+)\)", text)):
        assert text.count(f"{variable}: #") == 2, "for light and dark"


SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 30}
CONFIGS: dict[str, tuple[DispatcherConfig, int]] = {
    "alltoall": (small_config(pad_multiple=4), 4),
    "alltoall wide": (small_config(num_experts=32, top_k=4, hidden_size=128, wire_dtype="float8_e4m3fn"), 2),
    "alltoall two levels": (small_config({"name": "alltoall", "levels": 2}), 4),
    "alltoall two levels exact": (small_config({"name": "alltoall", "levels": 2, "reduction": "exact"}), 4),
    "alltoall graph-safe": (small_config(pad_multiple=4, **SAFE), 2),
    "alltoall balanced": (small_config(spare_experts_per_rank=2, balance="least_loaded"), 4),
    "allgather": (small_config("allgather", pad_multiple=4), 2),
    "allgather static": (small_config("allgather", row_counts="static", max_tokens_per_rank=30), 4),
    "hybridep": (small_config({"name": "hybridep", "emulate": True}, hidden_size=512, wire_dtype="bfloat16"), 2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_bytes_are_those_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config, size), to_ranks = CONFIGS[name], Counter[tuple[int, int]]()
    plain = Communicator.all_to_all

    def counted(self: Communicator, out: Tensor, inp: Tensor, out_splits: Any, in_splits: Any, *, label: str) -> Any:
        for receiver, rows in enumerate(in_splits):
            to_ranks[self.rank, receiver] += rows * (inp.nbytes // max(len(inp), 1)) * (label != "balance")
        return plain(self, out, inp, out_splits, in_splits, label=label)

    monkeypatch.setattr(Communicator, "all_to_all", counted)
    if "two levels" in name:  # ranks 0 and 1 are on one host, ranks 2 and 3 on another
        monkeypatch.setattr(socket, "gethostname", lambda: f"host{int(threading.current_thread().name[-1]) // 2}")
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
    if config.backend_name == "alltoall" and config.balance is None:
        pairs = [
            [float(to_ranks[source, target]) * (source != target) for target in range(size)] for source in range(size)
        ]
        assert traffic.pairs_PP.tolist() == pairs


def test_tables_of_a_trace_have_the_numbers(tmp_path: Path) -> None:
    metrics = run(small_config(pad_multiple=16), tmp_path, 2)
    text, outline = page_of(tmp_path / "run.safetensors")
    tokens_CE = counts_of(Trace.load(tmp_path / "run.safetensors"))[0].tokens_CE
    tokens = tokens_CE[1::2]
    rows = outline.tables[f"Rows per expert, {LAYERS[1]}"]
    assert rows[0] == ["expert", "rows", "of the mean", "per step", "min", "max"]
    assert [int(row[1]) for row in rows[1:]] == tokens.sum(0).tolist()
    assert [int(row[5]) for row in rows[1:]] == tokens.amax(0).tolist()
    imbalance = outline.tables["Largest load, divided by the mean load"][1]
    assert imbalance[0] == LAYERS[0]
    largest = (tokens_CE.amax(1) / tokens_CE.double().mean(1)).max()
    assert float(imbalance[2]) == pytest.approx(float(largest), rel=1e-3)
    sent = outline.tables["MB per step to other ranks"]
    for rank, of in enumerate(metrics):
        nbytes = [of.bytes_sent.get(label, 0) / STEPS / 1e6 for label in sent[0][1:-1]]
        assert numbers(sent[1 + rank][1:]) == pytest.approx([*nbytes, sum(nbytes)], rel=1e-3)
    assert "Rows travel in float32." in text


def test_a_balanced_run_tells_what_it_saved(tmp_path: Path) -> None:
    run(small_config(spare_experts_per_rank=2, balance="least_loaded"), tmp_path, 4)
    for name in ("run.safetensors", "run-17"):
        text, outline = page_of(tmp_path / name)
        assert re.search(r"would have got [\d.]+ times the mean", text)
        placed, home = (numbers(outline.tables["Largest load, divided by the mean load"][1][i : i + 1]) for i in (4, 7))
        assert placed < home


def test_a_placed_run_has_the_rows_of_its_ranks(tmp_path: Path) -> None:
    """A trace has no placement, so only the log knows it."""
    placement = ExpertPlacement(8, ((0, 4, 5, -1, -1), (1, 6, 7, 2, 3)))
    metrics = run(small_config(spare_experts_per_rank=1), tmp_path, 2, placement)
    received = RunLog.load(tmp_path / "run-17").received_SP.sum(0).tolist()
    assert received == [int(of.real_tokens_per_expert.sum()) for of in metrics]
    assert "Experts were placed on other ranks." in page_of(tmp_path / "run-17")[0]
    assert "Experts were placed on other ranks." not in page_of(tmp_path / "run.safetensors")[0]


def test_tables_of_a_run_have_the_numbers_of_the_log(recorded: Path) -> None:
    (text, outline), log = page_of(recorded / "run-17"), RunLog.load(recorded / "run-17")
    rows = outline.tables["Rows per expert, all dispatchers"][1:]
    assert [int(row[1]) for row in rows] == log.tokens_SE.sum(0).tolist()
    real, padding = int(log.tokens_SE.sum()), int(log.rows["expert"].sum())
    assert f"{100 * padding / (real + padding):.1f} % of all rows." in text
    by_rank = outline.tables["Padding rows by rank"]
    assert by_rank[0] == ["rank", "left out", "masked", "for ranks", "for experts"]
    assert [int(row[4]) for row in by_rank[1:]] == [*log.rows["expert"].sum(0).tolist(), padding]
    sent = outline.tables["MB per step to other ranks"]
    assert sent[0] == ["rank", *log.sent, "total"]
    total = sum(float(of.sum()) for of in log.sent.values()) / STEPS / 1e6
    assert numbers(sent[-1][-1:])[0] == pytest.approx(total, rel=1e-3)
    needed_SP, room_S = log.needed_SP, log.room_S
    assert needed_SP is not None
    assert room_S is not None
    first = int((needed_SP.amax(1) > room_S).nonzero()[0])
    need, pairs = outline.tables["Largest need of a dispatch"][1:]
    assert [need[0], *need[1::2], need[-1]] == ["rows of a rank's experts", str(int(needed_SP.max())), "36", str(first)]
    assert pairs[0] == "rows from a rank to a rank"
    assert f"A capacity_factor of {int(needed_SP.max()) / 60:.3f} would have been enough" in text
    assert "Rows beyond the capacity were dropped, and the loads above do not count them." in text


def test_small_and_eager_runs(tmp_path: Path) -> None:
    """One rank: nothing to send. Nothing can overflow."""
    run(small_config("local", pad_multiple=4), tmp_path, 1)
    text, outline = page_of(tmp_path / "run-17")
    assert outline.headings == OF_TRACE, "nothing can overflow"
    assert "No bytes between ranks were counted." in text
    assert outline.tables["Padding rows by rank"][-1][:2] == ["all", str(2 * 2 * STEPS)]
    assert page_of(tmp_path / "run.safetensors")[1].headings == OF_TRACE
    dispatcher = build_dispatcher(DispatcherConfig(backend="local", num_experts=1, top_k=1, hidden_size=4))
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        dispatcher.dispatch(random_rows(0, 4), Routing(torch.zeros(0, 1, dtype=torch.int64), torch.ones(0, 1)))
    empty = page_of(tmp_path / "empty.safetensors")[1]
    assert empty.headings == OF_TRACE
    assert not any("padding" in alt for alt in empty.pictures), "a plot of no padding shows nothing"


def test_a_crash_and_long_runs(recorded: Path, tmp_path: Path) -> None:
    """A column of a picture stands for several steps, and tables have every step."""
    directory = shutil.copytree(recorded / "run-17", tmp_path / "run")
    cut = (directory / "rank1.jsonl").read_text().splitlines(keepends=True)[:-1]
    (directory / "rank1.jsonl").write_text("".join(cut))
    assert (
        "Ranks ended after different numbers of steps, from 2 to 3. This page has the 2 steps" in page_of(directory)[0]
    )
    one, repeats = RunLog.load(recorded / "run-17"), 1000 // STEPS + 1

    def repeated(value: Any) -> Any:
        if isinstance(value, dict) and value and isinstance(next(iter(value.values())), Tensor):
            return {name: repeated(of) for name, of in value.items()}
        return value.repeat(repeats, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value

    page = render(run_content("long", RunLog(**{name: repeated(getattr(one, name)) for name in one.__slots__})))
    assert "A column of a picture is the sum of 3 steps. The tables count single steps." in page
    assert "over 1002 steps" in page
    rows = Outline(page).tables["Rows per expert, all dispatchers"][1:]
    assert [numbers(row[1:2])[0] for row in rows] == (one.tokens_SE.sum(0) * repeats).tolist()


def test_command(recorded: Path, tmp_path: Path, command: Command) -> None:
    for name, title in (("run-17", "Run run-17"), ("run.safetensors", "Routing of run.safetensors")):
        answer = command("report", str(recorded / name), "--out", str(tmp_path / "out"))
        assert (answer.status, answer.out) == (0, f"{tmp_path / 'out' / 'index.html'}\n")
        assert f"<title>{title}</title>" in Path(answer.out.strip()).read_text(encoding="utf-8")


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
