"""The pages under docs/: links lead somewhere, code runs, design notes have their parts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.backends import Arrived, Backend, BackendOptions, Constraints, Route, registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
NOTE_PARTS = ["Problem", "Choices", "Rejected alternatives", "Consequences"]

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A path in backticks: it has a folder and an ending.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml|txt))`")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [target for target in _LINK.findall(_prose(page)) if not _leads_somewhere(page, target)]
    assert not dead, f"{_name(page)} links to {dead}"


def _leads_somewhere(page: Path, target: str) -> bool:
    if target.startswith("https://"):
        return True
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    return linked.exists() and (not anchor or anchor in _anchors(linked))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_files_exist(page: Path) -> None:
    missing = [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).is_file()]
    assert not missing, f"{_name(page)} names {missing}"


def test_design_notes_are_numbered_without_gaps() -> None:
    numbers = [int(note.name[:4]) for note in NOTES]
    assert numbers == list(range(1, len(NOTES) + 1))
    assert len(NOTES) >= 8


@pytest.mark.parametrize("note", NOTES, ids=_name)
def test_design_note_has_its_parts(note: Path) -> None:
    text = note.read_text(encoding="utf-8")
    assert re.match(
        rf"# {note.name[:4]}: \S.*\n\nStatus: (accepted|superseded by \d{{4}}), \d{{4}}-\d\d-\d\d\.\n", text
    )
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == NOTE_PARTS


def test_backend_of_the_page_passes_the_kit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    page = ROOT / "docs" / "writing-a-backend.md"
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(page), "exec"), namespace)
    assert namespace["report"].passed
    assert "excused: wire_float8 on 1 ranks: wire_dtypes none" in capsys.readouterr().out


def test_code_of_the_page_on_graph_safe_mode_runs() -> None:
    torch.manual_seed(0)
    page = ROOT / "docs" / "graph-safe.md"
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(page), "exec"), namespace)
    assert namespace["matrices"].grad.isfinite().all()  # the blocks ran to the end


def test_page_on_backends_names_every_member_and_constraint() -> None:
    text = _prose(ROOT / "docs" / "writing-a-backend.md")
    # Of a pydantic class, the members are the public ones that pydantic itself does not make.
    members = [
        name
        for owner in (BackendOptions, Backend, Route)
        for name in vars(owner)
        if not name.startswith(("_", "model_"))
    ]
    assert {"open", "constraints", "restore", "combine_backward"} <= set(members)
    fields = [field.name for values in (Constraints, Arrived) for field in dataclasses.fields(values)]
    for name in [*members, *fields]:
        assert re.search(rf"`{name}\b", text), name
