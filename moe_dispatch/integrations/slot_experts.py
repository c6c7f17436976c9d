"""Layers whose experts are one module of a framework: in one dispatch, in chunks, or with weights of expert slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation.grouped_mm import leaves_idle_groups, without_idle_garbage
from moe_dispatch.types import Plan, Routing

_PARAMETRIZATIONS = "parametrizations"  # torch's name for the submodule of a parametrized module


def has_spare_slots(config: DispatcherConfig) -> bool:
    """Return whether experts may run with the weights of other ranks."""
    return config.slot_options is not None


def stacked_weights(experts: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a module itself holds, by name, as its forward reads them.

    A parametrization, such as that of LoRA for stacked experts, moves a parameter into a submodule. Then the weight is
    the result of the parametrization, with its autograd graph.
    """
    weights: dict[str, Tensor] = dict(experts.named_parameters(recurse=False))
    if parametrize.is_parametrized(experts):
        weights |= {name: getattr(experts, name) for name in experts.get_submodule(_PARAMETRIZATIONS)._modules}
    return weights


def own_weights(where: str, experts: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the experts of a module, by name.

    Raises:
        ConfigError: A submodule holds weights, such as a norm or a module for each expert; or dtypes differ, as with
            quantised experts.
    """
    weights = stacked_weights(experts)
    names = [name for name, _ in experts.named_parameters() if not name.startswith(f"{_PARAMETRIZATIONS}.")]
    deeper = [name for name in names if name not in weights]
    dtypes = sorted({str(weight.dtype) for weight in weights.values()})
    if deeper or len(dtypes) != 1:
        told = f"weights like {deeper[0]}" if deeper else f"{', '.join(dtypes) or 'no weights'}"
        raise ConfigError(
            f"{where}: with balance, {type(experts).__name__} itself must hold all weights of "
            f"its experts, with one dtype, got {told}. Leave balance out."
        )
    return weights


def view_of(experts: nn.Module, weights: Mapping[str, Any], **attributes: Any) -> Any:
    """Return a view of a module with other weights and attributes. It shares the rest, and has no state of its own.

    ``copy.copy`` would run the constructor of modules under FSDP2. The class of a parametrized module has a property
    for each weight, which would hide the weights of the view.
    """
    view: Any = object.__new__(parametrize.type_before_parametrizations(experts))
    vars(view).update(vars(experts), _parameters={**experts._parameters, **weights}, **attributes)
    if parametrize.is_parametrized(experts):
        vars(view)["_modules"] = {name: each for name, each in experts._modules.items() if name != _PARAMETRIZATIONS}
    return view


def needs_clean_gradients(sent: Dispatched) -> bool:
    """Return whether experts that call torch's own grouped GEMM need ``clean_gradients`` around their weights."""
    return leaves_idle_groups(sent.offs.device)


def clean_gradients(weights: Mapping[str, Tensor], sent: Dispatched) -> dict[str, Tensor]:
    """Return weights, each (L, ...), whose gradient is 0 for experts without rows in a dispatch."""
    return {name: without_idle_garbage(weight, sent.offs) for name, weight in weights.items()}


def run_layer(
    dispatcher: Dispatcher,
    experts: Callable[..., Tensor],
    own: Sequence[Tensor],
    x: Tensor,
    routing: Routing,
    plan: Plan | Layout | None,
) -> Tensor:
    """Dispatch rows, run experts on the rows that arrive, and combine: the shape of x. In chunks with ``chunks``.

    Args:
        dispatcher: Dispatcher of the layer.
        experts: Called as ``experts(sent)``; with spare expert slots as in ``SlotWeights.run``.
        own: Weights of this rank's experts for ``SlotWeights.run``. Unused without spare expert slots.
        x: As in ``Dispatcher.dispatch``.
        routing: As in ``Dispatcher.dispatch``.
        plan: As in ``Dispatcher.dispatch``.
    """
    slots = None
    if has_spare_slots(dispatcher.config):
        from moe_dispatch.capabilities.balance.slot_weights import slot_weights_of  # noqa: PLC0415 - other layers never need it

        slots = slot_weights_of(dispatcher)
    if dispatcher.config.chunks is not None:
        from moe_dispatch.steps.chunks import run_in_chunks  # noqa: PLC0415 - other layers never need it

        run_experts = experts if slots is None else lambda sent: slots.run(sent, experts, *own)[1]
        return run_in_chunks(dispatcher, run_experts, x, routing, plan)
    if slots is None:
        sent = dispatcher.dispatch(x, routing, plan)
        return dispatcher.combine(experts(sent), sent)
    in_flight = dispatcher.dispatch(x, routing, plan, async_op=True)  # so rows and weights travel at the same time
    sent, rows_RD = slots.run(in_flight, experts, *own)
    return dispatcher.combine(rows_RD, sent)
