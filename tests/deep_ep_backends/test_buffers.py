"""Buffers of the vendor libraries: how large, and who decides that they grow."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, Rows, build_dispatcher
from moe_dispatch.backends import Sizes
from moe_dispatch.backends.base import BackendContext, MoEShape
from moe_dispatch.backends.deep_ep.buffers import LibraryBackend
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import InputError, PeerError
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.deep_ep_backends.vendors import (
    ALL,
    HYBRID,
    RAGGED,
    V1,
    V2,
    V25,
    backend_of,
    config,
    identity,
    names,
    rank_of,
)
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing


@pytest.mark.parametrize("size", [2, 16])
def test_v1_takes_the_hints_and_across_nodes_a_queue_for_every_multiprocessor(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int, int | None]] = []
    buffer = emulated_deep_ep("v1.2.1").Buffer
    original = buffer.__init__

    @functools.wraps(original)
    def spy(self: Any, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **more: Any) -> None:
        found.append((num_nvl_bytes, num_rdma_bytes, more.get("num_qps_per_rank")))
        original(self, group, num_nvl_bytes, num_rdma_bytes, **more)

    monkeypatch.setattr(buffer, "__init__", spy)

    def body(group: Group) -> list[Any]:
        backend = {**V1, "ranks_per_node": 8, "num_sms": 32}
        dispatcher = build_dispatcher(config(backend, num_experts=16), group)
        identity(dispatcher, 2 + rank_of(group))
        backend_of_rank: Any = backend_of(dispatcher)
        dispatcher.close()
        return [backend_of_rank._dispatch_config, backend_of_rank._combine_config]

    configs = on_ranks(body, size)[0]
    ((nvl_bytes, rdma_bytes, queues),) = set(found)
    assert nvl_bytes == max(one.get_nvl_buffer_size_hint(256 * 2, size) for one in configs)
    assert (rdma_bytes > 0, queues) == ((False, None) if size == 2 else (True, 32))


def test_num_sms_reaches_v1_without_changing_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, made = emulated_deep_ep("v1.2.1").Buffer, []
    before, original = buffer.num_sms, buffer.get_dispatch_config

    def spy(num_ranks: int) -> Any:
        made.append(buffer.num_sms)
        return original(num_ranks)

    monkeypatch.setattr(buffer, "get_dispatch_config", staticmethod(spy))
    on_ranks(lambda group: build_dispatcher(config({**V1, "num_sms": 24}), group).close(), 2)
    assert made == [24, 24]
    assert buffer.num_sms == before


@pytest.mark.parametrize("backend", [V2, V25, HYBRID, RAGGED], ids=names[1:])
def test_buffers_grow_by_what_the_ranks_agreed_on(backend: dict[str, Any]) -> None:
    """Only rank 1 has many rows; every rank's buffer grows, to the same size, and earlier dispatches stay good."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(config(backend), group)
        sizes = []
        x = torch.ones(3, 256, requires_grad=True)
        early = dispatcher.dispatch(x, Routing(torch.tensor([[0, 7]] * 3), torch.ones(3, 2)))
        for rows in (3, 600, 5, 1300):
            identity(dispatcher, rows if rank_of(group) == 1 else 3)
            sizes.append(backend_of(dispatcher).rows)
        dispatcher.combine(early.rows, early).sum().backward()
        assert x.grad is not None
        assert bool((x.grad == 2).all())
        dispatcher.close()
        return sizes

    assert on_ranks(body, 2) == [[512, 1024, 1024, 2048]] * 2


@pytest.mark.parametrize("backend", [V2, HYBRID], ids=["v2", "hybrid"])
def test_a_known_maximum_is_reserved_when_the_channel_opens(backend: dict[str, Any]) -> None:
    def body(group: Group) -> int:
        dispatcher = build_dispatcher(config(backend, max_tokens_per_rank=700), group)
        opened = backend_of(dispatcher).rows
        identity(dispatcher, 700)
        assert backend_of(dispatcher).rows == opened
        with pytest.raises(InputError, match=r"at most max_tokens_per_rank \(700\) rows per rank, got 701"):
            dispatcher.plan(Rows(), like=torch.ones(701, 256))
        dispatcher.close()
        return opened

    first, second = on_ranks(body, 2)
    assert first == second >= 700


def test_buffers_are_no_larger_than_rows_can_be() -> None:
    """Across domains the next power of two after 17000 is beyond what the library takes."""

    def body(group: Group) -> list[int]:
        found = []
        known: list[dict[str, Any]] = [{}, {"max_tokens_per_rank": 17000}]
        for fields in known:
            dispatcher = build_dispatcher(config({**HYBRID, "ranks_per_domain": 1}, **fields), group)
            identity(dispatcher, 17000 if rank_of(group) == 1 else 5)
            found.append(backend_of(dispatcher).rows)
            dispatcher.close()
        return found

    assert on_ranks(body, 2) == [[21824, 17024]] * 2


def test_a_buffer_that_refuses_to_go_does_not_keep_the_others() -> None:
    gone: list[int] = []

    class Buffer:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def destroy(self) -> None:
            gone.append(self.rows)
            if self.rows == 1024:
                raise RuntimeError("not now")

    class Backend(LibraryBackend):
        name = "deepep"

        def make(self, rows: int) -> Buffer:
            return Buffer(rows)

        def dispatch(self, *call: Any) -> Any:
            raise NotImplementedError

    shape = MoEShape(num_experts=8, top_k=2, hidden_size=16, ep_size=1, pad_multiple=1)
    backend = Backend(BackendContext(shape=shape, communicator=Communicator(None)))
    backend.reserve(Sizes(group_max_rows=1))
    backend.reserve(Sizes(group_max_rows=1000))
    with pytest.raises(RuntimeError, match="not now"):
        backend.close()
    assert sorted(gone) == [512, 1024]
    backend.close()
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


@pytest.mark.parametrize("backend", ALL, ids=names)
def test_a_rank_without_room_keeps_its_own_error(backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = LibraryBackend.reserve

    def reserve(self: LibraryBackend, sizes: Sizes) -> None:
        if threading.current_thread().name == "rank-1":
            raise MemoryError("no room on this rank")
        original(self, sizes)

    monkeypatch.setattr(LibraryBackend, "reserve", reserve)
    results = outcomes(lambda group: build_dispatcher(config(backend, max_tokens_per_rank=64), group), 2, seconds=1)
    assert isinstance(results[1], MemoryError)
    assert isinstance(results[0], Exception)
