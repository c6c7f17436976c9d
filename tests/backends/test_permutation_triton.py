"""Our Triton kernels without a GPU: run by Triton's interpreter, and compiled for the GPUs they are meant for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends.wire import WireDtype, packet_format, row_format
from moe_dispatch.capabilities.quantised.formats import FORMATS, Quantised
from moe_dispatch.capabilities.quantised.rows import as_bytes
from moe_dispatch.permutation.triton_rows import TritonPermutation
from moe_dispatch.seams.plug_ins import Rejected, Usable
from tests.backends.permutations import INTERPRETED
from tests.backends.tables import EXAMPLE

installed = pytest.importorskip("triton", reason="triton has wheels for Linux only")

ROOT = Path(__file__).parents[2]
SUITE = [f"tests/backends/test_{name}.py" for name in ("permutation_rows", "index_kernels", "quantised_kernels")]
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
POINTERS |= {torch.bool: "*i1", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32"}


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
        "triton or index_kernels or exact_kernels or quantised_kernels",
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
    assert int(passed.group(1)) > 60


needs_compiler = pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")


class Recorder:
    """Stands where a kernel stands, and keeps what it would have been launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < programs < 65536 for programs in grid[1:])
        return lambda *args, **options: self.launches.append((args, options))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A fresh cache of compiled kernels, in which the tests below find what others have compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


Record = Callable[..., dict[str, tuple[Any, Recorder]]]


@pytest.fixture
def record(cache: None, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Put recorders in the place of kernels of a module. Return both by name."""

    def put(module: Any, *names: str) -> dict[str, tuple[Any, Recorder]]:
        found = {name: (getattr(module, name), Recorder()) for name in names}
        for name, (_, recorder) in found.items():
            monkeypatch.setattr(module, name, recorder)
        return found

    return put


@pytest.fixture
def kernels(record: Record) -> dict[str, tuple[Any, Recorder]]:
    """By name, our kernels and the recorders put in their place."""
    from moe_dispatch.permutation import triton_kernels

    return record(
        triton_kernels, "gather_kernel", "scatter_kernel", "scatter_weighted_kernel", "weigh_kernel", "sum_bags_kernel"
    )


def launch_everything(rows_dtype: torch.dtype, out_dtype: torch.dtype, width: int) -> None:
    permutation, index = TritonPermutation(), EXAMPLE.index
    rows_SD, out = torch.zeros(4, width, dtype=rows_dtype), torch.zeros(4, width, dtype=out_dtype)
    rows_RD = torch.zeros(index.num_grouped, width, dtype=rows_dtype)
    weights_R = torch.ones(index.num_grouped)
    permutation.gather(rows_SD, index.source_R, torch.zeros(index.num_grouped, width, dtype=out_dtype))
    permutation.expand(rows_SD, index, out_dtype)
    is_real_R = weights_R > 0
    for weights in (None, weights_R):
        permutation.reduce(rows_RD, index, weights, out)
    for partners in (None, rows_RD):
        permutation.expand_weighted(rows_SD, index, weights_R, partners, out_dtype)
        clears = partners is not None
        permutation.weigh(rows_RD, weights_R, lambda: is_real_R, out_dtype, partners_RD=partners, clears=clears)


def compiled(kernel: Any, launch: tuple[tuple[Any, ...], dict[str, Any]], capability: int) -> Any:
    """As at a launch: None and 1 are constants, and what 16 divides is known to be so, unless it may change."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    args, options = launch
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = given[name]
        is_special = not kernel.params[at].do_not_specialize
        if name in options or value is None or (is_special and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS.get(value.dtype, "*i64") if isinstance(value, Tensor) else "i32"
        if is_special and (isinstance(value, Tensor) or value % 16 == 0):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiler_options = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(source, GPUTarget("cuda", capability, 32), compiler_options)


@needs_compiler
@pytest.mark.parametrize(
    ("rows_dtype", "out_dtype", "capability"),
    [
        (*PAIRS[0], 90),
        (*PAIRS[-1], 100),
        *(pytest.param(*pair, 90, marks=pytest.mark.slow) for pair in PAIRS[1:]),
        *(pytest.param(*PAIRS[at], 80, marks=pytest.mark.slow) for at in (0, -1)),
        pytest.param(*PAIRS[0], 100, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_compile_for_gpus(
    rows_dtype: torch.dtype, out_dtype: torch.dtype, capability: int, kernels: dict[str, tuple[Any, Recorder]]
) -> None:
    """With the arguments that our launchers give, to machine code, by the ptxas that triton brings."""
    launch_everything(rows_dtype, out_dtype, 4096)
    assert [len(recorder.launches) for _, recorder in kernels.values()] == [1, 1, 2, 2, 2]
    for kernel, recorder in kernels.values():
        for launch in recorder.launches:
            # Triton up to 3.9 fuses unless told otherwise; 3.9 warns where a launch leaves it to the default.
            assert launch[1]["enable_fp_fusion"] is False
            result = compiled(kernel, launch, capability)
            assert result.asm["cubin"]
            assert f".target sm_{capability}" in result.asm["ptx"]
            assert not re.search(r"\b(atom|red)\.", result.asm["ptx"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_exact_plans_compile_for_gpus(capability: int, record: Record) -> None:
    """For 64 ranks with 4 experts each, with as many spare slots and with fewer, exact and with a bound."""
    from moe_dispatch.capabilities.balance import triton_plan

    names = ("tally_kernel", "totals_kernel", "slots_kernel", "loads_kernel", "take_kernel", "split_kernel")
    found = record(triton_plan, *names)
    counts_PE = torch.zeros(64, 256, dtype=torch.int64)
    for spare, bound in ((4, None), (1, torch.ones((), dtype=torch.float64))):
        triton_plan.plan(counts_PE, 3, spare=spare, bound=bound, pad_multiple=16, per_node=8)
    ids_TK = torch.zeros(4096, 8, dtype=torch.int64)
    turns = triton_plan.counts_and_turns(ids_TK, 256)[1]
    triton_plan.slots_of(torch.zeros(256, 64).long(), torch.zeros(256, 64).long(), ids_TK, turns)
    for kernel, recorder in found.values():
        for launch in recorder.launches:
            assert f".target sm_{capability}" in compiled(kernel, launch, capability).asm["ptx"]


@needs_compiler
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_of_quantised_rows_compile_for_gpus(recipe: WireDtype, capability: int, record: Record) -> None:
    """With packets of real sizes. Rows, codes and widened rows are accessed 16 bytes at once."""
    from moe_dispatch.capabilities.quantised import triton_codes

    found = record(triton_codes, "quantise_kernel", "expand_kernel", "expand_weighted_kernel")
    rows, index, row = torch.zeros(4, 7168).bfloat16(), EXAMPLE.index, row_format(torch.bfloat16, 7168, recipe)
    form = packet_format(row, 8, torch.float32, torch.int16)
    packets = form.unpack(torch.zeros(4, form.stride, dtype=torch.uint8))[0]
    assert isinstance(packets, Quantised)
    triton_codes.quantise(rows, *as_bytes(packets), index.byrow_N, index.cu_S)
    for as_sent in (False, True):
        packets.expand(TritonPermutation(), index, torch.bfloat16, as_sent=as_sent)
    triton_codes.expand(*as_bytes(packets), rows)
    rows_RD, weights_R = torch.zeros(index.num_grouped, 7168).bfloat16(), torch.ones(index.num_grouped)
    packets.expand_weighted(TritonPermutation(), index, weights_R, rows_RD, torch.bfloat16, as_sent=False)
    of_scales = "b32" if recipe == "float8_e4m3fn" else "b8"
    launches = [(kernel, launch) for kernel, recorder in found.values() for launch in recorder.launches]
    assert len(launches) == 5
    for kernel, launch in launches:
        assert launch[1]["enable_fp_fusion"] is False
        result = compiled(kernel, launch, capability)
        ptx, code = result.asm["ptx"], result.asm["ttir"]
        assert result.asm["cubin"]
        assert f".target sm_{capability}" in ptx
        assert not re.search(r"\b(atom|red)\.|\.ftz|div\.full", ptx)
        assert ("fma.rn" in ptx) == ("partners" in kernel.arg_names)
        # Entries of tables are accessed one by one, and so are float32 weights and dot products.
        narrow = {"b64", of_scales, *(["b32"] if "weights" in kernel.arg_names else [])}
        assert set(re.findall(r"(?:ld|st)\.global\.(\S+)", ptx)) <= {"v4.b32", *narrow}
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        offsets = re.findall(r"tt\.addptr %\w+, (%\w+) : .*, (?:tensor<[\dx]+)?(i\d+)>? loc", code)
        assert {kind for offset, kind in offsets if offset != "%c1_i32"} == {"i64"}
        assert not re.search(r"arith\.muli .*: (?:tensor<[\dx]+)?i32", code)


@needs_compiler
@pytest.mark.parametrize("width", [4096, 4100])
def test_machine_code_is_what_the_docstrings_say(width: int, kernels: dict[str, tuple[Any, Recorder]]) -> None:
    """Rows times columns of real shapes exceed 2**31: no offset is a 32-bit product."""
    launch_everything(torch.bfloat16, torch.bfloat16, width)
    for name, (kernel, recorder) in kernels.items():
        for launch in recorder.launches:
            result = compiled(kernel, launch, 90)
            ptx, code = result.asm["ptx"], result.asm["ttir"]
            assert ("v4.b32" in ptx or "v2.b64" in ptx) == (width % 16 == 0)  # 16 bytes at once where rows allow it
            offsets = re.findall(r"tt\.addptr %\w+, (%\w+) : .*, (?:tensor<\d+x)?(i\d+)>? loc", code)
            assert {kind for offset, kind in offsets if offset != "%c1_i32"} == {"i64"}, name
            assert not re.search(r"arith\.muli .*: (?:tensor<\d+x)?i32", code), name
        if name == "sum_bags_kernel":
            assert "fma.rn.f32" in ptx
            assert "mul.f32" not in ptx


LONG = 8192  # rows of a rank, with 8 slots each


def places_of_ranks(tables: Any, size: int, pair_rows: int | None) -> None:
    counts = torch.zeros(size, 8, dtype=torch.int64)
    ids_TK = torch.zeros(LONG, 8, dtype=torch.int64)
    tables.send_places(ids_TK, 4, size, pair_rows=pair_rows, counts=counts, mark=counts[0, 0])


def groups_of_keys(tables: Any, num_keys: int, *, fixed: bool) -> None:
    keys_SK, rows = torch.zeros(2 * LONG + 1, 8, dtype=torch.int16), 16 * LONG + 8
    if fixed:
        sizes = {"rows": rows, "buffer_rows": rows + 16 * num_keys, "pad_multiple": 16}
        tables.group_statically(keys_SK, num_keys, weights_SK=None, **sizes)
    else:
        tables.group_slots(keys_SK, [rows, *[0] * (num_keys - 1)], 16)


@needs_compiler
@pytest.mark.parametrize(
    ("makes", "count"),
    [
        (places_of_ranks, 64),
        (groups_of_keys, 64),
        *(pytest.param(places_of_ranks, size, marks=pytest.mark.slow) for size in (1, 8, 32, 256, 1000)),
        *(pytest.param(groups_of_keys, size, marks=pytest.mark.slow) for size in (1, 8, 256, 1000)),
    ],
)
def test_tables_of_many_ranks_and_experts_fit_the_registers(makes: Any, count: int, record: Record) -> None:
    """A lane has 255 registers. What does not fit is spilled to memory."""
    from moe_dispatch.permutation import triton_tables

    ptxas = Path(installed.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip(f"this build of Triton has no ptxas at {ptxas.name}")
    names = ("count_kernel", "place_kernel", "pairs_kernel", "places_kernel", "running_kernel")
    found, most = record(triton_tables, *names), {"place_kernel": 224, "running_kernel": 80}
    if makes is places_of_ranks:
        for pair_rows in (None, LONG):
            places_of_ranks(triton_tables, count, pair_rows)
    else:
        for fixed in (False, True):
            groups_of_keys(triton_tables, count, fixed=fixed)
    launches = [(name, launch) for name, (_, recorder) in found.items() for launch in recorder.launches]
    many = makes is groups_of_keys or count >= 64
    assert len(launches) == (6 if many else 4)
    for name, launch in launches:
        ptx = compiled(found[name][0], launch, 90).asm["ptx"]
        command = [str(ptxas), "-arch=sm_90a", "-v", "-", "-o", os.devnull]
        told = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
        spilled, used = (
            int(re.findall(pattern, told)[0]) for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) reg")
        )
        assert spilled <= 32, f"{name} {launch[1]}"
        assert used <= most.get(name, 144), f"{name} {launch[1]}"


def narrow_accesses(dtype: torch.dtype, stride: int, kernels: dict[str, tuple[Any, Recorder]]) -> list[str]:
    """Return the accesses of less than 16 bytes at once to rows in packets of ``stride`` bytes, with their kernels."""
    permutation, index, row = TritonPermutation(), EXAMPLE.index, row_format(dtype, 4096)
    packets = torch.zeros(4, stride, dtype=torch.uint8)
    rows_SD, in_packets = torch.zeros(4, 4096, dtype=dtype), packets[:, : row.nbytes].view(dtype)
    rows_RD, weights_R = torch.zeros(index.num_grouped, 4096, dtype=dtype), torch.ones(index.num_grouped)
    edges = torch.arange(5)
    row.scatter(permutation, rows_SD, (edges[:4], edges[:4], edges), packets[:, : row.nbytes])
    permutation.scatter(packets, edges[:4], edges[:4], edges, packets.clone())
    permutation.expand(in_packets, index, dtype)
    permutation.reduce(rows_RD, index, None, in_packets)
    permutation.sum_bags(in_packets, edges[:4], edges, None, rows_SD)
    permutation.expand_weighted(in_packets, index, weights_R, rows_RD, dtype)
    found = []
    for name, (kernel, recorder) in kernels.items():
        for launch in recorder.launches:
            ptx = compiled(kernel, launch, 90).asm["ptx"]
            # Tables and weights are read number by number, of 32 and 64 bits, so that only 16-byte forms count here.
            wide = {kind for kind in ("ld", "st") if re.search(rf"{kind}\.global[.\w:]*\.(v4\.b32|v2\.b64)", ptx)}
            found += [f"{name} {kind}" for kind in ("ld", "st") if kind not in wide]
            found += [f"{name} {each}" for each in re.findall(r"(?:ld|st)\.global[.\w:]*?(?<!v4|v8)\.[bu]16", ptx)]
        recorder.launches.clear()
    return found


@needs_compiler
@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8, 10])
def test_rows_in_packets_are_accessed_in_16_bytes(top_k: int, kernels: dict[str, tuple[Any, Recorder]]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for ids, note in ((torch.int16, False), (torch.int16, True), (None, False)):
            form = packet_format(row_format(dtype, 4096), top_k, torch.float32, ids, note=note)
            assert narrow_accesses(dtype, form.stride, kernels) == []


@needs_compiler
def test_rows_in_packets_of_another_stride_are_accessed_narrowly(kernels: dict[str, tuple[Any, Recorder]]) -> None:
    """The stride that 6 slots had when packets were rounded to 4 bytes."""
    found = narrow_accesses(torch.bfloat16, 2 * 4096 + 6 * 6, kernels)
    assert {each.split()[0] for each in found} == {"scatter_kernel", "scatter_weighted_kernel", "sum_bags_kernel"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Pretend that torch sees a device of some compute capability, or none."""

    def put(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return put


def test_probe_reads_the_capability(device: Callable[[tuple[int, int] | None], None]) -> None:
    device(None)
    assert TritonPermutation.probe("cuda") == Rejected("torch sees no CUDA device")
    device((7, 5))
    assert TritonPermutation.probe("cuda") == Rejected("compute capability 8.0 or later is needed, got 7.5")
    for capability in ((8, 0), (12, 0)):
        device(capability)
        verdict = TritonPermutation.probe("cuda")
        assert isinstance(verdict, Usable)
        assert verdict.version.startswith("3.")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does run on a CPU")
def test_probe_on_a_cpu() -> None:
    told = "Triton's kernels run on CUDA devices, and on the CPU in its interpreter, got 'cpu'"
    assert TritonPermutation.probe("cpu") == Rejected(told)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "moe_dispatch.permutation.triton_kernels", raising=False)


def test_probe_tells_what_the_import_raised(without_triton: None) -> None:
    verdict = TritonPermutation.probe("cuda")
    assert isinstance(verdict, Rejected)
    assert verdict.reason.startswith("importing triton raised ModuleNotFoundError: ")
