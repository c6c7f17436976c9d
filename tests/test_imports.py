"""The public names of moe_dispatch import torch and pydantic, and nothing else from outside the standard library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import moe_dispatch

ALLOWED = {"torch", "pydantic"}

# Runs in a fresh interpreter: imports the package alone, and then the modules of its public names as their first use
# does. `direct` are the packages that modules of moe_dispatch ask for by a statement or by import_module; `loaded` is
# all of sys.modules after the first import, whoever asked.
IMPORT_AND_REPORT = """
import builtins, importlib, json, sys

plain_import, plain_import_module, direct = builtins.__import__, importlib.import_module, set()

def record(importer, name):
    if importer.partition(".")[0] == "moe_dispatch":
        direct.add(name.partition(".")[0])

def recording_import(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0:
        record((globals or {}).get("__name__") or "", name)
    return plain_import(name, globals, locals, fromlist, level)

def recording_import_module(name, package=None):
    record(sys._getframe(1).f_globals["__name__"], name)
    return plain_import_module(name, package)

builtins.__import__, importlib.import_module = recording_import, recording_import_module
import moe_dispatch
loaded = [*sys.modules]
for name in json.loads(sys.argv[1]):
    plain_import_module(name)
print(json.dumps({"direct": sorted(direct), "loaded": loaded}))
"""


def third_party(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"moe_dispatch", "__main__"}


def test_package_asks_for_torch_and_pydantic_only_and_only_when_a_name_is_used() -> None:
    modules = sorted({getattr(moe_dispatch, name).__module__ for name in moe_dispatch.__all__})
    command = [sys.executable, "-c", IMPORT_AND_REPORT, json.dumps(modules)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert third_party(report["direct"]) == ALLOWED
    assert ALLOWED.isdisjoint(third_party(report["loaded"]))


def test_names_of_the_package() -> None:
    assert {*dir(moe_dispatch)} == {*moe_dispatch.__all__, "__version__"}, "also after its modules were imported"
    with pytest.raises(AttributeError, match=r"^module 'moe_dispatch' has no attribute 'Dispather'$"):
        _ = getattr(moe_dispatch, "Dispather")  # noqa: B009 - mypy knows that there is none
