"""Examples are scripts: their folder is on the path when they run, and here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

Variables = Callable[..., None]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Variables:
    """Set variables of the environment until the test ends."""

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all
