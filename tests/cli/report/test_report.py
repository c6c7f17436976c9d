"""The page on a trace: whole in itself, its numbers in tables, and a browser of a phone shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import TraceError
from moe_dispatch_testing.ranks import run_ranks
from moe_dispatch_tools.report.command import write_report
from moe_dispatch_tools.report.history import history_of, recorded_share
from moe_dispatch_tools.traces import Trace
from tests.cli.conftest import Command
from tests.dispatchers.layer import Group, random_routing, random_rows, small_config

STEPS, LAYERS = 3, ("layers.0 <mlp>", "layers.1 & more")
SECTIONS = [
    "Expert load over steps",
    "Imbalance over steps",
    "Placements",
    "Padding by cause",
    "Bytes by pair of ranks",
    "Overflow",
]
ONE_RANK = [heading for heading in SECTIONS if heading != "Placements"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, two layers, three steps."""
    path = tmp_path_factory.mktemp("recorded") / "run.safetensors"

    def body(group: Group) -> None:
        assert group is not None
        layers = [build_dispatcher(small_config(pad_multiple=16), group, name=name) for name in LAYERS]
        with Trace.record(layers[0], path):
            for step in range(STEPS):
                for seed, dispatcher in enumerate(layers):
                    rows = 20 + 5 * group.rank() + step
                    way = random_routing(rows, seed=10 * step + seed + group.rank())
                    dispatcher.dispatch(random_rows(rows), Routing(way.topk_ids // 2, way.topk_weights))

    run_ranks(body, 2)
    return path


@pytest.fixture(scope="module")
def page(recorded: Path) -> Path:
    return write_report(recorded, recorded.parent / "made" / "report")


@final
class Outline(HTMLParser):
    """Headings, tables by caption, pictures' descriptions, ids and everything that refers to something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.pictures: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: Counter[str] = Counter()
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.ids += [given["id"]] if "id" in given else []
        self.targets += [given[name] for name in ("href", "xlink:href", "src") if name in given]
        self.targets += re.findall(r"url\(([^)]*)\)", " ".join(given.values()))
        if given.get("role") == "img":
            self.pictures.append(given["aria-label"])
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


@pytest.fixture(scope="module")
def outline(page: Path) -> Outline:
    return Outline(page.read_text(encoding="utf-8"))


def test_page_is_whole_in_itself(page: Path, outline: Outline) -> None:
    assert [file.name for file in page.parent.iterdir()] == ["index.html"]
    assert not outline.tags.keys() & {"script", "link", "iframe", "img", "object", "base", "form"}
    assert outline.targets, "pictures refer to parts of themselves"
    for target in outline.targets:
        assert target.startswith("data:image/png;base64,") or target[1:] in outline.ids, target
    assert [name for name, count in Counter(outline.ids).items() if count > 1] == []
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_every_section_has_pictures_with_descriptions(outline: Outline) -> None:
    assert outline.headings == SECTIONS
    assert len(outline.pictures) == len(LAYERS) + len(SECTIONS) - 1
    assert all(len(alt) > 50 for alt in outline.pictures)
    assert outline.pictures[0].startswith(f"Heat map of {LAYERS[0]}: rows per expert over 3 steps.")


def test_colours_are_the_page_s(page: Path) -> None:
    """None of those that stand for them is left, and each of the page's is defined for light and dark."""
    text = page.read_text(encoding="utf-8")
    assert "#0a0b" not in text
    for name in set(re.findall(r"var\((--[\w-]+)\)", text)):
        assert text.count(f"{name}: #") == 2, name
    assert text.count("currentColor") > 50


def numbers(cells: list[str]) -> list[float]:
    return [float(re.sub(r"[\u202f %]", "", cell)) for cell in cells]


def test_tables_have_the_numbers(recorded: Path, outline: Outline) -> None:
    history = history_of(Trace.load(recorded))
    share = recorded_share(history)
    tokens = history.loads.tokens_CE[history.layer_C == 1]
    rows = outline.tables[f"Rows per expert, {LAYERS[1]}"]
    assert rows[0] == ["expert", "rows", "of the mean", "per step", "min", "max"]
    assert [int(row[1]) for row in rows[1:]] == tokens.sum(0).tolist()
    assert [int(row[5]) for row in rows[1:]] == tokens.amax(0).tolist()
    imbalance = outline.tables["Largest load, divided by the mean load"]
    assert imbalance[1][0] == LAYERS[0]
    assert float(imbalance[1][2]) == pytest.approx(
        float(history.timeline.imbalance_C[history.layer_C == 0].max()), abs=0.006
    )
    padding = {row[0]: numbers(row[1:4]) for row in outline.tables["Padding rows of all steps"][1:]}
    assert padding["alltoall"] == [0, 0, share.expert_padding]
    assert padding["allgather"] == [0, 2 * STEPS * 5, share.expert_padding]
    assert share.bytes_PP is not None
    pairs = outline.tables["kB per step from rank to rank"]
    assert float(pairs[1][2]) == pytest.approx(float(share.bytes_PP[0, 1]) / STEPS / 1e3, rel=1e-3)
    assert pairs[1][1] == "-"
    assert outline.tables["kB per step to other ranks"][0][1] == "rows in"
    dtypes = {row[0]: row[1] for row in outline.tables["kB per step to other ranks"][1:]}
    assert dtypes == {"alltoall": "float32", "allgather": "float32", "hybridep": "bfloat16"}
    sent = {row[0]: numbers(row[2:]) for row in outline.tables["kB per step to other ranks"][1:]}
    assert sent["alltoall"][-1] == pytest.approx(sum(share.sent.values()) / STEPS / 1e3, rel=1e-3)
    overflow = outline.tables["Overflow by capacity"][1:]
    assert overflow[0][:2] == ["1.0", "54"]
    assert numbers(overflow[0])[2] == 100
    assert overflow[-1][0] == "worst"
    assert numbers(overflow[-1][2:]) == [0, 0]
    assert outline.tables["Backends that refuse this run"][1][0] == "deepep"


def test_one_rank_and_one_step(tmp_path: Path) -> None:
    """Nothing to send, one point in each line, an expert for all tokens."""
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=40))
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(random_rows(4), Routing(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)))
    found = Outline(write_report(tmp_path / "run.safetensors", tmp_path).read_text(encoding="utf-8"))
    assert found.headings == ONE_RANK
    assert not any("rank to rank" in caption for caption in found.tables)


def test_no_tokens_at_all(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(DispatcherConfig(backend="local", num_experts=1, top_k=1, hidden_size=4))
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(random_rows(0, 4), Routing(torch.zeros(0, 1, dtype=torch.int64), torch.ones(0, 1)))
    assert Outline(write_report(tmp_path / "run.safetensors", tmp_path).read_text()).headings == ONE_RANK


def test_what_cannot_be_reported(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trace.record(build_dispatcher(small_config("local")), tmp_path / "empty.safetensors"):
        pass
    with pytest.raises(TraceError, match=r"empty\.safetensors must hold a dispatch, got none\. Record at least one"):
        write_report(tmp_path / "empty.safetensors", tmp_path)
    tensors = load_file(recorded)
    tensors["rank1.ids"][3, 0] = 8
    with safe_open(recorded, framework="pt") as opened:
        save_file(tensors, tmp_path / "odd.safetensors", opened.metadata())
    with pytest.raises(TraceError, match=r"topk_ids must lie in -1\.\.7, got 0\.\.8 on rank 1 in step 0 of layers\.0"):
        write_report(tmp_path / "odd.safetensors", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"index\.html cannot be written: .*\. Use another directory\."):
        write_report(recorded, tmp_path / "file" / "report")


def test_command(recorded: Path, tmp_path: Path, command: Command) -> None:
    answer = command("report", str(recorded), "--out", str(tmp_path / "out"))
    assert (answer.status, answer.out) == (0, f"{tmp_path / 'out' / 'index.html'}\n")
    assert Path(answer.out.strip()).is_file()
    wrong = command("report", str(tmp_path / "metrics.jsonl"))
    assert (wrong.status, wrong.out) == (2, "")
    assert re.match(r"Error: Trace.load: \S+ must be an existing file, got no file\. Check the path\.\n$", wrong.error)


BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
# Runs in the page: what a reader would see, as JSON in the title.
PROBE = """<script>
const shown = element => { const box = element.getBoundingClientRect(); return [box.left, box.right, box.height] };
const texts = [...document.querySelectorAll('svg text')];
const scale = text => Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b);
const size = text => parseFloat(getComputedStyle(text).fontSize) * scale(text);
const lines = [...document.querySelectorAll('[id^=imbalance-line2d] path')];
document.title = JSON.stringify({
  width: innerWidth, wide: document.documentElement.scrollWidth,
  dark: matchMedia('(prefers-color-scheme: dark)').matches,
  paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  fills: [...new Set(texts.filter(text => !text.closest('[id^=pairs-figure]')).map(t => getComputedStyle(t).fill))],
  strokes: [...new Set(lines.map(line => getComputedStyle(line).stroke))],
  columns: new Set([...document.querySelectorAll('section')].map(section => shown(section)[0])).size,
  pictures: [...document.querySelectorAll('figure svg')].map(shown), size: Math.min(...texts.map(size)),
  loaded: performance.getEntriesByType('resource').map(entry => entry.name),
});
</script>"""


def seen(page: Path, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What a headless browser makes of the page."""
    assert BROWSER is not None
    probed = folder / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    finished = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},800",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search("<title>(.*?)</title>", finished.stdout)
    assert title is not None, finished.stderr
    found: dict[str, Any] = json.loads(title[1].replace("&quot;", '"').replace("&amp;", "&"))
    return found


def luminance(colour: str) -> float:
    """Of "rgb(r, g, b)", as WCAG 2 computes it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (Debian: chromium-headless-shell)")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (390, False), (1280, True)])
def test_browser_shows_it(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    view = seen(page, tmp_path, width=width, dark=dark)
    if view["width"] != width:
        pytest.skip(f"this Chromium has windows of {view['width']} pixels only, asked for {width}")
    assert view["dark"] == dark
    assert (luminance(view["paper"]) < 0.05) == dark
    assert view["wide"] <= width, "nothing makes the page scroll sideways"
    assert view["columns"] == (2 if width > 1100 else 1), "sections stand side by side where there is room"
    assert len(view["pictures"]) == len(LAYERS) + len(SECTIONS) - 1
    for left, right, height in view["pictures"]:
        assert 0 <= left < right <= width
        assert right - left > min(width, 500) * 0.85, "a picture uses the width there is"
        assert height > 80
    assert view["size"] >= 10, "pixels of the smallest text"
    assert contrast(view["paper"], view["ink"]) > 7
    assert view["fills"] == [view["ink"]], "pictures write in the page's colour"
    assert len(strokes := [colour for colour in view["strokes"] if colour.startswith("rgb(")]) >= 3
    assert sum(contrast(view["paper"], colour) > 3 for colour in strokes) >= 3, "lines, and the axes' ticks"
    assert view["loaded"] == []
