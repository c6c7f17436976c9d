"""What a first run on the real libraries meets: stand-ins of what each library does, and that the backends cope."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import build_dispatcher
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.emulation import EmulatedAbort, emulated_deep_ep
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25, config, identity, identity_and_close, rank_of
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing

Patch = pytest.MonkeyPatch


@pytest.fixture
def no_network_cards(monkeypatch: Patch) -> None:
    """A machine whose network cards no GPU can drive. The library then refuses, unless it is told to go without."""
    for release, name in (("v2-2.1.0", "ElasticBuffer"), ("v2.5.0", "EPBuffer")):
        monkeypatch.setattr(getattr(emulated_deep_ep(release), name), "has_gdaki", False)


@pytest.mark.parametrize(("backend", "size"), [(V2, 2), (V25, 2), (V25, 1)], ids=["v2", "v2.5", "v2.5 alone"])
def test_within_a_node_no_network_card_is_asked_for(backend: dict[str, Any], size: int, no_network_cards: None) -> None:
    on_ranks(lambda group: identity_and_close(build_dispatcher(config(backend), group)), size)
    assert "EP_DISABLE_GIN" not in os.environ


@pytest.mark.parametrize("options", [{"ranks_per_node": 1}, {"gin_within_node": True}], ids=["across", "kept"])
def test_missing_network_cards_are_named(options: dict[str, Any], no_network_cards: None) -> None:
    fields = config({**V25, **options}, max_tokens_per_rank=8)
    results = outcomes(lambda group: build_dispatcher(fields, group), 2)
    text = "needs network cards that GPUs drive themselves .*got: deep_ep: NCCL GDAKI is unavailable .*EP_DISABLE_GIN=1"
    for result in results:
        with pytest.raises(ConfigError, match=text):
            raise result


def test_a_buffer_across_nodes_that_is_outgrown_keeps_its_queues(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config({**V25, "ranks_per_node": 1}), group)
        for rows in (3, 600):
            identity(dispatcher, rows)
        dispatcher.close()

    on_ranks(body, 2)
    assert "is outgrown, and keeps its network queues until close(). Set max_tokens_per_rank" in caplog.text


@pytest.mark.parametrize("backend", [V1, V2, V25, HYBRID], ids=["v1", "v2", "v2.5", "hybrid"])
def test_torch_fills_no_memory_inside_a_call(backend: dict[str, Any], monkeypatch: Patch) -> None:
    """The emulation of v1, v2 and V2.5 refuses it, in construction, all calls and deferred epilogues."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        x = torch.ones(4, 256, requires_grad=True)
        sent = dispatcher.dispatch(x, random_routing(4), async_op=True).wait()
        dispatcher.combine(sent.rows, sent).sum().backward()
        dispatcher.dispatch(x, again=sent)
        dispatcher.close()

    on_ranks(body, 2)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_the_emulated_v1_refuses_filled_memory() -> None:
    def body(group: Group) -> None:
        emulated_deep_ep("v1.2.1").Buffer(group, 128, explicitly_destroy=True)

    raises_everywhere(outcomes(body, 2), EmulatedAbort, "fill_uninitialized_memory must be off in deterministic mode")


def test_a_build_of_v1_with_ids_of_32_bits(monkeypatch: Patch) -> None:
    module = emulated_deep_ep("v1.2.1")
    monkeypatch.setattr(module, "topk_idx_t", torch.int32, raising=False)
    monkeypatch.setattr(module.Buffer, "ids_dtype", torch.int32)
    on_ranks(lambda group: identity_and_close(build_dispatcher(config(V1), group)), 2)


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_an_estimate_without_a_bandwidth_names_num_sms(backend: dict[str, Any], monkeypatch: Patch) -> None:
    """Across nodes the library divides by the speed that ``ibstat`` prints. Without ``ibstat`` it is 0."""
    cls = _buffer_class(backend)
    monkeypatch.setattr(cls, "get_theoretical_num_sms", lambda self, *sizes: 1 // 0)
    fields = config(backend)
    results = outcomes(lambda group: identity(build_dispatcher(fields, group), 3), 2)
    raises_everywhere(results, ConfigError, "ibstat", "set the option num_sms, for example to 24")
    on_ranks(lambda group: identity_and_close(build_dispatcher(config({**backend, "num_sms": 24}), group)), 2)


@pytest.mark.parametrize(("num_sms", "warns"), [(4, True), (24, False)])
def test_a_suspiciously_small_estimate_warns(
    num_sms: int, warns: bool, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without ``nvidia-smi nvlink -s`` the library takes the speed of NVLink for 0, and its least number of SMs."""
    library.warn_once.cache_clear()
    monkeypatch.setattr(_buffer_class(V25), "get_theoretical_num_sms", lambda self, *sizes: num_sms)
    with caplog.at_level(logging.WARNING, logger="moe_dispatch"):
        on_ranks(lambda group: identity_and_close(build_dispatcher(config(V25), group)), 2)
    assert ("deep_ep uses only 4 multiprocessors" in caplog.text) == warns


def _buffer_class(backend: dict[str, Any]) -> Any:
    module = emulated_deep_ep(backend["emulate"])
    return getattr(module, "EPBuffer", None) or module.ElasticBuffer


@pytest.mark.parametrize("backend", [{**HYBRID, "emulate": "hybridep-34152ae"}, HYBRID, RAGGED], ids=str)
def test_buffers_of_one_process_share_their_kernels(backend: dict[str, Any], monkeypatch: Patch) -> None:
    """A new dispatcher is a new buffer, whose kernels would be compiled again, at 8 s each."""
    cls = emulated_deep_ep(backend["emulate"]).HybridEPBuffer
    monkeypatch.setattr(cls, "compilations", [])

    def body(group: Group) -> list[int]:
        found = []
        for top_k in (1, 2, 3):  # which is no part of a kernel
            dispatcher = build_dispatcher(config(backend, top_k=top_k, hidden_size=512), group)
            x = torch.ones(4, 512, requires_grad=True)
            sent = dispatcher.dispatch(x, random_routing(4, rank_of(group), top_k=top_k))
            dispatcher.combine(sent.rows, sent).sum().backward()
            found.append(len(cls.compilations))
            dispatcher.close()
        return found

    (counts,) = on_ranks(body, 1)
    assert counts[0] > 0
    assert counts == counts[:1] * 3


def test_the_folder_of_kernels_is_fresh_and_inside_the_one_that_is_set(tmp_path: Path, monkeypatch: Patch) -> None:
    from moe_dispatch.backends.deep_ep import hybridep

    monkeypatch.setenv("HYBRID_EP_CACHE_DIR", str(tmp_path / "cache"))
    hybridep._fresh_folder.cache_clear()
    seen: list[str] = []
    cls = emulated_deep_ep("hybridep-746").HybridEPBuffer
    original = cls.__init__

    def spy(self: Any, *args: Any, **given: Any) -> None:
        seen.append(os.environ["HYBRID_EP_CACHE_DIR"])
        original(self, *args, **given)

    monkeypatch.setattr(cls, "__init__", spy)
    build_dispatcher(config({"name": "hybridep", "emulate": True}, max_tokens_per_rank=8)).close()
    hybridep._fresh_folder.cache_clear()
    assert os.environ["HYBRID_EP_CACHE_DIR"] == str(tmp_path / "cache")
    assert [Path(folder).parent for folder in seen] == [tmp_path / "cache"]
    assert not list(Path(seen[0]).iterdir())
