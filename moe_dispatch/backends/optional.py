"""Importing what may be missing or broken, without leaving half of it behind."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType


def import_whole(name: str, package: str) -> ModuleType:
    """Import a module that brings an optional package.

    Args:
        name: the module.
        package: the top-level package that this import may load; if it fails, what it loaded of it is forgotten, so
            that a later import fails, or succeeds, as the first would.

    Raises:
        Exception: whatever the import raises.
    """
    before = set(sys.modules)
    try:
        return import_module(name)
    except BaseException:
        for other in set(sys.modules) - before:
            if other.partition(".")[0] == package:
                del sys.modules[other]
        raise
