"""Warn if DistributedDataParallel overwrites the experts of one rank with those of another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.dispatchers.autograd import Dispatch


def look(rows: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Warn if DistributedDataParallel manages parameters that the experts used. Return whether this could be seen.

    A module does not know that it is wrapped, and the names of parameters do not say which ones belong to experts. But
    during a forward, torch knows the wrapper, and the autograd graph shows which parameters the experts used.

    Args:
        rows: (R, D), the argument of ``combine``.
        group: The expert-parallel group.

    Cost: a walk over the autograd graph of the experts.
    """
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch has no public name for it
    if wrapper is None or group is None or rows.grad_fn is None:
        return False
    used = {id(leaf) for leaf in _leaves_before_dispatch(rows)}
    ignored = wrapper.parameters_to_ignore
    managed = [
        name for name, parameter in wrapper.module.named_parameters() if id(parameter) in used and name not in ignored
    ]
    if managed and _share_ranks(wrapper.process_group, group):
        warnings.warn(
            "Dispatcher.combine: DistributedDataParallel must leave out the parameters of experts, got "
            f"{len(managed)} that it manages ({', '.join(managed[:3])}). It has copied the experts of one rank to "
            "ranks that hold other experts, and it averages their gradients. Wrap the model as docs/training.md "
            "shows: name these parameters in model._ddp_params_and_buffers_to_ignore first.",
            UserWarning,
            stacklevel=3,
        )
    return True


def _leaves_before_dispatch(rows: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that autograd reaches from ``rows`` without passing a dispatch."""
    seen: set[Any] = set()
    nodes: list[Any] = [rows.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or isinstance(node, Dispatch._backward_cls):
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes.extend(following for following, _ in node.next_functions)


def _share_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Return whether two groups have two or more ranks in common."""
    with suppress(KeyError):  # torch.distributed does not know a group that was made by hand
        return len({*dist.get_process_group_ranks(one)} & {*dist.get_process_group_ranks(other)}) > 1
    return False
