"""A kernel that remembers what Triton compiled launches what Triton would launch for the same arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from moe_dispatch.permutation import triton_launch
from moe_dispatch.permutation.triton_launch import Kernel
from tests.simulated_cuda import host_time
from tests.simulated_cuda.device import recorded

SIZES = {"do_not_specialize": ["count"]}


def sum_kernel(values, other, out, count, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, block)
    found = tl.load(values + at) + count + stride
    if other is not None:
        found += tl.load(other + at)
    tl.store(out + at, found)


def launches() -> list[tuple[tuple[Any, ...], dict[str, int]]]:
    """Return arguments of every kind that Triton compiles anew for, and some of the same kind."""
    one, double = torch.zeros(64, device="cuda:0"), torch.zeros(64, dtype=torch.float64, device="cuda:0")
    with torch.cuda.device(1):
        two = torch.zeros(64, device="cuda")
    given: list[tuple[Any, ...]] = [(each, None, one, 8, 3) for each in (one, double, one[1:], one[4:], one.long())]
    given += [(one, one, one, 8, 3), (one, one[1:], one, 8, 3), (two, None, two, 8, 3), (two, None, two[1:], 8, 3)]
    given += [(one, None, one, count, 3) for count in (1, 16, 17, 2**31, 2**40)]
    given += [(one, None, one, 8, stride) for stride in (1, 2, 16, 2**31, 2**32)]
    options = [{"block": 16, "num_warps": 4}, {"block": 32, "num_warps": 4}, {"block": 16, "num_warps": 2}]
    return [(args, options[0]) for args in given] + [(given[0], each) for each in options[1:]]


def test_arguments_of_each_kind_get_what_triton_compiles_for_them() -> None:
    kernel, reference, found = Kernel(sum_kernel, **SIZES), JITFunction(sum_kernel, **SIZES), []
    for _ in range(2):
        for number, (args, options) in enumerate(launches()):
            with recorded() as records, torch.cuda.device(number % 2):
                compiled = kernel[(1,)](*args, **options)
            assert [(each.kind, each.device) for each in records] == [("kernel", args[0].get_device())]
            with torch.cuda.device_of(args[0]):
                expected = JITFunction.run(reference, *args, grid=(1,), warmup=False, **options)
            found.append((compiled, expected))
    numbers = [[column.index(each) for each in column] for column in zip(*found, strict=True)]
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 14


def test_results_are_those_of_the_arguments_of_each_launch() -> None:
    kernel, out = Kernel(sum_kernel, **SIZES), torch.empty(16, device="cuda")
    for count in (1, 2, 5):
        kernel[(1,)](torch.full((16,), 10.0, device="cuda"), None, out, count, 3, block=16)
        assert out.tolist() == [13.0 + count] * 16
    assert len(kernel._known) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_profilers_are_called(name: str) -> None:
    """What Triton compiles meanwhile may be other code, so it is not remembered."""
    kernel, out, names = Kernel(sum_kernel, **SIZES), torch.empty(16, device="cuda"), list[str]()
    kernel[(1,)](out, None, out, 1, 3, block=16)
    hooks, hook = getattr(triton.knobs.runtime, name), lambda metadata: names.append(metadata.get()["name"])
    hooks.add(hook)
    try:
        for stride in (3, 5):
            kernel[(1,)](out, None, out, 1, stride, block=16)
    finally:
        hooks.remove(hook)
    kernel[(1,)](out, None, out, 1, 3, block=16)
    assert names == ["sum_kernel", "sum_kernel"]
    assert len(kernel._known) == 1


def test_hooks_before_each_run_are_called() -> None:
    kernel, out, strides = Kernel(sum_kernel, **SIZES), torch.empty(16, device="cuda"), list[int]()
    kernel[(1,)](out, None, out, 1, 3, block=16)
    kernel.add_pre_run_hook(lambda *args, **_: strides.append(args[4]))
    kernel[(1,)](out, None, out, 1, 3, block=16)
    assert strides == [3]


def test_memory_of_kinds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_MOST", 3)
    kernel, out = Kernel(sum_kernel, **SIZES), torch.empty(16, device="cuda")
    for stride in range(2, 12):
        kernel[(1,)](out, None, out, 1, stride, block=16)
        assert 0 < len(kernel._known) <= 3


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0"])
def test_other_versions_of_triton_launch_by_themselves(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    kernel, out = Kernel(sum_kernel, **SIZES), torch.empty(16, device="cuda")
    for count in (1, 2):
        kernel[(1,)](torch.zeros(16, device="cuda"), None, out, count, 3, block=16)
        assert out.tolist() == [3.0 + count] * 16
    assert not kernel._known


def test_host_time_of_two_checkouts_is_told_by_verb() -> None:
    command = [sys.executable, host_time.__file__, str(host_time.ROOT), "--rows", "8", "--turns", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
    assert [line.partition(":")[0] for line in told] == [*host_time.VERBS]
