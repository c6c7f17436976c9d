"""What every test runs under: fresh memory full of NaN, one thread, and no CUDA tests where there is no device.

In several processes (``--numprocesses``) each has a core of its own, and starts others by forking a server.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from moe_dispatch.dispatchers import channel

# cuBLAS is deterministic only with a fixed workspace, and reads this once, when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Ranks are threads or processes here: intra-op threads on top of them only compete for cores.
torch.set_num_threads(1)
# A rank that is a process is forked from a server that has imported of torch what ranks import. These imports look for
# GPUs, after which no forked process can use CUDA. So where there is a GPU, ranks are spawned.
if not torch.cuda.is_available():
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torch._inductor.compile_fx", "torch.distributed.checkpoint"])
# A pool of compilers takes 15 s to start on two cores, and no process with its threads may be forked.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Unbuffered, each argument of a print is written alone, and the lines of ranks that share a pipe run into each other.
os.environ.pop("PYTHONUNBUFFERED", None)
# Configs read these variables, and tests say themselves which are set.
for variable in [name for name in os.environ if name.startswith("MOE_DISPATCH_")]:
    del os.environ[variable]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, help="run one in N of the cases of each parametrized test")


def pytest_configure(config: pytest.Config) -> None:
    """Give a worker of xdist a core, which what it starts shares, and keep woken threads from taking it over.

    A thread of gloo that wants a lock spins until it has it. Where the one that holds the lock has lost its core to a
    thread that it woke, that lasts a time slice: collectives of ranks that are threads then take six times as long.
    """
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        config.pluginmanager.register(TimeLeft(config))
    if worker is None or not hasattr(os, "SCHED_BATCH"):
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(autouse=True)
def deterministic_algorithms() -> Iterator[None]:
    """Deterministic mode also fills fresh memory with NaN, so a row that nobody wrote shows in the result."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms does the same, but imports a compiler
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(autouse=True)
def channels_of_its_own() -> Iterator[None]:
    """What a test leaves behind, in a traceback or a compiler's cache, must not share its channel with the next."""
    yield
    channel._channels.clear()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``--every`` leaves out, and skip tests marked gpu where torch sees no CUDA device."""
    left_out = _left_out(items, config.getoption("every"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
    without_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_device)


def _left_out(items: list[pytest.Item], every: int) -> set[str]:
    """Return all cases but one in ``every`` of each test, chosen by a checksum of their names: always the same."""
    cases = defaultdict[str, list[str]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item.nodeid)
    return {
        name
        for names in cases.values()
        for place, name in enumerate(sorted(names, key=lambda name: zlib.crc32(name.encode())))
        if place % every
    }


def pytest_collection_finish() -> None:
    """Leave torch's modules and thousands of test items out of every garbage collection: a fifth of the time."""
    gc.collect()
    gc.freeze()


class TimeLeft:
    """Says after every tenth of a long run how long the rest will take, from the time of the tests that are done."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._tests, self._done, self._start = config, 0, 0, 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._begin(len(ids))

    def _begin(self, tests: int) -> None:
        self._tests, self._start = tests, time.monotonic()

    def pytest_runtest_logfinish(self) -> None:
        self._done += 1
        tenth = max(self._tests // 10, 1)
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if self._tests < 500 or self._done % tenth or self._done == self._tests or terminal is None:
            return
        left = (time.monotonic() - self._start) * (self._tests - self._done) / self._done
        terminal.write_line(f"\n{self._done} of {self._tests} tests, about {left:.0f} s left")
