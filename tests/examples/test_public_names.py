"""Examples are copied, so they use public names only."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# A backend package may import moe_dispatch.backends too: it is the interface for backends.
PUBLIC = {"moe_dispatch", "moe_dispatch.testing", "moe_dispatch.traces"}


def imported(path: Path) -> set[tuple[str, str]]:
    """Module and name of every ``from moe_dispatch... import name``, and "" as the name of a plain import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "moe_dispatch"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_import_public_names_only(path: Path) -> None:
    allowed = PUBLIC | ({"moe_dispatch.backends"} if "own_backend" in path.parts else set())
    for module, name in imported(path):
        assert module in allowed, f"{path.name} imports {module}"
        assert not name or name in importlib.import_module(module).__all__, f"{module}.{name} is not public"
