"""Which implementation of the reorder is chosen, and when one is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.permutation import choose_permutation, known_permutations, probe_permutation
from moe_dispatch.permutation.triton_rows import TritonPermutation
from moe_dispatch.seams.plug_ins import Rejected, Usable

Verdict = Usable | Rejected


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    choose_permutation.cache_clear()
    yield
    choose_permutation.cache_clear()


Probes = Callable[[Verdict | None], None]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    """Decide what the probe of Triton finds. None must not be asked."""

    def put(verdict: Verdict | None) -> None:
        found = (lambda _: pytest.fail("asked")) if verdict is None else (lambda _: verdict)
        monkeypatch.setattr(TritonPermutation, "probe", found)

    return put


def test_known_names() -> None:
    assert known_permutations() == ["torch", "triton"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_torch_is_always_usable(device_type: str) -> None:
    assert probe_permutation("torch", device_type) == Usable(version=torch.__version__)
    assert choose_permutation("torch", device_type).name == "torch"


def test_an_explicit_name_is_refused_with_the_reason(probes: Probes) -> None:
    probes(Rejected("torch sees no CUDA device"))
    with pytest.raises(
        BackendUnavailableError,
        match=r"^Permutation 'triton' cannot be used here: torch sees no CUDA device\. "
        r"Repair that, or choose one of: auto, torch\.$",
    ):
        choose_permutation("triton", "cuda")


def test_an_unknown_name_is_refused() -> None:
    known = r"Known permutations: auto, torch, triton\."
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
