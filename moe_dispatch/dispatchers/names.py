"""The names that a Dispatcher needs for itself, which its subclasses must leave alone, and the names of dispatchers."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn

from moe_dispatch.errors import ConfigError, shown

# Attributes that a Dispatcher sets in __init__.
_SET = frozenset({"config", "_lease"})
# What a subclass may override.
_OPEN = frozenset({"forward", "run_experts", "layout_of", "extra_repr"})


class OwnNames(nn.Module):
    """Refuses that a subclass of its first subclass, the Dispatcher, uses a name that the Dispatcher needs.

    torch would put a submodule called ``plan`` beside the method, where nothing finds it, and a ``config`` of the model
    would take the place of the dispatcher's.
    """

    _owner: ClassVar[type]
    _own: ClassVar[frozenset[str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if OwnNames in cls.__bases__:
            cls._owner = cls
            cls._own = _SET | {name for name in vars(cls) if not name.startswith("__")} - _OPEN
            return
        for name in cls._own:
            owned = inspect.getattr_static(cls._owner, name, OwnNames)
            if (found := inspect.getattr_static(cls, name, OwnNames)) is not owned:
                cls._refuse(name, found)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own and self.__dict__.get(name, OwnNames) is not value:
            if not (name == "name" and isinstance(value, str) and "_lease" in self.__dict__):
                self._refuse(name, value)
        elif name in _OPEN and isinstance(value, nn.Module | nn.Parameter):  # torch would put it behind the method
            self._refuse(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if name in self._own | _OPEN:
            self._refuse(name, module)
        super().add_module(name, module)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name in self._own | _OPEN:
            self._refuse(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self._own | _OPEN:
            self._refuse(name, param)
        super().register_parameter(name, param)

    @classmethod
    def _refuse(cls, name: str, value: object) -> None:
        owner, kind = cls._owner.__name__, value.__name__ if isinstance(value, type) else type(value).__name__
        owned = inspect.getattr_static(cls._owner, name, None)
        what = "a property" if isinstance(owned, property) else "a method" if callable(owned) else "an attribute"
        raise ConfigError(
            f"{cls.__qualname__}.{name}: {name!r} must stay {what} of {owner}, got a value of type {kind} for it. "
            f"Choose another name in your subclass, such as 'own_{name.lstrip('_')}'. It may define the methods "
            f"{', '.join(sorted(_OPEN))}."
        )


def check_name(name: object) -> None:
    """Refuse a name of a dispatcher that a trace, a log or a line of an error cannot hold.

    Raises:
        ConfigError: The name is no text, or contains a character that is not printable, such as a line break.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise ConfigError(
            f"Dispatcher: name must be a text of printable characters, got {shown(name)}. Use the place of the layer "
            'in the model, such as "layers.7.mlp".'
        )
