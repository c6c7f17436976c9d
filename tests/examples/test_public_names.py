"""Examples are copied, so they use public names only."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLIC = frozenset(
    {
        "moe_dispatch",
        "moe_dispatch.balance",
        "moe_dispatch.dispatchers",
        "moe_dispatch.layouts",
        "moe_dispatch.replay",
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
