"""The steps of ``make gpu`` for deep_ep fit their time limit: their compilations, counted on the emulation."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch.backends import load_backend
from moe_dispatch.backends.deep_ep import library
from moe_dispatch_testing.case import BackendSpec, case_config, poisoned_memory, run_rank
from moe_dispatch_testing.emulation import emulated_deep_ep
from moe_dispatch_testing.kit import backend_cases
from tests.gpu.first_hour.steps import VENDOR_SECONDS, VENDOR_SIZES, steps
from tests.gpu.vendor_cases import SECONDS_PER_KERNEL, vendor_cases

RUNNING = 100  # seconds for the rest: on two CPU cores, the emulation takes half of that


def compilations(backend: BackendSpec, release: str) -> int:
    """Run the cases of one rank. Return how often the real library would run nvcc."""
    module: Any = emulated_deep_ep(release)
    hybrid = getattr(module, "HybridEPBuffer", None)
    made = module.EPBuffer.kernels if hybrid is None else hybrid.compilations
    made.clear()
    for case in vendor_cases(backend, 1):
        with poisoned_memory():
            run_rank(case_config(backend, case), None, case)
    return len(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "release"), [("deepep", "v2.5.0"), ("hybridep", "hybridep-94a9f8f"), ("hybridep", "hybridep-746")]
)
def test_the_step_for_deep_ep_has_time_to_compile(name: str, release: str) -> None:
    count = compilations({"name": name, "emulate": release}, release)
    assert 0 < count * SECONDS_PER_KERNEL <= VENDOR_SECONDS - RUNNING


def test_each_group_size_has_a_step_and_the_largest_comes_first() -> None:
    found = [step.tests[-1] for step in steps() if step.name.startswith("deep_ep-")]
    assert found == [f"{size}_gpus" for size in VENDOR_SIZES]
    assert found[0] == f"{max(VENDOR_SIZES)}_gpus"


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_most_cases_run(backend: str) -> None:
    spec = {"name": backend, "emulate": True}
    assert len(vendor_cases(spec, 1)) > 0.7 * len(list(backend_cases(spec, (1,))))


@pytest.mark.parametrize(("name", "release"), [("deepep", "v2.5.0"), ("hybridep", "hybridep-746")])
def test_an_installed_library_has_cases_on_gpus(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes CUDA tensors only, for which no case on the CPU stands."""
    found = library.Library(module=emulated_deep_ep(release), version="2.5.0", emulated=False)
    monkeypatch.setattr(library, "find_library", lambda release: found)
    monkeypatch.setattr(load_backend(name), "lacking", lambda self, library: None)
    assert not vendor_cases(name, 2)
    cases = vendor_cases(name, 2, "cuda")
    assert len(cases) > 100
    assert {case.device for case in cases} == {"cuda"}
