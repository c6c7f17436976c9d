"""A CUDA graph around code that calls a graph-safe dispatcher, which refuses to be replayed where it would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError, StateError

if TYPE_CHECKING:
    from moe_dispatch.backends.capacity import Capacity
    from moe_dispatch.dispatchers.dispatcher import Dispatcher
    from moe_dispatch.types import Plan


@final
class Captured:
    """What ``capture`` gives back; call ``replay``."""

    def __init__(
        self,
        capacities: Sequence[tuple[Dispatcher, Capacity | None]],
        graph: Any,
        *,
        inputs: tuple[Tensor, ...],
        outputs: Any,
        plan: Plan | None,
    ) -> None:
        self._capacities = capacities
        self._graph = graph
        self._inputs = inputs
        self._outputs = outputs
        self._plan = plan

    def replay(self, *inputs: Tensor, plan: Plan | None = None) -> Any:
        """Run the graph on other values.

        Args:
            *inputs: like those captured; their values are copied to where the graph reads them.
            plan: of these inputs; refused unless it is the plan that was captured. Lengths that change between replays
                belong into tensors on the device, which the layout of the one plan holds.

        Returns:
            What the captured function returned: the same tensors in every replay, with new values.

        Raises:
            StateError: a dispatcher is closed or has grown, or the plan is another.
            InputError: inputs of another number, shape, dtype or device.
        """
        for dispatcher, captured in self._capacities:
            capacity = dispatcher._channel.capacity  # raises where closed
            if capacity != captured:
                raise StateError(
                    f"Captured.replay: the graph was captured with room for {captured}, got {capacity}: the dispatcher "
                    "has grown. Capture again."
                )
        if plan is not None and plan is not self._plan:
            raise StateError(
                "Captured.replay: plan must be the one that was captured, got another: its sizes and host-known "
                "lengths are part of the graph. Capture once for each plan, or keep lengths on the device."
            )
        _check_like(inputs, self._inputs)
        with torch.no_grad():
            for inside, given in zip(self._inputs, inputs, strict=True):
                inside.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


def capture(
    dispatcher: Dispatcher,
    function: Callable[..., Any],
    *inputs: Tensor,
    plan: Plan | None = None,
    others: Sequence[Dispatcher] = (),
    warmup: int = 3,
) -> Captured:
    """Capture ``function(*inputs)`` in a CUDA graph. Collective: every rank captures, and replays, alike.

    Plain ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` work around graph-safe layers too, after a run
    outside. They cannot see that a dispatcher was closed, has grown or got another plan, and replay all the same.

    Args:
        dispatcher: graph-safe.
        function: forward, or forward and backward, without host syncs. It reads ``inputs``, and gives back tensors.
        *inputs: CUDA tensors with the shapes of every replay. The graph reads copies of its own.
        plan: what the function passes to ``dispatch``, if it does. A layout whose lengths are on the host needs one
            made with ``like=x``: without it each dispatch copies them to the device, which cannot be captured.
        others: further dispatchers that the function uses, one of each config and group.
        warmup: runs before the capture, on a side stream: they open libraries and make what persists.

    Raises:
        StateError: a dispatcher is not graph_safe, or closed, or reads values because of ``debug``.
        InputError: an input is not on a CUDA device.

    Cost: ``warmup`` runs and the graph's own memory pool.
    """
    dispatchers = (dispatcher, *others)
    for each in dispatchers:
        _check_dispatcher(each)
    if elsewhere := _not_on_cuda(inputs):
        raise InputError(f"capture: inputs must be on a CUDA device, got {', '.join(elsewhere)}. Move them.")
    inside = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
    graph, outputs = _record(lambda: function(*inside), warmup)
    capacities = [(each, each._channel.capacity) for each in dispatchers]
    return Captured(capacities, graph, inputs=inside, outputs=outputs, plan=plan)


def _check_dispatcher(dispatcher: Dispatcher) -> None:
    if dispatcher._channel.capacity is None:
        raise StateError(
            "capture: the dispatcher must be graph_safe, got graph_safe=False, which waits for the host in every "
            "dispatch. Set graph_safe and max_tokens_per_rank."
        )
    if dispatcher.config.debug:
        raise StateError(
            "capture: the dispatcher must not have debug=True, which reads values in every dispatch, got it. Leave "
            "debug out."
        )


def _not_on_cuda(inputs: tuple[Tensor, ...]) -> list[str]:
    return [str(tensor.device) for tensor in inputs if not tensor.is_cuda]


def _record(step: Callable[[], Any], warmup: int) -> tuple[Any, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def _check_like(inputs: tuple[Tensor, ...], inside: tuple[Tensor, ...]) -> None:
    expected, got = ([(tuple(t.shape), t.dtype, t.device) for t in tensors] for tensors in (inside, inputs))
    if expected != got:
        raise InputError(
            f"Captured.replay: inputs must be like those captured, {expected}, got {got}. Capture for these shapes."
        )
