"""Backends by name. Built-in ones are listed here; other packages declare an entry point or call ``register_backend``.

No backend is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Literal

from moe_dispatch.backends.base import PROTOCOL, BackendOptions
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError, did_you_mean, shown
from moe_dispatch.seams.extension_points import declared, derives, load_declared
from moe_dispatch.seams.options import name_in, spelled_out
from moe_dispatch.seams.plug_ins import Rejected, Usable, has_code

ENTRY_POINT_GROUP = "moe_dispatch.backends"
AUTO = "auto"
# For editors, which offer these names; names of other backends are as good.
BackendName = Literal["auto", "local", "allgather", "alltoall", "alltoall_by_node", "deepep", "hybridep", "nccl_ep"]

_KIND = "a subclass of moe_dispatch.backends.BackendOptions with all of its methods"
_PATHS = {
    "local": "moe_dispatch.backends.local:LocalOptions",
    "allgather": "moe_dispatch.backends.allgather:AllGatherOptions",
    "alltoall": "moe_dispatch.backends.alltoall.options:AllToAllOptions",
    "alltoall_by_node": "moe_dispatch.backends.alltoall_by_node.options:AllToAllByNodeOptions",
    "deepep": "moe_dispatch.backends.deep_ep.deepep:DeepEPOptions",
    "hybridep": "moe_dispatch.backends.deep_ep.hybridep:HybridEPOptions",
    "nccl_ep": "moe_dispatch.backends.nccl_ep.backend:NcclEPOptions",
}
_BUILT_IN = {name: EntryPoint(name, path, ENTRY_POINT_GROUP) for name, path in _PATHS.items()}
_REGISTERED: dict[str, type[BackendOptions]] = {}
# Looking up entry points reads the metadata of every installed distribution, so each backend is looked up once.
_LOADED: dict[str, type[BackendOptions]] = {}


def parse_backend(spec: str | Mapping[str, Any]) -> BackendOptions | None:
    """Parse the ``backend`` of a config. Return the options of the backend, or None for "auto".

    Args:
        spec: Name of the backend, or a mapping with its ``name`` and its options.

    Raises:
        ConfigError: The backend is unknown, the mapping has no name, or "auto" was given options.
        ValidationError: The backend does not know an option, or the option has a wrong type. Raised by pydantic.
        BackendUnavailableError: The package of the backend failed to import.
    """
    options = spelled_out("backend", spec)
    name = name_in("backend", options, "alltoall")
    del options["name"]
    if name != AUTO:
        return load_backend(name).model_validate(options)
    if options:
        raise ConfigError(
            f'backend: options need a named backend, got "auto" with {sorted(options)}. Name the backend.'
        )
    return None


def choose_backend(ep_size: int) -> BackendOptions:
    """Return the options of the backend that "auto" stands for.

    On one rank it is ``local``, which exchanges nothing. On several it is ``alltoall``, the backend over
    torch.distributed that sends the fewest bytes.
    """
    return load_backend("local" if ep_size == 1 else "alltoall")()


def probe_backend(name: str) -> Usable | Rejected:
    """Return whether a known backend can run here with its default options. Never raises."""
    return _probed(lambda: load_backend(name)().probe())


def probed(options: BackendOptions) -> Usable | Rejected:
    """Return whether a backend can run here with these options. Never raises."""
    return _probed(options.probe)


def _probed(probe: Callable[[], Usable | Rejected]) -> Usable | Rejected:
    try:
        found: object = probe()
    except MoEDispatchError as error:
        return Rejected(str(error).rstrip("."))
    except (Exception, SystemExit) as error:  # the contract forbids it, but the probe of another package may raise
        return Rejected(f"its probe raised {type(error).__name__}: {error}".rstrip("."))
    return found if isinstance(found, Usable | Rejected) else Rejected(f"its probe returned {found!r}")


def register_backend(cls: type[BackendOptions]) -> type[BackendOptions]:
    """Register a backend in this process under the ``name`` of its options class; usable as a decorator.

    A package that is installed declares an entry point instead.

    Raises:
        ConfigError: The name is taken; or the class does not derive from ``BackendOptions``, has no name, or was
            written for another protocol.
    """
    name = _checked(getattr(cls, "name", None), cls).name
    if name in known_backends() and _REGISTERED.get(name) is not cls:
        raise ConfigError(f"register_backend: the name {name!r} is taken. Choose another name for {cls.__qualname__}.")
    _REGISTERED[name] = cls
    return cls


def known_backends() -> list[str]:
    """Return the names of all backends, sorted. No backend is imported for this."""
    return sorted({*_installed(), *_REGISTERED, *_third_party()})


def backends_with(option: str) -> list[str]:
    """Return the names of the built-in backends that have an option."""
    return [name for name in _installed() if option in load_backend(name).model_fields]


def load_backend(name: str) -> type[BackendOptions]:
    """Return the options class of a backend.

    Raises:
        ConfigError: The name is unknown, or the class was written for another protocol.
        BackendUnavailableError: The package of the backend failed to import.
    """
    known = _REGISTERED.get(name) or _LOADED.get(name)
    if known is not None:
        return known
    source = _BUILT_IN.get(name) or _third_party().get(name)
    if source is None:
        known_names = known_backends()
        raise ConfigError(
            f"Unknown backend {shown(name)}. Known backends: {', '.join(known_names)}."
            f"{did_you_mean(name, known_names)} [MD01]"
        )
    found = load_declared(
        source,
        "Backend",
        must_be=_KIND,
        fits=lambda cls: derives(cls, BackendOptions),
        others=sorted({*_installed()} - {name}),
        failure=BackendUnavailableError,
        code=" [MD02]",
    )
    return _LOADED.setdefault(name, _checked(name, found))


def _installed() -> list[str]:
    """Return the names of the built-in backends whose folders were not deleted."""
    return [name for name, source in _BUILT_IN.items() if has_code(source.module.rpartition(".")[0])]


def _third_party() -> dict[str, EntryPoint]:
    return declared(ENTRY_POINT_GROUP, built_in=_BUILT_IN)


def _checked(name: str | None, cls: Any) -> type[BackendOptions]:
    if not derives(cls, BackendOptions):
        raise ConfigError(f"Backend {name!r} must be {_KIND}, got {cls!r}.")
    if cls.protocol != PROTOCOL:
        raise ConfigError(
            f"Backend {name!r} speaks protocol {cls.protocol}, this moe-dispatch speaks {PROTOCOL}. "
            "Install versions with the same protocol."
        )
    if name is None or getattr(cls, "name", None) != name:
        raise ConfigError(
            f"Backend {name!r}: the options class must have this name, got {getattr(cls, 'name', None)!r}. "
            f'Set name = "..." in {cls.__qualname__} to the name that configs use.'
        )
    kind: type[BackendOptions] = cls
    return kind
