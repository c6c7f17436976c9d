"""The matrix with stand-ins for its environments: what it reports, and that it goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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


def in_this_environment(cell: run.Cell, _: Path, options: argparse.Namespace, log: Path) -> str:
    log.write_text("$ pip install\n")
    return run.find_python(cell.python, options.python)


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run the script with some cells, which install nothing, and return its exit status."""

    def end(cells: Sequence[run.Cell], *arguments: str) -> object:
        monkeypatch.setattr(run, "CELLS", cells)
        monkeypatch.setattr(run, "install", in_this_environment)
        # In one process: two workers take five seconds to start.
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--", "--numprocesses", "0"])
        with pytest.raises(SystemExit) as raised:
            run.main()
        return raised.value.code

    return end


def test_goes_on_after_cells_that_fail_and_cells_that_cannot_run(
    out: Path, end_of: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    suite = out / "test_suite.py"
    suite.write_text(TESTS)
    cells = [
        run.Cell("nowhere", "3.99", ("torch==9",)),
        run.Cell("all", VERSION, ("torch",), (str(suite),)),
        run.Cell("one", VERSION, ("torch",), (f"{suite}::test_right",)),
        run.Cell("left-out", VERSION, ("torch",), (str(suite),)),
    ]
    only = ("--only", "nowhere", "--only", "all", "--only", "one")
    assert end_of(cells, *only, "--python", sys.executable) is True
    rows = (out / "table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| nowhere", "| all", "| one"]
    why = "not run: python3.99 is not on the PATH, and no --python has this version"
    assert f"Python 3.99, torch==9 | 0 | 0 | 0 | {why} |" in rows[0]
    assert "| 1 | 1 | 1 | 1 failed, 1 passed, 1 skipped in" in rows[1]
    assert "| 1 | 0 | 0 | 1 passed in" in rows[2]
    assert f"Python {VERSION}." in rows[2]
    assert "test_bad" in (out / "all.log").read_text()
    assert rows[2] in capsys.readouterr().out
    assert end_of(cells, "--only", "torch-1.0") == 2
    assert "--only torch-1.0 must be part of a name: nowhere, all, one, left-out" in capsys.readouterr().err


def test_constraints_leave_torch_to_the_cell() -> None:
    pinned = run.constraints(run.torch_cell("2.10.0", "3.11")).splitlines()
    assert not [line for line in pinned if line.startswith(("torch=", "triton="))]
    assert any(line.startswith("pytest==") for line in pinned)
    assert run.constraints(run.CELLS[-1]) == ""
