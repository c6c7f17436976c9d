"""What all dispatchers of one config and group share: backend, buffers, metrics. Opened together, refcounted."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist

from moe_dispatch.backends.base import BackendContext, BackendOptions, Constraints, MoEShape, Sizes
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.dispatchers.overflow import HighWaterMark
from moe_dispatch.dispatchers.requirements import check_buffers
from moe_dispatch.errors import StateError

if TYPE_CHECKING:
    from moe_dispatch.traces.recorder import Recorder

logger = logging.getLogger("moe_dispatch")

ChannelKey = tuple[int, int, str]  # ids of the group and the control group, digest of the config


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blueprint:
    """What a channel is opened with: a backend that can run here and whose needs are met."""

    options: BackendOptions
    shape: MoEShape
    needs: Constraints


@final
class Channel:
    """One backend, open on one group, for one config.

    What changes later is the refcount, the capacity (by ``grow``), and who records.
    """

    def __init__(
        self, config: DispatcherConfig, communicator: Communicator, control: Communicator, blueprint: Blueprint
    ) -> None:
        options, shape = blueprint.options, blueprint.shape
        self.config = config
        self.communicator = communicator
        self.control = control
        self._watches = [watch for watch in (communicator.watch, control.watch) if watch is not None]
        self.shape = shape
        self.needs = blueprint.needs
        self.options = options
        self.backend_name = options.name
        self.name = f"{options.name}-{config.digest[:8]}-{next(_serial)}"
        self.meter = Meter(shape.num_local_experts)
        self.high_water = HighWaterMark()
        self.recorder: Recorder | None = None
        self.users = 0
        self._capacity = options.capacity(shape) if config.graph_safe else None
        self.backend = options.open(
            BackendContext(shape=shape, communicator=communicator, needs=self.needs, permutation=config.permutation)
        )
        if config.max_tokens_per_rank is not None:
            self.backend.reserve(self.sizes(config.max_tokens_per_rank))

    @property
    def capacity(self) -> Capacity | None:
        """Room of a dispatch; None where sizes follow the routing."""
        return self._capacity

    def set_capacity(self, capacity: Capacity) -> None:
        """Have another room from now on. Collective.

        Raises:
            ConfigError: more rows than can be counted; on every rank alike, before anything changes.
        """
        check_buffers(self.backend_name, capacity)
        self._capacity = capacity
        assert self.config.max_tokens_per_rank is not None  # graph_safe asks for it
        self.backend.reserve(self.sizes(self.config.max_tokens_per_rank))

    def mark(self, name: str) -> None:
        """Tell the watchdog, if there is one, the name of the dispatcher that makes the next collectives."""
        for watch in self._watches:
            watch.layer = name

    def prepare_counters(self, device: torch.device) -> None:
        """Have what graph-safe dispatches write to on a device.

        Raises:
            StateError: the first call there is being captured in a CUDA graph.
        """
        self.high_water.prepare(device)
        self.meter.prepare(device)

    def let_go(self) -> None:
        """Drop the process groups and the backend, without closing it; only for the end of the process."""
        self.communicator.let_go()
        self.control.let_go()
        self.users = 0  # a dispatcher that is closed later finds no last share, and so no backend to close
        del self.backend

    def sizes(self, largest: int) -> Sizes:
        """What follows from the largest count of any rank."""
        return dataclasses.replace(self.needs.sizes(largest), capacity=self._capacity)


@final
class Lease:
    """One dispatcher's share of a channel, given back by ``release`` or when collected; the last one closes it.

    Autograd graphs of eager calls hold it too, so that a model may be dropped before its last backward.

    Attributes:
        name: Name of the dispatcher.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        with _lock:
            channel.users += 1
        self.name = name
        self._channel = channel
        self._collected = weakref.finalize(self, _release, channel, by_hand=False)
        self._collected.atexit = False  # by then the process group is gone; the process takes everything with it

    def mark(self) -> None:
        """Tell the watchdog, if there is one, that this dispatcher makes the next collectives."""
        self._channel.mark(self.name)

    def release(self) -> None:
        """Give the share back; the second time does nothing."""
        self.mark()
        if self._collected.detach() is not None:
            _release(self._channel, by_hand=True)

    @property
    def channel(self) -> Channel:
        """The channel.

        Raises:
            StateError: the share was given back.
        """
        if torch.compiler.is_compiling():  # the operators ask, each time they run
            return self._channel
        if not self._collected.alive:
            raise StateError(
                f"Dispatcher: it must be open, got a closed one of backend {self._channel.backend_name!r} on channel "
                f"{self._channel.name}. Build another with build_dispatcher. [MD10]"
            )
        self.mark()
        return self._channel

    @property
    def description(self) -> str:
        """The backend and this rank's place in the group; it can be read after ``release`` too."""
        ranks = self._channel.communicator
        closed = "" if self._collected.alive else ", closed"
        return f"backend={self._channel.backend_name!r}, rank {ranks.rank} of {ranks.size}{closed}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(
            "Dispatcher: only the weights of a model with a dispatcher can be saved, got pickle or torch.save of the "
            "module, which holds a process group. Save model.state_dict(), build the model again, and load it there."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        """A copied model (an average of weights, say) shares the channel: process groups cannot be copied."""
        return Lease(self.channel, self.name)


def _release(channel: Channel, *, by_hand: bool) -> None:
    with _lock:
        channel.users -= 1
        if channel.users:
            return
        for key in [key for key, other in _channels.items() if other is channel]:
            del _channels[key]
    if by_hand or not channel.backend.collective_close:
        channel.backend.close()
    else:  # ranks are collected at different times, and would wait for each other in the middle of something else
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
# Kept on purpose, so that no destructor frees on one rank what its peers have mapped.
_abandoned: list[Channel] = []


def find_channel(key: ChannelKey, name: str) -> Lease | None:
    """A share of the open channel with this key, if there is one."""
    with _lock:
        return Lease(_channels[key], name) if key in _channels else None


def keep_channel(key: ChannelKey, channel: Channel, name: str) -> Lease:
    """The first share of a channel just opened. It holds its groups, so their ids stay theirs while it lives."""
    with _lock:
        _channels[key] = _by_name[channel.name] = channel
        return Lease(channel, name)


def has_channel(group: dist.ProcessGroup) -> bool:
    """Whether a channel is open on the group."""
    return any(id(group) in key[:2] for key in _channels)


def named_channel(name: str) -> Channel:
    """The open channel of this name: operators are given names, because they cannot be given process groups.

    Raises:
        StateError: it was closed, or never opened in this process.
    """
    channel = _by_name.get(name)
    if channel is None or not channel.users:
        raise StateError(
            f"moe_dispatch operators: channel {name!r} must be open in this process, got none of that name. Keep the "
            "dispatcher open while what was compiled with it, or a backward of it, still runs."
        )
    channel.mark("")  # which dispatcher calls is not known here
    return channel


@atexit.register
def _let_go_of_groups() -> None:
    """Drop what open channels hold of process groups while the interpreter still runs.

    Models hold their dispatchers to the end. A process group that is first destroyed when the interpreter goes down
    may abort the process, so that a clean run ends with the status of a failure.
    """
    for channel in {id(channel): channel for channel in (*_by_name.values(), *_abandoned)}.values():
        channel.let_go()
