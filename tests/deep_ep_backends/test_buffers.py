"""Buffers of the vendor libraries: how large, and who decides that they grow."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError, PeerError
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.deep_ep_backends.conftest import Wrap
from tests.deep_ep_backends.vendors import (
    HYBRID,
    RAGGED,
    V1,
    V2,
    V25,
    backend_of,
    buffer_class,
    config,
    identity,
    identity_and_close,
    names,
    on_dispatchers,
    rank_of,
)
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing


@pytest.mark.parametrize("size", [2, 16])
def test_v1_takes_the_hints_and_across_nodes_a_queue_for_every_multiprocessor(size: int, wrap: Wrap) -> None:
    """The hints are those for ``num_sms`` multiprocessors, which the class has only while they are asked for."""
    buffer = emulated_deep_ep("v1.2.1").Buffer
    before, opened, configs = buffer.num_sms, set(), []

    def opening(original: Any, *args: Any, num_qps_per_rank: int | None = None, **given: Any) -> None:
        opened.add((*args[2:], num_qps_per_rank))
        original(*args, **given, **({} if num_qps_per_rank is None else {"num_qps_per_rank": num_qps_per_rank}))

    def configured(original: Any, num_ranks: int) -> Any:
        assert buffer.num_sms == 32
        configs.append(original(num_ranks))
        return configs[-1]

    wrap(buffer, "__init__", opening)
    wrap(buffer, "get_dispatch_config", configured)
    wrap(buffer, "get_combine_config", configured)
    backend = {**V1, "ranks_per_node": 8, "num_sms": 32}
    on_ranks(lambda group: identity_and_close(build_dispatcher(config(backend, num_experts=16), group)), size)
    ((nvl_bytes, rdma_bytes, queues),) = opened
    assert nvl_bytes == max(one.get_nvl_buffer_size_hint(256 * 2, size) for one in configs)
    assert (rdma_bytes > 0, queues) == ((False, None) if size == 2 else (True, 32))
    assert buffer.num_sms == before


@pytest.mark.parametrize("backend", [V2, V25, HYBRID, RAGGED], ids=names[1:])
def test_buffers_grow_by_what_the_ranks_agreed_on(backend: dict[str, Any]) -> None:
    """Only rank 1 has many rows; every rank's buffer grows, to the same size, and earlier dispatches stay good."""

    def body(dispatcher: Dispatcher, rank: int) -> list[int]:
        sizes = []
        x = torch.ones(3, 256, requires_grad=True)
        early = dispatcher.dispatch(x, Routing(torch.tensor([[0, 7]] * 3), torch.ones(3, 2)))
        for rows in (3, 600, 5, 1300):
            dispatcher.plan(like=torch.empty(rows if rank == 1 else 3, 256))
            sizes.append(backend_of(dispatcher).rows)
        identity(dispatcher, 5)
        dispatcher.combine(early.rows, early).sum().backward()
        assert x.grad is not None
        assert bool((x.grad == 2).all())
        return sizes

    assert on_dispatchers(body, config(backend)) == [[512, 1024, 1024, 2048]] * 2


@pytest.mark.parametrize("backend", [V2, HYBRID], ids=["v2", "hybrid"])
def test_a_known_maximum_is_reserved_when_the_channel_opens(backend: dict[str, Any]) -> None:
    def body(dispatcher: Dispatcher, rank: int) -> int:
        opened = backend_of(dispatcher).rows
        dispatcher.plan(like=torch.empty(700, 256))
        assert backend_of(dispatcher).rows == opened
        with pytest.raises(InputError, match=r"at most max_tokens_per_rank \(700\) rows per rank, got 701"):
            dispatcher.plan(Rows(), like=torch.ones(701, 256))
        return opened

    first, second = on_dispatchers(body, config(backend, max_tokens_per_rank=700))
    assert first == second >= 700


def test_buffers_are_no_larger_than_rows_can_be() -> None:
    """Across domains the next power of two after 17000 is beyond what the library takes."""

    def body(group: Group) -> list[int]:
        found = []
        known: list[dict[str, Any]] = [{}, {"max_tokens_per_rank": 17000}]
        for fields in known:
            dispatcher = build_dispatcher(config({**HYBRID, "ranks_per_domain": 1}, **fields), group)
            dispatcher.plan(like=torch.empty(17000 if rank_of(group) == 1 else 5, 256))
            found.append(backend_of(dispatcher).rows)
            dispatcher.close()
        return found

    assert on_ranks(body, 2) == [[21824, 17024]] * 2


def test_a_buffer_that_refuses_to_go_does_not_keep_the_others(wrap: Wrap) -> None:
    gone: list[int] = []

    def destroying(original: Any, buffer: Any) -> None:
        original(buffer)
        gone.append(buffer.num_max_tokens_per_rank)
        if len(gone) == 1:
            raise RuntimeError("not now")

    wrap(emulated_deep_ep("v2.5.0").EPBuffer, "destroy", destroying)
    dispatcher = build_dispatcher(config(V25))
    for rows in (1, 1000):
        dispatcher.plan(like=torch.ones(rows, 256))
    with pytest.raises(RuntimeError, match="not now"):
        dispatcher.close()
    assert sorted(gone) == [512, 1024]
    dispatcher.close()
    assert len(gone) == 2


def test_a_mark_reaches_peers_before_they_make_buffers() -> None:
    """debug: a rank that refuses does not come to the buffers, which are made when sizes are settled."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(V2, row_counts="assume", debug=True), group)
        routing = random_routing(4)
        ids = routing.topk_ids.int() if rank_of(group) == 1 else routing.topk_ids
        dispatcher.dispatch(torch.ones(4, 256), Routing(ids, routing.topk_weights))

    first, second = outcomes(body, 2)
    raises_everywhere([first], PeerError, "rank 1 refused: Dispatcher.dispatch: topk_ids must be torch.int64, got")
    assert isinstance(second, InputError)


def test_a_rank_without_room_keeps_its_own_error(wrap: Wrap) -> None:
    def opening(original: Any, *args: Any, **given: Any) -> None:
        if threading.current_thread().name == "rank-1":
            raise MemoryError("no room on this rank")
        original(*args, **given)

    wrap(buffer_class(HYBRID), "__init__", opening)
    results = outcomes(lambda group: build_dispatcher(config(HYBRID, max_tokens_per_rank=64), group), 2, seconds=1)
    assert isinstance(results[1], MemoryError)
    assert isinstance(results[0], Exception)
