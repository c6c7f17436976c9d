"""The seams for plug-ins that take dispatches in the place of a dispatcher, or add columns to the rows of one."""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import Tensor

from moe_dispatch._probing import require_plug_in

if TYPE_CHECKING:
    from moe_dispatch.carry.columns import CarriedColumns
    from moe_dispatch.dispatchers.channel import Channel
    from moe_dispatch.dispatchers.dispatcher import Dispatcher
    from moe_dispatch.layouts import Layout
    from moe_dispatch.types import Dispatched, InFlight, Plan, Routing


class Interceptor(Protocol):
    """Takes the eager calls of a thread, and may make them itself."""

    @property
    def repeats(self) -> bool:
        """Whether a dispatch may take the route of an earlier one. If so, this way also refuses wrong columns."""

    def dispatch(
        self, dispatcher: Dispatcher, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, *, async_op: bool
    ) -> Dispatched | InFlight:
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
        grad_mode: Text about a dispatch whose route is kept, because repetitions of it take the route; otherwise empty.
            It takes the place of the grad mode among the facts that must be equal on all ranks.
        columns: What travels with the rows of the dispatch that is being made; None for nothing.
    """

    interceptor: Interceptor | None = None
    grad_mode: str = ""
    columns: CarriedColumns | None = None


of_thread = OfThread()


def load_carry() -> ModuleType:
    """Return the plug-in that carries data with rows.

    Raises:
        ConfigError: It is not installed.
    """
    require_plug_in("moe_dispatch.carry", "carry of Dispatcher.dispatch needs it. Leave carry out")
    return import_module("moe_dispatch.carry.columns")
