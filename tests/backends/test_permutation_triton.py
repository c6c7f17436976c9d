"""Our Triton kernels without a GPU: run by Triton's interpreter, and compiled for the GPUs they are meant for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch._probing import Rejected, Usable
from moe_dispatch.permutation.triton_rows import TritonPermutation
from tests.backends.permutations import INTERPRETED
from tests.backends.tables import EXAMPLE

installed = pytest.importorskip("triton", reason="triton has wheels for Linux only")

ROOT = Path(__file__).parents[2]
SUITE = [f"tests/backends/test_{name}.py" for name in ("permutation_rows", "static_rows", "index_kernels")]
SUITE += ["tests/balance/test_exact_kernels.py"]
PAIRS = [  # dtypes of the rows that are read and of those that are written
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.bfloat16),
]
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}


@pytest.mark.slow
@pytest.mark.skipif(
    installed.__version__.startswith("3.6."), reason="Triton 3.6 cannot interpret our loops with numpy 2.4, as 3.7 can"
)
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it would start")
def test_interpreter_passes_the_suite() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets or compiles."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "triton or index_kernels or exact_kernels",
    ]
    finished = subprocess.run(
        [*command, *SUITE],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    passed = re.search(r"(\d+) passed, \d+ deselected in", finished.stdout)
    assert passed is not None, finished.stdout[-2000:]
    assert int(passed.group(1)) > 150


class Recorder:
    """Stands where a kernel stands, and keeps what it would have been launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < programs < 65536 for programs in grid[1:])
        return lambda *args, **options: self.launches.append((args, options))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, Recorder]]:
    """By name, our kernels and the recorders put in their place."""
    from moe_dispatch.permutation import triton_kernels

    found = {}
    for name in ("gather_kernel", "gather_weighted_kernel", "sum_bags_kernel"):
        found[name] = (getattr(triton_kernels, name), Recorder())
        monkeypatch.setattr(triton_kernels, name, found[name][1])
    return found


def launch_everything(rows_dtype: torch.dtype, out_dtype: torch.dtype, width: int) -> None:
    permutation, index = TritonPermutation(), EXAMPLE.index
    rows_SD, out = torch.zeros(4, width, dtype=rows_dtype), torch.zeros(4, width, dtype=out_dtype)
    rows_RD = torch.zeros(index.num_grouped, width, dtype=rows_dtype)
    weights_R = torch.ones(index.num_grouped)
    permutation.expand(rows_SD, index, out_dtype)
    for weights in (None, weights_R):
        permutation.reduce(rows_RD, index, weights, out)
    for partners in (None, rows_RD):
        permutation.expand_weighted(rows_SD, index, weights_R, partners, out_dtype)


def compiled(kernel: Any, launch: tuple[tuple[Any, ...], dict[str, Any]], capability: int) -> Any:
    """As at a launch: what is None or 1 is a constant, and what 16 divides is known to be so."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    args, options = launch
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = given[name]
        if name in options or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS.get(value.dtype, "*i64") if isinstance(value, Tensor) else "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiler_options = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(source, GPUTarget("cuda", capability, 32), compiler_options)


@pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")
@pytest.mark.parametrize(
    ("rows_dtype", "out_dtype", "capability"),
    [*((*pair, 90) for pair in PAIRS), *((*PAIRS[at], capability) for at in (0, -1) for capability in (80, 100))],
    ids=str,
)
def test_kernels_compile_for_gpus(
    rows_dtype: torch.dtype,
    out_dtype: torch.dtype,
    capability: int,
    kernels: dict[str, tuple[Any, Recorder]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With the arguments that our launchers give, to machine code, by the ptxas that triton brings."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch_everything(rows_dtype, out_dtype, 4096)
    assert [len(recorder.launches) for _, recorder in kernels.values()] == [1, 2, 2]
    for kernel, recorder in kernels.values():
        for launch in recorder.launches:
            result = compiled(kernel, launch, capability)
            assert result.asm["cubin"]
            assert f".target sm_{capability}" in result.asm["ptx"]
            assert not re.search(r"\b(atom|red)\.", result.asm["ptx"])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_exact_plans_compile_for_gpus(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For 64 ranks with 4 experts each, with as many spare slots and with fewer, exact and with a bound."""
    from moe_dispatch.balance import triton_plan

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ("turns_kernel", "slots_kernel", "loads_kernel", "ranks_kernel", "copies_kernel", "split_kernel")
    found = {name: (getattr(triton_plan, name), Recorder()) for name in names}
    for name, (_, recorder) in found.items():
        monkeypatch.setattr(triton_plan, name, recorder)
    counts_PE = torch.zeros(64, 256, dtype=torch.int64)
    for spare, bound in ((4, None), (1, torch.ones((), dtype=torch.float64))):
        triton_plan.plan(counts_PE, 3, spare=spare, bound=bound, pad_multiple=16, per_node=8)
    ids_TK = torch.zeros(4096, 8, dtype=torch.int64)
    turns_TK = triton_plan.counts_and_turns(ids_TK, 256)[1]
    triton_plan.slots_of(torch.zeros(256, 64).long(), torch.zeros(256, 64).long(), ids_TK, turns_TK)
    for kernel, recorder in found.values():
        for launch in recorder.launches:
            assert f".target sm_{capability}" in compiled(kernel, launch, capability).asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")
@pytest.mark.parametrize("width", [4096, 4100])
def test_machine_code_is_what_the_docstrings_say(width: int, kernels: dict[str, tuple[Any, Recorder]]) -> None:
    launch_everything(torch.bfloat16, torch.bfloat16, width)
    ptx = {
        name: [compiled(kernel, launch, 90).asm["ptx"] for launch in recorder.launches]
        for name, (kernel, recorder) in kernels.items()
    }
    weighted = ptx["sum_bags_kernel"][1]
    assert "fma.rn.f32" in weighted
    assert "mul.f32" not in weighted
    for text in (text for texts in ptx.values() for text in texts):
        assert ("v4.b32" in text or "v2.b64" in text) == (width % 16 == 0)  # 16 bytes at once where rows allow it


@pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")
def test_memory_offsets_are_64_bits_wide(kernels: dict[str, tuple[Any, Recorder]]) -> None:
    """Rows times columns of real shapes exceed 2**31: no offset is a 32-bit product."""
    launch_everything(torch.bfloat16, torch.bfloat16, 4100)
    for kernel, recorder in kernels.values():
        for launch in recorder.launches:
            code = compiled(kernel, launch, 90).asm["ttir"]
            offsets = re.findall(r"tt\.addptr %\w+, (%\w+) : .*, (?:tensor<\d+x)?(i\d+)>? loc", code)
            assert {kind for name, kind in offsets if name != "%c1_i32"} == {"i64"}, kernel.__name__
            assert not re.search(r"arith\.muli .*: (?:tensor<\d+x)?i32", code), kernel.__name__


def test_only_tl_fma_fuses(kernels: dict[str, tuple[Any, Recorder]]) -> None:
    """Triton up to 3.9 fuses unless told otherwise; 3.9 warns where a launch leaves it to the default."""
    launch_everything(torch.bfloat16, torch.float32, 4096)
    launches = [launch for _, recorder in kernels.values() for launch in recorder.launches]
    assert [options["enable_fp_fusion"] for _, options in launches] == [False] * 5


@pytest.mark.parametrize(
    ("device_type", "reason"),
    [
        ("cuda", "torch sees no CUDA device"),
        pytest.param(
            "cpu",
            "Triton's kernels run on CUDA devices, and on the CPU in its interpreter, got 'cpu'",
            marks=pytest.mark.skipif(INTERPRETED, reason="the interpreter does run on a CPU"),
        ),
    ],
)
def test_probe_without_a_device(device_type: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TritonPermutation.probe(device_type) == Rejected(reason)


@pytest.mark.parametrize(("capability", "usable"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_probe_reads_the_capability(capability: tuple[int, int], usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    verdict = TritonPermutation.probe("cuda")
    if usable:
        assert isinstance(verdict, Usable)
        assert verdict.version.startswith("3.")
    else:
        assert verdict == Rejected("compute capability 8.0 or later is needed, got 7.5")


def test_probe_tells_what_the_import_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "moe_dispatch.permutation.triton_kernels", raising=False)
    verdict = TritonPermutation.probe("cuda")
    assert isinstance(verdict, Rejected)
    assert verdict.reason.startswith("importing triton raised ModuleNotFoundError: ")
