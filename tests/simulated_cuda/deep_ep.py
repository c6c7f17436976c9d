"""The emulation of ``deep_ep`` for tensors of simulated devices, whose memory is memory of the host."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe_dispatch.backends.deep_ep import library
from moe_dispatch_testing.emulation import emulated_deep_ep
from moe_dispatch_testing.emulation.elastic_rows import EPHandle
from tests.simulated_cuda.values import on_cpu

_BUFFERS = ("HybridEPBuffer", "EPBuffer", "ElasticBuffer", "Buffer")
_VERBS = ("dispatch", "combine", "dispatch_with_permute", "combine_with_unpermute")


@contextmanager
def deep_ep_on_devices(release: str, device: str = "cuda") -> Iterator[list[str]]:
    """Let backends find the emulation of a release with buffers that take tensors of devices. One rank without a group.

    Args:
        release: Name of the release.
        device: Device type of the tensors; "cpu" for the emulation as it is.

    Yields:
        The names of the verbs of the library, as they are called.
    """
    calls: list[str] = []
    module = ModuleType("deep_ep")
    module.__dict__.update(emulated_deep_ep(release).__dict__)
    for name in _BUFFERS:
        if hasattr(module, name) and device == "cuda":
            setattr(module, name, _on_devices(getattr(module, name), calls))
    found = library.Library(module=module, version=release, emulated=True)
    with (
        patch.object(library, "find_library", lambda release: found),
        patch.object(library.Library, "device", property(lambda self: device)),
    ):
        yield calls


def _on_devices(cls: type[Any], calls: list[str]) -> type[Any]:
    """Return a subclass whose verbs take and return tensors of devices."""
    own = {name: _verb(getattr(cls, name), calls) for name in _VERBS if hasattr(cls, name)}
    return type(cls.__name__, (cls,), own)


def _verb(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    @wraps(method)
    def verb(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(method.__name__)
        with _disable_current_modes(), torch.no_grad():
            found = method(self, *_moved(args, on_cpu), **_moved(kwargs, on_cpu))
            return _moved(found, _to_device)

    verb.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return verb


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Move the tensors in a value, and in the handles in it."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, tuple | list):
        return type(value)(_moved(each, move) for each in value)
    if isinstance(value, dict):
        return {name: _moved(each, move) for name, each in value.items()}
    if isinstance(value, EPHandle):
        value = copy.copy(value)
        value.__dict__.update(_moved(vars(value), move))
    return value


def _to_device(value: Tensor) -> Tensor:
    out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
    on_cpu(out).copy_(value)
    return out
