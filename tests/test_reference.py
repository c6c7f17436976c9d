"""docs/reference.md has every public name, and its constructors of pydantic classes list the fields."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.config import ConstraintOverrides

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
# Module -> the names that the page asks mkdocstrings for.
ON_PAGE = {
    module: set(names.split(", "))
    for module, names in re.findall(r"^::: ([\w.]+)\n    options:\n      members: \[(.*)\]$", PAGE, re.MULTILINE)
}
# Parts of a package: what other modules of the package may import from them.
PARTS = {
    "moe_dispatch.integrations.megatron.core",
    "moe_dispatch_testing.emulation.elastic.buffer",
    "moe_dispatch_testing.emulation.hybrid",
}


def _exports() -> Iterator[tuple[str, set[str]]]:
    """Each module with an ``__all__``. Sources are read: integrations cannot be imported without their framework."""
    for path in sorted(ROOT.glob("moe_dispatch*/**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                yield module, set(ast.literal_eval(node.value))


EXPORTS = {module: names for module, names in _exports() if module not in PARTS}


def test_every_public_name_is_on_the_page() -> None:
    assert {"moe_dispatch", "moe_dispatch.backends", "moe_dispatch_testing"} <= set(EXPORTS) <= set(ON_PAGE)
    shown = set().union(*ON_PAGE.values())
    for module, names in EXPORTS.items():
        assert not names - shown, module
        assert not ON_PAGE[module] - names, f"the page names what {module} does not export"


def test_constructors_of_pydantic_classes_list_their_fields() -> None:
    griffe = pytest.importorskip("griffe", reason="the packages of the docs extra are not installed")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "pydantic_fields.py"))
    package: Any = griffe.load("moe_dispatch", search_paths=[str(ROOT)], extensions=extensions)
    for model in (DispatcherConfig, ConstraintOverrides):
        parameters = package[f"config.{model.__name__}"].parameters
        assert [parameter.name for parameter in parameters] == ["self", *model.model_fields]
        assert "Annotated" not in " ".join(str(parameter.annotation) for parameter in parameters)
        required = [parameter.name for parameter in parameters if parameter.default is None]
        assert required == ["self", *(name for name, field in model.model_fields.items() if field.is_required())]


def test_every_name_has_a_page_of_its_own() -> None:
    for package in ("griffe", "mkdocs"):
        pytest.importorskip(package, reason="the packages of the docs extra are not installed")
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    listed = hook.on_page_markdown(PAGE, page=SimpleNamespace(file=SimpleNamespace(src_uri="reference.md")))
    for module, names in ON_PAGE.items():
        for name in names:
            assert f"- [`{name}`](reference/{module}.{name}.md)" in listed
    assert "moe_dispatch.Dispatcher.md): Send a model" in listed, "the first sentence of its docstring"
    assert hook.on_page_markdown(PAGE, page=SimpleNamespace(file=SimpleNamespace(src_uri="cli.md"))) == PAGE
