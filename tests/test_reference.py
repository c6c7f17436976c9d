"""docs/reference.md has every public name, and its constructors of pydantic classes list the fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.config import ConstraintOverrides

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
# Module -> the names that the page asks mkdocstrings for.
ON_PAGE = {
    module: names.split(", ")
    for module, names in re.findall(r"^::: ([\w.]+)\n    options:\n      members: \[(.*)\]$", PAGE, re.MULTILINE)
}
# Parts of a package: what other modules of the package may import from them.
PARTS = {
    "moe_dispatch.integrations.megatron.core",
    "moe_dispatch_testing.emulation.elastic.buffer",
    "moe_dispatch_testing.emulation.hybrid",
}


def _exports() -> Iterator[tuple[str, list[str]]]:
    """Each module with an ``__all__``. Sources are read: integrations cannot be imported without their framework."""
    for path in sorted(ROOT.glob("moe_dispatch*/**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                yield module, ast.literal_eval(node.value)


EXPORTS = {module: names for module, names in _exports() if module not in PARTS}


def test_public_modules_are_found() -> None:
    assert set(EXPORTS) == {
        "moe_dispatch",
        "moe_dispatch.backends",
        "moe_dispatch.balance",
        "moe_dispatch.dispatchers",
        "moe_dispatch.integrations.megatron",
        "moe_dispatch.integrations.nemo_automodel",
        "moe_dispatch.integrations.packing",
        "moe_dispatch.integrations.torchtitan",
        "moe_dispatch.integrations.transformers",
        "moe_dispatch.layouts",
        "moe_dispatch.permutation",
        "moe_dispatch.replay",
        "moe_dispatch_testing",
        "moe_dispatch_testing.emulation",
        "moe_dispatch_tools.traces",
    }


@pytest.mark.parametrize("module", EXPORTS)
def test_every_public_name_is_on_the_page(module: str) -> None:
    shown_once = {name for names in ON_PAGE.values() for name in names}
    assert not set(EXPORTS[module]) - shown_once
    assert not set(ON_PAGE[module]) - set(EXPORTS[module]), "the page names what the module does not export"


def test_values_of_a_dispatch_are_on_the_page() -> None:
    assert "InFlight" in ON_PAGE["moe_dispatch.types"]
    assert "ConstraintOverrides" in ON_PAGE["moe_dispatch.config"]


def test_constructors_of_pydantic_classes_list_their_fields() -> None:
    griffe = pytest.importorskip("griffe", reason="the packages of the docs extra are not installed")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "pydantic_fields.py"))
    package: Any = griffe.load("moe_dispatch", search_paths=[str(ROOT)], extensions=extensions)
    for model in (DispatcherConfig, ConstraintOverrides):
        parameters = package[f"config.{model.__name__}"].parameters
        assert [parameter.name for parameter in parameters] == ["self", *model.model_fields]
        required = [parameter.name for parameter in parameters if parameter.default is None]
        assert required == ["self", *(name for name, field in model.model_fields.items() if field.is_required())]
    parameters = package["config.DispatcherConfig"].parameters
    assert str(parameters["row_counts"].annotation) == "Literal['agree', 'assume', 'check', 'static'] | None"
    assert str(parameters["capacity_factor"].annotation).startswith("Literal['worst'] | Annotated[float, ")
