"""Every exception this library raises on purpose, each also the built-in it resembles."""


class MoEDispatchError(Exception):
    """Base of all errors raised by moe-dispatch.

    Some messages end with a code in brackets. ``docs/troubleshooting.md`` has a section for each code.
    """


class ConfigError(MoEDispatchError, ValueError):
    """A configuration that cannot work: a field, a rule across fields, or a rule that needs the group."""


class BackendUnavailableError(MoEDispatchError, ImportError):
    """A backend that exists but cannot be used on this machine."""


class IntegrationError(MoEDispatchError, ImportError):
    """A framework that is missing here, or of a version whose hooks this package does not know."""


class TraceError(MoEDispatchError, ValueError):
    """A routing trace or the log of a run that cannot be written or read, or does not fit what it is used with."""


class InputError(MoEDispatchError, ValueError):
    """A call with tensors that do not fit the configuration, the routing or each other."""


class LayoutError(InputError):
    """A layout that is malformed, or that does not describe the tensor it is used with."""


class StateError(MoEDispatchError, RuntimeError):
    """A closed dispatcher, a state of another dispatcher, or a use autograd does not support."""


class CapacityError(MoEDispatchError, RuntimeError):
    """A graph-safe dispatch had more rows than its buffers hold, and ``on_overflow`` is "raise"."""


class PeerError(MoEDispatchError, RuntimeError):
    """Another rank of the group refused the call, so this rank must not wait for it."""
