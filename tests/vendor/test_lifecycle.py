"""Buffers of the vendor libraries: how large, who decides that they grow, and that they go when they should."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.backends import Sizes
from moe_dispatch.backends.deepep import DeepEP
from moe_dispatch.backends.hybridep import HybridEP
from moe_dispatch.backends.vendor import hybrid, library
from moe_dispatch.backends.vendor.normal import NormalTransport
from moe_dispatch.backends.vendor.pool import BufferPool
from moe_dispatch.backends.vendor.switch import ProcessSwitch
from moe_dispatch.errors import ConfigError, InputError, PeerError, StateError
from moe_dispatch.testing.emulation import EmulatedHang, emulated_deep_ep
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing

V1: dict[str, Any] = {"name": "deepep", "emulate": "v1.2.1"}
V2: dict[str, Any] = {"name": "deepep", "emulate": "v2-2.1.0"}
HYBRID: dict[str, Any] = {"name": "hybridep", "emulate": "hybridep-94a9f8f"}
RAGGED: dict[str, Any] = {"name": "hybridep", "emulate": "hybridep-744"}
ALL = [V1, V2, HYBRID, RAGGED]
names = [backend["emulate"] for backend in ALL]


def config(backend: dict[str, Any], **fields: Any) -> DispatcherConfig:
    sizes: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "wire_dtype": "bfloat16"}
    return DispatcherConfig(backend=backend, **{**sizes, **fields})


def identity(dispatcher: Dispatcher, rows: int, *, seed: int = 0) -> None:
    """Rows out and back; numbers that bfloat16 holds exactly."""
    routing = random_routing(rows, seed)
    x = torch.arange(rows * 256).view(rows, 256).remainder(64).float()
    sent = dispatcher.dispatch(x, Routing(routing.topk_ids, torch.ones(rows, 2)))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), 2 * x)


def pool_of(dispatcher: Dispatcher) -> BufferPool:
    backend = dispatcher._lease.channel.backend
    assert isinstance(backend, (DeepEP, HybridEP))
    transport: Any = backend.transport
    pool: BufferPool = transport._pool
    return pool


def rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def test_v1_takes_the_hints_and_no_rdma_buffer_inside_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    buffer = emulated_deep_ep("v1.2.1").Buffer
    original = buffer.__init__

    @functools.wraps(original)
    def spy(self: Any, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **more: Any) -> None:
        found.append((num_nvl_bytes, num_rdma_bytes))
        original(self, group, num_nvl_bytes, num_rdma_bytes, **more)

    monkeypatch.setattr(buffer, "__init__", spy)
    on_ranks(lambda group: build_dispatcher(config(V1), group).close(), 2)
    hints = [
        make(2).get_nvl_buffer_size_hint(256 * 2, 2) for make in (buffer.get_dispatch_config, buffer.get_combine_config)
    ]
    assert found == [(max(hints), 0)] * 2


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


@pytest.mark.parametrize("backend", [V2, HYBRID, RAGGED], ids=names[1:])
def test_buffers_grow_by_what_the_ranks_agreed_on(backend: dict[str, Any]) -> None:
    """Only rank 1 has many rows; every rank's buffer grows, to the same size, and earlier dispatches stay good."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(config(backend), group)
        sizes = []
        x = torch.ones(3, 256, requires_grad=True)
        early = dispatcher.dispatch(x, Routing(torch.tensor([[0, 7]] * 3), torch.ones(3, 2)))
        for rows in (3, 600, 5, 1300):
            identity(dispatcher, rows if rank_of(group) == 1 else 3)
            sizes.append(pool_of(dispatcher).rows)
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
        opened = pool_of(dispatcher).rows
        identity(dispatcher, 700)
        assert pool_of(dispatcher).rows == opened
        with pytest.raises(InputError, match=r"at most max_tokens_per_rank \(700\) rows per rank, got 701"):
            dispatcher.plan(Rows(), like=torch.ones(701, 256))
        dispatcher.close()
        return opened

    first, second = on_ranks(body, 2)
    assert first == second >= 700


@pytest.mark.parametrize("backend", [V2, HYBRID], ids=["v2", "hybrid"])
def test_a_buffer_that_grows_on_one_rank_alone_is_seen(
    backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: a rank decides from a count of its own. The real library would wait for ever."""
    cls = DeepEP if backend is V2 else HybridEP
    original = cls.reserve

    def by_its_own_count(self: Any, sizes: Sizes) -> None:
        mine = 2000 if self.context.communicator.rank == 1 else 3
        original(self, Sizes(padded_rows=mine, group_max_rows=mine))

    monkeypatch.setattr(cls, "reserve", by_its_own_count)

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        pool_of(dispatcher).reserve(3)
        identity(dispatcher, 3)

    results = outcomes(body, 2, seconds=3)
    assert any(isinstance(result, EmulatedHang) for result in results), results


def test_buffers_are_no_larger_than_rows_can_be() -> None:
    """Across domains the next power of two after 17000 is beyond what the library takes."""

    def body(group: Group) -> list[int]:
        found = []
        known: list[dict[str, Any]] = [{}, {"max_tokens_per_rank": 17000}]
        for fields in known:
            dispatcher = build_dispatcher(config({**HYBRID, "ranks_per_domain": 1}, **fields), group)
            identity(dispatcher, 17000 if rank_of(group) == 1 else 5)
            found.append(pool_of(dispatcher).rows)
            dispatcher.close()
        return found

    assert on_ranks(body, 2) == [[21824, 17024]] * 2


@pytest.mark.parametrize("backend", [V2, RAGGED], ids=["v2", "ragged"])
def test_an_overridden_multiple_counts_in_what_is_reserved(backend: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        known: list[dict[str, Any]] = [{}, {"max_tokens_per_rank": 500}]
        for fields in known:
            dispatcher = build_dispatcher(config(backend, constraints={"row_multiple": 1000}, **fields), group)
            identity(dispatcher, 500 - rank_of(group))
            dispatcher.close()

    on_ranks(body, 2)


def test_a_buffer_that_could_not_be_made_is_asked_for_again() -> None:
    sizes: list[int] = []

    def make(rows: int) -> str:
        sizes.append(rows)
        if sizes == [512, 1024]:
            raise MemoryError("no room")
        return f"buffer of {rows}"

    pool = BufferPool("deepep", make, most_rows=None)
    pool.reserve(1)
    with pytest.raises(MemoryError, match="no room"):
        pool.reserve(600)
    assert pool.rows == 512
    pool.reserve(600)
    assert pool.current.buffer == "buffer of 1024"
    assert sizes == [512, 1024, 1024]


def test_a_buffer_that_refuses_to_go_does_not_keep_the_others() -> None:
    gone: list[int] = []

    class Buffer:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def destroy(self) -> None:
            gone.append(self.rows)
            if self.rows == 1024:
                raise RuntimeError("not now")

    pool = BufferPool("deepep", Buffer, most_rows=None)
    pool.reserve(1)
    pool.reserve(1000)
    with pytest.raises(RuntimeError, match="not now"):
        pool.close()
    assert sorted(gone) == [512, 1024]
    pool.close()
    assert len(gone) == 2


def test_a_mark_reaches_peers_before_they_make_buffers() -> None:
    """debug: a rank that refuses does not come to the buffers, which are made when sizes are settled."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(V2, row_counts="assume", debug=True), group)
        routing = random_routing(4)
        ids = routing.topk_ids.int() if rank_of(group) == 1 else routing.topk_ids
        dispatcher.dispatch(torch.ones(4, 256), Routing(ids, routing.topk_weights))

    first, second = outcomes(body, 2, seconds=3)
    raises_everywhere([first], PeerError, "rank 1 refused: its tensors do not fit")
    assert isinstance(second, InputError)


@pytest.mark.parametrize("backend", ALL, ids=names)
def test_a_rank_without_room_keeps_its_own_error(backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = BufferPool.reserve

    def reserve(self: BufferPool, rows: int) -> None:
        if threading.current_thread().name == "rank-1":
            raise MemoryError("no room on this rank")
        original(self, rows)

    monkeypatch.setattr(BufferPool, "reserve", reserve)
    results = outcomes(lambda group: build_dispatcher(config(backend, max_tokens_per_rank=64), group), 2, seconds=3)
    assert isinstance(results[1], MemoryError)
    assert isinstance(results[0], Exception)


@pytest.mark.parametrize("backend", ALL, ids=names)
def test_a_closed_backend_names_itself(backend: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        x = torch.ones(4, 256, requires_grad=True)
        sent = dispatcher.dispatch(x, random_routing(4))
        y = dispatcher.combine(sent.rows, sent)
        dispatcher.close()
        dispatcher.close()
        name = backend["name"]
        with pytest.raises(StateError, match=f"must be open, got a closed one of backend '{name}' on channel {name}-"):
            dispatcher.dispatch(x, random_routing(4))
        with pytest.raises(StateError, match=f"Backend '{name}': its buffers must be open, got a call after close"):
            y.sum().backward()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ALL, ids=names)
def test_two_dispatchers_of_different_sizes_side_by_side(backend: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        narrow, wide = (
            build_dispatcher(config(backend, num_experts=n, pad_multiple=m), group) for n, m in ((8, 1), (16, 16))
        )
        for rows in (5, 700):
            identity(wide, rows + rank_of(group))
            identity(narrow, rows)
        narrow.close()
        identity(wide, 9)
        wide.close()

    on_ranks(body, 2)


def test_the_last_of_a_channel_frees_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    original = NormalTransport.close

    def close(self: NormalTransport) -> None:
        freed.append(1)
        original(self)

    monkeypatch.setattr(NormalTransport, "close", close)

    def body(group: Group) -> None:
        one, two = (build_dispatcher(config(V1), group) for _ in range(2))
        one.close()
        assert not freed  # neither rank closes the other one before both have sent rows
        identity(two, 3)
        two.close()

    on_ranks(body, 2)
    assert len(freed) == 2


def test_collected_without_close_says_so_and_leaves_the_buffers(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(V1), group)
        identity(dispatcher, 3)
        del dispatcher
        gc.collect()

    alive: list[Any] = []

    def watching(group: Group) -> None:
        dispatcher = build_dispatcher(config(HYBRID, top_k=3), group)
        dispatcher.plan(like=torch.ones(3, 256))
        alive.append(weakref.ref(pool_of(dispatcher).current.buffer))

    on_ranks(body, 2)
    on_ranks(watching, 2)
    gc.collect()
    assert (
        "was collected without close(): its buffers stay until the process ends. Call close() on every" in caplog.text
    )
    assert all(buffer() is not None for buffer in alive), "a destructor would free what peers have mapped"


SCRIPT = """
import torch
import torch.distributed as dist
from moe_dispatch import DispatcherConfig, Routing, build_dispatcher

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = DispatcherConfig(
    backend={"name": "hybridep", "emulate": True}, num_experts=4, top_k=1, hidden_size=16, wire_dtype="bfloat16"
)
dispatcher = build_dispatcher(config, dist.group.WORLD)
sent = dispatcher.dispatch(torch.ones(2, 16), Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)))
dist.destroy_process_group()
print("leaves", flush=True)
"""


def test_a_process_may_end_without_close() -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (0, "leaves\n"), finished.stderr
    assert "Traceback" not in finished.stderr


def test_emulation_is_announced_once_and_only_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    library._announce.cache_clear()

    def body(group: Group) -> None:
        for top_k in (1, 2):
            build_dispatcher(config(HYBRID, top_k=top_k), group).close()
        build_dispatcher(config({"name": "alltoall"}), group).close()

    with caplog.at_level(logging.INFO, logger="moe_dispatch"):
        on_ranks(body, 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "backend 'hybridep' runs on the emulation of deep_ep hybridep-94a9f8f: for tests, not for speed."
    ]
    assert "2 ranks, 2 ranks per NVLink domain (detected)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="moe_dispatch"):
        on_ranks(lambda group: build_dispatcher(config({**V1, "ranks_per_node": 2}), group).close(), 2)
    assert "2 ranks, 2 ranks per node (configured), " in caplog.text
    assert "and 0 of RDMA buffer per rank" in caplog.text


def test_tensors_elsewhere_are_refused() -> None:
    dispatcher = build_dispatcher(config(HYBRID))
    x, routing = torch.ones(2, 256, device="meta"), random_routing(2)
    with pytest.raises(
        InputError,
        match=r"x must be on cpu, got meta. Move x, or use another backend: .hybridep. takes no other device",
    ):
        dispatcher.dispatch(x, Routing(routing.topk_ids.to("meta"), routing.topk_weights.to("meta")))
    dispatcher.close()
    with pytest.raises(ConfigError, match="device must be one of cpu, got 'cuda'"):
        build_dispatcher(config(HYBRID, device="cuda"))


@pytest.mark.parametrize("backend", [V2, HYBRID], ids=["v2", "hybrid"])
def test_peers_of_a_refusing_rank_are_told(backend: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        dispatcher.dispatch(torch.ones(4, 256), random_routing(4 + rank_of(group)))

    first, second = outcomes(body, 2)
    raises_everywhere([first], PeerError, "rank 1 refused: its tensors do not fit")
    assert isinstance(second, InputError)


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


def identity_and_close(dispatcher: Dispatcher) -> None:
    identity(dispatcher, 3)
    dispatcher.close()


def test_a_switch_of_the_process_has_one_value_at_a_time() -> None:
    held = {"value": "before"}
    switch = ProcessSwitch("the setting", lambda: held["value"], lambda value: held.update(value=value))
    with switch.at("a"), switch.at("a"):
        assert held["value"] == "a"
        with pytest.raises(ConfigError, match="the setting must be one value in all threads, got 'b' while it is 'a'"):
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
        "the library found 1 ranks per NVLink domain, constraints were taken for 2. Set the option ranks_per_domain=1"
    )
    raises_everywhere(results, ConfigError, told)


def test_an_early_release_refuses_a_rank_that_receives_nothing() -> None:
    def body(group: Group) -> None:
        backend = {"name": "hybridep", "emulate": "hybridep-0ed15b5"}
        dispatcher = build_dispatcher(config(backend, hidden_size=512), group)
        dispatcher.dispatch(torch.ones(4, 512), Routing(torch.tensor([[0, 1]] * 4), torch.ones(4, 2)))

    results = outcomes(body, 2, seconds=3)
    assert results[0] is None
    told = ("every rank must receive a row, got none on rank 1", "install one of 2026-04")
    raises_everywhere(results[1:], StateError, *told)


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
