"""Import modules of trainers from their sources, where most of what the trainers need is missing.

``make integration`` puts the packages into ``.frameworks``. slime is in no package index: put the folder ``slime`` of a
checkout there. Parent packages are not executed, because they import everything. Missing packages are stubs.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, final
from unittest.mock import MagicMock

import pytest
import typing_extensions

FOLDER = Path(__file__).parents[3] / ".frameworks"
VERSIONS = {
    "megatron/bridge": "megatron-bridge 0.6.2",
    "verl": "verl 0.9.1",
    "areal": "areal 1.0.4",
    "swift": "ms-swift 4.6.0",
    "nemo_automodel": "nemo-automodel 0.7.0",
    "slime": "a checkout of slime",
}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where the sources are not at hand."""
    missing = not (FOLDER / package).is_dir()
    return pytest.mark.skipif(
        missing, reason=f"needs {VERSIONS[package]} in {FOLDER.name}: make integration installs it"
    )


def function_in(path: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a function or a class, read and not imported."""
    tree = ast.parse((FOLDER / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
    assert len(found) == 1, f"{path} has {len(found)} definitions of {name}"
    return found[0]


def import_real(module: str, *, bare: Iterable[str] = (), stubs: Sequence[str] = ()) -> Any:
    """Import a module of a trainer for the rest of this process, so call it in a process of its own.

    Args:
        module: its full name.
        bare: packages around it that are made without running their ``__init__``.
        stubs: packages and modules in whose place there is a stub.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # at the end, because some of these wheels bring a package named tests
    if not hasattr(typing, "override"):  # Python 3.11, which megatron-core 0.19 runs with but does not ask for
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    for name in bare:
        package = types.ModuleType(name)
        package.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)
    sys.meta_path.insert(0, _Stubs(tuple(stubs)))
    return importlib.import_module(module)


class _Stub(types.ModuleType):
    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stub := MagicMock(name=f"{self.__name__}.{name}"))
        return stub


@final
class _Stubs(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
