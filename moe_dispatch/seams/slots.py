"""The seam for expert slots, in which ranks hold experts of other ranks. A plain call runs nothing of it.

A plug-in has the shape of a backend: ``SlotOptions`` answers before anything is open, ``Slots`` works in the calls, and
each call gives an ``Assigned``. The plug-in of this package is ``moe_dispatch.balance``. It is imported when a config
asks for it, or when ``Dispatcher.place`` is called. Everything else works without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from moe_dispatch.seams.options import Options
from moe_dispatch.seams.plug_ins import load_plug_in

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.dispatchers.channel import Channel, Lease

# For editors, which offer these names; names of other planners are as good.
BalanceName = Literal["manual", "exact", "least_loaded", "eplb"]
MANUAL = "manual"


class Placement:
    """The expert in each expert slot of each rank. The plug-in knows its form.

    Attributes:
        num_experts: E.
    """

    __slots__ = ()

    num_experts: int


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assigned:
    """The slots that the rows of one dispatch go to.

    Attributes:
        ids_TK: int64 (T, K), the numbers of expert slots that take the place of the ids.
        placement: The placement of this dispatch; None in compiled code.
        experts_L: int64 (L,), the expert in each slot of this rank, or E for an empty slot.
        num_copies: Number of slots that were filled for this dispatch only, as an integer or int64 (); None if such
            copies are not counted.
    """

    ids_TK: Tensor
    placement: Placement | None
    experts_L: Tensor
    num_copies: Tensor | int | None = None


class Slots(ABC):
    """The expert slots of a dispatcher.

    Attributes:
        placement: The placement in force between dispatches.
        device: Device of the tables.
        collective: Whether ``assign`` is collective. Then it runs when the ranks have agreed on the sizes of a call.
        hears_refusals: Whether ``refuse`` can tell peers that wait in ``assign``.
    """

    placement: Placement | None
    device: torch.device
    collective: bool = False
    hears_refusals: bool = False

    @abstractmethod
    def assign(self, channel: Channel, ids_TK: Tensor) -> Assigned:
        """Choose a slot for each valid id of the rows that are sent. Call with gradients off."""

    @abstractmethod
    def copied(self) -> Slots:
        """Return the slots of one more dispatcher of the channel, with the same placement."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tables as arguments of an operator, for ``SlotOptions.restored``. Not called with ``balance``.

        The last one is ``experts_L`` of ``Assigned``.
        """

    def let_go(self) -> None:  # noqa: B027 - most hold little
        """Drop what can be made again, when the channel is released."""

    def refuse(self, channel: Channel, error: Exception) -> None:
        """Tell peers that wait in ``assign`` that this rank refuses the call, and raise ``error``."""
        raise NotImplementedError


class SlotOptions(Options, ABC):
    """What ``balance`` says about expert slots, before a channel is open.

    Attributes:
        name: Name of the planner, or "manual".
        plans: Whether each dispatch plans a placement of its own. If not, only ``Dispatcher.place`` changes it.
    """

    plans: ClassVar[bool] = True

    name: str

    @abstractmethod
    def spare_slots(self, config: DispatcherConfig, ep_size: int) -> int:
        """Return the number of slots that each rank has beside those of its own experts."""

    def is_proved(self, config: DispatcherConfig, ep_size: int) -> bool:
        """Return whether the load of ranks has a bound that holds for every routing."""
        return False

    def promise(self, config: DispatcherConfig, ep_size: int) -> str:
        """Say in a sentence what bound the load of ranks has; empty if nothing is promised."""
        return ""

    def planned_rows(self, config: DispatcherConfig, ep_size: int) -> int | None:
        """Return the most rows of one rank's experts in graph-safe mode, if plans bound them for every routing."""
        return None

    @abstractmethod
    def open(self, channel: Channel) -> Slots | None:
        """Return the first slots of every dispatcher of a channel, by ``copied``; None if there are no spare slots.

        The channel is not whole yet: it has its config, shape and communicator, but no backend.

        Raises:
            ConfigError: The config does not fit the group.
        """

    @staticmethod
    @abstractmethod
    def place(lease: Lease, placement: Placement, device: torch.device) -> None:
        """Do what ``Dispatcher.place`` says."""

    @staticmethod
    @abstractmethod
    def restored(tensors: Sequence[Tensor]) -> Slots:
        """Return the slots whose ``tensors()`` are given."""


def load_slot_options(name: str = MANUAL) -> type[SlotOptions]:
    """Return the options class of a planner, or of "manual".

    Raises:
        ConfigError: The plug-in is not installed, the name is unknown, or the package of the planner fails to import.
    """
    options = load_plug_in(
        "moe_dispatch.capabilities.balance.options", "balance and Dispatcher.place need it. Leave them out"
    )
    found: type[SlotOptions] = options.options_of(name)
    return found
