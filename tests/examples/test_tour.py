"""The notebook: it runs in a kernel from top to bottom, and its stored outputs are complete and small."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.examples.test_public_names import public_imports_only

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
PICTURES = 4


def read() -> Any:
    return nbformat.read(TOUR, as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def backend_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are outputs only with the kernel's own backend of matplotlib."""
    monkeypatch.delenv("MPLBACKEND", raising=False)


def execute(notebook: Any) -> Any:
    """Run all cells in a kernel of their own."""
    return NotebookClient(notebook, timeout=240, resources={"metadata": {"path": TOUR.parent}}).execute()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def num_pictures(notebook: Any) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_every_cell_runs() -> None:
    assert num_pictures(execute(read())) == PICTURES


@pytest.mark.slow
def test_a_wrong_number_fails() -> None:
    """The dense block weights its experts wrong, so the first comparison must fail."""
    notebook = read()
    (cell,) = [cell for cell in code_cells(notebook) if "class DenseMoE" in cell.source]
    cell.source = cell.source.replace("slot, None])", "slot, None] * 1.001)")
    with pytest.raises(CellExecutionError, match="not close"):
        execute(notebook)


def test_stored_outputs_are_complete_and_small() -> None:
    notebook = read()
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run make notebook"
    assert num_pictures(notebook) == PICTURES
    assert TOUR.stat().st_size < 400_000


def test_it_imports_public_names_only() -> None:
    source = "\n".join(cell.source for cell in code_cells(read()))
    public_imports_only(ast.parse(source), "tour.ipynb")
