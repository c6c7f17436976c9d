"""What all dispatchers of one config and group share: backend, buffers, metrics. Opened together, refcounted."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import weakref
from typing import Any, final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.backends.base import Backend, BackendContext, Constraints, MoEShape, Rejected
from moe_dispatch.backends.collectives import Communicator
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.metrics import Meter
from moe_dispatch.dispatchers.requirements import check_group, shape_of, usable_backend
from moe_dispatch.errors import ConfigError, MoEDispatchError, PeerError, StateError

Group = dist.ProcessGroup | DeviceMesh | None

logger = logging.getLogger("moe_dispatch")


@final
class Channel:
    """One backend, open on one group, for one config. Attributes are set here and never again, but for the refcount."""

    def __init__(
        self,
        config: DispatcherConfig,
        communicator: Communicator,
        control: Communicator,
        cls: type[Backend],
        shape: MoEShape,
        needs: Constraints,
    ) -> None:
        self.config = config
        self.communicator = communicator
        self.control = control
        self.shape = shape
        self.needs = needs
        self.backend_name = cls.name
        self.name = f"{cls.name}-{config.digest[:8]}-{next(_serial)}"
        self.meter = Meter(shape.num_local_experts)
        self.users = 0
        context = BackendContext(
            shape=shape, communicator=communicator, wire_dtype=config.wire_dtype, permutation=config.permutation
        )
        options = cls.Options() if config.backend_name == "auto" else config.backend_options
        self.backend = cls(context, options)
        self.backend.open()

    @property
    def row_counts(self) -> str:
        """The policy in force."""
        return self.config.row_counts or ("static" if self.config.graph_safe else "agree")


@final
class Lease:
    """One dispatcher's share of a channel, given back by ``release`` or when collected; the last one closes it."""

    def __init__(self, channel: Channel) -> None:
        with _lock:
            channel.users += 1
        self._channel = channel
        self.release = weakref.finalize(self, _release, channel)

    @property
    def channel(self) -> Channel:
        """The channel.

        Raises:
            StateError: the share was given back.
        """
        if not self.release.alive:
            raise StateError("Dispatcher: it is closed. Build another with build_dispatcher.")
        return self._channel

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        """A copied model (an average of weights, say) shares the channel: process groups cannot be copied."""
        return Lease(self.channel)


def _release(channel: Channel) -> None:
    with _lock:
        channel.users -= 1
        if channel.users:
            return
        for key in [key for key, other in _channels.items() if other is channel]:
            del _channels[key]
    channel.backend.close()


_lock = threading.RLock()
_serial = itertools.count()
_channels: dict[tuple[int, int, str], Channel] = {}


def lease_channel(config: DispatcherConfig, group: Group, control_group: dist.ProcessGroup | None) -> Lease:
    """Open, or share, the channel of a config on a group. Collective.

    Raises:
        ConfigError: a rule the config breaks on this group, or ranks with different configs, by field and rank.
        BackendUnavailableError: the backend cannot run here.
        PeerError: it cannot run on another rank.

    Cost: one small all-reduce on the control group (when ranks agree).
    """
    process_group = _process_group(group)
    communicator = Communicator(process_group)
    control = communicator if control_group is None else Communicator(control_group)
    problem: MoEDispatchError | None = None
    try:
        _check_control(communicator, control)
        shape = shape_of(config, communicator.size)
        name = _choose(shape) if config.backend_name == "auto" else config.backend_name
        cls = usable_backend(name)
        options = cls.Options() if config.backend_name == "auto" else config.backend_options
        needs = _overridden(cls.constraints(shape, options), config)
        check_group(config, name, shape, needs)
    except MoEDispatchError as error:
        problem = error
    _compare(config, problem, communicator if control.size != communicator.size else control)
    key = (id(process_group), id(control_group), config.digest)
    with _lock:
        if key in _channels:
            return Lease(_channels[key])
    if config.backend_name == "auto" and communicator.rank == 0:
        logger.warning('backend="auto": using %r%s.', name, _why_not(name, shape))
    channel = Channel(config, communicator, control, cls, shape, needs)  # collective, so not under the lock
    with _lock:
        # The channel holds its groups, so the ids in the key cannot be given to others while it lives.
        _channels[key] = channel
        return Lease(channel)


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


def _overridden(needs: Constraints, config: DispatcherConfig) -> Constraints:
    return dataclasses.replace(needs, **config.constraints.given())  # type: ignore[arg-type]


def _choose(shape: MoEShape) -> str:
    """What "auto" means: nothing to move on one rank, else the torch backend with the fewest bytes."""
    return "local" if shape.ep_size == 1 else "alltoall"


def _why_not(chosen: str, shape: MoEShape) -> str:
    reasons = []
    for name in known_backends():
        if name == chosen:
            continue
        verdict = load_backend(name).probe()
        if isinstance(verdict, Rejected):
            reasons.append(f"{name}: {verdict.reason}")
        elif name == "local":
            reasons.append(f"local: for one rank, this group has {shape.ep_size}")
        elif name in ("allgather", "alltoall"):
            reasons.append(f"{name}: {'more bytes' if shape.ep_size > 1 else 'one rank needs no exchange'}")
        else:
            reasons.append(f"{name}: choose it by name")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _compare(config: DispatcherConfig, problem: MoEDispatchError | None, control: Communicator) -> None:
    """Raise on every rank alike if any has a problem or another config."""
    number = int(config.digest[:15], 16)
    highest, lowest, problems = control.max([number, -number, int(problem is not None)], label="build")
    if highest == -lowest and not problems:
        return
    told = control.gather_json([config.model_dump(mode="json"), problem and str(problem)], label="build")
    if problem is not None:
        raise problem
    _refuse_difference([fields for fields, _ in told])
    raise PeerError("; ".join(f"rank {rank} refused: {text}" for rank, (_, text) in enumerate(told) if text))


def _refuse_difference(configs: list[dict[str, Any]]) -> None:
    for field in configs[0]:
        values = {rank: config[field] for rank, config in enumerate(configs)}
        other = next((rank for rank, value in values.items() if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"Ranks disagree on {field}: rank 0 has {values[0]!r}, rank {other} has {values[other]!r}. "
                "Give every rank the same config."
            )
