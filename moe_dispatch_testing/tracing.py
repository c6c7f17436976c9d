"""Run code on tensors that have a shape but no values, to show whether it depends on values."""

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

from moe_dispatch_testing.host_syncs import HostSyncError, refuse_host_syncs


def trace_static(fn: Callable[..., Any], *args: Any, device: str | None = None) -> Any:
    """Run ``fn(*args)`` and its backward on tensors without values. An operation that needs a value raises.

    The Python bodies of registered operators run, not their fake kernels. A tensor that ``fn`` uses keeps its values if
    it is not an argument. But tensors that ``fn`` stores may have no values afterwards, so give ``fn`` a dispatcher
    that nothing else uses. Collectives need a group of the backend "fake", or no group.

    Args:
        fn: Function that returns tensors, possibly in lists, tuples and dicts. The backward starts at the tensors that
            require grad.
        args: Arguments of ``fn``. Tensors may be in lists, tuples and dicts.
        device: Device that the arguments pretend to be on. The default is their own device. With "meta", every copy
            from and to the CPU is found, because "meta" is not the CPU. ``fn`` must then make its tensors on the device
            of its arguments.

    Returns:
        The result of ``fn``, with shapes but without values. Every call with arguments of these shapes returns a result
        of the same shapes.

    Raises:
        HostSyncError: An operator needed a value. The text names the operator.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def bare(tensor: Tensor) -> Tensor:
            empty = fake.from_tensor(tensor).detach()
            return empty.to(device or tensor.device).requires_grad_(tensor.requires_grad)

        bare_args = tree_map_only(Tensor, bare, args)
        # Enter it inside the fake mode. So it sees every operator first, also inside the operators of this library.
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
