"""Metrics count what really happened: tokens, padding by cause, collectives and bytes; profiles show ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import BSHD, THD, Dispatcher, Routing, build_dispatcher
from moe_dispatch.dispatchers import Metrics
from moe_dispatch.layouts import base
from moe_dispatch_testing import count_collectives
from tests.dispatchers.layer import HIDDEN, Group, on_ranks, random_routing, random_rows, small_config

IDS = [torch.tensor([[0, 1], [0, 5], [0, -1]]), torch.tensor([[0, 4], [7, 6], [7, -1], [-1, -1], [0, 7]])]
TOKENS = [5, 1, 0, 0, 1, 1, 1, 3]


def _step(dispatcher: Dispatcher, rank: int) -> None:
    rows = len(IDS[rank])
    sent = dispatcher.dispatch(random_rows(rows).requires_grad_(), Routing(IDS[rank], torch.ones(rows, 2)))
    dispatcher.combine(sent.rows, sent).sum().backward()


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_tokens_and_padding(backend: str) -> None:
    def body(group: Group) -> tuple[Metrics, Metrics]:
        assert group is not None
        dispatcher = build_dispatcher(small_config(backend, pad_multiple=4), group)
        for _ in range(2):
            _step(dispatcher, group.rank())
        return dispatcher.metrics(), dispatcher.metrics(gather=True)

    for rank, (mine, everyone) in enumerate(on_ranks(body, 2)):
        assert mine.backend == everyone.backend == backend
        assert (mine.dispatches, everyone.dispatches) == (2, 4)
        assert mine.real_tokens_per_expert.tolist() == [2 * n for n in TOKENS[4 * rank : 4 * rank + 4]]
        assert everyone.real_tokens_per_expert.tolist() == [2 * n for n in TOKENS]
        assert everyone.imbalance == pytest.approx(5 / (sum(TOKENS) / 8))
        assert mine.imbalance == pytest.approx([5 / 1.5, 3 / 1.5][rank])
        by_expert = [2 * (3 + 3), 2 * (3 + 3 + 3 + 1)]
        by_rank = [2 * 2, 0] if backend == "allgather" else [0, 0]
        assert mine.rows_padded == {"rank": by_rank[rank], "expert": by_expert[rank]}
        assert everyone.rows_padded == {"rank": sum(by_rank), "expert": sum(by_expert)}


@pytest.mark.parametrize("seen_by_host", [True, False])
def test_rows_that_are_no_tokens(monkeypatch: pytest.MonkeyPatch, seen_by_host: bool) -> None:
    """Cut where the host knows them; where only a device does, which a CPU can but pretend, their ids become -1."""
    dispatcher = build_dispatcher(small_config("local", pad_multiple=3))
    x, way = random_rows(8), random_routing(8)
    expected = x * way.topk_weights.sum(1, keepdim=True)
    layout = THD([0, 2, 5], [0, 4, 8])
    expected[[2, 3, 7]] = 0
    if not seen_by_host:
        monkeypatch.setattr(base, "is_host", lambda tensor: False)
    sent = dispatcher.dispatch(x, way, layout)
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), expected)
    metrics = dispatcher.metrics()
    assert metrics.rows_skipped == ({"cut": 3, "masked": 0} if seen_by_host else {"cut": 0, "masked": 3})
    assert int(metrics.real_tokens_per_expert.sum()) == 5 * 2


def test_padded_batches_count_as_cut() -> None:
    dispatcher = build_dispatcher(small_config("local", top_k=1))
    dispatcher.dispatch(random_rows(8).view(2, 4, HIDDEN), random_routing(8, top_k=1), BSHD([3, 0]))
    assert dispatcher.metrics().rows_skipped == {"cut": 5, "masked": 0}


def test_nothing_dispatched_yet() -> None:
    metrics = build_dispatcher(small_config("local", pad_multiple=7)).metrics()
    assert (metrics.dispatches, metrics.imbalance) == (0, 0.0)
    assert metrics.real_tokens_per_expert.tolist() == [0] * 8
    assert metrics.rows_padded == {"rank": 0, "expert": 0}


LABELS = {
    "alltoall": ["counts", "dispatch", "combine", "combine.backward", "dispatch.backward"],
    "allgather": ["sizes", "dispatch", "combine", "combine.backward", "dispatch.backward"],
}


@pytest.mark.parametrize(
    ("backend", "fields"), [("alltoall", {}), ("alltoall", {"wire_dtype": "bfloat16"}), ("allgather", {})]
)
def test_collectives_and_bytes_are_those_that_were_intercepted(backend: str, fields: dict[str, Any]) -> None:
    def body(group: Group) -> tuple[Metrics, Metrics, list[int]]:
        assert group is not None
        dispatcher = build_dispatcher(small_config(backend, **fields), group)
        before = dispatcher.metrics()
        with count_collectives() as seen:
            _step(dispatcher, group.rank())
        return before, dispatcher.metrics(), [call.nbytes for call in seen.calls]

    for before, after, intercepted in on_ranks(body, 2):
        sent = Counter(after.bytes_sent)
        sent.subtract(before.bytes_sent)
        made = Counter(after.collectives)
        made.subtract(before.collectives)
        assert {name: made[name] for name in LABELS[backend]} == dict.fromkeys(LABELS[backend], 1)
        assert {name: sent[name] for name in LABELS[backend]} == dict(zip(LABELS[backend], intercepted, strict=True))


def test_gathered_bytes_are_the_sum_over_ranks() -> None:
    def body(group: Group) -> tuple[Metrics, Metrics]:
        assert group is not None
        dispatcher = build_dispatcher(small_config(), group)
        _step(dispatcher, group.rank())
        return dispatcher.metrics(), dispatcher.metrics(gather=True)

    results = on_ranks(body, 2)
    for _, everyone in results:
        for name in ("dispatch", "combine"):
            assert everyone.bytes_sent[name] == sum(mine.bytes_sent[name] for mine, _ in results)


def test_reading_metrics_exchanges_nothing_unless_asked() -> None:
    def body(group: Group) -> tuple[int, int]:
        assert group is not None
        dispatcher = build_dispatcher(small_config(), group)
        with count_collectives() as alone:
            dispatcher.metrics()
        with count_collectives() as together:
            dispatcher.metrics(gather=True)
        return len(alone.calls), len(together.calls)

    assert on_ranks(body, 2) == [(0, 2), (0, 2)]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # of torch 2.10
@pytest.mark.parametrize("backend", ["local", "alltoall", "allgather"])
def test_profiles_show_each_verb_and_its_backward(backend: str) -> None:
    dispatcher = build_dispatcher(small_config(backend))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(dispatcher, 0)
    shown = Counter(event.name for event in profile.events() if event.name.startswith("moe_dispatch::"))
    verbs = ("dispatch", "combine", "combine.backward", "dispatch.backward")
    assert shown == dict.fromkeys((f"moe_dispatch::{verb}" for verb in verbs), 1)


def test_counters_on_a_device_are_updated_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates outside of a turn could be lost if dispatches run on several streams."""
    dispatcher = build_dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
    meter, inside, found = dispatcher._channel.meter, False, list[tuple[int, bool]]()
    way = random_routing(4)
    routing = Routing(way.topk_ids, way.topk_weights, torch.tensor([1, 8]))
    call = partial(dispatcher.dispatch, random_rows(4).view(2, 2, HIDDEN), routing, BSHD(lengths=[1, 2]))
    call()
    counters = [*meter._masked.values(), *meter._drift.values(), *meter._needs.values()]
    counters += [each for pair in meter._tokens.values() for each in pair]
    places = [each.data_ptr() for each in counters]

    @contextmanager
    def turn(device: torch.device) -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    class Uses(TorchDispatchMode):
        """Notes which counter each operator gets, and whether a turn is on."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [each for each in args if isinstance(each, torch.Tensor) and each.data_ptr() in places]
            found.extend((places.index(each.data_ptr()), inside) for each in given)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(meter, "turn", turn)
    with Uses():  # type: ignore[no-untyped-call]
        call()
    assert {place for place, _ in found} == set(range(len(places)))
    assert all(in_turn for _, in_turn in found)
    assert dispatcher.metrics().rows_skipped["masked"] == 2
