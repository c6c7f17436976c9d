"""What Megatron's Python asks of CUDA, answered on a CPU. Its code is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"`` of a call becomes the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Tensors made on CUDA are made on the CPU inside the block, and what would be compiled runs eagerly."""
    with torch.compiler.set_stance("force_eager"), _CudaMeansCpu():
        yield
