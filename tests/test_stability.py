"""Each public name is stable or experimental, and none changes unannounced since the last release."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from griffe import GriffeLoader

import moe_dispatch
from moe_dispatch import DispatcherConfig
from moe_dispatch._stability import EXPERIMENTAL_FIELDS, PUBLIC
from moe_dispatch.integrations.checks import parse_version
from tests.signatures import ROOT, lines, unannounced

RELEASED = sorted(
    Path(__file__).parent.glob("signatures-*.txt"), key=lambda path: parse_version(path.stem.split("-")[1])
)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
NEWS = CHANGELOG.partition("## [Unreleased]")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def today() -> list[str]:
    return lines()


# Of two modules without ``__all__``, only the names that no package exports are listed.
@pytest.mark.parametrize(
    "module", [name for name in PUBLIC if name not in ("moe_dispatch.types", "moe_dispatch.config")]
)
def test_list_has_every_exported_name(module: str) -> None:
    names = PUBLIC[module]
    loaded = GriffeLoader(search_paths=[ROOT], allow_inspection=False).load(module)
    exported = [str(name) for name in loaded.exports or ()]
    if module == "moe_dispatch.errors":
        exported = [name for name, member in loaded.members.items() if not member.is_alias and member.is_class]
    assert sorted((*names.stable, *names.experimental)) == sorted(exported)


@pytest.mark.parametrize("module", [name for name in PUBLIC if name.count(".") < 2])
def test_names_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    names = (*PUBLIC[module].stable, *PUBLIC[module].experimental)
    assert not [name for name in names if not hasattr(found, name)]


def test_experimental_fields_are_fields() -> None:
    assert set(EXPERIMENTAL_FIELDS) <= set(DispatcherConfig.model_fields)


def test_no_public_name_changed_unannounced(today: list[str]) -> None:
    """Where this fails: name the change in the CHANGELOG. Or, before a release, write the file of signatures anew."""
    last = RELEASED[-1].read_text(encoding="utf-8").splitlines()
    assert not unannounced(last, today, NEWS)


def test_versions_agree() -> None:
    assert RELEASED[-1].name == f"signatures-{moe_dispatch.__version__}.txt"
    assert re.search(rf"^## \[{re.escape(moe_dispatch.__version__)}\]", CHANGELOG, re.MULTILINE)


BEFORE = "stable moe_dispatch.Dispatcher.combine(rows: Tensor, sent: Dispatched) -> Tensor"
AFTER = "stable moe_dispatch.Dispatcher.combine(rows: Tensor) -> Tensor"
DEPRECATED = "stable deprecated moe_dispatch.Dispatcher.combine(rows: Tensor, sent: Dispatched) -> Tensor"


@pytest.mark.parametrize(
    ("before", "after", "news", "refused"),
    [
        (BEFORE, AFTER, "", "the CHANGELOG does not name it"),
        (BEFORE, AFTER, "the sum of combined rows", "the CHANGELOG does not name it"),
        (BEFORE, AFTER, "`Dispatcher.combine` takes no `sent`.", None),
        (BEFORE, DEPRECATED, "`Dispatcher.combine` is deprecated: call `gather`.", None),
        (BEFORE, "", "`Dispatcher.combine` is gone.", "it was not deprecated in the last release"),
        (
            BEFORE,
            BEFORE.replace("stable", "experimental"),
            "`combine` may change.",
            "it was not deprecated in the last release",
        ),
        (DEPRECATED, "", "`Dispatcher.combine` is gone.", None),
        (BEFORE.replace("stable", "experimental"), "", "`Dispatcher.combine` is gone.", None),
        (BEFORE, BEFORE, "", None),
    ],
)
def test_changes_that_are_refused(before: str, after: str, news: str, refused: str | None) -> None:
    found = unannounced([before], [after] if after else [], news)
    assert [text.partition(":")[0] for text in found] == ([] if refused is None else [refused])


def test_a_change_of_a_parameter_changes_a_line(today: list[str]) -> None:
    """The planted changes above have the form of the lines that are read from the source."""
    assert BEFORE in today
    assert any(line.startswith("stable moe_dispatch.DispatcherConfig.top_k: ") for line in today)
    assert "experimental moe_dispatch.backends.PROTOCOL: None = 1" in today
