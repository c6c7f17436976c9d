"""Backends on the command line, such as ``hybridep+emulate=true`` or ``my_package.module:MyOptions``, and fields."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, final

from pydantic import ValidationError

from moe_dispatch.backends import BackendOptions, known_backends, load_backend, register_backend
from moe_dispatch.config import DispatcherConfig, json_or_text, with_variables
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.seams.options import with_option

logger = logging.getLogger("moe_dispatch")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBackend:
    """A backend named on the command line. This process and the rank processes load it.

    Attributes:
        label: Text from the command line.
        where: Registered name, or the path of a class, "package.module:Class".
        options: Options of the backend by name.
        fields: Fields of the config that stand among the options, and options of these, as ``balance.bound``.
    """

    label: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        """Whether the options choose an emulation of the backend's library."""
        return bool(self.options.get("emulate"))

    def load(self) -> type[BackendOptions]:
        """Load the options class. A class given by its path is registered under its name.

        Raises:
            ConfigError: The name or the class does not exist, the class is no options class, or its name is taken.
            BackendUnavailableError: The module cannot be imported.
        """
        return load_backend(self.where) if ":" not in self.where else register_backend(_imported(self.where))

    def spec(self) -> dict[str, Any]:
        """Load the class and return the value for ``DispatcherConfig.backend``.

        Raises:
            ConfigError: As for ``load``, or the backend does not have an option, or refuses its value.
            BackendUnavailableError: As for ``load``.
        """
        cls = self.load()
        try:
            cls.model_validate(self.options)
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}" for wrong in error.errors())
            known = ", ".join(cls.model_fields) or "none"
            raise ConfigError(f"backend {self.label!r}: {told}. Its options: {known}.") from error
        return {"name": cls.name, **self.options}


def parse_backend(text: str, *, fields: Collection[str] = ()) -> NamedBackend:
    """Parse ``NAME[+OPTION=VALUE...]``, where NAME may be the path of a class.

    Args:
        text: Text from the command line.
        fields: Names that are fields of the config; ``FIELD.OPTION`` is one of its options. All other names are options
            of the backend.

    Raises:
        ConfigError: An option has no value.
    """
    where, *pairs = text.split("+")
    options: dict[str, Any] = {}
    of_config: dict[str, Any] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not (option and separator and value):
            raise ConfigError(
                f"backend {text!r}: options must be written NAME+OPTION=VALUE, got {pair!r}. "
                "Write, for example, alltoall+reduction=exact."
            )
        (of_config if {option, option.partition(".")[0]} & {*fields} else options)[option] = json_or_text(value)
    return NamedBackend(label=text, where=where, options=options, fields=of_config)


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse FIELD=VALUE and FIELD.OPTION=VALUE, for ``with_changes``. Values are as in environment variables.

    Raises:
        ConfigError: There is no such field, or no value.
    """
    found = {}
    for pair in pairs:
        field, separator, value = pair.partition("=")
        if not separator or field.partition(".")[0] not in DispatcherConfig.model_fields:
            raise ConfigError(
                f"--set must be FIELD=VALUE or FIELD.OPTION=VALUE, got {pair!r}. Fields: "
                f"{', '.join(DispatcherConfig.model_fields)}."
            )
        found[field] = json_or_text(value)
    return found


def with_changes(config: DispatcherConfig, changes: Mapping[str, Any]) -> DispatcherConfig:
    """Return a copy of a config with some fields changed, or some options: ``{"balance.bound": 1.05}``.

    Raises:
        ConfigError: A field has no options, or the copy is no valid config.
    """
    fields = config.model_dump()
    for path, value in changes.items():
        field, _, option = path.partition(".")
        fields[field] = with_option(fields, field, option, value) if option else value
    return config.replace(**fields)


def load_config(
    file: Path | None, changes: Mapping[str, Any], *, backends: str | None = None, **defaults: Any
) -> DispatcherConfig:
    """Load a config as ``DispatcherConfig.load`` does, and change it as ``with_changes`` does.

    Args:
        file: Path of a config, or None.
        changes: Changes by path, over all else.
        backends: Backends that the command line names. A warning says that a variable that names another is not used.
        **defaults: Fields that stand below the environment, in place of a file.
    """
    whole = {path: value for path, value in changes.items() if "." not in path}
    if backends is not None:
        with_variables({}, os.environ, {"backend": backends}, "moe-dispatch")
    if file is None:
        fields, _ = with_variables(defaults, os.environ, whole, "moe-dispatch")
        loaded = DispatcherConfig.load(environment={}, **fields)
    else:
        loaded = DispatcherConfig.load(file, **whole)
    options = {path: value for path, value in changes.items() if "." in path}
    return with_changes(loaded, options) if options else loaded


def tell_unread(command: str) -> None:
    """Warn of the variables of a config, none of which a command reads."""
    for variable in with_variables({}, os.environ, {}, "moe-dispatch")[1]:
        logger.warning("%s is not used: %s sets all fields itself. Unset it.", variable, command)


def parse_numbers(option: str, text: str, example: str, *, least: int = 1) -> list[int]:
    """Parse whole numbers that are separated by commas, without repetitions.

    Raises:
        ConfigError: A number is missing or below ``least``.
    """
    words = list(dict.fromkeys(text.split(",")))
    if not all(word.isdecimal() and int(word) >= least for word in words):
        told = f"{option} must be whole numbers from {least} on, separated by commas, got {text!r}."
        raise ConfigError(f"{told} Write {option} {example}.")
    return list(map(int, words))


def own_backend(config: DispatcherConfig) -> NamedBackend | None:
    """Return the backend of a config with its options; None for "auto"."""
    if config.backend_name == "auto":
        return None
    options = {} if isinstance(config.backend, str) else {**config.backend}
    options.pop("name", None)
    return NamedBackend(label=config.backend_name, where=config.backend_name, options=options)


def planned_backends(config: DispatcherConfig, text: str | None) -> list[NamedBackend]:
    """Return the backends named in a text with commas, or all known ones, with the options of the config for its own.

    Raises:
        ConfigError: An option has no value.
    """
    if text is not None:
        return list(map(parse_backend, dict.fromkeys(text.split(","))))
    own = own_backend(config)
    return [own if own and own.where == name else parse_backend(name) for name in known_backends()]


@contextmanager
def noting(label: str) -> Iterator[None]:
    """Add the note "in <label>", which names the backend, to an error that the block raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {label}")
        raise


def _imported(path: str) -> type[BackendOptions]:
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does, so that a user's module need not be installed
    try:
        module = import_module(module_name)
    except Exception as error:  # a third-party module may raise any error
        raise BackendUnavailableError(
            f"backend {path!r}: importing {module_name!r} raised {type(error).__name__}: {error}. "
            "Install its package, or run this in the directory that contains it."
        ) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, BackendOptions)):
        raise ConfigError(
            f"backend {path!r}: {attribute!r} of {module_name} must be a subclass of "
            f"moe_dispatch.backends.BackendOptions, got {found!r}. Write PACKAGE.MODULE:CLASS."
        )
    return found
