"""What ``nccl_ep`` asks of a machine, and how it says what is missing. Its calls: tests/integration/nccl_ep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from moe_dispatch.backends import MoEShape, Rejected
from moe_dispatch.backends.nccl_ep import library
from moe_dispatch.backends.nccl_ep.backend import NcclEPOptions, _check_group
from moe_dispatch.backends.nccl_ep.library import NAMES, find_library, unusable
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.ranks import thread_group

RECORDED = json.loads(Path(__file__).with_name("nccl_ep_signatures.json").read_text())
BUILT = SimpleNamespace(ep_initialize=None)


def module(**without: str) -> Any:
    """A module with the recorded signatures, but for a parameter of each function that is named."""

    def function(name: str, parameters: dict[str, str | None]) -> Any:
        left = [one for one in parameters if one != without.get(name)]
        return eval(f"lambda {', '.join(left)}: None")

    return SimpleNamespace(**{name: function(name, given) for name, given in RECORDED["parameters"].items()})


def test_every_parameter_that_is_given_was_recorded() -> None:
    for name, needed in NAMES.items():
        assert set(needed) <= RECORDED["parameters"][name].keys()
    assert RECORDED["parameters"]["EpBuffer"]["recv_capacity_per_rank"] == "None"


@pytest.mark.parametrize(
    ("built", "ep", "nccl", "reason"),
    [
        (BUILT, module(), (2, 30, 4), None),
        (BUILT, module(), None, None),
        (BUILT, None, None, "transformer-engine 2.12.0 has no transformer_engine.pytorch.ep; install 2.20 or later"),
        (
            SimpleNamespace(),
            module(),
            None,
            "transformer-engine 2.12.0 is built without NCCL EP; build it from source with NVTE_WITH_NCCL_EP=1",
        ),
        (
            BUILT,
            module(ep_bootstrap="drop_on_overflow"),
            None,
            "transformer-engine 2.12.0 lacks the parameter drop_on_overflow of "
            "transformer_engine.pytorch.ep.ep_bootstrap; install 2.20 or later",
        ),
        (
            BUILT,
            SimpleNamespace(**{"ep_bootstrap": module().ep_bootstrap}),
            None,
            "transformer-engine 2.12.0 lacks ep_finalize of transformer_engine.pytorch.ep; install 2.20 or later",
        ),
        (
            BUILT,
            module(),
            (2, 29, 7),
            'NCCL EP needs NCCL 2.30.4 or later, got 2.29.7; run pip install "nvidia-nccl-cu13>=2.30.4" --no-deps',
        ),
    ],
)
def test_what_is_missing_is_said_with_the_way_out(built: Any, ep: Any, nccl: Any, reason: str | None) -> None:
    assert unusable("2.12.0", built, ep, nccl) == reason


@pytest.fixture(autouse=True)
def looked_up_anew() -> None:
    find_library.cache_clear()


def reason() -> str:
    verdict = NcclEPOptions().probe()
    find_library.cache_clear()
    assert isinstance(verdict, Rejected)
    return verdict.reason


def test_a_machine_that_cannot_run_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*names: str) -> None:
        raise OSError("libtransformer_engine.so: cannot open shared object file\n")

    assert reason() == "no module named 'transformer_engine' is installed"
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    assert reason() == "torch sees no CUDA device"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert reason() == "NCCL EP needs compute capability 9.0, this device has 8.0"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(library, "import_whole", broken)
    assert reason() == (
        "importing 'transformer_engine' raised OSError: libtransformer_engine.so: cannot open shared object file"
    )


def test_padding_that_is_no_power_of_two_is_refused_before_anything_is_installed() -> None:
    shape = MoEShape(num_experts=8, top_k=2, hidden_size=64, ep_size=2, pad_multiple=24)
    with pytest.raises(ConfigError, match=r"pad_multiple must be a power of two, got 24\. Use 32, or another backend"):
        NcclEPOptions().constraints(shape)


class NCCL:
    """What is asked of ProcessGroupNCCL."""

    def _comm_ptr(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (None, "needs a process group over NCCL, whose communicator it borrows, got None"),
        (thread_group(HashStore(), 0, 1), "borrows, got one without CUDA. Pass group=, made by"),
        (SimpleNamespace(_get_backend=lambda device: object(), bound_device_id=None), "borrows, got object"),
        (
            SimpleNamespace(_get_backend=lambda device: NCCL(), bound_device_id=torch.device("cuda:1")),
            r"must be that of the group, cuda:1, got cuda:0\. Call torch.cuda.set_device",
        ),
        (SimpleNamespace(_get_backend=lambda device: NCCL(), bound_device_id=torch.device("cuda:0")), None),
        (SimpleNamespace(_get_backend=lambda device: NCCL(), bound_device_id=None), None),
    ],
)
def test_a_group_must_be_over_nccl_and_on_the_current_device(
    group: Any, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if told is None:
        _check_group(group)
        return
    with pytest.raises(ConfigError, match=told):
        _check_group(group)
