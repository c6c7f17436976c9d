"""Each public name is stable or experimental, and none changes unannounced since the last release."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import moe_dispatch
from docs.stability import EXPERIMENTAL_FIELDS, PUBLIC
from moe_dispatch import DispatcherConfig
from moe_dispatch.integrations.checks import parse_version
from tests.signatures import ROOT, lines, modules, unannounced

RELEASED = sorted(
    Path(__file__).parent.glob("signatures-*.txt"), key=lambda path: parse_version(path.stem.split("-")[1])
)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
NEWS = CHANGELOG.partition("## [Unreleased]")[2].partition("\n## ")[0]


def test_lists_have_every_exported_name_and_these_exist() -> None:
    for module, names in PUBLIC.items():
        listed, read = sorted((*names.stable, *names.experimental)), modules()[module]
        exported = [str(name) for name in read.exports or ()]
        if module == "moe_dispatch.errors":
            exported = [name for name, member in read.members.items() if not member.is_alias and member.is_class]
        # Of two modules without ``__all__``, only the names that no package exports are listed.
        assert listed == sorted(exported) or module in ("moe_dispatch.types", "moe_dispatch.config"), module
        if module.count(".") < 2:  # others need packages of integrations
            imported = importlib.import_module(module)
            assert [name for name in listed if not hasattr(imported, name)] == []
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=128, wire="mxfp8")
    for field, _, option in (name.partition(".") for name in EXPERIMENTAL_FIELDS):
        assert field in DispatcherConfig.model_fields
        assert not option or option in config.canonical[field]


def test_no_public_name_changed_unannounced() -> None:
    """Where this fails: name the change in the CHANGELOG. Or, before a release, write the file of signatures anew."""
    today = lines()
    assert not unannounced(RELEASED[-1].read_text(encoding="utf-8").splitlines(), today, NEWS)
    assert BEFORE in today  # the changes below have the form of the lines that are read from the source
    assert any(line.startswith("stable moe_dispatch.DispatcherConfig.top_k: ") for line in today)
    assert "experimental moe_dispatch.backends.PROTOCOL: None = 1" in today


def test_versions_agree() -> None:
    assert RELEASED[-1].name == f"signatures-{moe_dispatch.__version__}.txt"
    assert re.search(rf"^## \[{re.escape(moe_dispatch.__version__)}\]", CHANGELOG, re.MULTILINE)


BEFORE = "stable moe_dispatch.Dispatcher.combine(rows: Tensor, sent: Dispatched) -> Tensor"
AFTER = "stable moe_dispatch.Dispatcher.combine(rows: Tensor) -> Tensor"
DEPRECATED = "stable deprecated moe_dispatch.Dispatcher.combine(rows: Tensor, sent: Dispatched) -> Tensor"


EXPERIMENTAL = BEFORE.replace("stable", "experimental")
GONE, UNNAMED, TOO_EARLY = "`Dispatcher.combine` is gone.", "the CHANGELOG does not name it", "it was not deprecated"


@pytest.mark.parametrize(
    ("before", "after", "news", "refused"),
    [
        (BEFORE, [AFTER], "", UNNAMED),
        (BEFORE, [AFTER], "the sum of combined rows", UNNAMED),
        (BEFORE, [AFTER], "`Dispatcher.combine` takes no `sent`.", None),
        (BEFORE, [DEPRECATED], "`Dispatcher.combine` is deprecated: call `gather`.", None),
        (BEFORE, [], GONE, TOO_EARLY),
        (BEFORE, [EXPERIMENTAL], "`combine` may change.", TOO_EARLY),
        (DEPRECATED, [], GONE, None),
        (EXPERIMENTAL, [], GONE, None),
        (BEFORE, [BEFORE], "", None),
    ],
)
def test_changes_that_are_refused(before: str, after: list[str], news: str, refused: str | None) -> None:
    found = unannounced([before], after, news)
    assert len(found) == (refused is not None)
    assert all(text.startswith(str(refused)) for text in found)
