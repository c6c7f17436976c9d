"""The public names of moe_dispatch import torch and pydantic, and nothing else from outside the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import moe_dispatch

ALLOWED = {"torch", "pydantic"}

# Runs in a fresh interpreter. `direct` are the packages that modules of moe_dispatch ask for by an import statement;
# `loaded` is all of sys.modules afterwards, whoever asked. Only modules with a file can be imported again by name.
IMPORT_AND_REPORT = """
import builtins, importlib, json, sys

plain_import, direct = builtins.__import__, set()

def recording_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__") or ""
    if level == 0 and importer.partition(".")[0] == "moe_dispatch":
        direct.add(name.partition(".")[0])
    return plain_import(name, globals, locals, fromlist, level)

builtins.__import__ = recording_import
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
loaded = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
print(json.dumps({"direct": sorted(direct), "loaded": loaded}))
"""


def import_fresh(*names: str) -> dict[str, list[str]]:
    """Import `names`, in order, in an interpreter of its own; what its modules asked for and what was loaded."""
    command = [sys.executable, "-c", IMPORT_AND_REPORT, json.dumps(names)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return report


def third_party(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"moe_dispatch", "__main__"}


@pytest.fixture(scope="module")
def of_package() -> dict[str, list[str]]:
    """Import the package, and the modules of its public names as their first use does."""
    return import_fresh(
        "moe_dispatch", *sorted({getattr(moe_dispatch, name).__module__ for name in moe_dispatch.__all__})
    )


def test_package_imports_nothing_before_a_name_is_used() -> None:
    assert ALLOWED.isdisjoint(third_party(import_fresh("moe_dispatch")["loaded"]))
    assert {*dir(moe_dispatch)} == {*moe_dispatch.__all__, "__version__"}, "also after its modules were imported"
    with pytest.raises(AttributeError, match=r"^module 'moe_dispatch' has no attribute 'Dispather'$"):
        _ = getattr(moe_dispatch, "Dispather")  # noqa: B009 - mypy knows that there is none


def test_package_asks_for_torch_and_pydantic_only(of_package: dict[str, list[str]]) -> None:
    assert third_party(of_package["direct"]) == ALLOWED


def test_package_loads_nothing_beyond_what_torch_and_pydantic_load(of_package: dict[str, list[str]]) -> None:
    """Held against a process that imports the same modules of torch and pydantic: what these bring is their own."""
    theirs = [name for name in of_package["loaded"] if name.partition(".")[0] in ALLOWED]
    baseline = import_fresh(*theirs)
    assert third_party(of_package["loaded"]) <= third_party(baseline["loaded"])
