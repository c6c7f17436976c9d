"""The option ``prefetch_weights``: copies get the same weights as all-to-all, by the mapping of the plan."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch_testing import count_collectives
from tests.deep_ep_backends.conftest import Setting, Wrap
from tests.deep_ep_backends.vendors import V2, V25, buffer_class, config, on_dispatchers
from tests.dispatchers.layer import outcomes, random_rows

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
