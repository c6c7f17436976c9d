"""Tracing with tensors that have a shape and no values, so that nothing can depend on them."""

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
    """Run ``fn(*args)`` and its backward on tensors without values: what needs a value raises.

    Bodies of registered operators are run, not their fake kernels. Other tensors that ``fn`` reaches are replaced where
    they are used, and keep their values; but what ``fn`` keeps may have none afterwards, so give it a dispatcher of its
    own. Collectives need a group of the backend "fake", or none.

    Args:
        fn: returns tensors, also in lists, tuples and dicts; the backward starts at those that require grad.
        args: tensors may also stand in lists, tuples and dicts.
        device: where the arguments shall seem to be; by default where they are. On "meta", which is not the CPU, every
            copy from and to the CPU is seen; ``fn`` must then make its tensors on the device of its arguments.

    Returns:
        What ``fn`` returned, without values: their shapes are those of every call with arguments of these shapes.

    Raises:
        HostSyncError: naming the operator.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def bare(tensor: Tensor) -> Tensor:
            empty = fake.from_tensor(tensor).detach()
            return empty.to(device or tensor.device).requires_grad_(tensor.requires_grad)

        bare_args = tree_map_only(Tensor, bare, args)
        # Entered inside the fake mode, so that it has every operator first, those of this library whole.
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
