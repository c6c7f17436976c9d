"""Packages that declare a wrong object as an extension: each kind says so in one sentence, and no command breaks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import Rejected, known_backends, load_backend, registry
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.backends.registry import probe_backend
from moe_dispatch.balance import ExpertPlacement, load_planner, run_planner
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch_tools.app import run

PACKAGE = """
import types
from abc import abstractmethod
from moe_dispatch.backends import BackendOptions, Rejected
from moe_dispatch.backends.wire import WireFormat
from moe_dispatch.balance import PlannerOptions

number, text, module, nothing = 3, "reef", types, None

class Other:
    pass

def main():
    raise SystemExit

class HalfBackend(BackendOptions):
    name = "wrong"

class HalfFormat(WireFormat):
    def encode(self, rows_TD, out):
        pass

class HalfPlanner(PlannerOptions):
    @abstractmethod
    def more(self): ...

def leaves(counts, home, *, ranks_per_node):
    raise SystemExit(3)

def wrong_emulation(release):
    raise ValueError(release)

def __getattr__(name):
    if name == "leaving":
        raise SystemExit(5)
    raise AttributeError(name)
"""
KINDS = {
    "moe_dispatch.backends": "Backend",
    "moe_dispatch.planners": "Planner",
    "moe_dispatch.wire_formats": "Wire format",
}
OBJECTS = [
    "number",
    "text",
    "module",
    "nothing",
    "Other",
    "Other()",
    "main",
    "HalfBackend",
    "HalfFormat",
    "HalfPlanner",
]
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package whose extension "wrong" of a group is an object of its module."""

    def declare(group: str, found: str, name: str = "wrong") -> None:
        (tmp_path / "wrong_package.py").write_text(PACKAGE + "made = Other()\n")
        information = tmp_path / "wrong_package-1.0.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-package\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[{group}]\n{name} = wrong_package:{found}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.setattr(registry, "_LOADED", {})
    monkeypatch.delitem(sys.modules, "wrong_package", raising=False)
    return declare


def use(group: str) -> Any:
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 8}
    field = {
        "moe_dispatch.backends": "backend",
        "moe_dispatch.planners": "balance",
        "moe_dispatch.wire_formats": "wire",
    }
    return DispatcherConfig(**{"backend": "local", **sizes, field[group]: "wrong"})


@pytest.mark.parametrize("found", OBJECTS)
@pytest.mark.parametrize("group", KINDS)
def test_an_object_of_another_kind_is_refused_when_a_config_names_it(group: str, found: str, install: Install) -> None:
    found = found.replace("Other()", "made")
    install(group, found)
    told = (
        rf"{KINDS[group]} 'wrong' must be a (sub|func).*, got .* from the entry point 'wrong_package:{found}'\. Correct"
    )
    with pytest.raises(ConfigError, match=told + r" its package, or choose one of: \w+"):
        use(group)


@pytest.mark.parametrize("found", ["absent", "leaving"])
@pytest.mark.parametrize("group", KINDS)
def test_an_import_that_fails_is_told_alike(group: str, found: str, install: Install) -> None:
    install(group, found)
    told = (
        rf"{KINDS[group]} 'wrong' cannot be used here: its import raised (AttributeError|SystemExit): .*Repair its pa"
    )
    with pytest.raises((ConfigError, BackendUnavailableError), match=told):
        use(group)


def test_a_planner_that_ends_the_program_is_refused(install: Install) -> None:
    install("moe_dispatch.planners", "leaves")
    home = ExpertPlacement.contiguous(4, 2, spare=1)
    with pytest.raises(ConfigError, match=r"Planner 'wrong' must return a placement, but it raised SystemExit: 3"):
        run_planner("wrong", torch.ones(2, 4, dtype=torch.int64), home, ranks_per_node=2)
    assert callable(load_planner("wrong"))


@pytest.mark.parametrize("found", ["number", "leaving", "absent", "main"])
def test_an_emulation_that_cannot_be_used_is_a_reason(
    found: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(library.EMULATIONS, found)
    monkeypatch.setattr(library, "PACKAGE", "wrong")
    made = library._emulated.__wrapped__("v1.2.1")
    assert isinstance(made, Rejected)
    assert re.match(r"Emulation 'wrong' (must be a function of a release|cannot be used here)", made.reason)


@pytest.mark.parametrize("found", ["number", "main", "HalfBackend", "leaving", "absent"])
def test_commands_list_a_backend_that_cannot_be_used(
    found: str, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``plan`` without ``-b`` shows why, and a command that names it ends with that text."""
    install("moe_dispatch.backends", found)
    assert "wrong" in known_backends()
    told = re.escape("Backend 'wrong' ") + r"(must be a subclass of|cannot be used here)"
    assert re.match(told, str(getattr(probe_backend("wrong"), "reason", None)))
    (tmp_path / "config.yaml").write_text("num_experts: 8\ntop_k: 2\nhidden_size: 64\n")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(
        sys, "argv", ["moe-dispatch", "plan", str(tmp_path / "config.yaml"), "--ep", "2", "--tokens", "16"]
    )
    with pytest.raises(SystemExit) as ended:
        run()
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    assert "alltoall" in shown.out
    assert re.search(told, " ".join(shown.out.split()))
    for command in (["check", "wrong"], ["doctor", "-b", "wrong"], ["compare", "-b", "wrong"]):
        monkeypatch.setattr(sys, "argv", ["moe-dispatch", *command])
        with pytest.raises(SystemExit) as ended:
            run()
        shown = capsys.readouterr()
        assert ended.value.code, command
        assert re.search(told, " ".join((shown.out + shown.err).split())), (command, shown)


def test_an_unknown_name_of_plan_stays_an_error() -> None:
    with pytest.raises(ConfigError, match=r"Unknown backend 'wrong'"):
        load_backend("wrong")
