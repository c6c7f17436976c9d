"""The exceptions that this library raises on purpose. Each one is also the built-in exception that it resembles."""


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
    """A graph-safe dispatch needed more rows than its buffers hold, and ``on_overflow`` is "raise"."""


class PeerError(MoEDispatchError, RuntimeError):
    """Another rank of the group refused the call, so this rank does not wait for it."""


class LostPeerError(PeerError):
    """Another rank of the group did not take part in a collective. The group cannot be used any more."""
