"""Measurements of single verbs on one rank: ``python -m tests.gpu.first_hour.verbs STEP DEVICE SCALE``.

The last line of the output is a JSON object: texts and numbers by name.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from moe_dispatch import Routing
from tests.gpu.first_hour.layer import Layer, Values, run_measurement
from tests.simulated_cuda.device import is_simulated

MODES = {"eager": False, "graph-safe": True}
ROWS = {"full": (64, 512, 2048, 8192), "small": (8, 16)}
VERBS = ("dispatch", "combine", "combine.backward", "dispatch.backward")
TRACE = "trace.json.gz"
FIRST, STEPS = 5, {"full": 200, "small": 12}


class Calls:
    """The verbs of a layer whose experts do nothing, one by one."""

    def __init__(self, layer: Layer, seed: int, rows: int | None = None) -> None:
        self.layer = layer
        self.x, ids, self.weights = (each.detach()[:rows] for each in layer.inputs(seed))
        self.x.requires_grad_()
        self.routing, self.upstream = Routing(ids, self.weights.requires_grad_()), torch.ones_like(self.x)

    def run(self, verb: str) -> None:
        """Run one verb. They must be run in the order of ``VERBS``."""
        if verb == "dispatch":
            self.sent = self.layer.dispatcher.dispatch(self.x, self.routing)
            self.outputs = self.sent.rows.detach().requires_grad_()
        elif verb == "combine":
            self.y = self.layer.dispatcher.combine(self.outputs, self.sent)
        elif verb == "combine.backward":
            self.grads = torch.autograd.grad(self.y, (self.outputs, self.sent.weights), self.upstream)
        else:
            torch.autograd.grad((self.sent.rows, self.sent.weights), (self.x, self.weights), self.grads)


def verbs(device: str, *, small: bool) -> Values:
    """Return the time of each verb on the host and on the device, for several numbers of rows.

    The host's time ends when the call returns, while the device still works. An eager dispatch waits for the device
    once.
    """
    found: Values = {}
    for backend in ("local", "alltoall"):
        for rows in ROWS["small" if small else "full"]:
            for mode, graph_safe in MODES.items():
                layer = Layer(backend, device, small=small, rows=rows, matrices=False, graph_safe=graph_safe)
                for verb, (host, on_device) in timed(Calls(layer, 0), device, 2 if small else 20).items():
                    told = "" if device == "cpu" else f", device {on_device:.3f} ms"
                    found[f"{backend} {mode}, {rows} rows, {verb}"] = f"host {host:.3f} ms{told}"
    return found


def timed(calls: Calls, device: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the medians of both times, after a round that is not counted."""
    times: dict[str, list[tuple[float, float]]] = {verb: [] for verb in VERBS}
    for _ in range(1 + rounds):
        for verb in VERBS:
            times[verb].append(_once(lambda verb=verb: calls.run(verb), device))  # type: ignore[misc]
    return {
        verb: (median(one for one, _ in each[1:]), median(two for _, two in each[1:])) for verb, each in times.items()
    }


def _once(action: Callable[[], object], device: str) -> tuple[float, float]:
    if device != "cuda":
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3, 0.0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    events[0].record()
    action()
    host = (time.perf_counter() - begin) * 1e3
    events[1].record()
    torch.cuda.synchronize()
    return host, events[0].elapsed_time(events[1])


def trace(device: str, *, small: bool) -> Values:
    """Write a trace of torch's profiler: two steps of an eager and of a graph-safe layer. Return what took longest."""
    from torch.profiler import ProfilerActivity, profile

    folder = Path(os.environ.get("OUT", "."))
    if device == "cuda" and is_simulated():
        return {"skipped": "torch's profiler cannot read a simulated device"}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    layers = {mode: Layer("alltoall", device, small=small, graph_safe=safe) for mode, safe in MODES.items()}
    given = {mode: layer.inputs(0) for mode, layer in layers.items()}
    for mode, layer in layers.items():
        layer.step(*given[mode])
    with profile(activities=activities) as profiler:
        for mode, layer in layers.items():
            for _ in range(2):
                with torch.profiler.record_function(f"step, {mode}"):
                    layer.step(*given[mode])
        if device == "cuda":
            torch.cuda.synchronize()
    plain = folder / "trace.json"
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as text, gzip.open(folder / TRACE, "wb") as packed:
        shutil.copyfileobj(text, packed)
    plain.unlink()
    averages = profiler.key_averages()
    kernels = sorted(averages, key=lambda each: each.self_device_time_total, reverse=True)[:12]
    slow = {
        each.key[:80]: f"{each.self_device_time_total:.0f} us on the device in {each.count} calls" for each in kernels
    }
    return {"file": TRACE, "events": len(averages), **{key: text for key, text in slow.items() if text[:2] != "0 "}}


def compilations(device: str, *, small: bool) -> Values:
    """Return how many versions of each Triton kernel were compiled in steps with random numbers of rows.

    Raise if one was compiled after the first steps, because it stalls all ranks.
    """
    found: Values = {}
    most, steps = (64, STEPS["small"]) if small else (8192, STEPS["full"])
    for mode, graph_safe in MODES.items():
        layer, random = Layer("alltoall", device, small=small, matrices=False, graph_safe=graph_safe), Random(0)
        before, after_first = _compiled(), Counter[str]()
        for number in range(steps):
            calls = Calls(layer, number, random.randrange(1, most + 1))
            for verb in VERBS:
                calls.run(verb)
            if number == FIRST - 1:
                after_first = _compiled()
        late = _compiled() - after_first
        found[f"{mode}: steps"] = steps
        found[f"{mode}: versions compiled in the first {FIRST} steps"] = (after_first - before).total()
        found[f"{mode}: versions compiled later"] = str(dict(late)) if late else 0
    late_ones = {key: value for key, value in found.items() if key.endswith("later") and value}
    assert not late_ones, f"kernels were compiled after step {FIRST}: {late_ones}"
    return found


def _compiled() -> Counter[str]:
    """Return the number of compiled versions of each Triton kernel of this package, on the current device."""
    return Counter({name: sum(len(of_device[0]) for of_device in caches) for name, caches in _caches()})


def _caches() -> Iterator[tuple[str, Any]]:
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("moe_dispatch."):
            for name, value in vars(module).items():
                if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "device_caches"):
                    yield f"{module.__name__}.{name}", value.device_caches.values()


if __name__ == "__main__":
    run_measurement(globals(), *sys.argv[1:])
