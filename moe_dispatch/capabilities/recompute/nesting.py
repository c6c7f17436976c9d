"""Find the checkpoints and the routers that run in this thread, in torch's own records of them and on its stack."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

_CALL = nn.Module._call_impl.__code__
_CHECKPOINTS = CheckpointFunction.forward.__code__.co_filename


@final
class Place:
    """A place among the checkpoints of a thread.

    Attributes:
        hooks: The functions that take what autograd saves for a backward, and return it; None if there are none.
        grad_enabled: Whether gradients are recorded. In the forward of a reentrant checkpoint they are not.
        frame: Torch's record of the innermost checkpointed call with ``use_reentrant=False``, if the hooks are its own.
        module: Identity of the call of the innermost module; None if there is none.
    """

    def __init__(self) -> None:
        self.hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.grad_enabled = torch.is_grad_enabled()
        self.frame = _frame_of(self.hooks)
        # The frame is not kept alive, because it holds tensors. It lasts as long as what is called in it.
        self.module = None if (call := _module_call()) is None else id(call)


def in_saved_region() -> bool:
    """Return whether this is the forward of a ``torch_remat.region(recompute=False)``, which no recomputation calls."""
    regions = sys.modules.get("torch_remat._region")
    return regions is not None and regions._active_save_op.get() is not None


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


Site = tuple[tuple[CodeType, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Asker:
    """Who has called ``keep_ids``. A recomputation asks as its forward has.

    Attributes:
        router: The module that runs; None outside of the modules of the checkpointed call.
        site: Which line of a router's code calls ``torch.topk``: the functions from there up to the router, each with
            the instruction that it is at. Empty if the model itself calls ``keep_ids``.
        shape: Shape of the ids.
        dtype: Dtype of the ids.
    """

    router: weakref.ref[Any] | None
    site: Site
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        router = None if self.router is None else self.router()
        names = [] if router is None else [type(router).__name__]
        names += [f"topk in {function.co_name}" for function, _ in self.site[:1]]
        kind = f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"
        return f"{kind} of {', '.join(names)}" if names else kind


def asker_in(place: Place, tensor: Tensor) -> Asker:
    """Return who calls ``keep_ids`` for a tensor, in a checkpointed call that began at a place."""
    call = _module_call()
    router = None if call is None or id(call) == place.module else weakref.ref(call.f_locals["self"])
    return Asker(router, (), tensor.shape, tensor.dtype)


def _module_call() -> FrameType | None:
    """Return the call of the innermost module that runs; None if a checkpoint of torch's runs inside of it."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_filename != _CHECKPOINTS:
        if caller.f_code is _CALL:
            return caller
        caller = caller.f_back
    return None


def site_below(function: CodeType) -> Site:
    """Return the path of calls from a function to the caller of this one."""
    path, caller = [], sys._getframe(2)
    while caller is not None and caller.f_code is not function:
        path.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back  # type: ignore[assignment]
    return tuple(path)
