"""Operators under a dispatch mode: which operators wait for the host, and how a mode sees inside Python bodies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACE = "moe_dispatch"


class OpaqueOperatorError(AssertionError):
    """An operator of this library has no Python body for a device, so a mode cannot see what it does there."""


def run_in_sight(mode: TorchDispatchMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator from ``mode.__torch_dispatch__``, so that ``mode`` also sees the operators that its body calls.

    Torch disables a mode while it handles a call, which hides the body of a custom operator. This function runs the
    body with the mode enabled again. Bodies in C++ remain hidden.

    Raises:
        OpaqueOperatorError: An operator of this library has no Python body and is not composed of other operators.
    """
    if is_opaque(func, args, kwargs):
        raise OpaqueOperatorError(
            f"{func.name()}: an operator of {NAMESPACE} must have a Python body that a mode can watch, got none for "
            f"{' or '.join(_kernel_keys(args, kwargs))}. Register one with torch.library.custom_op or Library.impl."
        )
    key = _body_key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    with mode:
        return func._op_dk(key, *args, **kwargs)


def is_opaque(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator of this library has no Python body for this call, so that a mode cannot watch it."""
    return func.namespace == NAMESPACE and _body_key(func, args, kwargs) is None


def _body_key(func: Any, args: Any, kwargs: dict[str, Any]) -> DispatchKey | None:
    """Return the dispatch key of a kernel that calls other operators. Return None for all other kernels of torch."""
    # Attributes of tensor subclasses, such as prim::device, are not operators of the dispatcher.
    if func.namespace == "prim":
        return None
    # Autograd decomposes a composite operator, but autograd is disabled in bodies and under inference_mode.
    if _is_composite(func):
        return DispatchKey.CompositeImplicitAutograd
    if func.namespace in ("aten", "prims"):
        return None
    prefix = func.name().replace("::", "/")
    # torch.library.custom_op and Library.impl both record the kernels that they register in _impls.
    found = (key for key in _kernel_keys(args, kwargs) if f"{prefix}/{key}" in torch.library._impls)
    key = next(found, None)
    return None if key is None else getattr(DispatchKey, key)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd)


def _kernel_keys(args: Any, kwargs: dict[str, Any]) -> list[str]:
    """Return the dispatch keys at which torch looks for the kernel of a call, in the order of the search."""
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} or {"cpu"}
    # The kernel for "meta" only computes shapes. Tensors on "meta" stand for tensors on any device.
    own = [torch._C._dispatch_key_for_device(kind) for kind in sorted(devices - {"cpu", "meta"})] or ["CPU"]
    return [*own, "CompositeExplicitAutograd"]


_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)


def waits_for_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator needs tensor values on the host, if it is called with these arguments."""
    exact = _exact_rule(func)
    if exact is None:
        return not _DEPENDS_ON_DATA.isdisjoint(func.tags)
    return exact({argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs)


@cache
def _exact_rule(func: Any) -> Callable[[dict[str, Any]], bool] | None:
    return _EXACT.get(func._schema.name.removesuffix("_"))


def _has_mask(arguments: dict[str, Any]) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in arguments["indices"])


def _lacks_size(arguments: dict[str, Any]) -> bool:
    return isinstance(arguments.get("repeats"), torch.Tensor) and arguments.get("output_size") is None


def _waits_for_copy(arguments: dict[str, Any]) -> bool:
    """Return whether a copy waits. A copy to the CPU always waits, a copy from it waits unless ``non_blocking``."""
    source = arguments.get("src", arguments["self"]).device.type
    target = arguments["self"].device if "src" in arguments else arguments.get("device")
    target = source if target is None else torch.device(target).type
    return source != target and (target == "cpu" or (source == "cpu" and not arguments.get("non_blocking")))


_EXACT: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(("aten::index", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index"), _has_mask),
    "aten::_unsafe_index_put": _has_mask,
    "aten::repeat_interleave": _lacks_size,
    "aten::_to_copy": _waits_for_copy,
    "aten::copy": _waits_for_copy,
}
