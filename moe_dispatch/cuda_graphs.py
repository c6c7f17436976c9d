"""Capture code that calls a graph-safe dispatcher in a CUDA graph, and refuse replays that would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.types import Capacity, Plan


@final
@dataclass(frozen=True, repr=False, eq=False)
class Captured:
    """A captured CUDA graph, made by ``capture``. Run it with ``replay``."""

    _captured: Sequence[tuple[Dispatcher, int, Capacity | None]]
    _inputs: tuple[Tensor, ...]
    _plan: Plan | None
    _graph: Any
    _outputs: Any

    def replay(self, *inputs: Tensor, plan: Plan | None = None) -> Any:
        """Run the graph on new values.

        Args:
            *inputs: Tensors with the shapes, dtypes and devices of the captured inputs. Their values are copied into
                the tensors that the graph reads.
            plan: The plan of these inputs. It must be the plan that was captured. If lengths change between replays,
                keep them in tensors on the device, in the layout of that plan.

        Returns:
            The result of the captured function. Every replay returns the same tensors, with new values.

        Raises:
            StateError: A dispatcher is closed, was released or has grown, or ``plan`` is not the captured plan.
            InputError: The number, shape, dtype or device of the inputs differs from the captured inputs.
        """
        for dispatcher, opening, capacity in self._captured:
            channel = dispatcher._channel  # raises if closed
            if channel.opening != opening:
                raise StateError("Captured.replay: a dispatcher was released since the capture. Capture again.")
            if channel.capacity != capacity:
                raise StateError("Captured.replay: a dispatcher has grown since the capture. Capture again.")
        if plan is not None and plan is not self._plan:
            raise StateError(
                "Captured.replay: another plan was captured, and its sizes are part of the graph. Capture once for "
                "each plan, or keep lengths on the device."
            )
        expected, got = ([(tuple(t.shape), t.dtype, t.device) for t in tensors] for tensors in (self._inputs, inputs))
        if expected != got:
            raise InputError(f"Captured.replay: inputs must be like those captured, {expected}, got {got}.")
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
    """Capture ``function(*inputs)`` in a CUDA graph. Collective: all ranks must capture and replay together.

    ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` also work with graph-safe layers that have run once
    before. But their replays do not notice that a dispatcher was closed, has grown or got another plan.

    Args:
        dispatcher: A graph-safe dispatcher that the function uses.
        function: Function that runs forward, or forward and backward, without host syncs. It takes ``inputs`` and
            returns tensors.
        *inputs: CUDA tensors with the shapes of every replay. The graph reads its own copies of them.
        plan: The plan that the function passes to ``dispatch``, if any. If the lengths of the layout are on the host,
            a plan made with ``like=x`` is needed: otherwise each dispatch copies the lengths to the device, which
            cannot be captured.
        others: Further dispatchers that the function uses, one of each config and group.
        warmup: Number of runs before the capture, on a side stream. They load libraries and make persistent buffers.

    Raises:
        StateError: A dispatcher is closed, is not graph_safe, or has ``debug``, which reads values.
        InputError: An input is not on a CUDA device.

    Cost: ``warmup`` runs, and a memory pool for the graph.
    """
    dispatchers = (dispatcher, *others)
    for each in dispatchers:
        if each._channel.capacity is None or each.config.debug:
            raise StateError("capture: a graph cannot wait for the host. Set graph_safe, and leave debug out.")
    if elsewhere := _not_on_cuda(inputs):
        raise InputError(f"capture: inputs must be on a CUDA device, got {', '.join(elsewhere)}.")
    inside = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
    undo = [each._channel.meter.watch_trained() for each in dispatchers]
    recorded = _record(lambda: function(*inside), warmup, undo)
    captured = [(each, each._channel.opening, each._channel.capacity) for each in dispatchers]
    return Captured(captured, inside, plan, *recorded)


def _not_on_cuda(inputs: tuple[Tensor, ...]) -> list[str]:
    return [str(tensor.device) for tensor in inputs if not tensor.is_cuda]


def _record(step: Callable[[], Any], warmup: int, undo: Sequence[Callable[[], None]]) -> tuple[Any, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
        for take_back in undo:  # the runs are no steps
            take_back()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # torch's own stream for captures is on the first device that captured
        outputs = step()
    return graph, outputs
