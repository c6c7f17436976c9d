"""Every exception this library raises on purpose, each also the built-in it resembles."""


class MoEDispatchError(Exception):
    """Base of all errors raised by moe-dispatch."""


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


# What a refusing rank can tell its peers inside an exchange of integers.
REASONS = {
    1: "its tensors do not fit the config or each other",
    2: "its layout is malformed or does not fit x",
    3: "it was given a plan of another dispatcher",
    4: "it failed before the exchange",
}


def reason_code(error: BaseException) -> int:
    """The code of an error, for ``REASONS``."""
    if isinstance(error, LayoutError):
        return 2
    if isinstance(error, InputError):
        return 1
    return 3 if isinstance(error, StateError) else 4


def refusal(codes: dict[int, int]) -> str:
    """The text of a PeerError from codes by rank."""
    told = "; ".join(f"rank {rank} refused: {REASONS.get(code, REASONS[4])}" for rank, code in sorted(codes.items()))
    return f"{told}. Look at the error that rank raised."
