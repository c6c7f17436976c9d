"""Whether deep_ep can be used here, and the reason in a sentence where it cannot. No real library is touched."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch._probing import loaded_nccl
from moe_dispatch.backends import BackendOptions, Rejected, Usable
from moe_dispatch.backends.deep_ep import deepep_v2, library
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch_testing.emulation import emulated_deep_ep
from moe_dispatch_testing.ranks import thread_group
from tests.deep_ep_backends.conftest import Setting, Wrap

Install = Callable[..., None]
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that torch, its GPU and the NCCL that is loaded are such ones."""

    def put(
        *,
        capability: Callable[[], tuple[int, int]] = lambda: (9, 0),
        nccl: tuple[int, int, int] | None = (2, 32, 3),
        torch_version: str = "2.10.0+cu130",
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(deepep_v2, "loaded_nccl", lambda: nccl)
        monkeypatch.setattr(torch, "__version__", torch_version)

    return put


@pytest.fixture
def hopper(machine: Machine) -> None:
    machine()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write a package deep_ep that runs some code when it is imported."""

    def write(code: str) -> None:
        folder = tmp_path / "deep_ep"
        folder.mkdir()
        (folder / "__init__.py").write_text(code)
        (folder / "part.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)

    return write


def reason(options: type[BackendOptions]) -> str:
    verdict = options().probe()
    assert isinstance(verdict, Rejected)
    return verdict.reason


@pytest.mark.parametrize("options", [DeepEPOptions, HybridEPOptions])
def test_not_installed(options: type[BackendOptions]) -> None:
    assert reason(options) == "no module named 'deep_ep' is installed"


def test_no_device_or_an_older_one(package: Callable[[str], None], machine: Machine) -> None:
    package("raise RuntimeError('it must not be imported')")
    assert reason(DeepEPOptions) == reason(HybridEPOptions) == "torch sees no CUDA device"
    machine(capability=lambda: (8, 0))
    assert reason(DeepEPOptions) == "its kernels need compute capability 9.0, this device has 8.0"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("assert False, 'NCCL differs from what was linked'", "AssertionError: NCCL differs from what was linked"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('libnvshmem.so: cannot open')", "OSError: libnvshmem.so: cannot open"),
        ("assert False", "AssertionError: no text"),
    ],
)
def test_an_import_that_raises(code: str, told: str, package: Callable[[str], None], hopper: None) -> None:
    package(f"import deep_ep.part\n{code}")
    assert reason(DeepEPOptions) == f"importing 'deep_ep' raised {told}"
    assert not [name for name in sys.modules if name.startswith("deep_ep")], "nothing is left half imported"
    text = rf"Backend 'deepep' cannot be used here: importing 'deep_ep' raised {told.partition(':')[0]}.*choose one of"
    with pytest.raises(BackendUnavailableError, match=text):
        build_dispatcher(DispatcherConfig(backend="deepep", num_experts=8, top_k=2, hidden_size=256))


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a CUDA toolkit of some version in the place of the installed one."""

    def put(version: str) -> Path:
        nvcc = tmp_path / version / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.0'\n")
        nvcc.chmod(0o755)
        (tmp_path / version / "lib64").mkdir()
        (tmp_path / version / "lib64" / "libcudart.so").touch()
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / version))
        return nvcc

    return put


@pytest.fixture
def installed(hopper: None, toolkit: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A module in place of the installed deep_ep, beside a CUDA toolkit that every release takes."""
    toolkit("13.1")

    def put(**names: Any) -> None:
        module = ModuleType("deep_ep")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, "deep_ep", module)

    return put


def test_the_variant_is_told_by_attributes(installed: Install) -> None:
    v1, v2 = emulated_deep_ep("v1.2.1"), emulated_deep_ep("v2-2.1.0")
    installed(Buffer=v1.Buffer, __version__="1.2.1+abc")
    assert DeepEPOptions().probe() == Usable(version="1.2.1+abc", features=("v1", "normal mode"))
    assert "has no HybridEPBuffer: it is not built from the branch hybrid-ep" in reason(HybridEPOptions)
    installed(Buffer=v1.Buffer, ElasticBuffer=v2.ElasticBuffer, __version__="2.1.0")
    assert DeepEPOptions().probe() == Usable(version="2.1.0", features=("v2", "compact", "expand"))
    installed(EPBuffer=emulated_deep_ep("v2.5.0").EPBuffer, __version__="2.5.0")
    assert DeepEPOptions().probe() == Usable(version="2.5.0", features=("v2.5", "compact", "expand"))
    hybrid = emulated_deep_ep("hybridep-94a9f8f")
    installed(Buffer=v1.Buffer, HybridEPBuffer=hybrid.HybridEPBuffer)
    assert HybridEPOptions().probe() == Usable(version="of unknown version", features=("chunks of 64 and 64 rows",))
    installed(HybridEpBuffer=hybrid.HybridEPBuffer, __version__="1.1.0")  # the only release that spells it so
    assert "install 34152ae or later" in reason(HybridEPOptions)
    installed()
    assert "has neither EPBuffer, ElasticBuffer nor Buffer" in reason(DeepEPOptions)


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Load a library that says that it is some version of NCCL. Only the first one of a process is found by name."""

    def load(number: int) -> None:
        source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
        source.write_text(f"int ncclGetVersion(int* version) {{ *version = {number}; return 0; }}")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        real = ctypes.CDLL
        # torch has no NCCL here, so the loader is asked for this file in place of the library of that name.
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name, mode: real(str(library) if name == "libnccl.so.2" else name, mode=mode)
        )
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))  # what torch was compiled with
        real(str(library))

    return load


@pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in of NCCL needs a C compiler")
def test_the_nccl_that_is_loaded_is_asked(nccl: Callable[[int], None]) -> None:
    """Upstream says ``pip install nvidia-nccl-cu13``, after which torch goes on naming the version of its build."""
    nccl(23203)
    assert loaded_nccl() == (2, 32, 3)


def test_v25_needs_recent_versions(installed: Install, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    installed(EPBuffer=emulated_deep_ep("v2.5.0").EPBuffer, __version__="2.5.0")
    machine(nccl=(2, 32, 2))
    told = 'NCCL 2.32.3 or later, got 2.32.2; run pip install "nvidia-nccl-cu13>=2.32.3" --no-deps'
    assert told in reason(DeepEPOptions)
    machine(nccl=(2, 33, 0), torch_version="2.9.1")
    assert "torch 2.10 or later, got 2.9" in reason(DeepEPOptions)
    library.warn_once.cache_clear()
    machine(nccl=None)
    assert isinstance(DeepEPOptions().probe(), Usable)
    assert "needs NCCL 2.32.3 or later; which NCCL is loaded is unknown" in caplog.text


def test_v25_needs_a_recent_compiler(toolkit: Callable[[str], Path], installed: Install, variables: Setting) -> None:
    """It compiles at the first dispatch, so nothing else would say so before."""
    installed(EPBuffer=emulated_deep_ep("v2.5.0").EPBuffer, __version__="2.5.0")
    old = toolkit("12.9")
    assert f"nvcc 13.1 or later, got 12.9 ({old})" in reason(DeepEPOptions)
    variables(EP_JIT_NVCC_COMPILER=str(toolkit("13.2")), CUDA_HOME=str(old.parents[1]))
    assert isinstance(DeepEPOptions().probe(), Usable)
    variables(EP_JIT_NVCC_COMPILER="/no/nvcc")
    assert "/no/nvcc, which is missing; set CUDA_HOME" in reason(DeepEPOptions)


def test_hybridep_needs_the_compiler_of_its_variable(installed: Install, variables: Setting) -> None:
    """The library runs "$CUDA_HOME/bin/nvcc", which is "/bin/nvcc" without the variable."""
    installed(HybridEPBuffer=emulated_deep_ep("hybridep-746").HybridEPBuffer, __version__="1.2")
    assert isinstance(HybridEPOptions().probe(), Usable)
    home = Path(os.environ["CUDA_HOME"])
    (home / "lib64" / "libcudart.so").unlink()
    assert f"libcudart, which is not in {home}/lib64" in reason(HybridEPOptions)
    variables(CUDA_HOME=None)
    assert "/bin/nvcc, which is missing; set CUDA_HOME" in reason(HybridEPOptions)


def test_an_older_v1_is_refused_with_what_it_lacks(installed: Install) -> None:
    class Old:
        def __init__(self, group: Any, num_nvl_bytes: int = 0) -> None: ...

        def dispatch(self, x: Any, handle: Any = None) -> None: ...

    installed(Buffer=Old, __version__="1.0.0")
    assert "lacks explicitly_destroy, num_worst_tokens; install v1.2.1 or later" in reason(DeepEPOptions)


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_an_emulation_is_usable_anywhere_and_says_what_it_is(name: str) -> None:
    config = DispatcherConfig(backend={"name": name, "emulate": True}, num_experts=8, top_k=2, hidden_size=256)
    assert config.backend_options is not None
    verdict = config.backend_options.probe()
    assert isinstance(verdict, Usable)
    assert verdict.features[-1] == "emulated"


@pytest.mark.parametrize(
    ("name", "value"), [("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API", "abc"), ("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", "0")]
)
def test_a_malformed_variable_is_a_reason(name: str, value: str, variables: Setting) -> None:
    variables(**{name: value})
    verdict = HybridEPOptions(emulate=True).probe()
    assert isinstance(verdict, Rejected)
    assert f"{name} must be a positive number, got {value!r}" in verdict.reason


def test_whatever_a_probe_stumbles_over_is_a_reason(installed: Install, machine: Machine) -> None:
    installed(HybridEPBuffer=object)
    assert "reading the constraints of deep_ep raised AttributeError" in reason(HybridEPOptions)
    machine(capability=lambda: 1 // 0)
    assert "reading the constraints of deep_ep raised ZeroDivisionError" in reason(DeepEPOptions)


@pytest.fixture
def current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(("name", "release"), [("deepep", "v2-2.1.0"), ("hybridep", "hybridep-94a9f8f")])
def test_real_libraries_need_a_group_on_the_current_device(
    name: str, release: str, installed: Install, current_device: None, wrap: Wrap
) -> None:
    found = library.Library(module=emulated_deep_ep(release), version="2.1.0", emulated=False)
    wrap(library, "find_library", lambda original, release: found)
    config = DispatcherConfig(backend=name, num_experts=8, top_k=2, hidden_size=256)
    with pytest.raises(ValueError, match=f"'{name}' needs a process group, even for one rank, got None"):
        build_dispatcher(config)
    group = thread_group(HashStore(), 0, 1)
    group.bound_device_id = torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"must be that of the group, cuda:1, got cuda:0. Call torch.cuda.set_device"):
        build_dispatcher(config, group)
