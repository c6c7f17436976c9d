"""What a dispatch mode should know of operators: which of them wait for the host, and what their Python bodies do."""

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
    """An operator of this library has no Python body for a device, so nobody can tell what it does there."""


def run_in_sight(mode: TorchDispatchMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator from within ``mode.__torch_dispatch__``, so that ``mode`` sees what its body does as well.

    Torch switches a mode off while it handles a call: what runs inside a custom operator is hidden from it. Here the
    body is run with the mode on again. Bodies in C++ stay closed.

    Raises:
        OpaqueOperatorError: an operator of this library without a Python body, nor made of other operators.
    """
    if is_opaque(func, args, kwargs):
        raise OpaqueOperatorError(
            f"{func.name()}: an operator of {NAMESPACE} must have a Python body that can be looked into, got none for "
            f"{' or '.join(_kernel_keys(args, kwargs))}. Register one with torch.library.custom_op or Library.impl."
        )
    key = _body_key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    with mode:
        return func._op_dk(key, *args, **kwargs)


def is_opaque(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is of an operator of this library that cannot be looked into."""
    return func.namespace == NAMESPACE and _body_key(func, args, kwargs) is None


def _body_key(func: Any, args: Any, kwargs: dict[str, Any]) -> DispatchKey | None:
    """The key of the kernel that is made of operators torch can show; None where there is none, as with torch's own."""
    if func.namespace == "prim":  # attributes of tensor subclasses, as prim::device: nothing of the dispatcher's
        return None
    # Where autograd is out of the way, in such bodies and under inference_mode, it has not taken composites apart.
    if _is_composite(func):
        return DispatchKey.CompositeImplicitAutograd
    if func.namespace in ("aten", "prims"):
        return None
    prefix = func.name().replace("::", "/")
    # Every kernel given from Python is entered in _impls, by torch.library.custom_op and Library.impl alike.
    found = (key for key in _kernel_keys(args, kwargs) if f"{prefix}/{key}" in torch.library._impls)
    key = next(found, None)
    return None if key is None else getattr(DispatchKey, key)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd)


def _kernel_keys(args: Any, kwargs: dict[str, Any]) -> list[str]:
    """Where torch looks for the kernel of a call, in its order."""
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} or {"cpu"}
    # The kernel for "meta" only tells shapes: tensors traced there stand for those of any device.
    own = [torch._C._dispatch_key_for_device(kind) for kind in sorted(devices - {"cpu", "meta"})] or ["CPU"]
    return [*own, "CompositeExplicitAutograd"]


_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)


def waits_for_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator called like this needs values on the host."""
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


def _changes_side(arguments: dict[str, Any]) -> bool:
    """To the CPU always waits; from it only where ``non_blocking`` does not say otherwise."""
    source = arguments.get("src", arguments["self"]).device.type
    target = arguments["self"].device if "src" in arguments else arguments.get("device")
    target = source if target is None else torch.device(target).type
    return source != target and (target == "cpu" or (source == "cpu" and not arguments.get("non_blocking")))


_EXACT: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(("aten::index", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index"), _has_mask),
    "aten::_unsafe_index_put": _has_mask,
    "aten::repeat_interleave": _lacks_size,
    "aten::_to_copy": _changes_side,
    "aten::copy": _changes_side,
}
