"""A plugin of pytest that runs every test on simulated devices: ``pytest -p tests.simulated_cuda.plugin``.

A test fails if two streams used one memory without an order, or if an operator gave another shape or dtype on CUDA than
on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.simulated_cuda.device import LIBRARIES, Record, is_simulated, recorded, watched_streams

# Both are read at the first call of CUDA.
os.environ.setdefault("SIMULATED_CUDA_DEVICES", "4")
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARIES))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_races: the test plants an access without an order between streams")
    config.option.tbstyle = "short"  # a long traceback prints tensors, and outside of a test their values are not there
    if not is_simulated():
        raise pytest.UsageError("torch does not run on simulated CUDA here. Run the tests with make simgpu.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("real_gpu") is not None:
        pytest.skip("a simulated device has neither the speed nor the memory of a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    from tests.simulated_cuda.values import simulated

    with recorded() as records, watched_streams(), simulated() as findings:
        yield
    if item.get_closest_marker("expects_races") is None:
        refuse_races(records)
    assert not findings.differences, f"CUDA and the CPU disagree: {dict(findings.differences)}"


def refuse_races(records: list[Record]) -> None:
    """Fail if two streams used one memory without an order."""
    races = [f"{each.detail}, at {each.place}" for each in records if each.kind == "race"]
    assert not races, "\n".join(races)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End at once: the threads of NCCL would wait for a device."""
    sys.stdout.flush()
    os._exit(getattr(config, "_exit_status", 1))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config._exit_status = int(exitstatus)  # type: ignore[attr-defined]
