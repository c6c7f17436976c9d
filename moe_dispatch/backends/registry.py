"""Backends by name: ours by import path, third parties' by entry point. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moe_dispatch.backends.base import PROTOCOL, BackendOptions
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError
from moe_dispatch.probing import Rejected, Usable

ENTRY_POINT_GROUP = "moe_dispatch.backends"
AUTO = "auto"

_PATHS = {
    "local": "moe_dispatch.backends.local:LocalOptions",
    "allgather": "moe_dispatch.backends.allgather:AllGatherOptions",
    "alltoall": "moe_dispatch.backends.alltoall.backend:AllToAllOptions",
    "deepep": "moe_dispatch.backends.deep_ep.deepep:DeepEPOptions",
    "hybridep": "moe_dispatch.backends.deep_ep.hybridep:HybridEPOptions",
}
_BUILT_IN = {name: EntryPoint(name, path, ENTRY_POINT_GROUP) for name, path in _PATHS.items()}
_REGISTERED: dict[str, type[BackendOptions]] = {}
# What was loaded by name is kept: looking up entry points reads the metadata of every installed distribution.
_LOADED: dict[str, type[BackendOptions]] = {}


def parse_backend(spec: str | Mapping[str, Any]) -> BackendOptions | None:
    """What a config's ``backend`` says: the options of the backend it names; None for "auto".

    Args:
        spec: a name, or a mapping of ``name`` and that backend's options.

    Raises:
        ConfigError: no such backend, a mapping without a name, or options for "auto".
        ValidationError: pydantic's, for options that the backend does not know or of the wrong type.
        BackendUnavailableError: the backend's package failed to import.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f'backend: a mapping must have "name", a string, got {spec!r}. Write {{"name": "alltoall"}}.')
    if name != AUTO:
        return load_backend(name).model_validate(options)
    if options:
        raise ConfigError(
            f'backend: options need a named backend, got "auto" with {sorted(options)}. Name the backend.'
        )
    return None


def choose_backend(ep_size: int) -> BackendOptions:
    """What "auto" means: no exchange on one rank, else the torch backend that sends the fewest bytes."""
    return load_backend("local" if ep_size == 1 else "alltoall")()


def probe_backend(name: str) -> Usable | Rejected:
    """Whether a known backend can run here with its default options. An import or a probe that raises is rejected."""
    try:
        return load_backend(name)().probe()
    except MoEDispatchError as error:
        return Rejected(str(error).rstrip("."))
    except Exception as error:  # a probe must not raise, but a third party's may
        return Rejected(f"its probe raised {type(error).__name__}: {error}".rstrip("."))


def register_backend(cls: type[BackendOptions]) -> type[BackendOptions]:
    """Make a backend known in this process by the ``name`` of its options class; usable as a decorator.

    Packages declare an entry point instead.

    Raises:
        ConfigError: the name is taken, or the class is no options class, has no name, or is of another protocol.
    """
    name = _checked(getattr(cls, "name", None), cls).name
    if name in known_backends() and _REGISTERED.get(name) is not cls:
        raise ConfigError(f"register_backend: the name {name!r} is taken. Choose another name for {cls.__qualname__}.")
    _REGISTERED[name] = cls
    return cls


def known_backends() -> list[str]:
    """Every name a config may use, sorted; third parties' are listed without being imported."""
    return sorted({*_BUILT_IN, *_REGISTERED, *_third_party()})


def load_backend(name: str) -> type[BackendOptions]:
    """The options class behind a name.

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
            f"Repair its package, or choose one of: {', '.join(sorted({*_BUILT_IN} - {name}))}. [MD02]"
        ) from error


def _third_party() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BUILT_IN}


def _checked(name: str | None, cls: object) -> type[BackendOptions]:
    if not (isinstance(cls, type) and issubclass(cls, BackendOptions)):
        raise ConfigError(f"Backend {name!r} must be a subclass of moe_dispatch.backends.BackendOptions, got {cls!r}.")
    if cls.protocol != PROTOCOL:
        raise ConfigError(
            f"Backend {name!r} speaks protocol {cls.protocol}, this moe-dispatch speaks {PROTOCOL}. "
            "Install versions that agree."
        )
    if name is None or getattr(cls, "name", None) != name:
        raise ConfigError(
            f"Backend {name!r}: the options class must have this name, got {getattr(cls, 'name', None)!r}. "
            f'Set name = "..." in {cls.__qualname__}, as a config writes it.'
        )
    return cls


def _unknown(name: str) -> str:
    known = known_backends()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown backend {name!r}. Known backends: {', '.join(known)}.{hint} [MD01]"
