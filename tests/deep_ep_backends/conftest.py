"""The surroundings of a vendor library that tests change: its version's behaviour, and variables of the process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

Wrap = Callable[[Any, str, Callable[..., Any]], None]
Setting = Callable[..., None]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Stand for a library that behaves otherwise: ``around(original, *args, **given)`` runs in a method's place."""

    def put(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)  # the backends tell releases by their signatures
        def wrapped(*args: Any, **given: Any) -> Any:
            return around(original, *args, **given)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)

    return put


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Set variables of the environment; None unsets one."""

    def put(**values: str | None) -> None:
        for name, value in values.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return put
