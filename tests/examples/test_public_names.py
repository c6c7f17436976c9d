"""Examples are copied, so they use public names only."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLIC = frozenset(
    {
        "moe_dispatch",
        "moe_dispatch.balance",
        "moe_dispatch.dispatchers",
        "moe_dispatch.integrations.transformers",
        "moe_dispatch.layouts",
        "moe_dispatch.lean",
        "moe_dispatch.pipelining",
        "moe_dispatch.recompute",
        "moe_dispatch.replay",
        "moe_dispatch.training",
        "moe_dispatch_testing",
        "moe_dispatch_tools.traces",
    }
)


def public_imports_only(tree: ast.AST, source: str, modules: frozenset[str] = PUBLIC) -> None:
    """Fail on an import from moe_dispatch of another module, or of a name that is not in the module's ``__all__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            if module.split(".")[0] == "moe_dispatch":
                assert module in modules, f"{source} imports {module}"
                assert not name or name in importlib.import_module(module).__all__, f"{source}: {module}.{name}"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_import_public_names_only(path: Path) -> None:
    # moe_dispatch.backends is the interface for packages that bring a backend.
    modules = PUBLIC | {"moe_dispatch.backends"} if "own_backend" in path.parts else PUBLIC
    public_imports_only(ast.parse(path.read_text(encoding="utf-8")), path.name, modules)


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
