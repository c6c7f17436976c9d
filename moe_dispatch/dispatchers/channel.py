"""A channel: the backend, buffers and counters that all dispatchers with the same config and group share.

Ranks open a channel together. A channel is refcounted: each dispatcher holds a ``Lease``, and the last one closes it.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist

from moe_dispatch.backends.base import BackendContext, BackendOptions, Constraints, MoEShape, Sizes
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.balance.slot_table import SlotTable
from moe_dispatch.communication import Communicator, control_device, device_types
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.dispatchers.requirements import check_buffers
from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.recorder import Recorder

logger = logging.getLogger("moe_dispatch")

ChannelKey = tuple[int, int, str]  # ids of the group and the control group, digest of the config


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that marks a ``moe_dispatch::name`` range in profiles. Without a profiler it does nothing."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"moe_dispatch::{name}")
    return _NO_RANGE


_NO_RANGE = nullcontext()


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blueprint:
    """The values to open a channel with: a backend that can run here, and whose constraints are met.

    Attributes:
        options: Options of the backend.
        shape: Sizes of the layer on this group.
        needs: Constraints of the backend.
    """

    options: BackendOptions
    shape: MoEShape
    needs: Constraints


@final
class Channel:
    """One backend, open on one group, for one config.

    Only four attributes change later: the refcount ``users``, the capacity (in ``grow``), the recorder and ``numbers``,
    which counts the dispatchers that the ranks have built on the channel.

    Attributes:
        context: The objects that the backend is opened with.
        row_counts: The policy of the config for the number of rows per rank; None if each rank may bring its own number
            and the backend need not know the largest.
        capacity: Number of rows that the buffers of a dispatch hold; None if sizes follow the routing.
        watches: The watchdogs of the groups, if there are any. They report the name of the dispatcher that calls.
        checked: The kinds of tensors that ``check_call`` has found to fit.
        agrees_on_rows: Whether the ranks settle sizes with a collective.
        sums_tallies: Whether ranks that agree on sizes also sum their counts of slots in a tally.
    """

    def __init__(
        self, config: DispatcherConfig, communicator: Communicator, control: Communicator, blueprint: Blueprint
    ) -> None:
        options, shape = blueprint.options, blueprint.shape
        self.config = config
        self.communicator = communicator
        self.control = control
        self.watches = [watch for watch in (communicator.watch, control.watch) if watch is not None]
        self.shape = shape
        self.needs = blueprint.needs
        self.options = options
        self.backend_name = options.name
        self.name = f"{options.name}-{config.digest[:8]}-{next(_serial)}"
        first = communicator.rank * shape.num_local_experts
        self.meter = Meter(shape.num_local_experts, config.num_experts, first)
        self.checked: set[object] = set()
        self.recorder: Recorder | None = None
        self.users = 0
        self.numbers = itertools.count()
        self.capacity: Capacity | None = options.capacity(shape) if config.graph_safe else None
        same_or_known = self.needs.equal_rows or self.needs.group_max
        self.row_counts = config.row_counts_policy if same_or_known else None
        self.agrees_on_rows = self.row_counts in ("agree", "check")
        # The counts are on the device of the rows, so sizes must be agreed on there too.
        device = None if control.group is None else control_device(control.group).type
        same_device = device_types(communicator.group) == {device}
        # With ``balance``, the slots of experts are planned after the sizes.
        self.sums_tallies = self.needs.counts_with_sizes and same_device and config.balance is None
        self.context = BackendContext(
            shape=shape, communicator=communicator, needs=self.needs, permutation=config.permutation
        )
        self.backend = options.open(self.context)
        if config.max_tokens_per_rank is not None:
            self.backend.reserve(self.sizes(config.max_tokens_per_rank))

    def set_capacity(self, capacity: Capacity) -> None:
        """Set the capacity of later dispatches. Collective.

        Raises:
            ConfigError: The buffers would have more rows than int32 can count. Raised on every rank; the old capacity
                stays.
        """
        check_buffers(self.backend_name, capacity)
        self.capacity = capacity
        assert self.config.max_tokens_per_rank is not None  # graph_safe requires it
        self.backend.reserve(self.sizes(self.config.max_tokens_per_rank))

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks that share a node: the backend's option of this name, else found by host name."""
        configured: int | None = getattr(self.options, "ranks_per_node", None)
        return configured or self.shape.ranks_per_node or self.shape.ep_size

    def table_of(self, placement: ExpertPlacement, device: torch.device) -> SlotTable:
        """Return the table of a placement on this rank. In graph-safe mode all tables have the same shape."""
        most = min(self.shape.ep_size, 1 + self.shape.ep_size * self.config.spare_experts_per_rank)
        return SlotTable.make(
            placement,
            self.communicator.rank,
            ranks_per_node=self.ranks_per_node,
            device=device,
            most_copies=most if self.config.graph_safe else None,
        )

    def let_go(self) -> None:
        """Drop the process groups and the backend without closing the backend. Only for the end of the process."""
        self.communicator.let_go()
        self.control.let_go()
        self.users = 0  # a dispatcher that is closed from now on must not close the backend
        del self.backend

    def sizes(self, largest: int) -> Sizes:
        """Return the sizes that follow from the largest row count of any rank."""
        return dataclasses.replace(self.needs.sizes(largest), capacity=self.capacity)


@final
class Lease:
    """One dispatcher's share of a channel. The last share that is given back closes the channel.

    A share is given back by ``release``, or when the lease is garbage-collected. Autograd graphs of eager calls hold
    the lease too, so a model may be deleted before its last backward.

    Attributes:
        name: Name of the dispatcher.
        shared: The channel, also after the share was given back. ``enter`` returns it for a call.
        number: Number of the dispatcher on its channel, in the order of building, so it is equal on all ranks. A copy
            has the number of its original.
        placement: Placement in force. None if every rank holds its own experts and has no spare expert slots. Only
            ``place`` changes it.
        table: Table of the placement; None without one.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        with _lock:
            channel.users += 1
        self.name = name
        self.number = 0
        self.placement: ExpertPlacement | None = None
        self.table: SlotTable | None = None
        self.shared = channel
        self._collected = weakref.finalize(self, _release, channel, by_hand=False)
        self._collected.atexit = False  # at exit the process group is gone, and the process frees everything

    def tell_watchdog(self) -> None:
        """Tell the watchdog, if there is one, that this dispatcher makes the next collectives."""
        for watch in self.shared.watches:
            watch.layer = self.name

    def release(self) -> None:
        """Give the share back. A second call does nothing."""
        self.tell_watchdog()
        if self._collected.detach() is not None:
            _release(self.shared, by_hand=True)

    def enter(self) -> Channel:
        """Return the channel for a call, and tell the watchdog, if there is one, who calls.

        Raises:
            StateError: The share was given back.
        """
        if torch.compiler.is_compiling():  # the operators check this each time they run
            return self.shared
        if not self._collected.alive:
            raise StateError(
                "Dispatcher: the dispatcher must be open, got a closed one of backend "
                f"{self.shared.backend_name!r} on channel {self.shared.name}. Build another with build_dispatcher. "
                "[MD10]"
            )
        if self.shared.watches:
            self.tell_watchdog()
        return self.shared

    def place(self, placement: ExpertPlacement, device: torch.device) -> None:
        """Use a placement in later dispatches. It must be equal on all ranks, and fit the channel.

        In graph-safe mode the values of the old table change in place, so captured graphs follow.
        """
        channel = self.shared
        channel.meter.place(device)
        graph_safe = channel.config.graph_safe
        table = channel.table_of(placement, device)
        self.placement = placement
        if self.table is None or not graph_safe or not self.table.update(table):
            self.table = table

    @property
    def description(self) -> str:
        """Text with the backend and this rank's number in the group. It can be read after ``release`` too."""
        ranks = self.shared.communicator
        closed = "" if self._collected.alive else ", closed"
        return f"backend={self.shared.backend_name!r}, rank {ranks.rank} of {ranks.size}{closed}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(
            "Dispatcher: only the weights of a model with a dispatcher can be saved, got pickle or torch.save of the "
            "module, which holds a process group. Save model.state_dict(), build the model again, and load it there."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        """Return a new lease on the same channel, because process groups cannot be copied.

        Models are copied to average their weights, for example.
        """
        lease = Lease(self.enter(), self.name)
        lease.number = self.number
        if self.placement is not None and self.table is not None:
            lease.place(self.placement, self.table.copies_EC.device)
        return lease


def _release(channel: Channel, *, by_hand: bool) -> None:
    with _lock:
        channel.users -= 1
        if channel.users:
            return
        for key in [key for key, other in _channels.items() if other is channel]:
            del _channels[key]
    if by_hand or not channel.backend.collective_close:
        channel.backend.close()
    else:  # ranks collect garbage at different times, so a collective close would make them wait for each other
        _abandoned.append(channel)
        logger.warning(
            "The last dispatcher of channel %s was collected without close(): its buffers stay until the process ends. "
            "Call close() on every rank.",
            channel.name,
        )


_lock = threading.RLock()
_serial = itertools.count()
_channels: dict[ChannelKey, Channel] = {}
_by_name: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
# These channels are kept, because a destructor would free memory on this rank that its peers have mapped.
_abandoned: list[Channel] = []


def find_channel(key: ChannelKey, name: str) -> Lease | None:
    """Return a new share of the open channel with this key, or None if there is no such channel."""
    with _lock:
        return Lease(_channels[key], name) if key in _channels else None


def keep_channel(key: ChannelKey, channel: Channel, name: str) -> Lease:
    """Register a channel that was just opened, and return its first share.

    The channel holds its groups. So no other group gets the same ``id``, which is part of the key, while the channel is
    open.
    """
    with _lock:
        _channels[key] = _by_name[channel.name] = channel
        return Lease(channel, name)


def has_channel(group: dist.ProcessGroup) -> bool:
    """Return whether a channel is open on the group."""
    return any(id(group) in key[:2] for key in _channels)


def named_channel(name: str) -> Channel:
    """Return the open channel of this name. Operators take names, because they cannot take process groups.

    Raises:
        StateError: The channel was closed, or was never opened in this process.
    """
    channel = _by_name.get(name)
    if channel is None or not channel.users:
        raise StateError(
            f"moe_dispatch operators: channel {name!r} must be open in this process, got none of that name. Keep the "
            "dispatcher open while what was compiled with it, or a backward of it, still runs."
        )
    for watch in channel.watches:
        watch.layer = ""  # which dispatcher calls is not known here
    return channel


@atexit.register
def _let_go_of_groups() -> None:
    """Drop the process groups of open channels while the interpreter still runs.

    Models hold their dispatchers until the end. A process group that is destroyed during the interpreter's shutdown may
    abort the process. A successful run would then end with the exit status of a failure.
    """
    for channel in {id(channel): channel for channel in (*_by_name.values(), *_abandoned)}.values():
        channel.let_go()
