"""What other packages add by name: a backend, a planner, a wire format, an emulation. One loader serves all of them.

A package declares an entry point in the group of its kind. Nothing is imported before a name is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moe_dispatch.errors import BackendUnavailableError, ConfigError


def declared(group: str, *, built_in: Container[str] = ()) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without those whose names are taken. No package is imported."""
    return {point.name: point for point in entry_points(group=group) if point.name not in built_in}


def load_declared(
    point: EntryPoint,
    noun: str,
    *,
    must_be: str,
    fits: Callable[[Any], bool],
    others: Sequence[str],
    failure: type[ConfigError] | type[BackendUnavailableError] = ConfigError,
    code: str = "",
) -> Any:
    """Return the object that an entry point names.

    Args:
        point: The entry point.
        noun: What it stands for, such as "Backend".
        must_be: What its object must be, for the error.
        fits: Whether an object is that.
        others: Names that can be used instead.
        failure: Error to raise if the import of the package fails.
        code: Code of that error, with a space before it.

    Raises:
        ConfigError: The object is no such thing; or its import failed, unless ``failure`` is another error.
    """
    instead = f" its package, or choose one of: {', '.join(others)}." if others else " its package."
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # the import of another package may raise anything
        raise failure(
            f"{noun} {point.name!r} cannot be used here: its import raised {type(error).__name__}: {error}. Repair"
            f"{instead}{code}"
        ) from error
    if not fits(found):
        raise ConfigError(
            f"{noun} {point.name!r} must be {must_be}, got {found!r} from the entry point {point.value!r}. Correct"
            f"{instead}"
        )
    return found


def derives(found: object, base: type) -> bool:
    """Return whether an object is a class that derives from ``base``, and defines all of its abstract methods."""
    return isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found)


def takes(found: object, *positional: Any, **named: Any) -> bool:
    """Return whether an object can be called with such arguments. One whose signature is unknown passes."""
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind(*positional, **named)
    except TypeError:
        return False
    except ValueError:  # of a function without a signature, such as some written in C
        return True
    return True
