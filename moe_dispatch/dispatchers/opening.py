"""Open a dispatcher's channel. Every rank checks first, and nothing is opened if any rank has a problem."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.backends.base import Constraints
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.communication import Communicator, device_types, raise_alike
from moe_dispatch.config import ENVIRONMENT_PREFIX, DispatcherConfig
from moe_dispatch.dispatchers.channel import Blueprint, Channel, Lease, find_channel, has_channel, keep_channel
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_usable, shape_of
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.permutation import choose_permutation
from moe_dispatch.watchdog import watch_group

Group = dist.ProcessGroup | DeviceMesh | None
Result = TypeVar("Result")

logger = logging.getLogger("moe_dispatch")


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
    process_group = _process_group(group)
    seconds, problem = _attempt(lambda: _watch(config, filter(None, (process_group, control_group)), name))
    communicator = Communicator(process_group)
    control = communicator if control_group is None else Communicator(control_group)
    if problem is None:
        _, problem = _attempt(lambda: _check_control(communicator, control))
    if control.size != communicator.size:
        control = communicator
    key = (id(process_group), id(control_group), config.digest)
    lease = find_channel(key, name)
    # Opening is collective. So if one rank must open the channel (its last dispatcher was collected), all ranks do.
    facts = {**config.canonical, "watchdog": seconds}
    (opens,) = raise_alike(control, problem, values=[int(lease is None)], facts=facts, label="build")
    if not opens:
        assert lease is not None
        lease.number = next(lease.enter().numbers)
        return lease
    nodes = ranks_per_node(control.gather_json(socket.gethostname(), label="build"))
    blueprint, problem = _attempt(lambda: _draw(config, communicator, nodes))
    raise_alike(control, problem, facts={} if blueprint is None else _facts(blueprint), label="build")
    assert blueprint is not None
    _announce(config, communicator, blueprint)
    opened, problem = _attempt(lambda: Channel(config, communicator, control, blueprint))
    raise_alike(control, problem, label="build")
    assert opened is not None
    lease = keep_channel(key, opened, name)
    lease.number = next(opened.numbers)
    return lease


def _watch(config: DispatcherConfig, groups: Iterable[dist.ProcessGroup], name: str) -> float | None:
    """Start watchdogs on the groups of the dispatcher ``name``, if config or environment ask for them.

    Returns:
        The time limit in seconds; None without a watchdog.

    Raises:
        ConfigError: The time limit is malformed, another open dispatcher of the group has a different time limit, or
            the group has no store.
    """
    seconds = _time_limit(config)
    if seconds is None:
        return None
    for group in groups:
        watch = watch_group(group, seconds)
        if watch.seconds != seconds and has_channel(group):
            raise ConfigError(
                f"watchdog must be the same for all open dispatchers of a group, got {seconds:g} after "
                f"{watch.seconds:g}. Use one number of seconds."
            )
        watch.seconds, watch.layer = seconds, name
    return seconds


def _time_limit(config: DispatcherConfig) -> float | None:
    """Return the time limit of collectives in seconds, or None.

    Raises:
        ConfigError: The environment variable is not a positive number.
    """
    text = os.environ.get(f"{ENVIRONMENT_PREFIX}WATCHDOG", "")
    if config.watchdog is not None or not text:
        return config.watchdog
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ConfigError(
        f"{ENVIRONMENT_PREFIX}WATCHDOG must be a number of seconds above 0, got {text!r}. Set it to 60, or unset it."
    )


def _facts(blueprint: Blueprint) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks beside the config: the backend and its constraints.

    Constraints may depend on the installed version of the backend's library.
    """
    needs = {field.name: getattr(blueprint.needs, field.name) for field in dataclasses.fields(blueprint.needs)}
    return {"backend": blueprint.options.name, **{name: _ordered(value) for name, value in needs.items()}}


def _ordered(value: Any) -> Any:
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset) else value


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Run an action. Returns its result, or the error that it raised.

    Errors of all types are caught, because a backend may raise any of them, and the peers must be told before this rank
    raises.
    """
    try:
        return action(), None
    except Exception as problem:
        return None, problem


def _process_group(group: Group) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ConfigError(
            f"Dispatcher: a DeviceMesh must have one dimension, got {group.ndim} ({group.mesh_dim_names}). "
            'Pass the expert-parallel part, for example mesh["ep"].'
        )
    return group.get_group()


def _check_control(communicator: Communicator, control: Communicator) -> None:
    if (control.size, control.rank) != (communicator.size, communicator.rank):
        raise ConfigError(
            f"control_group must hold the ranks of group in the same order, got rank {control.rank} of {control.size} "
            f"for rank {communicator.rank} of {communicator.size}. Make it with the same ranks."
        )


def _draw(config: DispatcherConfig, communicator: Communicator, ranks_per_node: int) -> Blueprint:
    shape, options = shape_of(config, communicator.size, ranks_per_node), config.options_for(communicator.size)
    check_usable(options)
    needs = dataclasses.replace(options.constraints(shape), **config.constraints.given())
    check_group(config, options.name, shape, needs)
    if config.graph_safe:
        check_buffers(options.name, options.capacity(shape))
    _check_permutation(config, options.name, needs, communicator)
    return Blueprint(options=options, shape=shape, needs=needs)


def _check_permutation(config: DispatcherConfig, name: str, needs: Constraints, communicator: Communicator) -> None:
    """Refuse a named permutation that cannot be used, if the device of the rows is already certain."""
    if config.permutation == "auto":
        return
    if needs.pads_experts:
        raise ConfigError(
            f'Backend {name!r}: permutation must be "auto", because its library reorders rows itself, got '
            f"{config.permutation!r}. Leave permutation out."
        )
    kinds = {config.device} if config.device is not None else needs.devices or device_types(communicator.group)
    if config.graph_safe and config.permutation == "te":
        raise ConfigError(
            f'Backend {name!r}: permutation must be "auto", "torch" or "triton" with graph_safe=True, because '
            "transformer-engine's kernels are not yet used on buffers of fixed size, got 'te'. Leave permutation out."
        )
    if len(kinds) == 1:
        choose_permutation(config.permutation, *kinds)


def _announce(config: DispatcherConfig, communicator: Communicator, blueprint: Blueprint) -> None:
    """Log on rank 0 which backend "auto" chose, and why it did not choose the others."""
    if config.backend_options is not None or communicator.rank:
        return
    chosen = blueprint.options.name
    reasons = [f"{name}: {_why_not(name)}" for name in known_backends() if name != chosen]
    logger.info('backend="auto": using %r. Not %s.', chosen, "; ".join(reasons))


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
    borders = [rank for rank, (left, right) in enumerate(pairwise(hosts), start=1) if left != right]
    sizes = [size for size in range(1, len(hosts) + 1) if len(hosts) % size == 0]
    inside = [size for size in sizes if all(border % size == 0 for border in borders)]
    return max(inside)
