"""Whether something optional can be used on this machine, and how to import it without leaving half of it behind."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import final

_importing = threading.RLock()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """It can run here."""

    version: str
    features: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Rejected:
    """It cannot run here, and why, in one sentence without a full stop."""

    reason: str


def import_whole(name: str, package: str) -> ModuleType:
    """Import a module that needs an optional package.

    Args:
        name: Module to import.
        package: Top-level package that this import may load. If the import fails, the parts of the package that it
            loaded are forgotten, so that a later import fails or succeeds as the first one would.

    Raises:
        Exception: Whatever the import raises.
    """
    with _importing:  # a failing import must not forget what another thread has just loaded
        before = set(sys.modules)
        try:
            return import_module(name)
        except BaseException:
            for other in set(sys.modules) - before:
                if other.partition(".")[0] == package:
                    del sys.modules[other]
            raise
