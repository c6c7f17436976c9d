"""A dispatch as a value: what a model passes, and what plug-ins add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor

from moe_dispatch.layouts import Layout
from moe_dispatch.types import Plan, Routing

if TYPE_CHECKING:
    from moe_dispatch.capabilities.carry.columns import CarriedColumns


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch, before it is checked. ``dispatcher.make`` makes it; a plug-in passes on a changed copy.

    Attributes:
        x: As in ``Dispatcher.dispatch``.
        routing: As in ``Dispatcher.dispatch``.
        plan: As in ``Dispatcher.dispatch``.
        async_op: As in ``Dispatcher.dispatch``.
        columns: The data that travels with the rows; None if there is none.
        repetition: How repetitions of the dispatch take its route, which ranks compare beside the grad mode; empty if
            they do not.
        trains: Whether a backward of the dispatch belongs to a training step, for ``Dispatcher.expert_counts``.
    """

    x: Tensor
    routing: Routing | None
    plan: Plan | Layout | None
    async_op: bool = False
    columns: CarriedColumns | None = None
    repetition: str = ""
    trains: bool = True
