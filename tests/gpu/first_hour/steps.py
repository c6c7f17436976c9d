"""The steps of the first hour: what each shows, how it is run, and how long it may take.

The first steps tell most. Their limits are longer than what they are expected to take.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
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
        tests: Arguments of pytest; empty if the step is no test.
        module: Module of a measurement, which prints its values as JSON in its last line.
        source: Folder of a library to build.
        library: Name of the library that the step builds or needs; empty if it needs none.
    """

    name: str
    shows: str
    seconds: int
    tests: tuple[str, ...] = ()
    module: str = ""
    source: str = ""
    library: str = ""

    def command(self, device: Device, out: Path, *, dry: bool) -> list[str]:
        """Return the command that runs the step on a device. A dry run collects tests and runs none."""
        if self.tests:
            plugin = ["-p", "tests.simulated_cuda.plugin"] if device == "simulated" else []
            asked = ["--collect-only"] if dry else ["-ra"]
            return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *asked, *plugin, *self.tests]
        if self.source:
            # Not by pip: no index is asked, and nothing else is installed.
            folders = f"--build-lib={out / 'built' / self.library}", f"--build-temp={out / 'objects' / self.library}"
            return [sys.executable, "setup.py", "--quiet", "build", *folders]
        simulator = ["-m", "tests.simulated_cuda"] if device == "simulated" else []
        kind = "cpu" if device == "cpu" else "cuda"
        scale = "full" if device == "cuda" else "small"
        return [sys.executable, *simulator, "-m", self.module, self.name, kind, scale]


_LAYER, _VERBS = "tests.gpu.first_hour.layer", "tests.gpu.first_hour.verbs"
_ONE_RANK, _ALL_GPUS = "tests/gpu/test_one_rank.py", "tests/gpu/test_all_gpus.py"

_FIRST = (
    Step("environment", "the machine, and the versions of what is installed", 60, module=_LAYER),
    Step(
        "kernels",
        "kernels of one rank against the bandwidth of a copy in the same run",
        180,
        module="tests.gpu.first_hour.kernels",
    ),
    Step("verbs", "each verb on one rank: its time on the host and on the device", 120, module=_VERBS),
    Step("compilations", "versions of Triton kernels that random row counts compile", 120, module=_VERBS),
    Step("trace", "a trace of torch's profiler", 60, module=_VERBS),
    Step("graphs", "capture and replay of graph-safe layers, without a host sync", 180, ("tests/gpu/test_graphs.py",)),
    Step("host-syncs", "host syncs of each verb, as torch reports them", 90, module=_LAYER),
    Step("bits", "equal bits in every run, forward and backward", 90, module=_LAYER),
    Step("memory", "peak memory of a step, beside the forecast of Plan.bytes", 90, module=_LAYER),
    Step("times", "a step of the layer: eager, replayed and compiled", 240, module=_LAYER),
    Step(
        "rates",
        "byte rates over NCCL against a bare all_to_all_single, on all GPUs and on fewer",
        300,
        module="tests.gpu.first_hour.rates",
    ),
    Step(
        "nccl", "replays and a killed rank over NCCL, on all GPUs and on fewer", 300, (_ALL_GPUS, "-k", "not conforms")
    ),
    Step("kit-nccl", "the conformance kit over NCCL, on all GPUs and on fewer", 420, (_ALL_GPUS, "-k", "conforms")),
)
_LAST = (
    Step(
        "reorder",
        "the reorder on one rank against torch on the CPU",
        180,
        ("tests/gpu/test_permutation.py", "-k", "not speed"),
    ),
    Step("kit-local", "the conformance kit without a group", 120, (_ONE_RANK, "-k", "local")),
    Step(
        "kit-gloo",
        "the conformance kit on two ranks that share the GPU, over gloo",
        300,
        ("tests/gpu/test_two_ranks.py",),
    ),
)
# V2.5 compiles 32 kernels for a group of each size, in 8 seconds each. So each size has a step, the largest one first.
VENDOR_SIZES, VENDOR_SECONDS = (8, 1, 4, 2), 420
BUILD_SECONDS = 600


def steps(sources: Path | None = None) -> list[Step]:
    """Return the steps.

    Args:
        sources: Folder of folders with a setup.py, of which each is built and tested; None for the ``deep_ep`` that is
            installed.
    """
    found = [Path(path).parent for path in sorted(sources.glob("*/setup.py"))] if sources else []
    names = [folder.name for folder in found] or [""]
    builds = [
        Step(f"build-{each.name}", f"a build of {each}", BUILD_SECONDS, source=str(each), library=each.name)
        for each in found
    ]
    of_sizes = [[_vendor(name, size) for name in names] for size in VENDOR_SIZES]
    once, *fewer = [[each for of_size in of_sizes[:2] for each in of_size], *of_sizes[2:]]
    return [*_FIRST, *builds, *once, *_LAST, *(each for of_size in fewer for each in of_size)]


def _vendor(library: str, size: int) -> Step:
    told = library or "deep_ep"
    shows = f"the conformance kit on {told} and {size} GPU{'s' if size > 1 else ''}"
    tests = ("tests/gpu/test_vendor_libraries.py", "-k", f"{size}_gpus")
    return Step(f"{told}-{size}", shows, VENDOR_SECONDS, tests, library=library)
