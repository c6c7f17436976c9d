"""The steps of the first hour: what each shows, how it is run, and how long it may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, final

Device = Literal["cuda", "simulated", "cpu"]


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One step, which runs in a process of its own.

    Attributes:
        name: Name of the step.
        shows: What the step shows.
        seconds: Time limit.
        tests: Arguments of pytest; empty if the step is a measurement.
        module: Module of the measurement, which prints its values as JSON in its last line.
    """

    name: str
    shows: str
    seconds: int
    tests: tuple[str, ...] = ()
    module: str = ""

    def command(self, device: Device) -> list[str]:
        """Return the command that runs the step on a device."""
        if self.tests:
            plugin = ["-p", "tests.simulated_cuda.plugin"] if device == "simulated" else []
            return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-ra", *plugin, *self.tests]
        simulator = ["-m", "tests.simulated_cuda"] if device == "simulated" else []
        kind = "cpu" if device == "cpu" else "cuda"
        scale = "full" if device == "cuda" else "small"
        return [sys.executable, *simulator, "-m", self.module, self.name, kind, scale]


_LAYER, _KERNELS = "tests.gpu.first_hour.layer", "tests.gpu.first_hour.kernels"
_ONE_RANK, _ALL_GPUS = "tests/gpu/test_one_rank.py", "tests/gpu/test_all_gpus.py"

STEPS = (
    Step("environment", "the machine, and the versions of what is installed", 60, module=_LAYER),
    Step("kernels", "the reorder on one rank against the bandwidth of a copy in the same run", 180, module=_KERNELS),
    Step("graphs", "capture and replay of graph-safe layers, without a host sync", 180, ("tests/gpu/test_graphs.py",)),
    Step("host-syncs", "host syncs of each verb, as torch reports them", 90, module=_LAYER),
    Step("bits", "equal bits in every run, forward and backward", 90, module=_LAYER),
    Step("memory", "peak memory of a step, beside the forecast of Plan.bytes", 90, module=_LAYER),
    Step("times", "a step of the layer: eager, replayed and compiled", 240, module=_LAYER),
    Step(
        "reorder",
        "the reorder on one rank against torch on the CPU",
        180,
        ("tests/gpu/test_permutation.py", "-k", "not speed"),
    ),
    Step("kit-local", "the conformance kit without a group", 120, (_ONE_RANK, "-k", "local")),
    Step("kit-nccl", "the conformance kit over NCCL on all GPUs, and on fewer", 420, (_ALL_GPUS, "-k", "conforms")),
    Step(
        "nccl",
        "replays and a killed rank over NCCL on all GPUs, and on fewer",
        300,
        (_ALL_GPUS, "-k", "not conforms"),
    ),
    Step(
        "kit-gloo",
        "the conformance kit on two ranks that share the GPU, over gloo",
        300,
        ("tests/gpu/test_two_ranks.py",),
    ),
    Step("deep-ep", "the conformance kit on the installed deep_ep", 420, ("tests/gpu/test_vendor_libraries.py",)),
)
