"""The seam for plug-ins that take dispatches in the place of a dispatcher. A plain call reads one attribute of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.dispatcher import Dispatcher
    from moe_dispatch.layouts import Layout
    from moe_dispatch.types import Dispatched, InFlight, Plan, Routing


class Interceptor(ABC):
    """Takes the eager dispatches of a thread, and may make them itself."""

    @abstractmethod
    def dispatch(
        self, dispatcher: Dispatcher, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, *, async_op: bool
    ) -> Dispatched | InFlight:
        """Do what ``Dispatcher.dispatch`` says."""

    @property
    def grad_mode(self) -> bool | str:
        """The grad mode of the dispatches, as in ``facts_of``, for calls that agree on it before they dispatch."""
        return torch.is_grad_enabled()


@final
class OfThread(threading.local):
    """What is in force in this thread.

    Attributes:
        interceptor: What takes the dispatches; None if dispatchers make them.
        grad_mode: Text about a dispatch whose route is kept, because repetitions of it take the route; otherwise empty.
            It takes the place of the grad mode among the facts that must be equal on all ranks.
    """

    interceptor: Interceptor | None = None
    grad_mode: str = ""


of_thread = OfThread()
