"""Give back what channels hold, and open them again on the groups as they are then. Calls do not need this module.

A channel that was released keeps its config, counters, capacity and slots, and its dispatchers their names. It has no
backend, no memory and no process group until ``reopen``.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from moe_dispatch.backends.base import Route
from moe_dispatch.capabilities.instances import instances_of
from moe_dispatch.capabilities.phases.groups import KnownGroup, hold
from moe_dispatch.communication import device_of, raise_alike, ranks_by_value, real_group
from moe_dispatch.dispatchers.agreement import agree_on_largest
from moe_dispatch.dispatchers.autograd import Departed, State
from moe_dispatch.dispatchers.channel import Channel, Group, Lease, attempt, list_channel, process_group_of
from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.dispatchers.meter import Tally
from moe_dispatch.errors import MoEDispatchError, PeerError, StateError
from moe_dispatch.seams.observers import observe_groups
from moe_dispatch.seams.tracing import real_tensors

Model = nn.Module | Dispatcher | Iterable[Any]


def release(model: Model) -> None:
    """Give back the buffers, memory and process groups of all dispatchers of a model. Collective.

    See ``Dispatcher.release``. All ranks of a group pass models with the same dispatchers on it, in the same order.

    Args:
        model: A module with dispatchers in it or in the attributes of its modules, as the integrations put them there;
            or several modules or dispatchers.

    Raises:
        StateError: There is no dispatcher in the model; or a call is in flight. Then nothing was given back.
        PeerError: A call is in flight on another rank; or a rank has not called ``release``, and the error names it.
    """
    release_channels([each._lease for each in dispatchers_in(model, "release")])


def reopen(model: Model, group: Group = None, *, control_group: dist.ProcessGroup | None = None) -> None:
    """Open all dispatchers of a model that were released, as ``Dispatcher.reopen`` does. Collective.

    Args:
        model: As in ``release``.
        group: The group of all of them; by default each finds its own.
        control_group: Their control group; by default each finds its own, or has none if ``group`` is given.
    """
    for dispatcher in dispatchers_in(model, "reopen"):
        dispatcher.reopen(group, control_group=control_group)


def dispatchers_in(model: Model, verb: str) -> list[Dispatcher]:
    """Return the dispatchers of a model, in the order of its modules.

    Raises:
        StateError: There is none.
    """
    found = dict.fromkeys(_walk(model))
    if not found:
        raise StateError(f"{verb}: the model must have a dispatcher, got none. Pass the module that holds it.")
    return [*found]


def _walk(model: Model) -> Iterator[Dispatcher]:
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, Dispatcher):
                yield module
            for value in vars(module).values():
                held = value if isinstance(value, Dispatcher) else getattr(value, "dispatcher", None)
                if isinstance(held, Dispatcher):
                    yield held
    else:
        for each in model.values() if isinstance(model, dict) else model:
            yield from _walk(each)


def release_channels(leases: Sequence[Lease]) -> None:
    """Run ``Dispatcher.release`` for the channels of leases."""
    named: dict[Channel, str] = {}
    for lease in leases:
        named.setdefault(lease.enter(wakes=False), lease.name)
    channels = [channel for channel in named if channel.waken is None]
    calls = _calls(channels)
    for channel in channels:
        if channel.communicator.is_gone or channel.control.is_gone:
            continue
        try:
            _agree(channel, _in_flight(calls[channel]))
        except Exception as error:
            calls.clear()  # the error keeps this frame
            if name := named[channel]:
                error.add_note(f"In the dispatcher {name!r}.")
            raise
    for channel in channels:
        for call in calls.pop(channel):
            if isinstance(call, State):  # whoever holds it holds no memory of the backend any more
                object.__setattr__(call, "route", ReleasedRoute())
        links = dict.fromkeys((channel.communicator, channel.control))
        channel.shut(partial(_wake, channel, [KnownGroup(link) for link in links]))


def _wake(channel: Channel, groups: Sequence[KnownGroup], name: str, verb: str) -> None:
    """Open a channel for a call of the dispatcher ``name``."""
    if verb in ("combine", "dispatch"):  # of an earlier dispatch
        refuse_old(verb)
    reopen_channel(channel, name)


def _calls(channels: Sequence[Channel]) -> dict[Channel, list[State | Departed | Tally]]:
    """Return the calls of channels that something still holds."""
    found = _held(channels)
    if any(map(_in_flight, found.values())):
        found.clear()
        gc.collect()  # an error may have left cycles behind
        found = _held(channels)
    return found


def _held(channels: Sequence[Channel]) -> dict[Channel, list[State | Departed | Tally]]:
    found: dict[Channel, list[State | Departed | Tally]] = {channel: [] for channel in channels}
    with _looking:
        objects = instances_of(State, Tally, Departed)
    for each in objects:
        owner = each if type(each) is Departed else getattr(each, "lease", None)  # another thread may be making it
        if (channel := getattr(owner, "channel", None)) in found:
            found[channel].append(each)
    return found


_GRACE = 2.0  # seconds
_looking = threading.Lock()  # the list of all objects in one thread keeps those that another one looks for


def _in_flight(calls: Iterable[State | Departed | Tally]) -> StateError | None:
    """Return the error of calls of this rank that are not complete; None if there is none."""
    pending = [call for call in calls if isinstance(call, Tally) and call.is_pending]
    travelling = sum(isinstance(call, Departed) for call in calls)
    if not pending and not travelling:
        return None
    names = ", ".join(repr(name) for name in dict.fromkeys(call.lease.name for call in pending) if name)
    number, of = len(pending) + travelling, f" of {names}" if names else ""
    return StateError(
        f"Dispatcher.release: no call may be in flight, got {number}{of} whose rows, combine or backward are still to "
        "come. Release behind the backward, and drop outputs that get none."
    )


def _agree(channel: Channel, problem: StateError | None) -> None:
    """Raise on every rank if one has a problem, or makes another call.

    The exchange is the first one of an eager dispatch, so a rank that dispatches instead is told too.

    Raises:
        StateError: This rank has a problem.
        InputError: A rank makes another call.
        PeerError: Another rank has a problem; or a rank has made no call, which the transport has noticed.
    """
    facts = {"the call": "release"}
    with _noted(channel):
        if channel.config.debug or channel.agrees_on_rows:
            agree_on_largest(channel, 0, problem, facts=facts)
            return
        if channel.needs.exchanges_counts and not (channel.slots is not None and channel.slots.hears_refusals):
            preferred = torch.device(channel.config.device or "cpu")
            channel.backend.refuse(device_of(channel.communicator.group, preferred))
        raise_alike(channel.control, problem, facts=facts, of_call=True, label="refusal")


@contextmanager
def _noted(channel: Channel) -> Iterator[None]:
    """Note in the store of the group that this rank is here. If the transport fails, say which rank is not.

    The notes are gone when all ranks have come.
    """
    control, store = channel.control, None
    if control.size > 1:
        with suppress(AttributeError, RuntimeError):  # a group without a store
            group: Any = real_group(control.group)  # type: ignore[arg-type]
            place = f"moe_dispatch/release/{channel.config.digest}/{channel.opening}"
            store = PrefixStore(place, group.get_group_store())
            store.set(str(control.rank), "")
    try:
        yield
    except Exception as error:
        if isinstance(error, MoEDispatchError):
            _remove(store, control.rank)
        elif isinstance(error, RuntimeError):  # of the transport, so other ranks may still look for the note
            _name_late(control.size, store, error)
        raise
    _remove(store, control.rank)


def _remove(store: Any, rank: int) -> None:
    if store is not None:
        with suppress(RuntimeError):
            store.delete_key(str(rank))


def _name_late(size: int, store: Any, error: RuntimeError) -> None:
    """Raise an error that names the ranks without a note, if there are any."""
    late: list[int] = []
    if store is not None:
        until = time.monotonic() + _GRACE  # a rank that has ended breaks connections before others come here
        with suppress(RuntimeError):
            while late := [rank for rank in range(size) if not store.check([str(rank)])]:
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
    if late:
        ranks = ranks_by_value(dict.fromkeys(late, "late"))["late"]
        raise PeerError(
            f"Dispatcher.release: every rank must call it, got no call on {ranks} within the timeout of the group. "
            "Call it there too, behind the same step."
        ) from error


@final
class ReleasedRoute(Route):
    """Takes the place of the route of a dispatch that was made before ``release``."""

    __slots__ = ()

    def send(self, rows_TD: Tensor) -> NoReturn:
        refuse_old("dispatch")

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> NoReturn:
        refuse_old("combine")

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> NoReturn:
        refuse_old("dispatch")

    def combine_backward(self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None) -> NoReturn:
        refuse_old("combine")


def refuse_old(verb: str) -> NoReturn:
    """Refuse what was dispatched before ``release``."""
    raise StateError(
        f"Dispatcher.{verb}: the dispatch must be of the time since the last release(), which gave its route back, got "
        "an older one. Dispatch again."
    )


def reopen_channel(
    channel: Channel, name: str, group: Group = None, control_group: dist.ProcessGroup | None = None
) -> None:
    """Run ``Dispatcher.reopen`` for a channel that was released, called by the dispatcher ``name``.

    Raises:
        StateError: A group is not there, or has another rank or size than before.
        ConfigError: The group is no group; or ranks differ.
        PeerError: Opening failed on another rank.
    """
    waken = channel.waken
    assert isinstance(waken, partial)
    links = [*dict.fromkeys((channel.communicator, channel.control))]
    try:
        with real_tensors(), torch.inference_mode(False), torch.no_grad():
            if group is None:
                for known in waken.args[1]:
                    known.find()
            else:
                given = [process_group_of(each, "Dispatcher.reopen") for each in (group, control_group or group)]
                for link, each in zip(links, given, strict=False):
                    assert each is not None
                    hold(link, each)
            in_use = [link.group for link in links if link.group is not None]
            told, problem = attempt(partial(observe_groups, channel.config, in_use, name))
            facts = {"releases": channel.opening, **channel.config.canonical, **(told or {})}
            raise_alike(channel.control, problem, facts=facts, label="build")
            _, problem = attempt(channel.open)
            raise_alike(channel.control, problem, label="build")
    except BaseException as error:
        channel.opening -= 1  # it was not opened
        channel.shut(waken, closes=False)
        if isinstance(error, Exception) and name:
            error.add_note(f"In the dispatcher {name!r}.")
        raise
    list_channel(channel)
