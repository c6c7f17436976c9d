"""Planners of another package, as an installed distribution declares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_dispatch.capabilities.balance.planners import ENTRY_POINT_GROUP


@pytest.fixture
def install_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that declares a planner named "other", given as ``module:name``, for the rest of the test."""

    def install(target: str) -> None:
        folder = tmp_path / "other-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nother = {target}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install
