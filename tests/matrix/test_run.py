"""The matrix with stand-ins for its environments: what it reports, and that it goes on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.matrix import run

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TESTS = """
import pytest

def test_right():
    pass

def test_bad():
    assert False

def test_skipped():
    pytest.skip("no reason")
"""


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(run, "OUT", tmp_path)
    # Plugins that are installed by chance take seconds to import in each of the pytests that are started here.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    return tmp_path


def end_of(monkeypatch: pytest.MonkeyPatch, cells: list[run.Cell], *arguments: str) -> object:
    """Return the exit status of the script with these cells."""
    monkeypatch.setattr(run, "CELLS", cells)
    # In one process: two workers take five seconds to start.
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--", "--numprocesses", "0"])
    with pytest.raises(SystemExit) as end:
        run.main()
    return end.value.code


def in_this_environment(cell: run.Cell, _: Path, options: argparse.Namespace, log: Path) -> str:
    log.write_text("$ pip install\n")
    return run.find_python(cell.python, options.python)


def test_goes_on_after_cells_that_fail_and_cells_that_cannot_run(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "install", in_this_environment)
    suite = out / "test_suite.py"
    suite.write_text(TESTS)
    cells = [
        run.Cell("nowhere", "3.99", ("torch==9",)),
        run.Cell("all", VERSION, ("torch",), (str(suite),)),
        run.Cell("one", VERSION, ("torch",), (f"{suite}::test_right",)),
        run.Cell("left-out", VERSION, ("torch",), (str(suite),)),
    ]
    only = ("--only", "nowhere", "--only", "all", "--only", "one")
    assert end_of(monkeypatch, cells, *only, "--python", sys.executable) is True
    rows = (out / "table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| nowhere", "| all", "| one"]
    why = "not run: python3.99 is not on the PATH, and no --python has this version"
    assert f"Python 3.99, torch==9 | 0 | 0 | 0 | {why} |" in rows[0]
    assert "| 1 | 1 | 1 | 1 failed, 1 passed, 1 skipped in" in rows[1]
    assert "| 1 | 0 | 0 | 1 passed in" in rows[2]
    assert f"Python {VERSION}." in rows[2]
    assert "test_bad" in (out / "all.log").read_text()
    assert rows[2] in capsys.readouterr().out


def test_a_name_that_no_cell_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of(monkeypatch, list(run.CELLS), "--only", "torch-1.0") == 2
    assert "--only torch-1.0 must be part of a name: torch-2.10.0-py3.11, torch-" in capsys.readouterr().err


def test_constraints_leave_torch_to_the_cell() -> None:
    pinned = run.constraints(run.torch_cell("2.10.0", "3.11")).splitlines()
    assert not [line for line in pinned if line.startswith(("torch=", "triton="))]
    assert any(line.startswith("pytest==") for line in pinned)
    assert run.constraints(run.CELLS[-1]) == ""


def test_cells_cover_the_versions_that_the_metadata_promises() -> None:
    metadata = (run.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = [cell.name for cell in run.CELLS]
    assert len(set(names)) == len(names)
    lowest = f"torch>={run.CELLS[0].installs[0].removeprefix('torch==').removesuffix('.0')}"
    assert f'"{lowest}"' in metadata
    assert {cell.python for cell in run.CELLS} == {"3.11", "3.12", "3.13"}
