"""Buffers of the vendor libraries: how large they are, what a first run sets, and how they go."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.errors import ConfigError, InputError, PeerError, StateError
from moe_dispatch_testing.emulation import EmulatedAbort, emulated_deep_ep
from moe_dispatch_testing.emulation.normal import NormalBuffer
from tests.deep_ep_backends.conftest import Setting, Wrap
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
)
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere, random_routing, rank_of


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


@pytest.mark.parametrize("backend", [V1, V25, HYBRID], ids=["v1", "v2.5", "hybrid"])
def test_a_closed_backend_names_itself(backend: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        x = torch.ones(4, 256, requires_grad=True)
        sent = dispatcher.dispatch(x, random_routing(4))
        y = dispatcher.combine(sent.rows, sent)
        dispatcher.close()
        dispatcher.close()
        name = backend["name"]
        with pytest.raises(StateError, match=f"must be open, got a closed one of backend '{name}'"):
            dispatcher.dispatch(x, random_routing(4))
        with pytest.raises(StateError, match=f"Backend '{name}': its buffers must be open, got a call after close"):
            y.sum().backward()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", [V1, V2, RAGGED], ids=["v1", "v2", "ragged"])
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


def test_the_last_of_a_channel_frees_its_buffers(wrap: Wrap) -> None:
    freed: list[int] = []

    def destroying(original: Any, *args: Any) -> None:
        freed.append(1)
        original(*args)

    wrap(buffer_class(V1), "destroy", destroying)

    def body(group: Group) -> None:
        one, two = (build_dispatcher(config(V1), group) for _ in range(2))
        one.close()
        assert not freed  # neither rank closes the other one before both have sent rows
        identity(two, 3)
        two.close()

    on_ranks(body, 2)
    assert len(freed) == 2


def test_collected_without_close_says_so_and_leaves_the_buffers(caplog: pytest.LogCaptureFixture, wrap: Wrap) -> None:
    alive: list[Any] = []

    def opening(original: Any, buffer: Any, *args: Any, **given: Any) -> None:
        original(buffer, *args, **given)
        alive.append(weakref.ref(buffer))

    wrap(buffer_class(HYBRID), "__init__", opening)
    on_ranks(lambda group: identity(build_dispatcher(config(HYBRID, top_k=2), group), 3), 2)
    gc.collect()
    assert "was collected without close(): its buffers stay for the next dispatcher" in caplog.text
    assert len(alive) == 2
    assert all(buffer() is not None for buffer in alive), "a destructor would free what peers have mapped"


SCRIPT = """
import os
import torch
import torch.distributed as dist
from moe_dispatch import DispatcherConfig, Routing, build_dispatcher

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = DispatcherConfig(
    backend={"name": "hybridep", "emulate": True}, num_experts=4, top_k=1, hidden_size=16, wire="bfloat16"
)
dispatcher = build_dispatcher(config, dist.group.WORLD)
sent = dispatcher.dispatch(torch.ones(2, 16), Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)))
dist.destroy_process_group()
print(*os.listdir(os.environ["HYBRID_EP_CACHE_DIR"]), flush=True)
"""


@pytest.mark.slow
def test_a_process_may_end_without_close_and_leaves_no_folder_of_kernels(tmp_path: Path) -> None:
    parent = tmp_path / "cache"
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HYBRID_EP_CACHE_DIR": str(parent)},
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert len(finished.stdout.split()) == 1, "the folder of this process"
    assert not list(parent.iterdir())


def test_emulation_is_announced_once_and_only_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    library.warn_once.cache_clear()

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


@pytest.fixture
def no_network_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose network cards no GPU can drive. The library then refuses, unless it is told to go without."""
    for backend in (V2, V25):
        monkeypatch.setattr(buffer_class(backend), "has_gdaki", False)


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


def test_a_v2_that_asks_for_network_cards_within_a_node_is_named(wrap: Wrap) -> None:
    """Before pull request 630 it does so whatever ``EP_DISABLE_GIN`` says."""

    def refuse(*args: Any, **given: Any) -> None:
        raise RuntimeError("NCCL GIN is unavailable")

    wrap(buffer_class(V2), "__init__", refuse)
    results = outcomes(lambda group: build_dispatcher(config(V2, max_tokens_per_rank=8), group), 2)
    raises_everywhere(results, ConfigError, "even with EP_DISABLE_GIN=1", "Install a later version")


def test_a_buffer_across_nodes_that_is_outgrown_keeps_its_queues(caplog: pytest.LogCaptureFixture) -> None:
    def body(dispatcher: Dispatcher, rank: int) -> None:
        for rows in (3, 600):
            dispatcher.plan(like=torch.empty(rows, 256))

    on_dispatchers(body, config({**V25, "ranks_per_node": 1}))
    assert "is outgrown, and keeps its network queues until close(). Set max_tokens_per_rank" in caplog.text


def test_the_emulated_v1_refuses_filled_memory() -> None:
    def body(group: Group) -> None:
        buffer_class(V1)(group, 128, explicitly_destroy=True)

    raises_everywhere(outcomes(body, 2), EmulatedAbort, "fill_uninitialized_memory must be off in deterministic mode")


@pytest.fixture
def ids_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of v1 with another type of ids."""
    monkeypatch.setattr(emulated_deep_ep("v1.2.1"), "topk_idx_t", torch.int32, raising=False)
    monkeypatch.setattr(NormalBuffer, "ids_dtype", torch.int32)


def test_a_build_of_v1_with_ids_of_32_bits(ids_of_32_bits: None) -> None:
    on_ranks(lambda group: identity_and_close(build_dispatcher(config(V1), group)), 2)


@pytest.mark.parametrize("backend", [V2, V25], ids=["v2", "v2.5"])
def test_an_estimate_without_a_bandwidth_names_num_sms(backend: dict[str, Any], wrap: Wrap) -> None:
    """Across nodes the library divides by the speed that ``ibstat`` prints. Without ``ibstat`` it is 0."""
    wrap(buffer_class(backend), "get_theoretical_num_sms", lambda original, *sizes: 1 // 0)
    results = outcomes(lambda group: identity(build_dispatcher(config(backend), group), 3), 2)
    raises_everywhere(results, ConfigError, "ibstat", "set the option num_sms, for example to 24")
    on_ranks(lambda group: identity_and_close(build_dispatcher(config({**backend, "num_sms": 24}), group)), 2)


@pytest.mark.parametrize(("num_sms", "warns"), [(4, True), (24, False), (132, True)])
def test_a_suspicious_estimate_warns(num_sms: int, warns: bool, wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """Without ``nvidia-smi nvlink -s`` the library takes its least number of SMs, or all."""
    library.warn_once.cache_clear()
    wrap(buffer_class(V25), "get_theoretical_num_sms", lambda original, *sizes: num_sms)
    with caplog.at_level(logging.WARNING, logger="moe_dispatch"):
        on_ranks(lambda group: identity_and_close(build_dispatcher(config(V25), group)), 2)
    assert (f"deep_ep uses {num_sms} multiprocessors. It takes 4, or all" in caplog.text) == warns


@pytest.mark.parametrize("backend", [HYBRID, RAGGED], ids=str)
def test_buffers_of_one_process_share_their_kernels(backend: dict[str, Any], wrap: Wrap, variables: Setting) -> None:
    """A new dispatcher is a new buffer, whose kernels would be compiled again, at 8 s each.

    They lie in one folder, which the library is told by a variable while it makes a buffer.
    """
    compiled, counts, folders = buffer_class(backend).compilations, [], set()
    compiled.clear()

    def opening(original: Any, *args: Any, **given: Any) -> None:
        folders.add(os.environ["HYBRID_EP_CACHE_DIR"])
        original(*args, **given)

    wrap(buffer_class(backend), "__init__", opening)
    variables(HYBRID_EP_CACHE_DIR="elsewhere")
    for top_k in (1, 2, 3):  # which is no part of a kernel
        dispatcher = build_dispatcher(config(backend, top_k=top_k, hidden_size=512))
        sent = dispatcher.dispatch(torch.ones(4, 512, requires_grad=True), random_routing(4, top_k=top_k))
        dispatcher.combine(sent.rows, sent).sum().backward()
        counts.append(len(compiled))
        dispatcher.close()
    assert counts[0] > 0
    assert counts == counts[:1] * 3
    (folder,) = folders
    assert Path(folder).is_dir()
    assert os.environ["HYBRID_EP_CACHE_DIR"] == "elsewhere"
