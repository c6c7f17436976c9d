"""The look at newest releases, with a stand-in for its environments; and constraints.txt as its command makes it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.matrix import constraints, upstream

RIGHT = "def test_right():\n    pass\n"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    """Of a run that keeps an environment whose interpreter is that of this process."""
    monkeypatch.setattr(upstream, "OUT", tmp_path)
    monkeypatch.setattr(upstream, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    (tmp_path / ".venv-upstream" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-upstream" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv-upstream" / "bin" / "python").chmod(0o755)
    return argparse.Namespace(keep=True, minutes=1, python=sys.executable)


def framework(tmp_path: Path, text: str, installs: tuple[str, ...] = ()) -> upstream.Framework:
    (tmp_path / "test_it.py").write_text(text)
    return upstream.Framework("pytest", installs, (str(tmp_path / "test_it.py"),))


def test_the_table_names_what_is_pinned_what_is_newest_and_what_passed(
    options: argparse.Namespace, tmp_path: Path
) -> None:
    result = upstream.look(framework(tmp_path, RIGHT), options)
    row = upstream.table([result], {"pytest": "9.0"}).splitlines()[2]
    assert row.startswith(f"| pytest | 9.0 | {pytest.__version__} | 1 | 0 | 0 | 20")
    assert not upstream.differs([result])
    assert upstream.failures([result], tmp_path) == ""


def test_a_failed_test_is_named_and_differs(options: argparse.Namespace, tmp_path: Path) -> None:
    result = upstream.look(framework(tmp_path, f"{RIGHT}\ndef test_bad():\n    assert False\n"), options)
    assert upstream.differs([result])
    told = upstream.failures([result], tmp_path)
    assert told.startswith(f"pytest {pytest.__version__}: 1 failed, 1 passed")
    assert "test_it.py::test_bad" in told


def test_a_package_that_cannot_be_installed_differs_and_says_why(options: argparse.Namespace, tmp_path: Path) -> None:
    result = upstream.look(framework(tmp_path, RIGHT, installs=("--no-index no-such-package",)), options)
    assert upstream.differs([result])
    assert "| not run: not installed:" in upstream.table([result], {})


def test_folders_of_tests_exist() -> None:
    root = Path(__file__).parents[2]
    for each in (*upstream.FRAMEWORKS, *upstream.NIGHTLIES):
        assert all((root / tests).exists() for tests in each.tests), each.name


PINS = "# how\ntorch==2.13.0\ntransformers==5.23.0\nyarl==1.0\n"


def test_constraints_keep_versions_but_those_that_are_upgraded() -> None:
    comments, pins = constraints.parsed(PINS)
    assert constraints.kept(pins, []) == pins
    assert constraints.kept(pins, ["Transformers"]) == {"torch": "2.13.0", "yarl": "1.0"}
    assert constraints.kept(pins, ["all"]) == {"torch": "2.13.0"}  # held back
    with pytest.raises(SystemExit, match=r"must have the packages to upgrade, got nothing\."):
        constraints.kept(pins, ["nothing"])
    assert constraints.text_of(comments, pins) == PINS


def test_constraints_are_what_pip_chose_without_ours_and_local_builds() -> None:
    names = {"moe_dispatch": "0.1", "torch": "2.13.0+cpu", "spmd_types": "0.2.3", "setuptools": "80"}
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in names.items()]}
    assert constraints.chosen(json.dumps(report)) == {"torch": "2.13.0", "spmd-types": "0.2.3"}
    assert constraints.newest("deepspeed (0.19.8)\nAvailable versions: 0.19.8, 0.19.7") == "0.19.8"


def test_constraints_file_is_in_the_form_that_the_command_writes() -> None:
    text = constraints.FILE.read_text(encoding="utf-8")
    assert constraints.text_of(*constraints.parsed(text)) == text
