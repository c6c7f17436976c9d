"""A channel: the backend, buffers and counters that all dispatchers with the same config and group share.

Ranks open a channel together: every rank checks first, and nothing is opened if any rank has a problem. A channel is
refcounted: each dispatcher holds a ``Lease``, and the last one closes it.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.backends.base import BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.communication import Communicator, control_device, device_types, own_device, raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.meter import Meter
from moe_dispatch.dispatchers.names import check_name
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_usable, shape_of
from moe_dispatch.dispatchers.trail import Trail
from moe_dispatch.errors import BackendUnavailableError, ConfigError, StateError
from moe_dispatch.permutation import choose_permutation
from moe_dispatch.seams.calls import delivery
from moe_dispatch.seams.observers import Observer, observe_groups
from moe_dispatch.seams.slots import Slots
from moe_dispatch.seams.tracing import is_traced, refuse_traced
from moe_dispatch.types import Capacity, Sizes

Group = dist.ProcessGroup | DeviceMesh | None
Result = TypeVar("Result")

logger = logging.getLogger("moe_dispatch")


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that marks a ``moe_dispatch::name`` range in profiles. Without a profiler it does nothing."""
    return torch.profiler.record_function(f"moe_dispatch::{name}") if profiled() else NO_RANGE


# Verbs ask this themselves, so that a call without a profiler enters no function for it.
profiled, NO_RANGE = torch.autograd._profiler_enabled, nullcontext()


@final
class Channel:
    """One backend, open on one group, for one config.

    These attributes change later: ``checked``, the refcount ``users``, the capacity (in ``grow``), ``observers``,
    ``numbers``, which counts the dispatchers that the ranks have built on the channel, and what ``open`` and ``shut``
    set.

    Attributes:
        context: The objects that the backend is opened with. A channel that is shut has neither.
        waken: Function that opens the channel for a call, from the name of the dispatcher and the verb. None if the
            channel is open.
        opening: How often the channel was shut.
        row_counts: The policy of the config for the number of rows per rank; None if each rank may bring its own
            number, and neither the backend nor a number of chunks depends on the largest.
        capacity: Number of rows that the buffers of a dispatch hold; None if sizes follow the routing.
        observers: What observes the calls on this channel.
        trail: What this rank has exchanged, as a number that ranks compare.
        checked: The kinds of tensors that ``check_call`` has found to fit.
        slots: The expert slots that a new dispatcher has; None if every rank holds its own experts only.
        agrees_on_rows: Whether the ranks settle sizes with a collective.
        num_summed: Number of counts that ranks sum when they agree on sizes, 0 for none. The first counts invalid ids;
            the others, for a backend that uses them, count the slots that name each expert.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        communicator: Communicator,
        control: Communicator,
        options: BackendOptions,
        shape: MoEShape,
        needs: Constraints,
    ) -> None:
        self.config = config
        self.communicator = communicator
        self.control = control
        self.observers: list[Observer] = []
        self.shape = shape
        self.needs = needs
        self.options = options
        self.backend_name = options.name
        self.name = f"{options.name}-{config.digest[:8]}-{next(_serial)}"
        first = communicator.rank * shape.num_local_experts
        self.meter = Meter(shape.num_local_experts, config.num_experts, first)
        self.trail = Trail(control, self.meter if config.graph_safe else None, debug=config.debug)
        self.checked: set[object] = set()
        self.users = 0
        self.numbers = itertools.count()
        self.capacity: Capacity | None = options.capacity(shape) if config.graph_safe else None
        needs_largest = needs.equal_rows or needs.group_max or config.chunks is not None
        self.row_counts = config.row_counts_policy if needs_largest else None
        self.agrees_on_rows = self.row_counts in ("agree", "check")
        # The counts are on the device of the rows, so sizes must be agreed on there too.
        device = None if control.group is None else control_device(control.group).type
        same_device = device_types(communicator.group) == {device}
        self.slots = None if config.slot_options is None else config.slot_options.open(self)
        knows_slots = self.slots is None or not self.slots.collective  # when ranks agree on sizes
        sums = self.agrees_on_rows and same_device and not config.graph_safe and knows_slots
        self.num_summed = 1 + shape.num_experts * needs.counts_with_sizes if sums else 0
        self.opening = 0
        self.open()

    def open(self) -> None:
        """Open the backend on the groups as they are. Collective."""
        self.context = BackendContext(
            shape=self.shape,
            communicator=self.communicator,
            needs=self.needs,
            permutation_name=self.config.permutation,
            debug=self.config.debug,
            deliver=delivery(self.config),
        )
        self.backend = self.options.open(self.context)
        if self.config.max_rows_per_dispatch is not None:
            self.backend.reserve(self.sizes(self.config.max_rows_per_dispatch))
        self.waken: Callable[[str, str], None] | None = None

    def shut(self, waken: Callable[[str, str], None] | None = None, *, closes: bool = True) -> None:
        """Let go of the backend and of the groups. A channel that is shut is in no table.

        Args:
            waken: What opens the channel again.
            closes: Whether to close the backend, which may be collective. Otherwise it is dropped.
        """
        with _lock:
            for key in [key for key, other in _channels.items() if other is self]:
                del _channels[key]
        self.waken, self.opening = waken, self.opening + 1
        backend = self.__dict__.pop("backend", None)
        self.__dict__.pop("context", None)
        try:
            if backend is not None and closes:
                backend.close()
        finally:
            self.communicator.let_go()
            self.control.let_go()
            if self.slots is not None:
                self.slots.let_go()

    @property
    def owner(self) -> str:
        """What a plan of this channel notes. It changes with each opening, because a plan has room in buffers."""
        return f"{self.name}/{self.opening}" if self.opening else self.name

    def set_capacity(self, capacity: Capacity) -> None:
        """Set the capacity of later dispatches. Collective.

        Raises:
            ConfigError: The buffers would have more rows than int32 can count. Raised on every rank; the old capacity
                stays.
        """
        check_buffers(self.backend_name, capacity)
        self.capacity = capacity
        self.backend.reserve(self.sizes(self.config.max_rows_per_dispatch or 0))

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks that share a node: the backend's option of this name, else found by host name."""
        configured: int | None = getattr(self.options, "ranks_per_node", None)
        return min(configured or self.shape.ranks_per_node or self.shape.ep_size, self.shape.ep_size)

    def device_of_rows(self, device: torch.device | str | None = None) -> torch.device:
        """Return the device of rows: the given one, the config's, CUDA if the group exchanges its tensors, else CPU."""
        chosen = device or self.config.device
        if chosen is None:
            chosen = "cuda" if "cuda" in device_types(self.communicator.group) and torch.cuda.is_available() else "cpu"
        own = own_device(self.communicator.group, chosen)
        return torch.empty(0, device=own).device  # with its number, as tensors have it

    def announce(self, name: str) -> None:
        """Tell what observes the groups that the dispatcher of this name makes the next collectives."""
        for observer in (*self.communicator.observers, *self.control.observers):
            observer.called(name)

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
        channel: The channel, also after the share was given back.
        number: Number of the dispatcher on its channel, in the order of building, so it is equal on all ranks. A copy
            has the number of its original.
        layer: Number of the lease's own counters in the meter.
        slots: The expert slots in force; None if every rank holds its own experts only. Only ``use`` changes them.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        with _lock:
            channel.users += 1
            self.layer = channel.meter.add(name)
        self.name = name
        self.number = 0
        self.slots: Slots | None = None
        self.channel = channel
        self._collected = weakref.finalize(self, _release, channel, by_hand=False)
        self._collected.atexit = False  # at exit the process group is gone, and the process frees everything

    def rename(self, name: str) -> None:
        """Give the dispatcher another name. Raises ConfigError if the name has characters that are not printable."""
        check_name(name)
        self.name = self.channel.meter.names[self.layer] = name

    def release(self, *, by_hand: bool = True) -> None:
        """Give the share back. A second call does nothing.

        Args:
            by_hand: Whether all ranks do so now. Else a close that is collective is left out.
        """
        self.channel.announce(self.name)
        if self._collected.detach() is not None:
            _release(self.channel, by_hand=by_hand)

    def enter(self, verb: str = "", *, wakes: bool = True) -> Channel:
        """Return the channel for a call, and tell what observes the groups who calls.

        Args:
            verb: Name of a method of the dispatcher that torch must not compile.
            wakes: Whether to open a channel that was released. Collective.

        Raises:
            StateError: The share was given back; or torch compiles the call, and ``verb`` is given.
        """
        if torch.compiler.is_compiling():
            if verb:
                refuse_traced(f"Dispatcher.{verb}: compile both verbs of a layer or none, and pass the plan in.")
            return self.channel  # the operators check this each time they run
        if not self._collected.alive:
            error = StateError(
                f"Dispatcher: the dispatcher must be open, got a closed one of backend {self.channel.backend_name!r}. "
                "Build another with build_dispatcher. [MD10]"
            )
            self.name_in(error)
            raise error
        if wakes and self.channel.waken is not None:
            self.channel.waken(self.name, verb)
        if self.channel.communicator.observers or self.channel.control.observers:
            self.channel.announce(self.name)
        return self.channel

    def name_in(self, error: Exception) -> None:
        """Add the dispatcher's name to an error."""
        if self.name:
            error.add_note(f"In the dispatcher {self.name!r}.")

    def enter_unless_traced(self) -> Channel | None:
        """Return what ``enter`` does; None if torch traces the call, which the plug-in then runs."""
        channel = self.channel
        if torch.compiler.is_compiling() or (
            torch._C._len_torch_dispatch_stack() and channel.needs.compilable and is_traced()
        ):
            return None
        is_observed = channel.communicator.observers or channel.control.observers
        is_ready = self._collected.alive and channel.waken is None and not is_observed
        return channel if is_ready else self.enter()

    def use(self, slots: Slots) -> None:
        """Send the rows of later dispatches to these slots. They must be equal on all ranks, and fit the channel."""
        meter = self.channel.meter
        meter.placed = True
        meter.prepare(slots.device, self.layer)  # so that the first call may be captured
        self.slots = slots

    @property
    def description(self) -> str:
        """Text with the backend and this rank's number in the group. It can be read after ``release`` too."""
        ranks = self.channel.communicator
        state = ", dry run" * ranks.dry_run + ", closed" * (not self._collected.alive)
        return f"backend={self.channel.backend_name!r}, rank {ranks.rank} of {ranks.size}{state}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError("Dispatcher: a process group cannot be saved. Save model.state_dict() instead of the model.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        """Return a new lease on the same channel, because process groups cannot be copied.

        Models are copied to average their weights, for example.
        """
        self.enter()  # raises if closed
        lease = Lease(self.channel, self.name)
        lease.number = self.number
        if self.slots is not None:
            lease.use(self.slots.copied())
        return lease


def _release(channel: Channel, *, by_hand: bool) -> None:
    with _lock:
        channel.users -= 1
        if channel.users:
            return
        # Ranks collect garbage at different times, so a collective close would make them wait for each other. Such a
        # channel is kept: a destructor would free memory on this rank that its peers have mapped. If the group was
        # destroyed, no rank uses it any more.
        backend, is_gone = getattr(channel, "backend", None), channel.communicator.is_gone
        waits = backend is not None and backend.collective_close and not by_hand
    if waits and not is_gone:
        logger.warning(
            "The last dispatcher of channel %s was collected without close(): its buffers stay for the next dispatcher "
            "of this config and group. Call close() on every rank.",
            channel.name,
        )
        return
    channel.shut(closes=not waits)


def _drop_gone() -> None:
    """Drop channels that were kept for later dispatchers, if their group was destroyed since."""
    with _lock:
        gone = [each for each in _channels.values() if not each.users and each.communicator.is_gone]
        for channel in gone:
            channel.shut(closes=False)


_lock = threading.RLock()
_serial = itertools.count()
# By the ids of the group and the control group, and the digest of the config. An open channel holds its groups, so no
# other group gets the same id.
_channels: dict[tuple[int, int, str], Channel] = {}
open_by_name: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()


def lease_channel(config: DispatcherConfig, group: Group, control_group: dist.ProcessGroup | None, name: str) -> Lease:
    """Open the channel of a config on a group, or share an open one, for the dispatcher ``name``. Collective.

    Raises:
        ConfigError: The config breaks a rule on this group; or the configs of the ranks differ, and the error has the
            field and two ranks.
        BackendUnavailableError: The backend cannot run here.
        PeerError: Building failed on another rank. The error has the text of that rank.

    Cost: one small all-reduce on the control group. Opening a channel takes two more, and an exchange of host names.
    If ranks disagree, an exchange of texts comes on top.
    """
    process_group, control_group = process_group_of(group), process_group_of(control_group)
    _drop_gone()
    if group is None and config.backend_name != "local" and _ranks_of_job() > 1:
        _warn_of_one_rank()
    agreed, problem = attempt(lambda: check_name(name))
    if problem is None:
        agreed, problem = attempt(lambda: observe_groups(config, filter(None, (process_group, control_group)), name))
    communicator = Communicator(process_group)
    control = communicator if control_group is None else Communicator(control_group)
    if problem is None and (control.size, control.rank) != (communicator.size, communicator.rank):
        problem = ConfigError(
            f"control_group must hold the ranks of group in the same order, got rank {control.rank} of {control.size} "
            f"for rank {communicator.rank} of {communicator.size}."
        )
    if control.size != communicator.size:
        control = communicator
    key = (id(process_group), id(control_group), config.digest)
    with _lock:
        lease = Lease(_channels[key], name) if key in _channels else None
    # First the configs, because ranks whose configs differ may not even know the same backend. Opening is collective,
    # so if one rank must open the channel (its last dispatcher was collected), all ranks do.
    facts = {**config.canonical, **(agreed or {})}
    (opens,) = raise_alike(control, problem, values=[int(lease is None)], facts=facts, label="build")
    if not opens:
        assert lease is not None
        return _begin(lease)
    # Then the nodes, on which the constraints of a backend depend.
    nodes = ranks_per_node(control.gather_json(socket.gethostname(), label="build"))
    drawn, problem = attempt(lambda: _draw(config, communicator, nodes))
    facts = {}
    if drawn is not None:  # constraints may depend on the installed version of the backend's library
        options, _, needs = drawn
        facts = {"backend": options.name, **dataclasses.asdict(needs)}
    # Then the constraints, before any buffer exists: opening a library on some ranks only would leave them waiting.
    raise_alike(control, problem, facts=facts, label="build")
    assert drawn is not None
    if config.backend_options is None and communicator.rank == 0:
        others = [name for name in known_backends() if name != drawn[0].name]
        reasons = "; ".join(f"{name}: {_why_not(name)}" for name in others)
        logger.info('backend="auto": using %r. Not %s.', drawn[0].name, reasons)
    channel, problem = attempt(lambda: Channel(config, communicator, control, *drawn))
    # Last, whether every rank has opened it. A rank that failed must not leave a channel that the others use.
    raise_alike(control, problem, label="build")
    assert channel is not None
    with _lock:
        _channels[key] = open_by_name[channel.name] = channel
        lease = Lease(channel, name)
    return _begin(lease)


def list_channel(channel: Channel) -> None:
    """Let later dispatchers share a channel that was opened again, unless another one has its config and groups."""
    control = None if channel.control is channel.communicator else channel.control.group
    with _lock:
        _channels.setdefault((id(channel.communicator.group), id(control), channel.config.digest), channel)


def _begin(lease: Lease) -> Lease:
    """Give a new lease its number and its slots. All ranks have agreed by now, so an error leaves nobody waiting."""
    channel = lease.channel
    lease.number = next(channel.numbers)
    if channel.slots is not None:
        lease.use(channel.slots.copied())
    return lease


def open_channels(group: dist.ProcessGroup | None) -> list[Channel]:
    """Return the open channels whose ranks exchange something on a group."""
    with _lock:
        return [
            each for each in _channels.values() if each.users and group in (each.communicator.group, each.control.group)
        ]


def _ranks_of_job() -> int:
    """Return the number of ranks of the job, as torchrun says it before ``init_process_group``."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


@cache
def _warn_of_one_rank() -> None:
    logger.warning(
        "A dispatcher was built without a group in a job of several ranks, so each rank works alone. Call "
        "init_process_group first, and pass group=, such as torch.distributed.group.WORLD. Or choose "
        'backend="local".'
    )


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Run an action. Returns its result, or the error that it raised.

    Errors of all types are caught, because a backend may raise any of them, and the peers must be told before this rank
    raises.
    """
    try:
        return action(), None
    except Exception as problem:
        return None, problem


def process_group_of(group: Group, where: str = "Dispatcher") -> dist.ProcessGroup | None:
    """Return the process group of a DeviceMesh, or the group itself.

    Args:
        group: What a caller passed as the group.
        where: Name of the call, for the error.

    Raises:
        ConfigError: ``group`` is something else, or a mesh of several dimensions.
    """
    if not isinstance(group, DeviceMesh):
        if group is None or isinstance(group, dist.ProcessGroup):
            return group
        raise ConfigError(
            f"{where}: a group must be a process group that this rank is in, got {type(group).__name__}. new_group "
            "returns an int on the ranks outside the group: build no dispatcher there."
        )
    if group.ndim != 1:
        raise ConfigError(
            f'{where}: pass one dimension of a DeviceMesh, such as mesh["ep"], not {group.ndim} '
            f"({group.mesh_dim_names})."
        )
    return group.get_group()


def _draw(
    config: DispatcherConfig, communicator: Communicator, ranks_per_node: int
) -> tuple[BackendOptions, MoEShape, Constraints]:
    """Return the values to open a channel with: of a backend that can run here, and whose constraints are met."""
    shape, options = shape_of(config, communicator.size, ranks_per_node), config.options_for(communicator.size)
    check_usable(options)
    needs = dataclasses.replace(options.constraints(shape), **config.constraints.given())
    check_group(config, options.name, shape, needs)
    if config.graph_safe:
        check_buffers(options.name, options.capacity(shape))
    if config.permutation != "auto":
        if needs.pads_experts:
            raise ConfigError(
                f'Backend {options.name!r}: permutation must be "auto", because its library reorders rows itself, got '
                f"{config.permutation!r}."
            )
        kinds = {config.device} if config.device is not None else needs.devices or device_types(communicator.group)
        if len(kinds) == 1:  # the device of the rows is already certain
            choose_permutation(config.permutation, *kinds)
    return options, shape, needs


def _why_not(name: str) -> str:
    """Return why "auto" does not choose a backend. The backend is not probed, because a probe may import a library."""
    try:
        return load_backend(name).auto_reason
    except (BackendUnavailableError, ConfigError) as error:
        return str(error).rstrip(".")


def ranks_per_node(hosts: Sequence[str]) -> int:
    """Return the largest n such that each block of n consecutive ranks is on one host.

    For example, hosts a a b b b b give 2.

    Args:
        hosts: Host name of each rank. Containers with different host names count as different hosts.
    """
    borders = [rank for rank in range(1, len(hosts)) if hosts[rank - 1] != hosts[rank]]
    return math.gcd(len(hosts), *borders)


@atexit.register
def _drop_backends() -> None:
    """Drop the buffers of open channels, which hold process groups, while the interpreter still runs."""
    for channel in open_by_name.values():
        channel.users = 0  # a dispatcher that is closed from now on must not close the backend
        channel.__dict__.pop("backend", None)
