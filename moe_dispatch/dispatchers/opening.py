"""Building a dispatcher's channel: every rank checks, all hear of every problem, and only then something is opened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.communication import Communicator, device_types
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Blueprint, Channel, ChannelKey, Lease, find_channel, keep_channel
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_usable, probe_backend, shape_of
from moe_dispatch.dispatchers.topology import detect_ranks_per_node
from moe_dispatch.errors import ConfigError, MoEDispatchError, PeerError
from moe_dispatch.permutation import choose_permutation
from moe_dispatch.probing import Rejected

Group = dist.ProcessGroup | DeviceMesh | None
Result = TypeVar("Result")

logger = logging.getLogger("moe_dispatch")


def lease_channel(config: DispatcherConfig, group: Group, control_group: dist.ProcessGroup | None) -> Lease:
    """Open, or share, the channel of a config on a group. Collective.

    Raises:
        ConfigError: a rule the config breaks on this group, or ranks with different configs, by field and rank.
        BackendUnavailableError: the backend cannot run here.
        PeerError: building failed on another rank, with its text.

    Cost: one small all-reduce on the control group; when a channel is opened two more, and an exchange of host names;
    more where ranks do not agree.
    """
    process_group = _process_group(group)
    communicator = Communicator(process_group)
    control = communicator if control_group is None else Communicator(control_group)
    _, problem = _attempt(lambda: _check_control(communicator, control))
    if control.size != communicator.size:
        control = communicator
    key = (id(process_group), id(control_group), config.digest)
    lease = find_channel(key)
    # Where one rank has to open, because its last dispatcher was collected, say, all open: opening is collective.
    if not _raise_alike(config.model_dump(mode="json"), problem, control, opening=lease is None):
        assert lease is not None
        return lease
    nodes = detect_ranks_per_node(control)
    blueprint, problem = _attempt(lambda: _draw(config, communicator, nodes))
    _raise_alike({} if blueprint is None else _facts(blueprint), problem, control)
    assert blueprint is not None
    lease, problem = _attempt(lambda: _open(key, config, communicator, control, blueprint))
    _raise_alike({}, problem, control)
    assert lease is not None
    return lease


def _open(
    key: ChannelKey, config: DispatcherConfig, communicator: Communicator, control: Communicator, blueprint: Blueprint
) -> Lease:
    _announce(config, communicator, blueprint)
    return keep_channel(key, Channel(config, communicator, control, blueprint))


def _facts(blueprint: Blueprint) -> dict[str, Any]:
    """What must be alike on all ranks although no config says it: the rules of what is installed there."""
    needs = dataclasses.asdict(blueprint.needs)
    return {"backend": blueprint.backend.name, **{name: _ordered(value) for name, value in needs.items()}}


def _ordered(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result, or whatever was raised, also by a third party's code: the peers must hear of it before it goes on."""
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
    shape = shape_of(config, communicator.size, ranks_per_node)
    automatic = config.backend_name == "auto"
    backend = load_backend(_choose(shape) if automatic else config.backend_name)
    options = backend.Options() if automatic else config.backend_options
    check_usable(backend, options)
    needs = dataclasses.replace(backend.constraints(shape, options), **config.constraints.given())
    check_group(config, backend.name, shape, needs)
    if config.graph_safe:
        check_buffers(backend.name, backend.capacity(shape, options))
    _check_permutation(config, backend.name, needs, communicator)
    return Blueprint(backend=backend, options=options, shape=shape, needs=needs)


def _check_permutation(config: DispatcherConfig, name: str, needs: Constraints, communicator: Communicator) -> None:
    """Refuse a named permutation that cannot be used, where it is certain on which device rows will be."""
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


def _choose(shape: MoEShape) -> str:
    """What "auto" means: nothing to move on one rank, else the torch backend with the fewest bytes."""
    return "local" if shape.ep_size == 1 else "alltoall"


def _announce(config: DispatcherConfig, communicator: Communicator, blueprint: Blueprint) -> None:
    """Say once, on rank 0, what "auto" chose and why not the others."""
    if config.backend_name != "auto" or communicator.rank:
        return
    chosen = blueprint.backend.name
    reasons = [f"{name}: {_why_not(name, blueprint.shape)}" for name in known_backends() if name != chosen]
    logger.warning('backend="auto": using %r. Not %s.', chosen, "; ".join(reasons))


def _why_not(name: str, shape: MoEShape) -> str:
    if name in ("deepep", "hybridep"):  # not probed: that would import deep_ep on this rank, for a line in a log
        return "to be chosen by name"
    verdict = probe_backend(name)
    if isinstance(verdict, Rejected):
        return verdict.reason
    if name == "local":
        return f"for one rank, this group has {shape.ep_size}"
    if name in ("allgather", "alltoall"):
        return "one rank needs no exchange" if shape.ep_size == 1 else "more bytes"
    return "to be chosen by name"


def _raise_alike(
    facts: dict[str, Any], problem: Exception | None, control: Communicator, *, opening: bool = False
) -> bool:
    """Raise on every rank if any has a problem or other facts; else whether any rank has a channel to open."""
    number = int(hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:15], 16)
    marks = [number, -number, int(problem is not None), int(opening)]
    try:
        highest, lowest, problems, openings = control.max(marks, label="build")
        if highest == -lowest and not problems:
            return bool(openings)
        told = control.gather_json([facts, problem and _text(problem)], label="build")
    except Exception as failure:  # peers are elsewhere, in a collective that this rank left: its own error matters more
        if problem is None:
            raise
        problem.add_note(f"The other ranks were not told: {failure}")
        raise problem from None
    if problem is not None:
        raise problem
    if not any(text for _, text in told):
        _refuse_difference([fields for fields, _ in told])
    raise PeerError("; ".join(f"rank {rank} refused: {text}" for rank, (_, text) in enumerate(told) if text))


def _text(problem: Exception) -> str:
    """What peers are told; libraries assert without a text."""
    if isinstance(problem, MoEDispatchError):
        return str(problem)
    return f"{type(problem).__name__}: {str(problem) or 'no text'}"


def _refuse_difference(facts: list[dict[str, Any]]) -> None:
    for field in facts[0]:
        values = {rank: of_rank[field] for rank, of_rank in enumerate(facts)}
        other = next((rank for rank, value in values.items() if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"Ranks disagree on {field}: rank 0 has {values[0]!r}, rank {other} has {values[other]!r}. "
                "Give every rank the same config, library and environment."
            )
