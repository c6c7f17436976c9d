"""Find the checkpoints that run in this thread, in torch's own records of them."""

from __future__ import annotations

import sys
from typing import Any, final

import torch
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame


@final
class Place:
    """A place among the checkpoints of a thread.

    Attributes:
        hooks: The functions that take what autograd saves for a backward, and return it; None if there are none.
        grad_enabled: Whether gradients are recorded. In the forward of a reentrant checkpoint they are not.
        frame: Torch's record of the innermost checkpointed call with ``use_reentrant=False``, if the hooks are its own.
    """

    def __init__(self) -> None:
        self.hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.grad_enabled = torch.is_grad_enabled()
        self.frame = _frame_of(self.hooks)


def _frame_of(hooks: Any) -> _CheckpointFrame | None:
    cells = () if hooks is None else getattr(hooks[0], "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _CheckpointFrame)), None)


def checkpoints_between(outer: Place, inner: Place | None) -> list[tuple[Any, str]]:
    """Find the checkpointed calls that run inside of a place, and around another one.

    Args:
        outer: Where a checkpointed call began that still runs.
        inner: Where another one began inside of it; None for the place of this call.

    Returns:
        For each call, the object that keeps its function for recomputations, and the name of the attribute.
    """
    engine, popped = torch._C._autograd, list[Any]()
    while (top := engine._top_saved_tensors_default_hooks(True)) is not None and not _are_same(top, outer.hooks):
        engine._pop_saved_tensors_default_hooks()
        popped.append(top)
    for hooks in reversed(popped):
        engine._push_saved_tensors_default_hooks(*hooks)
    grad_enabled = torch.is_grad_enabled()
    if inner is not None:
        grad_enabled = inner.grad_enabled
        at = next((number for number, hooks in enumerate(popped) if _are_same(hooks, inner.hooks)), len(popped))
        popped = popped[at + grad_enabled :]  # the hooks of a call that is not reentrant are its own
    found: list[tuple[Any, str]] = [(frame, "recompute_fn") for hooks in popped if (frame := _frame_of(hooks))]
    # Only where gradients were turned off may a reentrant checkpoint run. Its record is a local variable of torch's.
    caller = sys._getframe() if outer.grad_enabled and not grad_enabled else None
    while caller is not None:
        if caller.f_code is CheckpointFunction.forward.__code__:
            found.append((caller.f_locals["ctx"], "run_function"))
        caller = caller.f_back
    return found


def _are_same(hooks: Any, others: Any) -> bool:
    return others is not None and hooks[0] is others[0]
