"""The options of a capability in a config: a short value, or a mapping with its options.

``balance="exact"`` and ``balance={"name": "exact", "bound": 1.05}`` are both parsed into the options class of the
planner. Such a class has the fields, the defaults and the rules of its capability, and lives with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from moe_dispatch.errors import ConfigError, shown

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig

# Hidden inputs, because pydantic would write out the whole of a deep or huge value.
FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)
Count = Annotated[int, Field(ge=1, lt=2**31)]
# The options of a field. Tools make a command line of these types; the options class checks the values.
if TYPE_CHECKING:
    OptionMapping = Mapping[str, Any]
else:
    OptionMapping = Mapping[str, Annotated[bool | int | float | str | None, SkipValidation]]

# By field of the config, the option that a short value sets. ``graph_safe=True`` sets none.
SHORT = {"backend": "name", "balance": "name", "wire": "dtype", "chunks": "tokens", "graph_safe": None}


class Options(BaseModel):
    """The options of a capability. Fields are frozen and strict; unknown fields are refused."""

    model_config = FROZEN

    def check(self, config: DispatcherConfig) -> None:
        """Raise ConfigError if the options contradict each other or another field of the config."""


def spelled_out(field: str, value: Any) -> dict[str, Any]:
    """Return the options that the value of a field stands for, as a new mapping: "exact" is ``{"name": "exact"}``."""
    if isinstance(value, Mapping):
        return dict(value)
    option = SHORT[field]
    return {} if option is None else {option: value}


def plain(value: Any) -> Any:
    """Return a value in which the mappings and sequences of config tools, such as OmegaConf, are dicts and lists."""
    if isinstance(value, dict):  # a deep one is returned as it is: aliases of YAML can stand for a billion words
        return {name: plain(each) if _is_of_a_tool(each) else each for name, each in value.items()}
    if not _is_of_a_tool(value):
        return value
    return {name: plain(value[name]) for name in value} if isinstance(value, Mapping) else list(map(plain, value))


def _is_of_a_tool(value: Any) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, dict | list | tuple | str | bytes)


def name_in(field: str, options: Mapping[str, Any], example: str) -> str:
    """Return the option of a field that names its options class, which is the one that a short value sets.

    Raises:
        ConfigError: There is none, or it is no string.
    """
    option = SHORT[field]
    assert option is not None
    name = options.get(option)
    if not isinstance(name, str):
        told = f'{field}: a mapping must have "{option}", a string, got {shown(options)}.'
        raise ConfigError(f'{told} Write {{"{option}": "{example}", ...}}.')
    return name


def with_option(fields: Mapping[str, Any], field: str, option: str, value: Any) -> dict[str, Any]:
    """Return the mapping for a field of a config in which one option is set. A short value becomes a mapping.

    Args:
        fields: Fields of a config, of which ``field`` may be missing.
        field: The field.
        option: The option.
        value: Value of the option.

    Raises:
        ConfigError: The value of the field has no options.
    """
    given = fields.get(field)
    if given is None:
        given = {"name": "auto"} if field == "backend" else {}
    if not isinstance(given, Mapping):
        if field not in SHORT or given is False:
            turned_on = " Set it to true." if given is False else ""
            raise ConfigError(f"{field} has no options, because it is {shown(given)}.{turned_on}")
        given = spelled_out(field, given)
    return {**given, option: value}
