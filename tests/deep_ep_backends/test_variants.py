"""What differs between releases, ranks and modes of the vendor libraries, and what is the same in all."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends.deep_ep import hybrid_driver as hybrid
from moe_dispatch.backends.deep_ep.switch import ProcessSwitch
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.testing.emulation import emulated_deep_ep
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, config, identity, identity_and_close, rank_of
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing


def test_v2_in_the_order_of_arrival_gives_the_same_sums() -> None:
    def body(group: Group, *, deterministic: bool) -> tuple[Tensor, Tensor]:
        dispatcher = build_dispatcher(config({**V2, "deterministic": deterministic}), group)
        generator = torch.Generator().manual_seed(rank_of(group))
        x = torch.randn(40, 256, generator=generator).requires_grad_()
        sent = dispatcher.dispatch(x, random_routing(40, rank_of(group)))
        y = dispatcher.combine(sent.rows.tanh(), sent)
        y.square().sum().backward()
        dispatcher.close()
        assert x.grad is not None
        return y.detach(), x.grad

    pairs = zip(
        on_ranks(lambda group: body(group, deterministic=True), 2),
        on_ranks(lambda group: body(group, deterministic=False), 2),
        strict=True,
    )
    for sorted_rows, as_they_came in pairs:
        for one, other in zip(sorted_rows, as_they_came, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_the_domain_variable_is_as_it_was_also_with_ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    monkeypatch.delenv(name, raising=False)
    for _ in range(5):
        on_ranks(
            lambda group: identity_and_close(build_dispatcher(config({**HYBRID, "ranks_per_domain": 2}), group)), 4
        )
        assert name not in os.environ
    monkeypatch.setenv(name, "8")  # of the cluster; this group is smaller
    on_ranks(lambda group: identity_and_close(build_dispatcher(config(HYBRID), group)), 2)
    assert os.environ[name] == "8"


def test_a_switch_of_the_process_has_one_value_at_a_time() -> None:
    held = {"value": "before"}
    switch = ProcessSwitch("the setting", lambda: held["value"], lambda value: held.update(value=value))
    with switch.at("a"), switch.at("a"):
        assert held["value"] == "a"
        with pytest.raises(
            ConfigError, match="the setting must have one value in all threads, got 'b' while it is 'a'"
        ):
            switch.at("b").__enter__()
    assert held["value"] == "before"


def test_a_domain_that_the_library_sees_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = emulated_deep_ep("hybridep-94a9f8f").HybridEPBuffer
    original = cls.__init__

    @functools.wraps(original)
    def elsewhere(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = 1

    monkeypatch.setattr(cls, "__init__", elsewhere)
    results = outcomes(lambda group: build_dispatcher(config(HYBRID, max_tokens_per_rank=9), group), 2)
    told = (
        "the library found 1 ranks per NVLink domain, but the constraints are for 2. Set the option ranks_per_domain=1"
    )
    raises_everywhere(results, ConfigError, told)


def test_an_early_release_refuses_a_rank_that_receives_nothing() -> None:
    def body(group: Group) -> None:
        backend = {"name": "hybridep", "emulate": "hybridep-0ed15b5"}
        dispatcher = build_dispatcher(config(backend, hidden_size=512), group)
        dispatcher.dispatch(torch.ones(4, 512), Routing(torch.tensor([[0, 1]] * 4), torch.ones(4, 2)))

    results = outcomes(body, 2, seconds=3)
    assert results[0] is None
    told = ("every rank must receive a row, got none on rank 1", "Install a version of 2026-04")
    raises_everywhere(results[1:], StateError, *told)


@pytest.mark.parametrize("backend", [V1, V2, HYBRID, RAGGED], ids=["v1", "v2", "hybrid", "ragged"])
def test_a_weight_of_zero_is_no_padding(backend: dict[str, Any]) -> None:
    """HybridEP tells real rows from padding by their probabilities: one of weight 0 counts, and has a gradient."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend, pad_multiple=16), group)
        routing, weights = random_routing(6, rank_of(group)), torch.zeros(6, 2).requires_grad_()
        x = torch.ones(6, 256)
        sent = dispatcher.dispatch(x, Routing(routing.topk_ids, weights))
        assert not sent.weights.signbit().any()
        dispatcher.combine(sent.rows, sent).sum().backward()
        assert weights.grad is not None
        assert torch.equal(weights.grad, torch.full((6, 2), 256.0))
        assert int(dispatcher.metrics(gather=True).real_tokens_per_expert.sum()) == 2 * 6 * 2
        dispatcher.close()

    on_ranks(body, 2)


def test_a_permutation_is_refused_where_the_library_reorders() -> None:
    with pytest.raises(ConfigError, match='permutation must be "auto", because its library reorders rows itself, got'):
        build_dispatcher(config(HYBRID, permutation="torch"))
    build_dispatcher(config(V2, permutation="torch")).close()


def test_ranks_with_different_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    original = hybrid.rules

    def rules(cls: Any, environment: Any = None) -> hybrid.Rules:
        found = original(cls, environment)
        odd = threading.current_thread().name == "rank-1"
        return dataclasses.replace(found, chunks=(128, 128), pads_capacity=False) if odd else found

    monkeypatch.setattr(hybrid, "rules", rules)
    results = outcomes(lambda group: build_dispatcher(config(HYBRID), group), 2)
    told = "Ranks disagree on row_multiple: rank 0 has 2, rank 1 has 128. Give every rank the same config, library"
    raises_everywhere(results, ConfigError, told)


def test_v2_expand_is_for_inference() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config({**V2, "expand": True}, pad_multiple=16), group)
        x, routing = torch.randn(256, 5).t(), random_routing(5, rank_of(group))  # strided: kernels want it contiguous
        text = (
            "backend 'deepep' has no backward as configured, got tensors that require grad. Call it under torch.no_grad"
        )
        with pytest.raises(InputError, match=text):
            dispatcher.dispatch(x.clone().requires_grad_(), routing)
        sent = dispatcher.dispatch(x, routing)
        assert sent.tokens_per_expert_list is not None
        assert all(count % 16 == 0 for count in sent.tokens_per_expert_list)
        with pytest.raises(InputError, match=text):
            dispatcher.dispatch(x.clone().requires_grad_(), again=sent)
        text = "Dispatcher.combine: backend 'deepep' has no backward as configured, got tensors that require grad"
        with pytest.raises(InputError, match=text):
            dispatcher.combine(sent.rows.clone().requires_grad_(), sent)
        y = dispatcher.combine(sent.rows.t().contiguous().t(), sent)
        torch.testing.assert_close(y, x * routing.topk_weights.sum(1, keepdim=True), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(dispatcher.dispatch(x, again=sent).rows, sent.rows)
        dispatcher.self_test()
        dispatcher.close()

    on_ranks(body, 2)


def test_torch_fills_fresh_memory_again_after_v2() -> None:
    """The library refuses to run while torch fills memory; the switch is put back, also with ranks as threads."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(V2), group)
        for rows in range(4):
            identity(dispatcher, rows)
        dispatcher.close()

    on_ranks(body, 4)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
