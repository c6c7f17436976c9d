"""Compilers start afresh in each test, and keep what they make in a folder of these tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch._dynamo
import torch._inductor.config
from torch.utils import _python_dispatch

with warnings.catch_warnings():  # inductor imports it, and it uses what torch itself has deprecated
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*", category=DeprecationWarning)
    import torch.utils.mkldnn


@pytest.fixture(autouse=True, scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        session = tmp_path_factory.getbasetemp()
        folder = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session  # which all workers share
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield


@pytest.fixture(autouse=True)
def no_dispatch_mode() -> None:
    """Say that no dispatch mode is on. torch keeps this in globals, which modes of several threads may leave set.

    torch 2.10 then compiles nothing.
    """
    for flag in ("torch_dispatch_mode", "non_infra_torch_dispatch_mode", "any_mode_without_ignore_compile_internals"):
        setattr(_python_dispatch, f"_is_in_{flag}", False)
    _python_dispatch.set_is_in_mode_without_ignore_compile_internals(False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
