"""The emulated classes take, and hold, what was recorded from the source of their release; and so do the real ones."""

from __future__ import annotations

import importlib
import inspect
import json
from importlib import resources
from typing import Any

import pytest
import torch

from moe_dispatch.testing.emulation import RELEASES, emulated_deep_ep
from tests.emulation.elastic_case import dispatched, open_buffer
from tests.emulation.tokens import make_tokens

# HybridEP's classes and handles have tests of their own.
OURS = ("v1.2.1", "v2-2.1.0")


def recorded(release: str) -> Any:
    file = resources.files("moe_dispatch.testing.emulation") / "signatures" / f"{release}.json"
    return json.loads(file.read_text())


def signature(function: Any) -> list[list[str]]:
    """Name and kind of each parameter, and its default if it has one."""
    return [
        [one.name, one.kind.name, *([] if one.default is inspect.Parameter.empty else [repr(one.default)])]
        for one in inspect.signature(function).parameters.values()
    ]


def differences(release: str, module: Any) -> list[str]:
    """Methods of a module's classes that do not take what the record says."""
    return [
        f"{name}.{method}"
        for name, methods in recorded(release)["classes"].items()
        for method, parameters in methods.items()
        if signature(getattr(_named(module, name), method)) != parameters
    ]


def _named(module: Any, name: str) -> Any:
    """EventHandle is a class of the extension module, which v1 shows in ``deep_ep.utils`` only."""
    return getattr(module, name, None) or getattr(module.utils, name)


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_a_record_with_its_source(release: str) -> None:
    record = recorded(release)
    assert record["release"] == release
    assert len(record["source"]["commit"]) == 40
    assert record["source"]["repository"].startswith("github.com/")


@pytest.mark.parametrize("release", OURS)
def test_methods_take_what_those_of_the_release_take(release: str) -> None:
    assert differences(release, emulated_deep_ep(release)) == []


@pytest.mark.parametrize("release", OURS)
def test_classes_have_no_public_method_that_the_release_lacks(release: str) -> None:
    for name, methods in recorded(release)["classes"].items():
        if name in ("Config", "EventHandle"):
            continue
        buffer = _named(emulated_deep_ep(release), name)
        public = {method for method in dir(buffer) if not method.startswith("_") and callable(getattr(buffer, method))}
        assert public <= set(methods), name


@pytest.mark.parametrize("release", OURS)
def test_the_module_has_the_names_of_the_package(release: str) -> None:
    assert set(recorded(release)["names"]) <= set(vars(emulated_deep_ep(release)))


def test_objects_of_v2_hold_what_those_of_the_release_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    attributes = recorded("v2-2.1.0")["attributes"]
    buffer = open_buffer(None)
    handle = dispatched(buffer, make_tokens([5])[0])[3]
    assert sorted(vars(handle)) == sorted(attributes["EPHandle"])
    assert sorted(vars(buffer)) == sorted(attributes["ElasticBuffer"])


def test_the_installed_deep_ep_is_one_that_was_recorded() -> None:
    """Runs where a real deep_ep can be imported. A difference means: record its release, and emulate it."""
    try:
        installed = importlib.import_module("deep_ep")
    except Exception as error:  # its import checks NCCL, CUDA and a compiler, each in its own way
        pytest.skip(f"no deep_ep to compare with: {type(error).__name__}: {error}")
    known = [
        release for release in RELEASES if set(recorded(release)["classes"]) - {"EventHandle"} <= set(vars(installed))
    ]
    differing = {release: differences(release, installed) for release in known}
    assert any(found == [] for found in differing.values()), differing
