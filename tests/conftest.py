"""What every test runs under: fresh memory full of NaN, one thread, and no CUDA tests where there is no device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moe_dispatch.dispatchers import channel

# cuBLAS is deterministic only with a fixed workspace, and reads this once, when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Ranks are threads or processes here: intra-op threads on top of them only compete for cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def deterministic_algorithms() -> Iterator[None]:
    """Deterministic mode also fills fresh memory with NaN, so a row that nobody wrote shows in the result."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture(autouse=True)
def channels_of_its_own() -> Iterator[None]:
    """What a test leaves behind, in a traceback or a compiler's cache, must not share its channel with the next."""
    yield
    channel._channels.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where torch sees no CUDA device."""
    without_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_device)
