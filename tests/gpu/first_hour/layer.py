"""Measurements of a layer on one rank: ``python -m tests.gpu.first_hour.layer STEP DEVICE SCALE``.

The last line of the output is a JSON object: texts and numbers by name.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher, capture
from moe_dispatch.backends.registry import known_backends, probe_backend
from moe_dispatch.permutation import known_permutations, probe_permutation
from moe_dispatch.versions import loaded_nccl

BACKENDS = ("local", "alltoall", "allgather")
VERBS = ("dispatch", "combine", "backward")
_PACKAGES = ("triton", "transformer-engine", "deep_ep", "sgl-deep-ep", "megatron-core", "torchtitan", "transformers")
Values = dict[str, Any]


class Layer:
    """A layer with grouped experts, forward and backward.

    Args:
        backend: Name of the backend.
        device: "cuda" or "cpu".
        small: Whether the sizes are for a try without a GPU.
        group: Ranks that share the experts; None for the default group, or for no group with "local".
        rows: Number of rows; None for 8192, or 64 if small.
        matrices: Whether to make experts. Without them there is no ``step``.
        fields: Fields of the config.
    """

    def __init__(
        self,
        backend: str,
        device: str,
        *,
        small: bool,
        group: dist.ProcessGroup | None = None,
        rows: int | None = None,
        matrices: bool = True,
        **fields: Any,
    ) -> None:
        most, self.width, self.experts, self.top_k = (64, 64, 8, 2) if small else (8192, 4096, 64, 8)
        self.rows, self.device = rows or most, device
        if group is None and backend != "local":
            group = dist.group.WORLD
        size = 1 if group is None else group.size()
        self.experts += -self.experts % size  # all ranks have equally many
        sizes: dict[str, Any] = {"num_experts": self.experts, "top_k": self.top_k, "hidden_size": self.width}
        if fields.get("graph_safe"):
            sizes["max_tokens_per_rank"] = self.rows
        config = DispatcherConfig(backend=backend, pad_multiple=16, **{**sizes, **fields})
        self.dispatcher: Dispatcher = build_dispatcher(config, group)
        if not matrices:
            return
        generator = torch.Generator(device).manual_seed(0 if group is None else group.rank())
        shape = self.experts // size, self.width, self.width
        drawn = torch.randn(shape, generator=generator, device=device)
        self.matrices = (drawn * self.width**-0.5).bfloat16().requires_grad_()

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, ids and weights."""
        generator = torch.Generator(self.device).manual_seed(seed)
        scores = torch.rand(self.rows, self.experts, generator=generator, device=self.device)
        weights, ids = scores.topk(self.top_k)
        x = torch.randn(self.rows, self.width, generator=generator, device=self.device).bfloat16()
        return x.requires_grad_(), ids, weights.requires_grad_()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = self.dispatcher.dispatch(x, Routing(ids, weights))
        rows = torch._grouped_mm(sent.rows, self.matrices, offs=sent.offs)
        return self.dispatcher.combine(torch.nn.functional.silu(rows), sent)

    def step(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        y = self.forward(x, ids, weights)
        return (y.detach(), *torch.autograd.grad(y, (x, weights, self.matrices), torch.ones_like(y)))


def environment(device: str, *, small: bool) -> Values:
    """Return the machine and the versions."""
    found: Values = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        found["device"] = f"{torch.cuda.device_count()} x {facts.name}, sm_{facts.major}{facts.minor}"
        found["device memory"] = f"{facts.total_memory / 2**30:.0f} GiB"
        found["multiprocessors"] = facts.multi_processor_count
        found["NCCL"] = ".".join(map(str, loaded_nccl() or ["unknown"]))
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name in known_backends():
        found[f"backend {name}"] = str(probe_backend(name))
    for name in known_permutations():
        found[f"permutation {name}"] = str(probe_permutation(name, device))
    return found


def host_syncs(device: str, *, small: bool) -> Values:
    """Return the host syncs of each verb, as torch warns of them; raise if graph-safe mode has one.

    On the CPU nothing waits, so there are none.
    """
    found: Values = {}
    for backend in BACKENDS:
        for mode in ("eager", "graph-safe"):
            layer = Layer(backend, device, small=True, graph_safe=mode == "graph-safe")
            inputs = layer.inputs(0)
            layer.step(*inputs)
            counts = _syncs(layer, inputs)
            assert mode == "eager" or not any(counts.values()), f"{backend} waits in graph-safe mode: {counts}"
            found[f"{backend} {mode}"] = ", ".join(f"{verb} {count}" for verb, count in counts.items())
    return found


def _syncs(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, int]:
    x, ids, weights = inputs
    dispatcher, counts = layer.dispatcher, {}
    with _counted_syncs(layer.device) as warned:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        counts["dispatch"] = len(warned)
        y = dispatcher.combine(sent.rows * 2, sent)
        counts["combine"] = len(warned) - counts["dispatch"]
        torch.autograd.grad(y, (x, weights), torch.ones_like(y))
        counts["backward"] = len(warned) - counts["dispatch"] - counts["combine"]
    return counts


@contextmanager
def _counted_syncs(device: str) -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells once that the mode is a prototype
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield warned
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def bits(device: str, *, small: bool) -> Values:
    """Return whether results have equal bits in ten runs; raise if not."""
    found: Values = {}
    for backend in BACKENDS:
        for graph_safe in (False, True):
            layer = Layer(backend, device, small=small, graph_safe=graph_safe)
            inputs = layer.inputs(0)
            first = layer.step(*inputs)
            for _ in range(9):
                for name, one, other in zip(("y", "dx", "dweights"), first, layer.step(*inputs), strict=False):
                    assert torch.equal(one, other), f"{backend}: {name} differs between two runs"
            found[f"{backend} graph_safe={graph_safe}"] = "equal bits in 10 runs"
    return found


def memory(device: str, *, small: bool) -> Values:
    """Return the peak memory of a dispatch and of a step, beside ``Plan.bytes``."""
    found: Values = {}
    for backend in BACKENDS:
        layer = Layer(backend, device, small=small, graph_safe=True)
        x, ids, weights = layer.inputs(0)
        layer.step(x, ids, weights)
        expected = sum(layer.dispatcher.plan(like=x).bytes(x.dtype).values())
        actions: dict[str, Callable[[], object]] = {
            "dispatch": lambda: layer.dispatcher.dispatch(x, Routing(ids, weights)),  # noqa: B023
            "step": lambda: layer.step(x, ids, weights),  # noqa: B023
        }
        for name, action in actions.items():
            peak = _peak(device, action)
            found[f"{backend} {name}"] = f"{peak / 2**20:.3f} MiB" if peak is not None else "not counted on the CPU"
        found[f"{backend} Plan.bytes"] = f"{expected / 2**20:.3f} MiB"
    return found


def _peak(device: str, action: Callable[[], object]) -> int | None:
    if device != "cuda":
        action()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times(device: str, *, small: bool) -> Values:
    """Return the time of a step, forward and backward: eager, graph-safe, replayed and compiled.

    All ways of a backend take turns, so that they meet the same machine.
    """
    found: Values = {}
    for backend in BACKENDS:
        eager, fixed = (Layer(backend, device, small=small, graph_safe=safe) for safe in (False, True))
        inputs = eager.inputs(0)
        ways: dict[str, Callable[[], object]] = {
            "eager": lambda: eager.step(*inputs),  # noqa: B023
            "graph-safe": lambda: fixed.step(*inputs),  # noqa: B023
        }
        if device == "cuda":
            graph = capture(fixed.dispatcher, fixed.step, *inputs)
            ways["replayed"] = lambda: graph.replay(*inputs)  # noqa: B023
        if not small:
            ways["compiled"] = _compiled(eager, inputs)
        rounds = [{name: _milliseconds(device, way) for name, way in ways.items()} for _ in range(2 if small else 10)]
        medians = {name: sorted(of_round[name] for of_round in rounds)[len(rounds) // 2] for name in ways}
        found |= {f"{backend} {name}": f"{ms:.2f} ms" for name, ms in medians.items()}
    return found


def _compiled(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    forward: Any = torch.compile(layer.forward, fullgraph=True)
    x, ids, weights = inputs

    def step() -> object:
        y = forward(x, ids, weights)
        return torch.autograd.grad(y, (x, weights, layer.matrices), torch.ones_like(y))

    return step


def _milliseconds(device: str, action: Callable[[], object]) -> float:
    """Return the time of one run after one that is not counted."""
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def run_measurement(functions: Mapping[str, Any], name: str, device: str, scale: str) -> None:
    """Run one of the functions in a group of one rank, NCCL on a GPU and gloo on the CPU, and print what it returns."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), 1),
            rank=0,
            world_size=1,
            timeout=datetime.timedelta(minutes=2),
        )
        values = functions[name.replace("-", "_")](device, small=scale == "small")
        dist.destroy_process_group()
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    run_measurement(globals(), *sys.argv[1:])
