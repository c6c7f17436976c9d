"""Permutations by name: an explicit one is honoured or refused, only "auto" may choose."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from moe_dispatch._probing import Rejected, Usable
from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.permutation import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.permutation.te_rows import TransformerEnginePermutation
from moe_dispatch.permutation.triton_rows import TritonPermutation


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    choose_permutation.cache_clear()
    yield
    choose_permutation.cache_clear()


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_known_names() -> None:
    assert known_permutations() == ["torch", "triton", "te"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_torch_is_always_usable(device_type: str) -> None:
    assert probe_permutation("torch", device_type) == Usable(version=torch.__version__)
    assert choose_permutation("torch", device_type).name == "torch"


def test_an_explicit_name_is_refused_with_the_reason(without_device: None) -> None:
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


def test_auto_is_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonPermutation, "probe", lambda device_type: pytest.fail("asked"))
    assert choose_permutation("auto", "cpu").name == "torch"


def test_auto_is_triton_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    monkeypatch.setattr(TritonPermutation, "probe", lambda device_type: Usable(version="3.7.1"))
    monkeypatch.setattr(TransformerEnginePermutation, "probe", lambda device_type: pytest.fail("asked"))
    assert choose_permutation("auto", "cuda").name == "triton"


def test_auto_says_once_why_it_is_not_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(TritonPermutation, "probe", lambda device_type: Rejected("there is none"))
    with caplog.at_level(logging.WARNING, "moe_dispatch"):
        first = choose_permutation("auto", "cuda")
        assert choose_permutation("auto", "cuda") is first
    assert first.name == "torch"
    assert caplog.messages == ["permutation=\"auto\": using 'torch', because 'triton' cannot be used: there is none."]
