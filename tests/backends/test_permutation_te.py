"""How transformer-engine's kernels are called and when not, against a stand-in with their recorded arguments."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_dispatch._probing import Rejected, Usable
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.permutation import (
    TorchPermutation,
    choose_permutation,
    group_slots,
    known_permutations,
    probe_permutation,
    te_rows,
)
from moe_dispatch.permutation.te_rows import TransformerEnginePermutation, kernels_of, layout_problem, row_map
from moe_dispatch.permutation.triton_rows import TritonPermutation
from tests.backends.tables import EXAMPLE, FLOATS, rows_of
from tests.backends.te_stand_in import RECORDED, VERSIONS, stand_in

LATEST = VERSIONS[-1]
PERMUTE, UNPERMUTE = "permute_with_mask_map", "unpermute_with_mask_map"
BACKWARD = "unpermute_with_mask_map_bwd_with_merging_probs"
CPU = torch.device("cpu")


def recorded(version: str = LATEST) -> tuple[TransformerEnginePermutation, list[str]]:
    module, calls = stand_in(version)
    return TransformerEnginePermutation(kernels_of(module, version)), calls


def test_row_map_of_an_example() -> None:
    """Row by row: grouped positions in slot order, from column 2 their slots, how many; between them anything."""
    table = row_map(EXAMPLE.index)
    assert table.dtype == torch.int32
    found = [(row[: row[-1]], row[2 : 2 + row[-1]]) for row in table.tolist()]
    assert found == [([4, 0], [0, 1]), ([5], [1]), ([], []), ([8, 6], [0, 1])]


@pytest.mark.parametrize("dtype", FLOATS)
def test_their_kernels_are_used_but_for_float64(dtype: torch.dtype) -> None:
    index = EXAMPLE.index
    for version in VERSIONS:
        permutation, calls = recorded(version)
        permutation.expand(rows_of(4), index, dtype)
        permutation.reduce(rows_of(index.num_grouped, dtype=dtype), index, None, torch.empty(4, 6, dtype=dtype))
        assert calls == ([] if dtype == torch.float64 else [PERMUTE, UNPERMUTE])


@pytest.mark.parametrize(("version", "used"), [(version, version == "2.20.2") for version in VERSIONS])
def test_their_backward_is_used_from_the_version_that_orders_it(version: str, used: bool) -> None:
    permutation, calls = recorded(version)
    index = EXAMPLE.index
    rows_RD, weights_R = rows_of(index.num_grouped), torch.ones(index.num_grouped)
    permutation.expand_weighted(rows_of(4), index, weights_R, rows_RD, torch.float32)
    assert calls == []  # under deterministic algorithms, as all tests run
    torch.use_deterministic_algorithms(False)
    permutation.expand_weighted(rows_of(4), index, weights_R, rows_RD, torch.float32)
    assert calls == ([BACKWARD] if used else [])


@pytest.mark.parametrize(
    ("version", "ordered"),
    [("2.19.0", False), ("2.20.0+4f1e", True), ("2.20", True), ("3.0.0rc1", True), ("unknown", False)],
)
def test_versions_in_the_forms_they_take(version: str, ordered: bool) -> None:
    assert kernels_of(stand_in(LATEST)[0], version).orders_zeroing == ordered


def test_what_they_would_round_twice_is_torchs() -> None:
    torch.use_deterministic_algorithms(False)
    permutation, calls = recorded()
    index = EXAMPLE.index
    rows_RD, weights_R = rows_of(index.num_grouped, dtype=torch.bfloat16), torch.full((index.num_grouped,), 0.3)
    wide = torch.empty(4, 6)
    permutation.reduce(rows_RD, index, weights_R, wide)
    grad_RD, _ = permutation.expand_weighted(rows_of(4), index, weights_R, rows_RD, torch.bfloat16)
    assert torch.equal(
        grad_RD, TorchPermutation().expand_weighted(rows_of(4), index, weights_R, None, grad_RD.dtype)[0]
    )
    assert not torch.equal(wide, wide.bfloat16().float())
    assert calls == []


def test_a_row_may_name_a_key_twice() -> None:
    """What their own tables cannot say: here the keys are ranks."""
    index = group_slots(torch.tensor([[1, 1, 0], [0, -1, 0]]), [3, 2])
    rows_RD, out = rows_of(5), torch.empty(2, 6)
    permutation, calls = recorded()
    permutation.reduce(rows_RD, index, None, out)
    torch.testing.assert_close(out, torch.stack((rows_RD[3] + rows_RD[4] + rows_RD[0], rows_RD[1] + rows_RD[2])))
    assert calls == [UNPERMUTE]


def test_stand_in_refuses_other_arguments() -> None:
    """Or the adapter's tests would prove nothing."""
    older, newer = stand_in("2.10.0")[0], stand_in("2.12.0")[0]
    table, rows_RD = row_map(EXAMPLE.index), rows_of(EXAMPLE.index.num_grouped)
    with pytest.raises(TypeError, match="pad_offsets"):
        older.unpermute_with_mask_map(rows_RD, table, None, None, None, 4, 2, pad_offsets=None)
    with pytest.raises(TypeError, match="missing a required argument: 'hidden_size'"):
        newer.unpermute_with_mask_map(rows_RD, table, None, None, 4, 2, 6)


def test_arguments_of_another_version_are_refused() -> None:
    module = stand_in(LATEST)[0]
    module.permute_with_mask_map = lambda inp, row_id_map, stream: None  # type: ignore[attr-defined]
    with pytest.raises(
        BackendUnavailableError,
        match=r"^transformer-engine 9.9: permute_with_mask_map must take \(inp, row_id_map, .*\), "
        r"got \(inp, row_id_map, stream\)\. Install a version from 2\.10 to 2\.20\.$",
    ):
        kernels_of(module, "9.9")


@pytest.mark.parametrize("version", VERSIONS)
def test_layout_of_their_table_is_known(version: str) -> None:
    assert layout_problem(kernels_of(stand_in(version)[0], version), CPU) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table[:, :-1],
        lambda table: table.roll(1, 1),
        lambda table: torch.cat((table[:, 3:6], table[:, :3], table[:, 6:]), 1),
    ],
    ids=["narrower", "count first", "experts first"],
)
def test_another_layout_of_their_table_is_noticed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    kernels = kernels_of(stand_in(LATEST)[0], LATEST)
    make_map = kernels.functions["make_row_id_map"]
    kernels.functions["make_row_id_map"] = lambda **arguments: change(make_map(**arguments))
    problem = layout_problem(kernels, CPU)
    assert problem is not None
    assert problem.startswith(f"transformer-engine {LATEST}: its table of positions must hold [{{0: 0, 2: 3}}, {{}}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device to ask about, whose tables are made on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(te_rows, "layout_problem", lambda kernels, device: layout_problem(kernels, CPU))


@pytest.fixture
def installed(cuda: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package transformer_engine whose kernels are the stand-in's, which are returned."""
    package, kernels = ModuleType("transformer_engine"), stand_in(LATEST)[0]
    package.__version__ = LATEST  # type: ignore[attr-defined]
    modules = {"transformer_engine": package, RECORDED["module"]: kernels}
    for name in ("transformer_engine.pytorch", "transformer_engine.pytorch.triton"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kernels


def test_probe_of_an_installed_package(installed: Any) -> None:
    assert TransformerEnginePermutation.probe("cuda") == Usable(version=LATEST)
    rows_SD, index = rows_of(4), EXAMPLE.index
    found = TransformerEnginePermutation().expand(rows_SD, index, torch.float32)
    assert torch.equal(found, TorchPermutation().expand(rows_SD, index, torch.float32))
    make_map = installed.make_row_id_map
    installed.make_row_id_map = lambda routing_map, num_tokens, num_experts: make_map(
        routing_map, num_tokens, num_experts
    ).roll(1, 1)
    verdict = TransformerEnginePermutation.probe("cuda")
    assert isinstance(verdict, Rejected)
    assert "its table of positions must hold" in verdict.reason
    del installed.permute_with_mask_map
    verdict = TransformerEnginePermutation.probe("cuda")
    assert isinstance(verdict, Rejected)
    assert "permute_with_mask_map must take" in verdict.reason


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed transformer_engine, whose parts tests write."""
    folder = tmp_path / "transformer_engine"
    (folder / "pytorch").mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = '2.20.2'")
    (folder / "common.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize("error", [AssertionError, FileNotFoundError])
def test_probe_takes_whatever_their_import_raises(error: type[Exception], package: Path, cuda: None) -> None:
    """And leaves nothing of a package that came in half."""
    (package / "pytorch" / "__init__.py").write_text(
        f"import transformer_engine.common\nraise {error.__name__}('no libcudart.so')"
    )
    verdict = TransformerEnginePermutation.probe("cuda")
    assert verdict == Rejected(f"loading transformer-engine raised {error.__name__}: no libcudart.so")
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("device_type", "reason"),
    [
        ("cpu", "transformer-engine's kernels run on CUDA devices only, got 'cpu'"),
        ("cuda", "torch sees no CUDA device"),
    ],
)
def test_probe_imports_nothing_without_a_device(device_type: str, reason: str, package: Path) -> None:
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    assert TransformerEnginePermutation.probe(device_type) == Rejected(reason)


Verdict = Usable | Rejected


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    choose_permutation.cache_clear()
    yield
    choose_permutation.cache_clear()


Probes = Callable[..., None]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    """Decide what the probes of Triton and transformer-engine find. None must not be asked."""

    def put(triton: Verdict | None, te: Verdict | None = None) -> None:
        for implementation, verdict in ((TritonPermutation, triton), (TransformerEnginePermutation, te)):
            found = (lambda _: pytest.fail("asked")) if verdict is None else (lambda _, verdict=verdict: verdict)
            monkeypatch.setattr(implementation, "probe", found)

    return put


def test_known_names() -> None:
    assert known_permutations() == ["torch", "triton", "te"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_torch_is_always_usable(device_type: str) -> None:
    assert probe_permutation("torch", device_type) == Usable(version=torch.__version__)
    assert choose_permutation("torch", device_type).name == "torch"


def test_an_explicit_name_is_refused_with_the_reason(probes: Probes) -> None:
    probes(Rejected("there is none"), Rejected("torch sees no CUDA device"))
    with pytest.raises(
        BackendUnavailableError,
        match=r"^Permutation 'te' cannot be used here: torch sees no CUDA device\. "
        r"Repair that, or choose one of: auto, torch\.$",
    ):
        choose_permutation("te", "cuda")


def test_an_unknown_name_is_refused() -> None:
    known = r"Known permutations: auto, torch, triton, te\."
    with pytest.raises(ConfigError, match=rf"^Unknown permutation 'trition'\. {known} Did you mean 'triton'\?$"):
        choose_permutation("trition", "cpu")


def test_auto_is_torch_on_a_cpu_and_triton_on_a_gpu(probes: Probes) -> None:
    probes(None)
    assert choose_permutation("auto", "cpu").name == "torch"
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    probes(Usable(version="3.7.1"))
    assert choose_permutation("auto", "cuda").name == "triton"


def test_auto_says_once_why_it_is_not_triton(probes: Probes, caplog: pytest.LogCaptureFixture) -> None:
    probes(Rejected("there is none"))
    with caplog.at_level(logging.WARNING, "moe_dispatch"):
        first = choose_permutation("auto", "cuda")
        assert choose_permutation("auto", "cuda") is first
    assert first.name == "torch"
    assert caplog.messages == ["permutation=\"auto\": using 'torch', because 'triton' cannot be used: there is none."]
