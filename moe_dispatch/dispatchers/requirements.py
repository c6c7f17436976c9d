"""Check a config and a backend against a group, when a dispatcher is built."""

from __future__ import annotations

import torch

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape, listed_sizes
from moe_dispatch.backends.registry import known_backends, probe_backend, probed
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import BackendUnavailableError, ConfigError, InputError
from moe_dispatch.seams.plug_ins import Rejected
from moe_dispatch.types import Capacity

_OTHER_HIDDEN = "Use another hidden size or another backend. [MD05]"


def check_usable(options: BackendOptions) -> None:
    """Refuse a backend that cannot run on this machine.

    Raises:
        BackendUnavailableError: The probe of the backend failed. The error has the reason.
    """
    verdict = probed(options)
    if isinstance(verdict, Rejected):
        usable = [other for other in known_backends() if not isinstance(probe_backend(other), Rejected)]
        raise BackendUnavailableError(
            f"Backend {options.name!r} cannot be used here: {verdict.reason}. "
            f"Repair that, or choose one of: {', '.join(usable)}. [MD02]"
        )


def shape_of(config: DispatcherConfig, ep_size: int, ranks_per_node: int | None = None) -> MoEShape:
    """Return the sizes of a config on a group. Its experts are the expert slots of the ranks, spare ones included.

    Raises:
        ConfigError: The number of experts is not divisible by the number of ranks.
    """
    if config.num_experts % ep_size:
        smaller = max(size for size in range(1, ep_size + 1) if config.num_experts % size == 0)
        raise ConfigError(
            f"num_experts ({config.num_experts}) must be divisible by ep_size ({ep_size}). "
            f"Use {-(-config.num_experts // ep_size) * ep_size} experts or ep_size {smaller}."
        )
    wire, fixed = config.wire_options, config.graph_safe_options
    return MoEShape(
        num_experts=config.num_experts + ep_size * config.spare_slots(ep_size),
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        ep_size=ep_size,
        pad_multiple=config.pad_multiple_rows,
        wire_dtype=None if wire is None else wire.dtype,
        grad_wire_dtype=None if wire is None else wire.of_gradients,
        quantised=wire is not None and wire.delivers_quantised,
        max_tokens_per_rank=config.max_rows_per_dispatch,
        graph_safe=fixed is not None,
        capacity_factor="worst" if fixed is None else fixed.capacity_factor,
        ranks_per_node=ranks_per_node,
        planned_rows=None if config.slot_options is None else config.slot_options.planned_rows(config, ep_size),
        weighs=config.weights == "combine",
    )


def check_group(config: DispatcherConfig, name: str, shape: MoEShape, needs: Constraints) -> None:
    """Refuse a config that breaks a constraint of the backend on this group.

    Raises:
        ConfigError: A constraint is broken. The error has both values.
    """
    where = f"Backend {name!r}"
    spread = f"{shape.num_local_experts} ({config.num_experts} experts over {shape.ep_size} ranks)"
    other_experts = "Use another ep_size or number of experts."
    if spare := config.spare_slots(shape.ep_size):
        spread = f"{spread[:-1]}, spare slots per rank: {spare})"
        other_experts = "Change balance.spare_experts_per_rank, ep_size or the number of experts."
    for what, value, multiple, got, way_out in (
        ("experts per rank", shape.num_local_experts, needs.local_experts_multiple, spread, other_experts),
        ("hidden_size", shape.hidden_size, needs.hidden_multiple, shape.hidden_size, _OTHER_HIDDEN),
    ):
        if value % multiple:
            raise ConfigError(f"{where}: {what} must be a multiple of {multiple}, got {got}. {way_out}")
    for what, value, most, got, way_out in (
        ("experts per rank", shape.num_local_experts, needs.max_local_experts, spread, "Use a larger ep_size."),
        ("hidden_size", shape.hidden_size, needs.max_hidden, shape.hidden_size, "Use another backend. [MD05]"),
        ("top_k", shape.top_k, needs.max_top_k, shape.top_k, "Lower top_k or use another backend."),
    ):
        if most is not None and value > most:
            raise ConfigError(f"{where}: {what} must be at most {most}, got {got}. {way_out}")
    if needs.group_sizes is not None and shape.ep_size not in needs.group_sizes:
        allowed = listed_sizes(needs.group_sizes)
        raise ConfigError(f"{where}: ep_size must be one of {allowed}, got {shape.ep_size}. {needs.group_sizes_hint}")
    if not needs.wire.carries(shape.wire_dtype):
        offered = ", ".join(repr(dtype) for dtype in (None, *sorted(needs.wire.dtypes)))
        others = " or the format of another package" if needs.wire.other_formats else ""
        raise ConfigError(f"{where}: wire must be one of {offered}{others}, got {shape.wire_dtype!r}.")
    if config.wire_options is not None:
        config.wire_options.check_backend(where, needs)
    if config.device is not None and needs.devices is not None and config.device not in needs.devices:
        offered = ", ".join(sorted(needs.devices))
        raise ConfigError(f"{where}: device must be one of {offered}, got {config.device!r}. Use another backend.")
    if config.graph_safe_options is not None:
        if needs.graph_safe is None:
            raise ConfigError(f"{where}: graph_safe is not possible: {needs.graph_safe_reason}. Set graph_safe=False.")
        config.graph_safe_options.check_backend(where, needs.graph_safe)
    try:
        check_max_rows(where, config.max_rows_per_dispatch or 0, needs)
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_buffers(name: str, capacity: Capacity) -> None:
    """Refuse graph-safe buffers with more rows than ``offs`` can count.

    Raises:
        ConfigError: The buffers have more rows than int32 can count.
    """
    most = torch.iinfo(torch.int32).max
    if capacity.buffer_rows > most:
        raise ConfigError(
            f"Backend {name!r}: a graph-safe buffer must have at most {most} rows, because offs is int32, got "
            f"{capacity.buffer_rows}. Lower max_tokens_per_rank or graph_safe.capacity_factor."
        )


def check_max_rows(where: str, rows: int, needs: Constraints) -> None:
    """Refuse more rows per rank than the backend can take.

    Raises:
        InputError: There are too many rows. The error has the largest number that fits.
    """
    fits = needs.most_rows
    if fits is not None and rows > fits:
        raise InputError(f"{where}: at most {fits} rows per rank fit, got {rows}. Use smaller micro-batches.")
