"""What Megatron asks of CUDA, answered on a CPU: devices, streams, splits, dropout. Its code is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.integration.jobs import Check, run_checks
from tests.integration.megatron_core import layer


@final
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


@final
class Stream:
    """All work is done when it is called for, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None: ...


_STREAM = Stream()


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside, megatron-core's MoE layers run on CPU tensors, with its own dispatchers too."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.utils import GlobalMemoryBuffer

    with ExitStack() as stack:
        stack.enter_context(cpu_for_cuda())
        for name, stand_in in {
            "Stream": Stream,
            "current_stream": lambda *args: _STREAM,
            "current_device": lambda: "cpu",
            "stream": lambda stream: nullcontext(),
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _splits_for_gloo))
        stack.enter_context(patch.object(dist, "all_gather", _all_gather))
        stack.enter_context(patch.object(dist, "reduce_scatter", _reduce_scatter))
        stack.enter_context(patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()))
        # Dropout draws from generators of CUDA's, whose states recomputation restores; the tests have no dropout.
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", lambda **_: None))
        stack.enter_context(patch.object(random, "_set_cuda_rng_state", lambda state, **_: None))
        stack.enter_context(patch.object(random.CudaRNGStatesTracker, "fork", lambda self, *args: nullcontext()))
        # Recomputation of activations asks transformer-engine whether fp8 is on.
        off = SimpleNamespace(is_fp8_enabled=lambda: False)
        stack.enter_context(patch.object(random, "FP8GlobalStateManager", off, create=True))
        for name in ("activation_recompute_forward", "fp8_autocast"):
            stack.enter_context(patch.object(random, name, lambda **_: nullcontext(), create=True))
        stack.enter_context(patch.object(random, "_get_share_storage", lambda: _fill_again, create=True))
        # torch's norms are refused with sequence parallelism, as nobody would reduce the gradients of their weights.
        stack.enter_context(patch.object(torch_norm.WrappedTorchNorm, "__new__", _norm))
        # 0.16 forgets to define it where transformer-engine is missing.
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


def run_megatron(checks: Mapping[str, Check], ranks: int = layer.RANKS) -> dict[str, list[Any]]:
    """The results by name, each by rank."""
    return run_checks(checks, ranks, _on_ranks)


@contextmanager
def _on_ranks(ranks: int) -> Iterator[None]:
    layer.RANKS = ranks
    with megatron_on_cpu():
        yield


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:
    return nn.LayerNorm(hidden_size, eps)


def _all_gather(tensors: list[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Of unequal sizes, which gloo does not take."""
    for index, received in enumerate(tensors):
        if index == group.rank():
            received.copy_(tensor)
        dist.broadcast(received, group=group, group_src=index)


def _reduce_scatter(output: Tensor, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Of unequal sizes, which gloo does not take."""
    for index, part in enumerate(tensors):
        total = part.clone()
        dist.reduce(total, group=group, group_dst=index)
        if index == group.rank():
            output.copy_(total)


def _fill_again(output: Tensor, recomputed: Tensor) -> None:
    """Give an output its numbers again, without the extension that Megatron compiles for it."""
    source = recomputed.untyped_storage()
    output.untyped_storage().resize_(source.nbytes())
    output.untyped_storage().copy_(source)


def _splits_for_gloo(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """On a GPU they would become arrays as they are copied; gloo takes no tensors either."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
