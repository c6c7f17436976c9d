"""Libraries that install ``deep_ep`` with the class of v1: how they are named, and what is theirs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.backends import MoEShape, Rejected, Usable
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.backends.deep_ep.library import Library
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import run_ranks
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.dispatchers.layer import Group

UCCL, ROCM = "uccl-da914a2", "rocm-92b4ae1"
NAMES = {UCCL: "UCCL-EP", ROCM: "ROCm DeepEP"}
IN_NODE = {2, 4, 8}


def shape(ep_size: int = 8) -> MoEShape:
    return MoEShape(
        num_experts=4 * ep_size, top_k=2, hidden_size=256, ep_size=ep_size, pad_multiple=1, ranks_per_node=8
    )


def config(release: str, ep_size: int, **fields: Any) -> DispatcherConfig:
    backend = {"name": "deepep", "emulate": release, "ranks_per_node": 8}
    return DispatcherConfig(backend=backend, num_experts=2 * ep_size, top_k=2, hidden_size=256, **fields)


@pytest.mark.parametrize(
    ("release", "across"), [(UCCL, {16, 24, 32, 64, 128}), (ROCM, {16, 32, 64, 128})], ids=NAMES.values()
)
def test_group_sizes_are_those_with_kernels(release: Any, across: set[int]) -> None:
    assert DeepEPOptions(emulate=release).constraints(shape()).group_sizes == frozenset(IN_NODE | across)


def test_24_ranks_are_for_uccl_only() -> None:
    """Each rank sends each of its rows to two other nodes, and gets twice its rows back."""

    def body(group: Group) -> bool:
        dispatcher = build_dispatcher(config(UCCL, 24), group)
        x = torch.full((3, 256), float(group.rank())).bfloat16()
        ids = (2 * group.rank() + torch.tensor([[16, 32]] * 3)) % 48
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(3, 2)), Rows())
        y = dispatcher.combine(sent.rows, sent)
        dispatcher.close()
        return bool((y == 2 * x).all())

    assert run_ranks(body, 24) == [True] * 24
    others: list[Any] = ["v1.2.1", ROCM]
    for release in others:
        sizes = DeepEPOptions(emulate=release).constraints(shape(24)).group_sizes
        assert sizes is not None
        assert 24 not in sizes


@pytest.mark.parametrize("release", NAMES)
def test_the_log_names_what_was_found(release: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="moe_dispatch")
    run_ranks(lambda group: build_dispatcher(config(release, 2), group).close(), 2)
    assert f"backend 'deepep': {NAMES[release]} {release}, 2 ranks, 8 ranks per node (configured)" in caplog.text


def installed(monkeypatch: pytest.MonkeyPatch, release: str, **given: Any) -> None:
    module = emulated_deep_ep(release)
    found = Library(module=module, version="0.1.0", emulated=False, is_rocm=release == ROCM, **given)
    monkeypatch.setattr(library, "find_library", lambda release: found)


@pytest.mark.parametrize("release", NAMES)
def test_probe_and_refusals_name_what_was_found(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``doctor`` shows the probe."""
    installed(monkeypatch, release)
    version = f"{NAMES[release]} 0.1.0"
    assert DeepEPOptions().probe() == Usable(version=version, features=("v1", "normal mode"))
    refused = HybridEPOptions().probe()
    assert isinstance(refused, Rejected)
    assert refused.reason == f"{version} has no HybridEPBuffer: it is not built from the branch hybrid-ep"


def test_float8_of_mi300_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its float8 is another format. MI350 has that of NVIDIA."""
    installed(monkeypatch, ROCM)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    for arch, wire_dtypes in (
        ("gfx942:sramecc+:xnack-", {"bfloat16"}),
        ("gfx950:sramecc+:xnack-", {"bfloat16", "float8_e4m3fn", "mxfp8"}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda arch=arch: SimpleNamespace(gcnArchName=arch))
        assert DeepEPOptions().constraints(shape()).wire.dtypes == wire_dtypes


def test_another_accelerator_is_not_refused_because_it_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    monkeypatch.setattr(library, "import_whole", lambda name, package: emulated_deep_ep("v1.2.1"))
    monkeypatch.setattr(library, "version", lambda name: "1.1.0+xpu")
    assert library.find_library(None) == Rejected("torch sees no accelerator")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    found = library.find_library(None)
    assert isinstance(found, Library)
    assert (found.device, found.named) == ("xpu", "deep_ep 1.1.0+xpu")
    assert DeepEPOptions().constraints(shape()).devices == frozenset({"xpu"})


def test_a_torch_for_rocm_is_not_asked_for_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    monkeypatch.setattr(library, "import_whole", lambda name, package: emulated_deep_ep(ROCM))
    monkeypatch.setattr(library, "version", lambda name: "1.2.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.version, "hip", "7.1")
    found = library.find_library(None)
    assert isinstance(found, Library)
    assert (found.device, found.named) == ("cuda", "ROCm DeepEP 1.2.1")


def test_a_size_without_kernels_is_refused() -> None:
    backend = {"name": "deepep", "emulate": UCCL, "ranks_per_node": 3}
    with pytest.raises(ConfigError, match=r"ep_size must be one of 2, 4, 8, 16, 24, 32, 64, 128, got 3"):
        run_ranks(lambda group: build_dispatcher(config(UCCL, 3).replace(backend=backend), group), 3)
