"""The one loader of capabilities, and of optional packages: whether they are there, and how to import them whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, final

from moe_dispatch.errors import ConfigError

_importing = threading.RLock()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """Says that something can run on this machine.

    Attributes:
        version: Its version.
        features: Names of optional abilities that it has here.
    """

    version: str
    features: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Rejected:
    """Says that something cannot run on this machine.

    Attributes:
        reason: Why not, in one sentence without a full stop.
    """

    reason: str


def has_code(package: str) -> bool:
    """Return whether a folder of this package is there with its code. A deleted one may have left its bytecode."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_plug_in(package: str, what: str) -> None:
    """Raise ConfigError if a folder of this package is not there.

    Args:
        package: Name of the folder as a package.
        what: Sentences that say what needs it and that it may be left out.
    """
    if not has_code(package):
        raise ConfigError(f"{package} is not installed. {what}, or install the whole package.")


def load_plug_in(module: str, what: str) -> Any:
    """Return a module of a capability, which the core knows by name only.

    Args:
        module: Its name, such as "moe_dispatch.capabilities.carry.columns".
        what: As in ``require_plug_in``.

    Raises:
        ConfigError: The folder of the module is not there.
    """
    require_plug_in(module.rpartition(".")[0], what)
    return import_module(module)


def import_whole(name: str, package: str) -> ModuleType:
    """Import a module that needs an optional package.

    Args:
        name: Module to import.
        package: Top-level package that this import may load. If the import fails, every part of the package that it
            loaded is removed from ``sys.modules``. A later import then starts anew.

    Raises:
        Exception: Whatever the import raises.
    """
    with _importing:  # a failed import must not remove what another thread has just loaded
        before = set(sys.modules)
        try:
            return import_module(name)
        except BaseException:
            for other in set(sys.modules) - before:
                if other.partition(".")[0] == package:
                    del sys.modules[other]
            raise


def imported_on_use(
    namespace: dict[str, Any], **modules: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports some of its names on first use.

    Args:
        namespace: The ``globals()`` of the package.
        **modules: The module of each of these names.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(modules[name]), name)
        return value

    return get, lambda: sorted({*namespace, *modules})
