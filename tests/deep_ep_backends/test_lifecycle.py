"""What happens to the vendor libraries when a dispatcher is closed, dropped or refused, and what is said of them."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.backends.deep_ep.deepep_v1 import NormalDeepEP
from moe_dispatch.errors import ConfigError, InputError, StateError
from tests.deep_ep_backends.vendors import ALL, HYBRID, V1, backend_of, config, identity, names, rank_of
from tests.dispatchers.layer import Group, on_ranks, random_routing


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
        with pytest.raises(StateError, match=f"must be open, got a closed one of backend '{name}'"):
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
    original = NormalDeepEP.close

    def close(self: NormalDeepEP) -> None:
        freed.append(1)
        original(self)

    monkeypatch.setattr(NormalDeepEP, "close", close)

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
        alive.append(weakref.ref(backend_of(dispatcher).buffer()))

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
