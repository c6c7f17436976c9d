"""Tracing with tensors that have a shape but no values, which shows whether code depends on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_dispatch.testing.host_syncs import HostSyncError, refuse_host_syncs


def trace_static(fn: Callable[..., Any], *args: Any, device: str | None = None) -> Any:
    """Run ``fn(*args)`` and its backward on tensors without values. An operation that needs a value raises.

    The Python bodies of registered operators run, not their fake kernels. Tensors that ``fn`` reaches without receiving
    them as arguments keep their values. But tensors that ``fn`` stores may have no values afterwards, so give it a
    dispatcher that nothing else uses. Collectives need a group of the backend "fake", or no group.

    Args:
        fn: Function that returns tensors, possibly in lists, tuples and dicts. The backward starts at those that
            require grad.
        args: Arguments of ``fn``. Tensors may be in lists, tuples and dicts.
        device: Device that the arguments pretend to be on; by default their own. With "meta", which is not the CPU,
            every copy from and to the CPU is seen; ``fn`` must then make its tensors on the device of its arguments.

    Returns:
        What ``fn`` returned, without values. Every call with arguments of these shapes returns these shapes.

    Raises:
        HostSyncError: An operator needed a value; the text names it.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def bare(tensor: Tensor) -> Tensor:
            empty = fake.from_tensor(tensor).detach()
            return empty.to(device or tensor.device).requires_grad_(tensor.requires_grad)

        bare_args = tree_map_only(Tensor, bare, args)
        # Entered inside the fake mode, so that it sees every operator first, and looks into those of this library.
        with refuse_host_syncs():
            try:
                result = fn(*bare_args)
                ends = [end for end in tree_leaves(result) if isinstance(end, Tensor) and end.requires_grad]
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise HostSyncError(
                    f"trace_static: no shape may depend on values, got {error.func}. Give it a static shape."
                ) from error
    return result
