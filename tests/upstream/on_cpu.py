"""Run one rank of a test file of DeepEP on CPUs, with the emulation in the place of ``deep_ep``.

``python -m tests.upstream.on_cpu CHECKOUT RELEASE FILE RANK [ARGUMENTS...]``. The file runs unchanged. Tensors for
"cuda" are made on the CPU, NCCL is gloo, a benchmark calls its function once, and spawning ranks runs this rank.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from moe_dispatch_testing.emulation import emulated_deep_ep
from moe_dispatch_testing.emulation.releases import imported_as_deep_ep


class _OnCpu(TorchFunctionMode):
    """Make and keep all tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: "cpu" if name == "device" else value for name, value in (kwargs or {}).items()}
        return func(*["cpu" if _is_cuda(one) else one for one in args], **kwargs)


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _nothing() -> Callable[..., None]:
    """Return a new function without an effect. torch refuses one function in two places."""
    return lambda *args, **kwargs: None


def _once(function: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for ``bench`` and ``bench_kineto``: call the function once, and return made-up seconds."""
    function()
    names = kwargs.get("kernel_names", args[0] if args else None)
    if isinstance(names, str):
        return 1e-3
    return (1e-3,) * (len(names) if isinstance(names, tuple) else 3)


def _use_cpu(rank: int) -> None:
    whole: Any = torch  # type checkers refuse to replace functions of modules
    cuda, distributed = whole.cuda, whole.distributed
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache", "_sleep"):
        setattr(cuda, name, _nothing())
    properties = SimpleNamespace(multi_processor_count=132, total_memory=1 << 37)
    cuda.current_device = lambda: rank
    cuda.get_device_properties = lambda *_: properties
    cuda.current_stream = lambda *_: SimpleNamespace(synchronize=_nothing(), wait_stream=_nothing())
    cuda.Stream = lambda *_, **__: SimpleNamespace(wait_stream=_nothing())
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.nvtx.range = contextlib.nullcontext
    whole.set_default_device = _nothing()
    exchange, init = dist.all_to_all_single, dist.init_process_group

    def all_to_all(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if given.element_size() == 1:  # gloo has no float8
            output, given = output.view(torch.uint8), given.view(torch.uint8)
        return exchange(output, given, *args, **kwargs)

    distributed.all_to_all_single = all_to_all
    distributed.init_process_group = lambda **given: init(**{**given, "backend": "gloo", "device_id": None})
    whole.multiprocessing.spawn = lambda function, args, nprocs: function(rank, *args)


def _submodules(package: ModuleType, checkout: Path) -> None:
    """Let tests import the files of DeepEP that need no GPU, such as deep_ep.utils.math."""
    binding = ModuleType("deep_ep._C")
    vars(binding).update(vars(package))
    sys.modules["deep_ep._C"] = package._C = binding  # type: ignore[attr-defined]
    package.__path__ = [str(checkout / "deep_ep")]
    package.utils.__path__ = [str(checkout / "deep_ep" / "utils")]


def main(checkout: Path, release: str, file: str, rank: int, arguments: list[str]) -> None:
    _use_cpu(rank)
    package = emulated_deep_ep(release)
    script = checkout / file
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    with imported_as_deep_ep(release), _OnCpu():
        _submodules(package, checkout)
        for name in ("utils", "deep_ep.utils.testing"):
            with contextlib.suppress(ImportError):
                module: Any = __import__(name, fromlist=["bench"])
                module.bench = module.bench_kineto = _once
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    _, _checkout, _release, _file, _rank, *_arguments = sys.argv
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}
    main(Path(_checkout), _release, _file, int(_rank), _arguments)
