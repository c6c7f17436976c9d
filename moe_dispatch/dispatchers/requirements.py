"""What must hold before anything is exchanged: rules that need the group, and rules that need the tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.backends.base import Backend, BackendOptions, Constraints, MoEShape, listed_sizes
from moe_dispatch.backends.capacity import Capacity
from moe_dispatch.backends.registry import known_backends, load_backend
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import BackendUnavailableError, ConfigError, InputError, MoEDispatchError
from moe_dispatch.probing import Rejected, Usable
from moe_dispatch.types import Routing

ROW_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def check_usable(cls: type[Backend], options: BackendOptions) -> None:
    """Refuse a backend that cannot run on this machine.

    Raises:
        BackendUnavailableError: it cannot, and why.
    """
    verdict = cls.probe(options)
    if isinstance(verdict, Rejected):
        usable = [other for other in known_backends() if not isinstance(probe_backend(other), Rejected)]
        raise BackendUnavailableError(
            f"Backend {cls.name!r} cannot be used here: {verdict.reason}. "
            f"Repair that, or choose one of: {', '.join(usable)}."
        )


def probe_backend(name: str) -> Usable | Rejected:
    """Whether a known backend can run here with its default options; one whose import raises is rejected with that."""
    try:
        cls = load_backend(name)
        return cls.probe(cls.Options())
    except MoEDispatchError as error:
        return Rejected(str(error).rstrip("."))
    except Exception as error:  # a probe must not raise, but a third party's may
        return Rejected(f"its probe raised {type(error).__name__}: {error}".rstrip("."))


def shape_of(config: DispatcherConfig, ep_size: int, ranks_per_node: int | None = None) -> MoEShape:
    """The sizes of a config on a group.

    Raises:
        ConfigError: the experts do not divide over the ranks.
    """
    if config.num_experts % ep_size:
        smaller = max(size for size in range(1, ep_size + 1) if config.num_experts % size == 0)
        raise ConfigError(
            f"num_experts ({config.num_experts}) must be divisible by ep_size ({ep_size}). "
            f"Use {-(-config.num_experts // ep_size) * ep_size} experts or ep_size {smaller}."
        )
    return MoEShape(
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        ep_size=ep_size,
        pad_multiple=config.pad_multiple_rows,
        wire_dtype=config.wire_dtype,
        max_tokens_per_rank=config.max_tokens_per_rank,
        graph_safe=config.graph_safe,
        capacity_factor=config.capacity_factor,
        ranks_per_node=ranks_per_node,
    )


def check_group(config: DispatcherConfig, name: str, shape: MoEShape, needs: Constraints) -> None:
    """Refuse what the backend cannot do on this group.

    Raises:
        ConfigError: naming the rule, both numbers and the way out.
    """
    where = f"Backend {name!r}"
    if needs.group_sizes is not None and shape.ep_size not in needs.group_sizes:
        allowed = listed_sizes(needs.group_sizes)
        raise ConfigError(f"{where}: ep_size must be one of {allowed}, got {shape.ep_size}. {_for_groups(name)}")
    if shape.num_local_experts % needs.local_experts_multiple:
        raise ConfigError(
            f"{where}: experts per rank must be a multiple of {needs.local_experts_multiple}, got "
            f"{shape.num_local_experts} "
            f"({shape.num_experts} experts over {shape.ep_size} ranks). Use another ep_size or number of experts."
        )
    if needs.max_local_experts is not None and shape.num_local_experts > needs.max_local_experts:
        raise ConfigError(
            f"{where}: experts per rank must be at most {needs.max_local_experts}, got {shape.num_local_experts} "
            f"({shape.num_experts} experts over {shape.ep_size} ranks). Use a larger ep_size."
        )
    if shape.hidden_size % needs.hidden_multiple:
        raise ConfigError(
            f"{where}: hidden_size must be a multiple of {needs.hidden_multiple}, got {shape.hidden_size}. "
            "Use another hidden size or another backend."
        )
    if needs.max_hidden is not None and shape.hidden_size > needs.max_hidden:
        raise ConfigError(
            f"{where}: hidden_size must be at most {needs.max_hidden}, got {shape.hidden_size}. Use another backend."
        )
    if needs.max_top_k is not None and shape.top_k > needs.max_top_k:
        raise ConfigError(
            f"{where}: top_k must be at most {needs.max_top_k}, got {shape.top_k}. Lower top_k or use another backend."
        )
    if config.wire_dtype is not None and config.wire_dtype not in needs.wire_dtypes:
        offered = ", ".join(repr(dtype) for dtype in (None, *sorted(needs.wire_dtypes)))
        raise ConfigError(
            f"{where}: wire_dtype must be one of {offered}, got {config.wire_dtype!r}. Use another backend."
        )
    if config.device is not None and needs.devices is not None and config.device not in needs.devices:
        raise ConfigError(
            f"{where}: device must be one of {', '.join(sorted(needs.devices))}, got {config.device!r}. Use another "
            f"backend."
        )
    if config.graph_safe and not needs.graph_safe:
        raise ConfigError(f"{where}: graph_safe is not possible: {needs.graph_safe_reason}. Set graph_safe=False.")
    _check_drop_order(config, where, needs)
    try:
        check_max_rows(where, config.max_tokens_per_rank or 0, needs)
    except InputError as error:
        raise ConfigError(str(error)) from None


def _check_drop_order(config: DispatcherConfig, where: str, needs: Constraints) -> None:
    if config.on_overflow is None:
        return
    if needs.drop_order is None:
        raise ConfigError(
            f'{where}: capacity_factor must be "worst", without on_overflow, because its library cannot drop rows, '
            f"got capacity_factor={config.capacity_factor!r} and on_overflow={config.on_overflow!r}. "
            "Leave both out, or use another backend."
        )
    chosen = {"drop": "weight", "drop_by_position": "position"}.get(config.on_overflow, needs.drop_order)
    if chosen != needs.drop_order:
        allowed = "drop" if needs.drop_order == "weight" else "drop_by_position"
        raise ConfigError(
            f"{where}: it drops rows by {needs.drop_order}, got on_overflow={config.on_overflow!r}. "
            f'Use on_overflow="{allowed}" or "raise".'
        )


def check_buffers(name: str, capacity: Capacity) -> None:
    """Refuse graph-safe buffers with more rows than ``offs`` can count.

    Raises:
        ConfigError: naming both numbers and the way out.
    """
    most = torch.iinfo(torch.int32).max
    if capacity.buffer_rows > most:
        raise ConfigError(
            f"Backend {name!r}: a graph-safe buffer must have at most {most} rows, because offs is int32, got "
            f"{capacity.buffer_rows}. Lower max_tokens_per_rank or capacity_factor."
        )


def _for_groups(name: str) -> str:
    return 'Use "alltoall", or pass group=None.' if name == "local" else "Use another ep_size or another backend."


def check_max_rows(where: str, rows: int, needs: Constraints) -> None:
    """Refuse more rows per rank than the backend can take.

    Raises:
        InputError: naming both numbers and what would fit.
    """
    fits = needs.most_rows
    if fits is not None and rows > fits:
        raise InputError(
            f"{where}: at most {fits} rows per rank fit, got {rows}. Use micro-batches of at most {fits} tokens per "
            f"rank."
        )


def checked_routing(routing: Routing | None) -> Routing:
    """The routing of a call.

    Raises:
        InputError: it is none.
    """
    if not isinstance(routing, Routing):
        raise InputError(
            f"Dispatcher.dispatch: routing must be a Routing, got {type(routing).__name__}. "
            "Pass Routing(topk_ids, topk_weights), or again=sent."
        )
    return routing


def check_tensors(x_TD: Tensor, routing: Routing, config: DispatcherConfig, needs: Constraints) -> None:
    """Shapes, dtypes and devices of one call.

    Raises:
        InputError: naming the tensor, both values and the way out.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    where = "Dispatcher.dispatch"
    if x_TD.shape[1] != config.hidden_size:
        raise InputError(
            f"{where}: x has hidden size {x_TD.shape[1]}, hidden_size is {config.hidden_size}. Build the dispatcher "
            f"for it."
        )
    check_dtype(where, "x", x_TD, config, needs)
    check_gradients(where, (x_TD, weights), config, needs)
    allowed = {config.device} if config.device is not None else needs.devices
    if allowed is not None and x_TD.device.type not in allowed:
        way_out = "change config.device"
        if config.device is None:
            way_out = f"use another backend: {config.backend_name!r} takes no other device as configured"
        raise InputError(
            f"{where}: x must be on {' or '.join(sorted(allowed))}, got {x_TD.device}. Move x, or {way_out}."
        )
    if ids.device != x_TD.device or weights.device != x_TD.device:
        raise InputError(
            f"{where}: x, topk_ids and topk_weights must share a device, got {x_TD.device}, {ids.device}, "
            f"{weights.device}. "
            "Move the routing."
        )
    if ids.dtype != torch.int64:
        raise InputError(f"{where}: topk_ids must be torch.int64, got {ids.dtype}. Convert with topk_ids.long().")
    if not weights.is_floating_point():
        raise InputError(f"{where}: topk_weights must be a floating dtype, got {weights.dtype}. Pass float32 weights.")
    if ids.dim() != 2 or weights.shape != ids.shape or ids.shape[1] != config.top_k:
        raise InputError(
            f"{where}: topk_ids and topk_weights must be (T, top_k={config.top_k}), got {tuple(ids.shape)} and "
            f"{tuple(weights.shape)}. Give every row top_k slots, with id -1 for those to skip."
        )
    if x_TD.shape[0] != ids.shape[0]:
        raise InputError(
            f"{where}: x has {x_TD.shape[0]} tokens but routing has {ids.shape[0]}. "
            "Route every token of x, with id -1 for those to skip."
        )


def check_dtype(where: str, what: str, rows: Tensor, config: DispatcherConfig, needs: Constraints) -> None:
    """Refuse rows that the backend cannot carry. With a ``wire_dtype`` they are converted, so any floating dtype goes.

    Raises:
        InputError: naming both dtypes and the way out.
    """
    carried = ROW_DTYPES if needs.dtypes is None or config.wire_dtype is not None else needs.dtypes
    if rows.dtype in carried:
        return
    by_wire = rows.dtype in ROW_DTYPES and "bfloat16" in needs.wire_dtypes
    way_out = 'Set wire_dtype="bfloat16"' if by_wire else f"Convert {what}"
    raise InputError(
        f"{where}: {what} must be {', '.join(sorted(map(str, carried)))}, got {rows.dtype}. "
        f"{way_out}, or use another backend."
    )


def check_again(x_TD: Tensor, num_rows: int, device: torch.device, config: DispatcherConfig) -> None:
    """Rows that are to go the way of an earlier dispatch.

    Raises:
        InputError: they are not like those of that dispatch.
    """
    expected = (num_rows, config.hidden_size)
    if x_TD.shape != expected or x_TD.dtype not in ROW_DTYPES or x_TD.device != device:
        raise InputError(
            f"Dispatcher.dispatch: again=sent was made with floating {expected} on {device}, got "
            f"{x_TD.dtype} {tuple(x_TD.shape)} on {x_TD.device}. Pass a tensor of the same rows."
        )


def check_combine(rows: Tensor, dispatched: Tensor, config: DispatcherConfig, needs: Constraints) -> None:
    """Shape, dtype, device and gradients of expert outputs, beside the rows that were dispatched.

    Raises:
        InputError: naming both values and the way out.
    """
    if rows.shape != dispatched.shape or rows.dtype not in ROW_DTYPES or rows.device != dispatched.device:
        raise InputError(
            f"Dispatcher.combine: rows must be floating {tuple(dispatched.shape)} on {dispatched.device}, like "
            f"sent.rows, got {rows.dtype} {tuple(rows.shape)} on {rows.device}. Return one output row per row."
        )
    check_dtype("Dispatcher.combine", "rows", rows, config, needs)
    check_gradients("Dispatcher.combine", (rows,), config, needs)


def check_gradients(where: str, tensors: Sequence[Tensor], config: DispatcherConfig, needs: Constraints) -> None:
    """Refuse what a backend without a backward would silently give no gradient.

    Raises:
        InputError: naming the backend and the way out.
    """
    if needs.differentiable or not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in tensors):
        raise InputError(
            f"{where}: backend {config.backend_name!r} has no backward as configured, got tensors that require grad. "
            "Call it under torch.no_grad(), or use another backend."
        )


def check_values(routing: Routing, valid_T: Tensor | None, num_experts: int) -> None:
    """Ids in range and weights finite, in rows that are tokens. A host sync on a GPU; only with ``debug=True``.

    Raises:
        InputError: with the offending value.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    if valid_T is not None:
        ids, weights = ids[valid_T], weights[valid_T]
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= num_experts:
        raise InputError(
            f"Dispatcher.dispatch: topk_ids must lie in -1..{num_experts - 1}, got {low}..{high}. Check the router."
        )
    wrong = int((~torch.isfinite(weights) & (ids >= 0)).sum())
    if wrong:
        raise InputError(
            f"Dispatcher.dispatch: topk_weights must be finite, got {wrong} that are not. Check the router's logits."
        )
