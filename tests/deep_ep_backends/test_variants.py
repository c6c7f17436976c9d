"""What differs between releases, ranks and modes of the vendor libraries, and what is the same in all."""

from __future__ import annotations

import dataclasses
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends.deep_ep import hybrid_rules as hybrid
from moe_dispatch.backends.deep_ep.buffers import ProcessSwitch
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch_testing import count_collectives
from tests.deep_ep_backends.conftest import Setting, Wrap
from tests.deep_ep_backends.vendors import (
    HYBRID,
    RAGGED,
    V1,
    V2,
    V25,
    buffer_class,
    config,
    identity,
    identity_and_close,
    on_dispatchers,
)
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing, random_rows, rank_of


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
@pytest.mark.parametrize("options", [{"expand": True}, {"deterministic": False}], ids=["expanded", "as they arrive"])
def test_sums_and_gradients_are_those_of_compact_rows(backend: dict[str, Any], options: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        results = []
        for more in ({}, options):
            dispatcher = build_dispatcher(config({**backend, **more}, pad_multiple=16), group)
            generator = torch.Generator().manual_seed(rank_of(group))
            x = torch.randn(256, 5, generator=generator).t()  # strided: kernels want it contiguous
            x.requires_grad_()
            routing = random_routing(5, rank_of(group))
            weights = routing.topk_weights.clone().requires_grad_()
            sent = dispatcher.dispatch(x, Routing(routing.topk_ids, weights))
            assert sent.tokens_per_expert_list is not None
            assert all(count % 16 == 0 for count in sent.tokens_per_expert_list)
            y = dispatcher.combine(sent.rows.tanh(), sent)
            y.square().sum().backward()
            results.append([y, x.grad, weights.grad])
            if "expand" in options:  # otherwise rows come in another order
                results[-1] += [dispatcher.dispatch(x.detach(), again=sent).rows, sent.rows]
            dispatcher.close()
        for compact, other in zip(*results, strict=True):
            torch.testing.assert_close(other, compact, rtol=2e-2, atol=2e-2)

    on_ranks(body, 2)
    # The library refuses to run while torch fills memory. The switch is put back, also with ranks as threads.
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunks", [False, True], ids=["", "in chunks"])
@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_rows_in_the_order_of_arrival_are_not_computed_again_with_handles_of_the_first_run(
    backend: dict[str, Any], chunks: bool
) -> None:
    """The gradients would belong to other rows. Chunks take the routes of their forwards."""
    fields: dict[str, Any] = {"chunks": {"tokens": 20, "recompute": True}} if chunks else {}

    def body(group: Group, deterministic: bool = False) -> None:
        dispatcher = build_dispatcher(config({**backend, "deterministic": deterministic}, **fields), group)
        x, routing = torch.randn(40, 256).requires_grad_(), random_routing(40, rank_of(group))
        layer = partial(run_in_chunks, dispatcher, lambda sent: sent.rows.tanh(), x, routing)
        try:
            if chunks:
                layer().sum().backward()
            else:
                checkpoint(lambda x: layer(), x, use_reentrant=False).sum().backward()
        finally:
            dispatcher.close()

    if chunks:
        on_ranks(body, 2)
    else:
        raises_everywhere(
            outcomes(body, 2), ConfigError, "checkpointing must have use_reentrant=True or context_fn=moe_dispatch"
        )
    on_ranks(partial(body, deterministic=True), 2)


def test_the_domain_variable_is_as_it_was_also_with_ranks_as_threads(variables: Setting) -> None:
    name = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    variables(**{name: None})
    for _ in range(2):
        on_ranks(
            lambda group: identity_and_close(build_dispatcher(config({**HYBRID, "ranks_per_domain": 2}), group)), 4
        )
        assert name not in os.environ
    variables(**{name: "8"})  # of the cluster; this group is smaller
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


def test_a_domain_that_the_library_sees_otherwise_is_refused(wrap: Wrap) -> None:
    def elsewhere(original: Any, buffer: Any, *args: Any, **given: Any) -> None:
        original(buffer, *args, **given)
        buffer.num_of_hybrid_ep_ranks_per_nvlink_domain = 1

    wrap(buffer_class(HYBRID), "__init__", elsewhere)
    results = outcomes(lambda group: build_dispatcher(config(HYBRID, max_tokens_per_rank=9), group), 2)
    told = (
        "the library found 1 ranks per NVLink domain, but the constraints are for 2. Set the option ranks_per_domain=1"
    )
    raises_everywhere(results, ConfigError, told)


@pytest.mark.parametrize("backend", [V25, HYBRID, RAGGED], ids=["v2.5", "hybrid", "ragged"])
def test_a_weight_of_zero_is_no_padding(backend: dict[str, Any]) -> None:
    """HybridEP tells real rows from padding by their probabilities: one of weight 0 counts, and has a gradient."""

    def body(dispatcher: Dispatcher, rank: int) -> None:
        routing, weights = random_routing(6, rank), torch.zeros(6, 2).requires_grad_()
        x = torch.ones(6, 256)
        sent = dispatcher.dispatch(x, Routing(routing.topk_ids, weights))
        assert not sent.weights.signbit().any()
        dispatcher.combine(sent.rows, sent).sum().backward()
        assert weights.grad is not None
        assert torch.equal(weights.grad, torch.full((6, 2), 256.0))
        assert int(dispatcher.metrics(gather=True).real_tokens_per_expert.sum()) == 2 * 6 * 2

    on_dispatchers(body, config(backend, pad_multiple=16))


def test_a_permutation_is_refused_where_the_library_reorders() -> None:
    with pytest.raises(ConfigError, match='permutation must be "auto", because its library reorders rows itself, got'):
        build_dispatcher(config(HYBRID, permutation="torch"))
    build_dispatcher(config(V2, permutation="torch")).close()


def test_ranks_with_different_libraries_are_told(wrap: Wrap) -> None:
    def rules(original: Any, cls: Any) -> hybrid.Rules:
        found: hybrid.Rules = original(cls)
        odd = threading.current_thread().name == "rank-1"
        return dataclasses.replace(found, ragged=True) if odd else found

    wrap(hybrid, "rules", rules)
    results = outcomes(lambda group: build_dispatcher(config(HYBRID), group), 2)
    told = "Ranks disagree on row_multiple: rank 0 has 2, rank 1 has 1. Give every rank the same config, library"
    raises_everywhere(results, ConfigError, told)


@pytest.mark.parametrize("backend", [V25, {**V25, "expand": True}], ids=["compact", "expanded"])
def test_deferred_epilogues_run_before_the_next_call(backend: dict[str, Any]) -> None:
    """Every call of the library writes over the rows that a deferred epilogue reads; the emulation refuses that."""

    def body(dispatcher: Dispatcher, rank: int) -> None:
        x, ways = torch.ones(4, 256), [random_routing(4, seed) for seed in range(3)]
        travelling = [dispatcher.dispatch(x * (1 + i), way, async_op=True) for i, way in enumerate(ways)]
        first = dispatcher.dispatch(x, ways[0])
        for i, (flight, way) in enumerate(zip(travelling, ways, strict=True)):
            sent = flight.wait()
            y = dispatcher.combine(sent.rows, sent)
            expected = x * (1 + i) * way.topk_weights.sum(1, keepdim=True)
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(dispatcher.dispatch(x, again=first).rows, first.rows)

    on_dispatchers(body, config(backend))


@pytest.mark.parametrize("backend", [V1, V2, V25], ids=["v1", "v2", "v2.5"])
def test_only_async_op_leaves_the_wait_to_an_event(backend: dict[str, Any], wrap: Wrap) -> None:
    """Otherwise the allocator of torch would keep the tensors of the call from reuse, in a capture until its end."""
    calls = []

    def spied(original: Any, *args: Any, **given: Any) -> Any:
        calls.append(any(given.get(name) for name in ("async_finish", "async_with_compute_stream", "defer_epilogue")))
        assert calls[-1] or not given["allocate_on_comm_stream"]
        return original(*args, **given)

    wrap(buffer_class(backend), "dispatch", spied)

    def body(dispatcher: Dispatcher, rank: int) -> None:
        identity(dispatcher, 3)
        x, routing = torch.ones(3, 256), random_routing(3, 0)
        sent = dispatcher.dispatch(x, routing, async_op=True).wait()
        assert torch.equal(sent.rows, dispatcher.dispatch(x, routing).rows)

    on_dispatchers(body, config({**backend, "allocate_on_comm_stream": True}))
    assert sorted(calls) == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("backend", "debug"),
    [(V1, False), (V1, True), (V2, True), ({**V25, "expand": True}, False)],
    ids=["v1", "v1 debug", "v2 debug", "v2.5 expanded"],
)
def test_a_list_of_counts_that_differs_from_the_rows_is_refused(
    backend: dict[str, Any], debug: bool, wrap: Wrap
) -> None:
    """Rows would reach wrong experts. Without ``debug``, the first rows of a channel are compared."""
    is_wrong = [not debug]

    def listing(original: Any, *args: Any, **given: Any) -> Any:
        result = original(*args, **given)
        counts = next((part for part in result if isinstance(part, list)), None)
        counts = result[3].num_recv_tokens_per_expert_list if counts is None else counts
        if is_wrong[0]:
            counts.reverse()
        return result

    wrap(buffer_class(backend), "dispatch", listing)

    def body(group: Group) -> None:
        dispatcher, x = build_dispatcher(config(backend, debug=debug), group), torch.ones(3, 256)
        routing = Routing(torch.tensor([[0, 5]] * 3), torch.ones(3, 2))
        if debug:
            identity(dispatcher, 3)
            is_wrong[0] = True
        with pytest.raises(StateError, match="must list the rows that each expert gets, got the list"):
            dispatcher.dispatch(x, routing)
        dispatcher.close()

    on_ranks(body, 2)


def test_ids_may_change_after_a_dispatch_of_v25() -> None:
    """A handle of V2.5 keeps the ids themselves, and refuses them after a change in place."""

    def body(dispatcher: Dispatcher, rank: int) -> None:
        routing = random_routing(4, rank)
        ids, weights = routing.topk_ids.clone(), torch.ones(4, 2)
        x = torch.arange(4 * 256).view(4, 256).remainder(64).float().requires_grad_()
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        ids.fill_(0)
        y = dispatcher.combine(sent.rows, sent)
        y.sum().backward()
        torch.testing.assert_close(y, 2 * x)

    on_dispatchers(body, config(V25))


NUM_EXPERTS, HIDDEN, ROWS = 8, 256, 12
STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": ROWS, "balance": "exact"}


def placed(prefetches: bool) -> DispatcherConfig:
    return config({**V25, "prefetch_weights": prefetches}, **STATIC)


def busy(seed: int) -> Routing:
    """Two experts of each token, mostly the first ones."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(NUM_EXPERTS, 0, -1).float().pow(3).expand(ROWS, -1)
    ids = chances.multinomial(2, generator=generator)
    return Routing(ids, torch.rand(ROWS, 2, generator=generator))


def own_part(rank: int, size: int, *widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(NUM_EXPERTS, HIDDEN, width, generator=generator) / 8 for width in widths]
    return [weight.chunk(size)[rank].clone().requires_grad_() for weight in whole]


def experts(part: Dispatched, up: Tensor, gate: Tensor) -> Tensor:
    assert torch.isfinite(up).all()  # also in slots that stay empty
    both = part.grouped_mm(part.rows, up) * part.grouped_mm(part.rows, gate)
    return part.grouped_mm(both, up.transpose(1, 2).contiguous())


@pytest.mark.parametrize(("size", "how"), [(1, "run"), (4, "fetch"), (2, "recomputed")], ids=str)
def test_results_and_gradients_are_those_over_all_to_all(size: int, how: str) -> None:
    """Two layers, of which the second has larger experts; where weights are not fetched again, two micro-batches."""
    batches = 2 if how == "fetch" else 1

    def body(dispatcher: Dispatcher, rank: int) -> tuple[list[Tensor], dict[str, int]]:
        layers = [own_part(rank, size, width, width) for width in (8, 16)]
        weights = [SlotWeights(dispatcher) for _ in layers]

        def layer(index: int, x: Tensor, routing: Routing) -> Tensor:
            if how == "fetch":
                sent, slots = weights[index].fetch(dispatcher.dispatch(x, routing), *layers[index])
                return dispatcher.combine(experts(sent, *slots), sent)
            in_flight = dispatcher.dispatch(x, routing, async_op=True)
            sent, outputs = weights[index].run(in_flight, experts, *layers[index])
            return dispatcher.combine(outputs, sent)

        call, results = layer if how != "recomputed" else partial(checkpoint, layer, use_reentrant=False), []
        for batch in range(batches):
            x = random_rows(ROWS, seed=10 * batch + rank, hidden=HIDDEN).requires_grad_()
            y = x
            for index in range(2):
                y = y + call(index, y, busy(20 * batch + 4 * index + rank))
            y.sum().backward()
            assert x.grad is not None
            results += [y.detach(), x.grad]
        results += [weight.grad for layer in layers for weight in layer if weight.grad is not None]
        collectives = dispatcher.metrics().collectives
        return results, {label: count for label, count in collectives.items() if label.startswith("weights")}

    by_mapping, all_to_all = (on_dispatchers(body, placed(prefetches=way), size) for way in (True, False))
    backward = {} if size == 1 else {"weights.backward": 2 * batches}
    for (found, labels), (wanted, other_labels) in zip(by_mapping, all_to_all, strict=True):
        assert len(found) == 4 + 2 * batches
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        assert labels == backward | ({} if size == 1 else {"weights.prefetch": 4})
        assert other_labels == backward | ({} if size == 1 else {"weights": 4})


def test_only_weights_of_copies_travel() -> None:
    size = 4

    def body(dispatcher: Dispatcher, rank: int) -> tuple[int, int]:
        stacked = own_part(rank, size, 8)
        sent = dispatcher.dispatch(random_rows(ROWS, hidden=HIDDEN), busy(rank))
        copies = sent.placement.copies_PS  # type: ignore[union-attr]
        with torch.no_grad(), count_collectives() as seen:
            SlotWeights(dispatcher).run(sent, lambda part, up: part.rows, *stacked)
        nbytes = sum(call.nbytes for call in seen.calls if call.op == "alltoall_base")
        return nbytes, int((copies // (NUM_EXPERTS // size) == rank).sum())

    expert = HIDDEN * 8 * 4
    for nbytes, copies in on_dispatchers(body, placed(prefetches=True), size):
        assert nbytes == copies * expert
    by_rank = on_dispatchers(body, placed(prefetches=False), size)
    assert [nbytes for nbytes, _ in by_rank] == [(size - 1) * (NUM_EXPERTS // size) * expert] * size
    assert any(copies for _, copies in by_rank)


def test_training_after_inference() -> None:
    """The memory of copies is made in inference mode here, and used outside too."""

    def body(dispatcher: Dispatcher, rank: int) -> None:
        stacked = own_part(rank, 2, 8, 8)
        x, routing = random_rows(ROWS, hidden=HIDDEN), busy(rank)

        def layer() -> Tensor:
            sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing), experts, *stacked)
            return dispatcher.combine(outputs, sent)

        with torch.inference_mode():
            first = layer()
        second = layer()
        second.sum().backward()
        assert torch.equal(first, second)
        assert all(weight.grad is not None for weight in stacked)
        with torch.inference_mode():
            assert torch.equal(first, layer())

    on_dispatchers(body, placed(prefetches=True))


def test_events_keep_tensors_during_the_call_alone(wrap: Wrap, variables: Setting) -> None:
    """The allocator of torch would not reuse the memory of weights before the end of a capture."""
    variables(EP_AVOID_RECORD_STREAM=None)
    seen = []

    def noting(original: Any, *args: Any, **given: Any) -> Any:
        seen.append(os.environ.get("EP_AVOID_RECORD_STREAM"))
        return original(*args, **given)

    wrap(buffer_class(V25), "lb_prefetch_weights", noting)

    def body(dispatcher: Dispatcher, rank: int) -> None:
        sent = dispatcher.dispatch(random_rows(ROWS, hidden=HIDDEN), busy(0))
        SlotWeights(dispatcher).fetch(sent, *own_part(rank, 2, 8))

    on_dispatchers(body, placed(prefetches=True))
    assert seen == ["1", "1"]
    assert "EP_AVOID_RECORD_STREAM" not in os.environ


@pytest.mark.parametrize(
    ("backend", "fields", "told"),
    [
        (V2, {}, "got v2, 2 of 2 ranks on a node, and graph_safe=True"),
        (V25, {"graph_safe": False, "max_tokens_per_rank": None}, "got v2.5, 2 of 2 .*graph_safe=False. Leave"),
        ({**V25, "ranks_per_node": 1}, {}, "got v2.5, 1 of 2 ranks on a node"),
    ],
    ids=["v2", "eager", "nodes"],
)
def test_where_weights_cannot_be_prefetched(backend: dict[str, Any], fields: dict[str, Any], told: str) -> None:
    given = config({**backend, "prefetch_weights": True}, **{**STATIC, **fields})
    for result in outcomes(lambda group: build_dispatcher(given, group), 2):
        with pytest.raises(ConfigError, match=f"prefetch_weights needs V2.5, .*{told}"):
            raise result


def test_experts_of_other_sizes_are_refused() -> None:
    def body(dispatcher: Dispatcher, rank: int) -> None:
        sent = dispatcher.dispatch(random_rows(ROWS, hidden=HIDDEN), busy(0))
        with pytest.raises(InputError, match=r"must have a multiple of 32 bytes, got 12\. Leave prefetch_weights"):
            SlotWeights(dispatcher).fetch(sent, torch.ones(NUM_EXPERTS // 2, 3))

    on_dispatchers(body, placed(prefetches=True))
