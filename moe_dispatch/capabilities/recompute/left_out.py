"""Leave the last combine of a recomputation out, and watch that nothing needs its result."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from moe_dispatch.capabilities.recompute.differences import report
from moe_dispatch.capabilities.recompute.routes import of
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers.dispatcher import Dispatcher, bring_back
from moe_dispatch.errors import InputError


def leave_out(dispatcher: Dispatcher, rows: Tensor, sent: Dispatched, watch: Watch | None) -> Tensor:
    """Save what the backward of the last combine needs, and exchange nothing.

    Args:
        dispatcher: The dispatcher whose ``combine`` was called.
        rows: As in ``Dispatcher.combine``.
        sent: As in ``Dispatcher.combine``.
        watch: What watches the result. Without it, the recomputation must stop here.

    Returns:
        NaN in the shape of the result. With a watch, the result itself where gradients are not recorded, because the
        watch sees nothing there.

    """
    state = sent.state
    route = SimpleNamespace(
        combine=lambda rows, _: rows.new_full((state.padded, rows.shape[1]), torch.nan),
        combine_backward=state.route.combine_backward,
        left_out=state.route,
    )
    y = bring_back(dispatcher, rows, dataclasses.replace(sent, state=state.changed(route=route)))
    if watch is None:
        raise _StopRecomputationError  # other tensors were saved before, of which the checkpoint hears now
    if y.grad_fn is None:
        return bring_back(dispatcher, rows, sent)
    watch.dispatcher, watch.combine = dispatcher, y.grad_fn
    return y


@final
class Watch(saved_tensors_hooks):
    """Watches the tensors that a recomputation saves, and reports one that is computed from a combine left out.

    It passes them on to the hooks that are in force. It knows what autograd has recorded: a mask, a tensor that was
    detached, or what compiled code saves, is not seen.

    Attributes:
        dispatcher: Dispatcher of the combine; None before it.
        combine: Node of the combine in the autograd graph; None before it and after a report.
    """

    def __init__(self) -> None:
        # A saved tensor holds ``unpack``, so the graph must not be reached from there.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_pack, _unpack)
        self.dispatcher: Dispatcher | None = None
        self.combine: Node | None = None

        def check(tensor: Tensor) -> Any:
            if self.combine is not None and _is_computed_from(tensor, self.combine):
                self.tell(tensor)
            return pack(tensor)

        super().__init__(check, unpack)

    def tell(self, tensor: Tensor) -> None:
        """Report a tensor, once."""
        assert self.dispatcher is not None
        self.combine = None
        error = InputError(
            f"keep_routes: with only_added, the result of the last combine{of(self.dispatcher)} must only be added "
            f"to other tensors, got a function that saves what is computed from it by "
            f"{type(tensor.grad_fn).__name__}. Leave only_added out."
        )
        report(self.dispatcher._lease, torch.zeros(2, dtype=torch.int64, device=tensor.device), error)

    def __exit__(self, *error: object) -> None:
        self.combine = None
        super().__exit__(*error)
        del self.pack_hook  # it refers to this object and, through the hooks around it, to recomputed tensors


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor. Autograd leaves it to hooks to find tensors that were changed in place."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation, {tuple(tensor.shape)}, has been modified by an "
            "inplace operation in the recomputation."
        )
    return tensor


def _is_computed_from(tensor: Tensor, combine: Node) -> bool:
    """Return whether autograd derives a tensor from a combine. It looks at what was recorded after the combine."""
    first, coming, seen = combine._sequence_nr(), [tensor.grad_fn], set[Node]()
    while coming:
        node = coming.pop()
        if node is combine:
            return True
        if node is not None and node not in seen and node._sequence_nr() > first:
            seen.add(node)
            coming += [each for each, _ in node.next_functions]
    return False
