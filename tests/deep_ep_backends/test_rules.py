"""Whether deep_ep can be used here, what its backends say of themselves, and what is refused for it."""

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

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends import BackendOptions, Constraints, MoEShape, Rejected, Usable
from moe_dispatch.backends.deep_ep import deepep_v2, library
from moe_dispatch.backends.deep_ep import hybrid_rules as hybrid
from moe_dispatch.backends.deep_ep import hybridep as hybridep_module
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.errors import BackendUnavailableError, ConfigError, InputError
from moe_dispatch.versions import loaded_nccl
from moe_dispatch_testing.emulation import emulated_deep_ep
from moe_dispatch_testing.ranks import thread_group
from tests.deep_ep_backends.conftest import Setting, Wrap
from tests.deep_ep_backends.vendors import HYBRID, V1, V2, config
from tests.dispatchers.layer import on_ranks, outcomes_on, raises_everywhere

DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def shape(ep_size: int = 8, ranks_per_node: int | None = None, experts: int = 64) -> MoEShape:
    return MoEShape(
        num_experts=experts, top_k=4, hidden_size=1024, ep_size=ep_size, pad_multiple=1, ranks_per_node=ranks_per_node
    )


def deepep(where: MoEShape, **options: Any) -> Constraints:
    return DeepEPOptions(**{"emulate": True, **options}).constraints(where)


def hybridep(where: MoEShape, **options: Any) -> Constraints:
    return HybridEPOptions(**{"emulate": True, **options}).constraints(where)


@pytest.mark.parametrize(
    ("ep_size", "ranks_per_node", "fits"),
    [(2, 2, True), (4, 8, True), (4, 2, False), (8, 4, False), (16, 8, True), (16, 16, True), (16, 4, False)],
)
def test_groups_of_v1_follow_the_nodes(ep_size: int, ranks_per_node: int, fits: bool) -> None:
    places: list[Callable[[], Constraints]] = [
        lambda: deepep(shape(ep_size, ranks_per_node), emulate="v1.2.1"),
        lambda: deepep(shape(ep_size, 3), emulate="v1.2.1", ranks_per_node=ranks_per_node),
    ]
    for constraints in places:
        if fits:
            assert constraints().group_sizes == frozenset({2, 4, 8, 16, 32, 64, 128, 144, 160})
            continue
        text = (
            f"a group of {ep_size} ranks must have {min(ep_size, 8)} ranks per node, got {ranks_per_node} per node. Use"
        )
        with pytest.raises(ConfigError, match=text):
            constraints()


def test_numbers_of_v1_v2_and_v25() -> None:
    v1, v2 = deepep(shape(), emulate="v1.2.1"), deepep(shape(), emulate="v2-2.1.0")
    assert deepep(shape()) == v2  # with 8 ranks, 2048 experts in all are 256 per rank
    assert deepep(shape(ep_size=2)).max_local_experts == 512
    assert deepep(shape(ep_size=2), emulate="v2-2.1.0").max_local_experts == 256
    assert (v1.hidden_multiple, v1.max_hidden, v1.max_top_k, v1.max_local_experts) == (256, 8191, 32, 128)
    assert (v2.hidden_multiple, v2.max_hidden, v2.max_top_k, v2.max_local_experts) == (256, None, 32, 256)
    assert deepep(shape(ep_size=64), emulate="v2-2.1.0").max_local_experts == 32  # 2048 experts in all
    assert (v1.equal_rows, v1.group_max, v1.differentiable) == (False, False, True)
    assert (v2.equal_rows, v2.group_max, v2.differentiable) == (False, True, True)
    assert all(deepep(shape(), emulate=release, expand=True).pads_experts for release in ("v2-2.1.0", "v2.5.0"))
    with pytest.raises(ConfigError, match=r"expand needs v2 or V2.5, got v1. Leave expand out, or install V2.5"):
        deepep(shape(), emulate="v1.2.1", expand=True)


@pytest.mark.parametrize(
    ("release", "ranks_per_domain", "multiple"),
    [
        ("hybridep-94a9f8f", 8, 1),
        ("hybridep-94a9f8f", 4, 1),
        ("hybridep-94a9f8f", 2, 2),
        ("hybridep-94a9f8f", 1, 4),
        ("hybridep-744", 1, 1),
    ],
)
def test_row_multiple_of_hybridep(release: str, ranks_per_domain: int, multiple: int) -> None:
    found = hybridep(shape(), emulate=release, ranks_per_domain=ranks_per_domain)
    assert found.row_multiple == multiple
    assert found.equal_rows == (release != "hybridep-744")
    assert found.min_rows == (0 if release == "hybridep-744" else 1)


@pytest.mark.parametrize(("chunk", "most"), [("64", 21824), ("128", 21760), ("32", 21824)])
def test_rows_across_domains(chunk: str, most: int, variables: Setting) -> None:
    variables(NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=chunk)
    assert 3 * most + 1 < 65536 <= 3 * (most + int(chunk)) + 1
    assert hybridep(shape(ranks_per_node=4)).max_rows == most
    assert hybridep(shape(ranks_per_node=8)).max_rows is None


def test_chunks_keep_rows_across_domains_below_the_limit() -> None:
    """Megatron #3999: a buffer for a whole micro-batch needs a deeper queue than the network has."""
    across: dict[str, Any] = {"backend": {**HYBRID, "ranks_per_domain": 1}, "max_tokens_per_rank": 30000}

    def body(group: Any) -> None:
        with pytest.raises(ConfigError, match="at most 21824 rows per rank fit"):
            build_dispatcher(config(**across), group)
        build_dispatcher(config(**across, chunks=16384), group)

    on_ranks(body, 2)


def test_the_domain_is_configured_or_named_by_its_variable_or_detected(variables: Setting) -> None:
    assert hybrid.domain_of(shape(ranks_per_node=4), None) == 4
    assert hybrid.domain_of(shape(), None) == 8
    variables(**{DOMAIN: "2"})
    assert hybrid.domain_of(shape(ranks_per_node=4), None) == 2
    assert hybrid.domain_of(shape(ranks_per_node=4), 1) == 1
    assert hybrid.domain_of(shape(ranks_per_node=4), 72) == 8


@pytest.mark.parametrize(("domain", "multiple"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (8, 1)])
def test_experts_per_rank_times_ranks_per_domain_divide_by_four(domain: int, multiple: int) -> None:
    assert hybridep(shape(ep_size=24, experts=96), ranks_per_domain=domain).local_experts_multiple == multiple


class Earliest:
    """The parameters of 1dddd19, which has neither non-blocking calls nor fused ones."""

    def __init__(self, group: Any, ib_dev_name_list: Any = None) -> None: ...


class April:
    """The constructor of 34152ae."""

    def __init__(self, group: Any, enable_custom_allgather: bool = True) -> None: ...


class Current:
    """The constructor of 94a9f8f, which changed a default."""

    def __init__(self, group: Any, enable_custom_allgather: bool = False) -> None: ...


@pytest.mark.parametrize(
    "names",
    [{"HybridEpBuffer": object}, {"HybridEPBuffer": Earliest}, {"HybridEPBuffer": April}],
    ids=["0ed15b5", "1dddd19", "34152ae"],
)
def test_early_releases_of_hybridep_are_refused_on_all_ranks(names: dict[str, Any], installed: Install) -> None:
    """Their rules of whole chunks are not known any more, and they order consecutive calls in other ways."""
    installed(**names, __version__="1.1.0")
    text = (
        "Backend 'hybridep' cannot be used here: deep_ep 1.1.0 is HybridEP 34152ae or another commit before 94a9f8f, "
        "whose support has ended; install commit 94a9f8f or a later one of DeepEP's branch hybrid-ep."
    )
    given = config({"name": "hybridep"})
    raises_everywhere(outcomes_on(lambda group: build_dispatcher(given, group), 2), BackendUnavailableError, text)


def test_the_newest_rules_are_those_of_its_class() -> None:
    release = HybridEPOptions(emulate=True).release
    assert release is not None
    assert hybrid.rules(emulated_deep_ep(release).HybridEPBuffer) == hybrid.NEWEST


@pytest.mark.parametrize(
    ("backend", "fields", "size", "text"),
    [
        (V1, {"num_experts": 9}, 3, "'deepep': ep_size must be one of 2, 4, 8, 16, 32, 64, 128, 144, 160, got 3"),
        (V1, {"hidden_size": 384}, 2, "'deepep': hidden_size must be a multiple of 256, got 384"),
        (V1, {"hidden_size": 8192}, 2, "'deepep': hidden_size must be at most 8191, got 8192"),
        (V1, {"num_experts": 258}, 2, "experts per rank must be at most 128, got 129 (258 experts over 2 ranks)"),
        (V2, {"num_experts": 64, "top_k": 33}, 2, "'deepep': top_k must be at most 32, got 33"),
        (HYBRID, {"num_experts": 6}, 2, "experts per rank must be a multiple of 2, got 3 (6 experts over 2 ranks)"),
        (
            HYBRID,
            {"balance": {"name": "manual", "spare_experts_per_rank": 1}},
            2,
            "got 5 (8 experts over 2 ranks, spare slots per rank: 1). Change",
        ),
        (HYBRID, {"hidden_size": 24}, 2, "'hybridep': hidden_size must be a multiple of 16, got 24"),
        ({**HYBRID, "ranks_per_domain": 1}, {"max_tokens_per_rank": 30000}, 2, "at most 21824 rows per rank fit"),
        (HYBRID, {"wire": "mxfp8"}, 2, "'hybridep': hidden_size must be a multiple of 512, got 256"),
        *(
            (
                backend,
                {"wire": "mxfp8", "hidden_size": 512},
                2,
                'gradients of combine must have it too. Set wire={"dtype": "mxfp8", "gradients": True}',
            )
            for backend in (HYBRID, {**V2, "ranks_per_node": 1})
        ),
    ],
)
def test_refused_at_build_on_all_ranks_alike(
    backend: dict[str, Any], fields: dict[str, Any], size: int, text: str
) -> None:
    results = outcomes_on(lambda group: build_dispatcher(config(backend, **fields), group), size)
    raises_everywhere(results, ConfigError, text)


def test_an_option_of_later_versions_is_refused(wrap: Wrap) -> None:
    wrap(hybridep_module, "parameters", lambda original, function: original(function) - {"num_blocks_permute"})
    with pytest.raises(ConfigError, match="the installed HybridEPBuffer must have num_blocks_permute, got a version"):
        build_dispatcher(config({**HYBRID, "num_blocks_permute": 8}))


def test_fusion_needs_equal_chunks(variables: Setting) -> None:
    variables(NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API="128")
    text = r"fuse_permute needs equal chunks in all kernels, got 64 \(dispatch\), 64 \(combine\) and 128"
    with pytest.raises(ConfigError, match=text):
        build_dispatcher(config({**HYBRID, "fuse_permute": True}))


def test_numbers_can_be_overridden() -> None:
    overrides = {"row_multiple": 192, "max_rows": 400, "hidden_multiple": 128, "group_sizes": [1, 3]}
    given = config(HYBRID, hidden_size=128, constraints=overrides)
    dispatcher = build_dispatcher(given)
    assert dispatcher.plan(like=torch.zeros(5, 128)).sizes.padded_rows == 192
    with pytest.raises(InputError, match="at most 384 rows per rank fit"):
        dispatcher.plan(like=torch.zeros(401, 128))
    dispatcher.close()
    raises_everywhere(outcomes_on(lambda group: build_dispatcher(given, group), 2), ConfigError, "ep_size", "1, 3")


@pytest.mark.parametrize(("backend", "dtype"), [(HYBRID, torch.float32), (V2, torch.float64)], ids=["hybrid", "v2"])
def test_other_dtypes_are_refused_with_the_way_out(backend: dict[str, Any], dtype: torch.dtype) -> None:
    dispatcher = build_dispatcher(config(backend, wire=None))
    x, routing = torch.ones(4, 256, dtype=dtype), Routing(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    with pytest.raises(InputError, match=rf'x must be torch.bfloat16, got {dtype}. Set wire="bfloat16", or use'):
        dispatcher.dispatch(x, routing)
    sent = dispatcher.dispatch(x.bfloat16(), routing)
    assert dispatcher.combine(sent.rows.to(dtype), sent).dtype == torch.bfloat16
    with pytest.raises(InputError, match=rf"x must be torch.bfloat16, got {dtype}. Set wire="):
        dispatcher.dispatch(x, again=sent)
    dispatcher.close()
    wired = build_dispatcher(config(backend))
    assert wired.dispatch(x, routing).rows.dtype == dtype
    wired.close()


def test_where_deepep_is_graph_safe() -> None:
    """v1 within a node; v2 and V2.5 unless it has to sort what it can only find by asking the device."""
    across = deepep(shape(16, 8), emulate="v1.2.1")
    assert not across.graph_safe
    assert "only within a node, that is with up to 8 ranks, got 16" in across.graph_safe_reason
    for v2, where, options in [("v2-2.1.0", shape(16, 8), {}), ("v2.5.0", shape(8, 8), {"expand": True})]:
        assert not deepep(where, emulate=v2, **options).graph_safe
        assert deepep(where, emulate=v2, deterministic=False, **options).graph_safe


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
    assert reason(DeepEPOptions) == reason(HybridEPOptions) == "torch sees no accelerator"
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
    assert HybridEPOptions().probe() == Usable(version="of unknown version", features=("equal rows",))
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
    installed(HybridEPBuffer=type("HybridEPBuffer", (), {"__init__": Current.__init__}))
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
