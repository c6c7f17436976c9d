"""Look for DistributedDataParallel around the parameters of experts."""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch._observers import Observer
from moe_dispatch.communication import real_group
from moe_dispatch.dispatchers.autograd import Dispatch

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel, Lease


@final
class DDPObserver(Observer):
    """Warn if DistributedDataParallel manages parameters that the experts used.

    It would overwrite the experts of one rank with those of another. A module does not know that it is wrapped, and the
    names of parameters do not say which ones belong to experts. But during a forward, torch knows the wrapper, and the
    autograd graph shows which parameters the experts used.

    Cost: a walk over the autograd graph of the experts, once for each dispatcher.
    """

    def __init__(self, channel: Channel) -> None:
        self._group = channel.communicator.group
        self._seen: weakref.WeakSet[Lease] = weakref.WeakSet()

    def combined(self, lease: Lease, rows: Tensor) -> None:
        """Look at the parameters behind the rows, unless those of the dispatcher were looked at before."""
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch has no public name for it
        if lease in self._seen or wrapper is None or self._group is None or rows.grad_fn is None:
            return
        self._seen.add(lease)
        managed = _managed(wrapper, rows)
        shared = set[int]()
        with suppress(KeyError):  # torch.distributed does not know a group that was made by hand
            shared = {*dist.get_process_group_ranks(wrapper.process_group)} & {
                *dist.get_process_group_ranks(real_group(self._group))
            }
        if managed and len(shared) > 1:
            warnings.warn(
                "Dispatcher.combine: DistributedDataParallel must leave out the parameters of experts, got "
                f"{len(managed)} that it manages ({', '.join(managed[:3])}). It has copied the experts of one rank to "
                "ranks that hold other experts, and it averages their gradients. Wrap the model as docs/training.md "
                "shows: name these parameters in model._ddp_params_and_buffers_to_ignore first.",
                UserWarning,
                stacklevel=4,
            )


def _managed(wrapper: Any, rows: Tensor) -> list[str]:
    """Return the names of the parameters that a wrapper manages and the rows of experts were computed with."""
    seen, used, nodes = set[Any](), set[int](), [rows.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or isinstance(node, Dispatch._backward_cls):
            continue
        seen.add(node)
        used.add(id(getattr(node, "variable", None)))  # a leaf is the variable of its node
        nodes.extend(following for following, _ in node.next_functions)
    ignored, parameters = wrapper.parameters_to_ignore, wrapper.module.named_parameters()
    return [name for name, parameter in parameters if id(parameter) in used and name not in ignored]
