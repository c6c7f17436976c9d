"""The exceptions that this library raises on purpose, and how their texts show values and suggest names.

Each exception is also the built-in exception that it resembles.
"""

from __future__ import annotations

import difflib
import reprlib
from collections import abc

_values = reprlib.Repr()
_values.maxlevel, _values.maxstring, _values.maxother = 2, 200, 200


def shown(value: object) -> str:
    """Return the ``repr`` of a value for the text of an error: short, and quick for a value of any size or depth."""
    try:
        return _values.repr(value)
    except ValueError:  # Python refuses to write an integer of more than 4300 digits
        return "an integer of thousands of digits"


def did_you_mean(name: str, known: abc.Iterable[str]) -> str:
    """Return a sentence with the known name that is most like ``name``, after a space; empty if there is none."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class MoEDispatchError(Exception):
    """Base class of the errors of this library.

    Some messages end with a code in brackets. ``docs/troubleshooting.md`` has a section for each code.
    """


class ConfigError(MoEDispatchError, ValueError):
    """A config cannot work: a field is wrong, fields contradict each other, or a field does not fit the group."""


class BackendUnavailableError(MoEDispatchError, ImportError):
    """A backend is known but cannot be used on this machine."""


class IntegrationError(MoEDispatchError, ImportError):
    """A framework is not installed, or the integration does not know its version."""


class TraceError(MoEDispatchError, ValueError):
    """A routing trace or the log of a run cannot be written or read, or does not fit the config that replays it."""


class InputError(MoEDispatchError, ValueError):
    """The tensors of a call do not fit the config, the routing or each other."""


class LayoutError(InputError):
    """A layout is malformed, or does not fit the tensor that it should describe."""


class StateError(MoEDispatchError, RuntimeError):
    """An object was used when or where it cannot be used, such as a dispatcher that is closed."""


class CapacityError(MoEDispatchError, RuntimeError):
    """A graph-safe dispatch needed more rows than its buffers hold, and ``graph_safe.on_overflow`` is "raise"."""


class PeerError(MoEDispatchError, RuntimeError):
    """Another rank of the group refused the call, so this rank does not wait for it."""


class LostPeerError(PeerError):
    """Another rank of the group did not take part in a collective. The group cannot be used any more."""
