"""The seams for plug-ins that take the calls of a dispatcher, or add data to the rows of one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import Tensor

from moe_dispatch.seams.plug_ins import load_plug_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_dispatch.backends.wire import Encoded
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.dispatched import Dispatched, InFlight
    from moe_dispatch.dispatchers.channel import Channel
    from moe_dispatch.dispatchers.dispatcher import Dispatcher
    from moe_dispatch.seams.call import Call
    from moe_dispatch.types import Plan


class Interceptor(Protocol):
    """Takes the eager calls of a thread. ``make`` and ``bring_back`` of ``dispatchers.dispatcher`` make them."""

    def dispatch(self, dispatcher: Dispatcher, call: Call) -> Dispatched | InFlight:
        """Do what ``Dispatcher.dispatch`` says."""

    def combine(self, dispatcher: Dispatcher, rows: Tensor, sent: Dispatched) -> Tensor:
        """Do what ``Dispatcher.combine`` says."""

    def settle(self, channel: Channel, draft: Plan, **call: Any) -> Plan:
        """Do what ``agreement.settle`` says, for a plan that is settled before its dispatches."""


@final
class OfThread(threading.local):
    """What is in force in this thread.

    Attributes:
        interceptor: What takes the dispatches; None if dispatchers make them.
    """

    interceptor: Interceptor | None = None


of_thread = OfThread()


def delivery(config: DispatcherConfig) -> Callable[[Any, Any], Encoded] | None:
    """Return ``BackendContext.deliver`` for a config: what keeps rows as they arrived, or None."""
    if config.deliver == "rows":
        return None
    found: Callable[[Any, Any], Encoded] = load_plug_in(
        "moe_dispatch.capabilities.lean.packets", 'deliver="packets" needs it. Leave that out'
    ).deliver
    return found


def load_carry() -> Any:
    """Return the plug-in that carries data with rows.

    Raises:
        ConfigError: It is not installed.
    """
    what = "carry of Dispatcher.dispatch needs it. Leave carry out"
    return load_plug_in("moe_dispatch.capabilities.carry.columns", what)


def load_phases() -> Any:
    """Return the plug-in that gives back what channels hold.

    Raises:
        ConfigError: It is not installed.
    """
    return load_plug_in(
        "moe_dispatch.capabilities.phases.release", "Dispatcher.release needs it. Use Dispatcher.close and build again"
    )
