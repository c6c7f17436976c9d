"""The tensors that a checkpointed call recomputes, once for all backward passes of the call.

Torch's checkpoint keeps what it has recomputed for one graph task. A pipeline schedule that splits the backward makes a
task for the inputs of a stage and one for each group of weights, and so torch recomputes in each. Here the tensors
belong to the forward: the first pass that reads one computes all of them. A tensor is freed with the node that saved
it, or as soon as the node has nothing left to compute.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import _CheckpointFrame, _Holder, _run_fn_with_dynamo_disabled, _StopRecomputationError

from moe_dispatch.capabilities.recompute.differences import report
from moe_dispatch.capabilities.recompute.nesting import Place
from moe_dispatch.capabilities.recompute.routes import Log
from moe_dispatch.errors import InputError

_engine = torch._C._autograd


def recompute_once(place: Place, log: Log) -> None:
    """Replace the hooks of torch's checkpoint, so that a call is recomputed once for all backward passes.

    Does nothing if the innermost hooks are not those of a checkpoint with ``use_reentrant=False``, if they have been
    replaced already, or if torch's checkpoint looks for differences with ``debug=True``.

    Args:
        place: Where the checkpointed call begins. It gets the new hooks.
        log: Its log.
    """
    frame = place.frame
    if frame is None or frame.unpack_error_cb is not None or place.hooks[0].__module__ == __name__:
        return
    save, recomputed = place.hooks[0], Recomputed(frame, log)

    def pack(tensor: Tensor) -> Any:
        holder = save(tensor)
        log.saved = len(frame.weak_holders), log.verbs
        return holder

    _engine._pop_saved_tensors_default_hooks()
    place.hooks = pack, recomputed.read
    _engine._push_saved_tensors_default_hooks(*place.hooks)


@final
class Recomputed:
    """The recomputed tensors of a checkpointed call.

    Args:
        frame: Torch's record of the call.
        log: Its log.
    """

    def __init__(self, frame: _CheckpointFrame, log: Log) -> None:
        self._frame, self._log = frame, log
        self._tensors = weakref.WeakKeyDictionary[_Holder, Tensor]()

    def read(self, holder: _Holder) -> Tensor:
        """Return a tensor that autograd has saved in the forward."""
        if holder not in self._tensors:
            self._recompute()
        return self._tensors[holder] if _may_read_again() else self._tensors.pop(holder)

    def _recompute(self) -> None:
        """Run the call again.

        Raises:
            InputError: It has saved other tensors than the forward, and it dispatches nothing, so that no other rank
                can be told.
        """
        frame, log, tensors = self._frame, self._log, dict[_Holder, Tensor]()
        number, verbs = log.saved
        count = log.repeated = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal count
            holder = frame.weak_holders[count]() if count < len(frame.weak_holders) else None
            count += 1
            tensor = tensor.detach()
            if holder is not None:
                tensors[holder] = tensor
            # A call that saves more than its forward still takes part in all exchanges that other ranks wait for.
            if frame.early_stop and count >= number and log.repeated >= verbs:
                raise _StopRecomputationError
            return tensor

        saver = getattr(frame, "input_saver", None)  # in torch 2.10
        inputs = frame.get_inputs() if saver is None else saver.grad_fn.get_args(saver.grad_fn.saved_tensors)
        try:
            with saved_tensors_hooks(keep, _same), torch.enable_grad():
                _run_fn_with_dynamo_disabled(frame.recompute_fn, *inputs)
        except _StopRecomputationError:
            pass
        if frame.forward_completed and (difference := self._difference(count, tensors)):
            self._refuse(difference)
            tensors = self._stand_ins()
        self._tensors.update(tensors)

    def _difference(self, count: int, tensors: dict[_Holder, Tensor]) -> str:
        """Return how the tensors of a recomputation differ from those of the forward; empty if they do not."""
        frame = self._frame
        if count != (number := len(frame.weak_holders)):
            return f"{count} in place of {number}"
        for index, (metadata, its) in enumerate(zip(frame.x_metadatas, frame.weak_holders, strict=True)):
            if (holder := its()) is not None and metadata != (mine := frame.metadata_fn(tensors[holder])):
                return f"{_text(mine)} in place of {_text(metadata)} as number {index + 1}"
        return ""

    def _refuse(self, difference: str) -> None:
        """Report that a recomputation differs, to all ranks with which it exchanges something."""
        leases = list(self._log.kept)
        names = ", ".join(sorted({repr(lease.name) for lease in leases if lease.name}))
        error = InputError(
            f"checkpoint: a recomputation{f' of {names}' * bool(names)} must save the tensors of its forward, got "
            f"{difference}. Checkpoint a function that does the same each time."
        )
        if not leases or None in self._frame.x_metadatas:
            raise error
        for lease, kept in self._log.kept.items():
            report(lease, torch.zeros(2, dtype=torch.int64, device=kept[0].ids.device), error)

    def _stand_ins(self) -> dict[_Holder, Tensor]:
        """Return tensors of NaN and 0 like those of the forward, with which the backward can take part in exchanges."""
        found = {}
        for metadata, its in zip(self._frame.x_metadatas, self._frame.weak_holders, strict=True):
            if (holder := its()) is not None:
                found[holder] = torch.zeros(metadata["shape"], dtype=metadata["dtype"], device=metadata["device"])
                if found[holder].is_floating_point():
                    found[holder].fill_(torch.nan)
        return found


def _may_read_again() -> bool:
    """Return whether the node that runs may read its saved tensors again, in another pass.

    It does if this pass leaves one of its gradients out, such as that of a weight. If the pass keeps the graph, but
    computes all gradients, tensors are freed as torch does. Otherwise the engine frees them with the node.
    """
    node = torch._C._current_autograd_node()
    if node is None or not _engine._get_current_graph_task_keep_graph():
        return True
    return not all(following is None or _runs(following) for following, _ in node.next_functions)


def _runs(node: Node) -> bool:
    """Return whether the backward pass that runs computes the gradient of a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf for which the caller wants a gradient
        return True


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _text(metadata: Any) -> str:
    return f"{str(metadata['dtype']).removeprefix('torch.')} {tuple(metadata['shape'])} on {metadata['device']}"
