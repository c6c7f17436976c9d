"""A machine on which only those packages are installed that a test names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that installs an empty package, by the name of its distribution and its version."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def put(name: str, version: str) -> None:
        package = tmp_path / name.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").touch()
        information = package.with_name(f"{package.name}-{version}.dist-info")
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    return put
