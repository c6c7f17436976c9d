"""Backends as a command line names them: ``alltoall``, ``hybridep+emulate=true``, ``my_package.module:MyBackend``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, final

from pydantic import ValidationError

from moe_dispatch.backends import Backend, load_backend, register_backend
from moe_dispatch.errors import BackendUnavailableError, ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBackend:
    """A backend to be loaded, in this process or in one that it starts.

    Attributes:
        label: as it was written.
        where: a known name, or the path of a class, "package.module:Class".
        options: its own.
    """

    label: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        """Its library is to be emulated."""
        return bool(self.options.get("emulate"))

    def load(self) -> type[Backend]:
        """The class; one that was given by its path is registered under its name.

        Raises:
            ConfigError: no such name, class or attribute, or a class that is no backend or whose name is taken.
            BackendUnavailableError: its module cannot be imported.
        """
        return load_backend(self.where) if ":" not in self.where else register_backend(_imported(self.where))

    def spec(self) -> dict[str, Any]:
        """What ``DispatcherConfig.backend`` takes; loads the class.

        Raises:
            ConfigError, BackendUnavailableError: as for ``load``; or the options are not the backend's.
        """
        cls = self.load()
        try:
            cls.Options.model_validate(self.options)
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}" for wrong in error.errors())
            known = ", ".join(cls.Options.model_fields) or "none"
            raise ConfigError(f"backend {self.label!r}: {told}. Its options: {known}.") from error
        return {"name": cls.name, **self.options}


def parse_backend(text: str) -> NamedBackend:
    """A backend from ``NAME[+OPTION=VALUE...]``, where NAME may be the path of a class.

    Raises:
        ConfigError: an option without a value.
    """
    where, *pairs = text.split("+")
    options = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not (option and separator and value):
            raise ConfigError(
                f"backend {text!r}: options must be written NAME+OPTION=VALUE, got {pair!r}. "
                "Write, for example, alltoall+reduction=exact."
            )
        options[option] = json_or_text(value)
    return NamedBackend(label=text, where=where, options=options)


def json_or_text(value: str) -> Any:
    """A value as on a command line: JSON where it parses as JSON, else the text."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _imported(path: str) -> type[Backend]:
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for python -m: one's own module need not be installed
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever a third party's import raises
        raise BackendUnavailableError(
            f"backend {path!r}: importing {module_name!r} raised {type(error).__name__}: {error}. "
            "Install its package, or run this in the folder that holds it."
        ) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(
            f"backend {path!r}: {attribute!r} of {module_name} must be a subclass of moe_dispatch.backends.Backend, "
            f"got {found!r}. Write PACKAGE.MODULE:CLASS."
        )
    return found
