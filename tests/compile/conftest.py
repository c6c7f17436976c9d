"""Compilers start afresh in each test, and keep what they make in a folder of these tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch._dynamo
import torch._inductor.config

with warnings.catch_warnings():  # inductor imports it, and it uses what torch itself has deprecated
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*", category=DeprecationWarning)
    import torch.utils.mkldnn


@pytest.fixture(autouse=True, scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """With threads of its own, inductor takes 15 s to start on two cores."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
