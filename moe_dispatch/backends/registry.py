"""Backends by name: ours by import path, third parties' by entry point. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import final

from moe_dispatch.backends.base import PROTOCOL, Backend
from moe_dispatch.errors import BackendUnavailableError, ConfigError

ENTRY_POINT_GROUP = "moe_dispatch.backends"


@final
@dataclass(frozen=True, slots=True)
class _BuiltIn:
    path: str

    def load(self) -> type[Backend]:
        module, _, name = self.path.partition(":")
        cls: type[Backend] = getattr(import_module(module), name)
        return cls


_BUILT_IN = {
    "local": _BuiltIn("moe_dispatch.backends.local:Local"),
    "allgather": _BuiltIn("moe_dispatch.backends.allgather:AllGather"),
    "alltoall": _BuiltIn("moe_dispatch.backends.alltoall.backend:AllToAll"),
    "deepep": _BuiltIn("moe_dispatch.backends.deep_ep.deepep:DeepEP"),
    "hybridep": _BuiltIn("moe_dispatch.backends.deep_ep.hybridep:HybridEP"),
}
_REGISTERED: dict[str, type[Backend]] = {}
# What was loaded by name is kept: looking up entry points reads the metadata of every installed distribution.
_LOADED: dict[str, type[Backend]] = {}


def register_backend(cls: type[Backend]) -> type[Backend]:
    """Make a backend known by its ``name`` in this process; usable as a decorator. Packages use an entry point instead.

    Raises:
        ConfigError: the name is taken, or the class speaks another protocol.
    """
    if cls.name in known_backends() and _REGISTERED.get(cls.name) is not cls:
        raise ConfigError(
            f"register_backend: the name {cls.name!r} is taken. Choose another name for {cls.__qualname__}."
        )
    _REGISTERED[cls.name] = _checked(cls.name, cls)
    return cls


def known_backends() -> list[str]:
    """Every name a config may use, sorted; third parties' are listed without being imported."""
    return sorted({*_BUILT_IN, *_REGISTERED, *_third_party()})


def load_backend(name: str) -> type[Backend]:
    """The class behind a name.

    Raises:
        ConfigError: no such name, or a class of another protocol.
        BackendUnavailableError: its package failed to import.
    """
    known = _REGISTERED.get(name) or _LOADED.get(name)
    if known is not None:
        return known
    source = _BUILT_IN.get(name) or _third_party().get(name)
    if source is None:
        raise ConfigError(_unknown(name))
    try:
        return _LOADED.setdefault(name, _checked(name, source.load()))
    except ConfigError:
        raise
    except Exception as error:  # whatever a third party's import raises
        raise BackendUnavailableError(
            f"Backend {name!r} cannot be used here: its import raised {type(error).__name__}: {error}. "
            f"Repair its package, or choose one of: {', '.join(sorted({*_BUILT_IN} - {name}))}."
        ) from error


def _third_party() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BUILT_IN}


def _checked(name: str, cls: object) -> type[Backend]:
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise ConfigError(f"Backend {name!r} must be a subclass of moe_dispatch.backends.Backend, got {cls!r}.")
    if cls.protocol != PROTOCOL:
        raise ConfigError(
            f"Backend {name!r} speaks protocol {cls.protocol}, this moe-dispatch speaks {PROTOCOL}. "
            "Install versions that agree."
        )
    return cls


def _unknown(name: str) -> str:
    known = known_backends()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown backend {name!r}. Known backends: {', '.join(known)}.{hint}"
