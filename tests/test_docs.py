"""The pages under docs/ are true: links lead somewhere, code runs, errors occur, tables follow from the code."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends import registry
from tests.pages import ROOT, blocks, run_page
from tests.ranks import run_ranks
from tests.reported_failures import SHOWN

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("findings/*.md"),
        *(ROOT / "tests").rglob("README.md"),
    ]
)
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
PAGES_OF_SITE = runpy.run_path(str(ROOT / "docs" / "links.py"))
WEIGHTS = runpy.run_path(str(ROOT / "docs" / "search.py"))
# What people type into a search, each as the stems of its words.
QUERIES = """
accumul gradient|no token|CUDA graph|capacity factor|wandb|bitwise|muon|migrat|MTP|tutel|megablocks|hydra|EMA
FSDP2 EP tensor|checkpoint|LoRA|pipeline|torchtitan|megatron|8-bit|hang|shared expert|mixed precision|metrics
""".replace("\n", "|").strip("|")
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A path in backticks: it has a folder and an ending.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml|txt))`")


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers or sets ends with the test, and it meets nothing of another one."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr("os.environ", {})


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _leads_somewhere(page: Path, target: str) -> bool:
    if target.startswith("https://"):
        return True
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    return linked.exists() and (not anchor or anchor in _anchors(linked))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_and_named_files_exist(page: Path) -> None:
    dead = [target for target in _LINK.findall(_prose(page)) if not _leads_somewhere(page, target)]
    assert not dead, f"{_name(page)} links to {dead}"
    missing = [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).is_file()]
    assert not missing, f"{_name(page)} names {missing}"


def test_design_notes_are_numbered_and_have_a_status() -> None:
    assert [int(note.name[:4]) for note in NOTES] == list(range(1, len(NOTES) + 1))
    for note in NOTES:
        opening = rf"# {note.name[:4]}: \S.*\n\nStatus: (accepted|superseded by \d{{4}}), \d{{4}}-\d\d-\d\d\.\n"
        assert re.match(opening, note.read_text(encoding="utf-8")), note


@pytest.mark.parametrize(
    ("page", "until", "holds"),
    [
        ("balance.md", "", lambda names: names["config"].slot_options.name == "exact"),
        ("deep-ep.md", "", lambda names: not names["emulated"]._lease._collected.alive),
        ("graph-safe.md", "", lambda names: names["matrices"].grad.isfinite().all()),
        ("layouts.md", "", lambda names: names["arrived"] == [(9, [0, 5, 8, 17])] * 8),
        ("questions.md", "", lambda names: torch.equal(names["again"].rows, names["sent"].rows)),
        # What follows needs tensorboard: tests/integration/test_metrics_page.py.
        (
            "tuning.md",
            "## TensorBoard, wandb and Prometheus",
            lambda names: names["bias"].any() and not names["metrics"].bytes_sent,
        ),
        pytest.param("writing-a-backend.md", "", lambda names: names["report"].passed, marks=pytest.mark.slow),
        (
            "your-model.md",
            "",
            lambda names: torch.equal(names["from_map"].topk_ids, names["routing"].topk_ids.sort(1).values),
        ),
    ],
)
def test_code_of_the_page_runs(page: str, until: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    """The condition is on a name of the last block, so it tells that the blocks ran to the end."""
    torch.manual_seed(0)
    assert holds(run_page(page, until))


def test_code_of_the_page_on_configuration_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n# (\S+)\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / block[1]).write_text("\n".join(block[0].splitlines()[1:-1]), encoding="utf-8")
    with contextlib.chdir(tmp_path):
        assert run_page("configuration.md")["config"].backend_name == "allgather"


def test_each_reported_failure_has_a_test_or_is_not_served() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = text.partition("\n## Failures known from other systems\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "#" in line and line.startswith("| ")]
    shown = {report for tests in SHOWN.values() for reports in tests.values() for report in reports}
    told = set()
    for failure, here in rows:
        reports = {
            f"{project} {number}"
            for project, numbers in re.findall(r"(\w+(?:[-/]\w+)*) (#\d+(?:, #\d+)*)", failure)
            for number in numbers.split(", ")
        }
        assert reports, failure
        assert reports <= shown or here.startswith("Not served"), failure
        told |= reports
    assert shown <= told
    for file, tests in SHOWN.items():
        defined = re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert not set(tests) - set(defined), file


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_shell_blocks_name_targets_scripts_and_variables_that_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in "".join(blocks(_name(page), "sh")).splitlines():
        words = shlex.split(line, comments=True)
        for target in words[words.index("make") + 1 :][:1] if "make" in words else []:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        for script in (word for word in words if re.match(r"(examples|tests|docs)/.*\.py$", word)):
            assert (ROOT / script).is_file(), line
        for name in re.findall(r"\bMOE_DISPATCH_(\w+?)(?:__\w+)?=", line):
            assert name.lower() in DispatcherConfig.model_fields, line


def _config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"backend": "alltoall", "num_experts": 8, "top_k": 2, "hidden_size": 16, **fields})


def test_the_error_that_the_page_on_graph_safe_mode_quotes_occurs() -> None:
    (quoted,) = blocks("docs/graph-safe.md", "text")
    exact = _config(backend={"name": "alltoall", "reduction": "exact"}, graph_safe=True, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=re.escape(quoted.strip())):
        build_dispatcher(exact)


@pytest.mark.parametrize("page", TABLES["TABLES"])
def test_tables_follow_from_the_code(page: str) -> None:
    """Where this fails: ``python docs/tables.py``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert TABLES["replaced"](page, text) == text


def test_the_page_on_differences_is_short_and_says_when_and_how_each_row_ran() -> None:
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    data = tomllib.loads((ROOT / "docs" / "differences.toml").read_text(encoding="utf-8"))
    assert len(page.replace("|", " ").split()) <= 1200
    assert f"Everything ran on {data['date']}" in page
    for table in data["table"]:
        for row in table["rows"]:
            assert len(row["cells"]) == len(table["columns"]), row
            assert row["run"] in ("test", "once") or (ROOT / "findings" / f"{row['run']}.sh").is_file(), row


def test_each_finding_is_listed_once_stops_at_an_error_and_leaves_nothing_behind() -> None:
    listed = re.findall(
        r"^\| \[([\w-]+)\]\(\1\.sh\) \|", (ROOT / "findings" / "README.md").read_text(encoding="utf-8"), re.M
    )
    scripts = sorted((ROOT / "findings").glob("*.sh"))
    assert sorted(listed) == [script.stem for script in scripts]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n# ")
        assert "\nset -euo pipefail\n" in text
        assert "trap 'rm -rf \"$folder\"' EXIT" in text
        assert "moe_dispatch" not in text
        assert script.stat().st_mode & 0o111, script


@pytest.mark.parametrize("line", TABLES["wire_table"]().splitlines()[2:])
def test_bytes_of_the_wire_table_are_those_sent(line: str) -> None:
    """Three rows whose eight experts are all on the other rank."""
    dtype, wire, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
    shape = TABLES["SHAPE"]
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k, "hidden_size": shape.hidden_size}

    def body(group: Any) -> dict[str, int]:
        dispatcher = build_dispatcher(_config(**sizes, wire=None if wire == "None" else wire.strip('"')), group)
        x = torch.ones(3, shape.hidden_size, dtype=getattr(torch, dtype), requires_grad=True)
        ids = torch.arange(shape.top_k).expand(3, -1) + 32 * (1 - group.rank())
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(3, shape.top_k, requires_grad=True)))
        dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics().bytes_sent

    for sent in run_ranks(body, 2):
        order = ("dispatch", "combine", "combine.backward", "dispatch.backward")
        assert [sent[label] for label in order] == [3 * int(number) for number in numbers]


def test_every_page_is_once_in_the_navigation() -> None:
    listed = re.findall(
        r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "changelog.md", "examples.md"])


REPOSITORY = "https://example.org"


@pytest.mark.parametrize(
    ("repository", "page", "link", "on_the_site"),
    [
        (REPOSITORY, "backends.md", "[it](../README.md#a)", f"[it]({REPOSITORY}/blob/main/README.md#a)"),
        (REPOSITORY, "design/0001.md", "[it](../../Makefile)", f"[it]({REPOSITORY}/blob/main/Makefile)"),
        ("", "backends.md", "[it](../README.md#a)", "it (`README.md`)"),
        ("", "design/0001.md", "[the Makefile](../../Makefile)", "the Makefile"),
        ("", "design/0001.md", "[it](../backends.md)", "[it](../backends.md)"),
        ("", "backends.md", "[it](../examples/launch.py)", "[it](examples/launch.md)"),
        (REPOSITORY, "design/0001.md", "[it](../../CHANGELOG.md#a)", "[it](../changelog.md#a)"),
    ],
)
def test_links_out_of_docs_lead_to_the_repository(repository: str, page: str, link: str, on_the_site: str) -> None:
    hook = runpy.run_path(str(ROOT / "docs" / "links.py"))["on_page_markdown"]
    of_page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hook(f"See {link}.", page=of_page, config={"repo_url": repository}) == f"See {on_the_site}."


def _weight(page: str) -> float:
    meta: dict[str, Any] = {}
    of_page = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta=meta)
    assert WEIGHTS["on_page_markdown"]("", page=of_page) is None, "the text of the page stays"
    return 0.0 if meta["search"].get("exclude") else meta["search"]["boost"]


@pytest.mark.parametrize("query", QUERIES.split("|"))
def test_what_people_type_stands_in_a_heading_of_a_guide(query: str) -> None:
    """The search of the site weighs words of headings most."""
    headings = {
        (page, heading.lower())
        for path in (ROOT / "docs").rglob("*.md")
        if _weight(page := str(path.relative_to(ROOT / "docs"))) >= 1
        for heading in re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    }
    assert [page for page, heading in headings if all(stem.lower() in heading for stem in query.split())]


def test_search_of_the_site_finds_guides_before_names_and_no_internals() -> None:
    assert _weight("questions.md") > _weight("training.md") == 1 > _weight("reference/moe_dispatch.Dispatcher.md") > 0
    assert _weight("training.md") > _weight("examples/train_fsdp2.md") > 0
    assert not any(_weight(f"design/{note.name}") for note in NOTES)
    assert not _weight("reference/moe_dispatch.permutation.SlotIndex.md")


def test_examples_and_the_changelog_are_pages_of_the_site() -> None:
    made = PAGES_OF_SITE["pages"]()
    assert {f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.py")} < set(made)
    page = made["examples/train_fsdp2.md"]
    assert page.startswith("# train_fsdp2.py\n\nTrain a mixture-of-experts language model")
    assert page.count("```") == 2
    assert "torchrun --nproc-per-node 4" in page.partition("```")[0]
    compile(page.split("```")[1].partition("\n")[2], "train_fsdp2.py", "exec")
    assert made["changelog.md"].startswith("# Changelog\n")
    assert "](docs/" not in made["changelog.md"]
    assert "- [`log_metrics.py`](examples/log_metrics.md): Log what" in made["examples.md"]
