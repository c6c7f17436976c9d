"""Nothing of this library keeps a process group after ``close`` and ``del``. No test here collects garbage.

A group that is freed while the interpreter shuts down may abort the process. Garbage that only a collector frees is
freed then.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.errors import StateError
from moe_dispatch.integrations.transformers.experts import ExpertsFunction
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing.emulation import RELEASES
from moe_dispatch_testing.ranks import _run_threads, thread_group

RANKS = 2
WIRE: dict[str, Any] = {"wire": "bfloat16", "hidden_size": 256}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 8}
CASES: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "alltoall, graph-safe": {"backend": "alltoall", **SAFE},
    "alltoall, exact": {"backend": {"name": "alltoall", "reduction": "exact"}},
    "alltoall_by_node": {"backend": {"name": "alltoall_by_node", "ranks_per_node": 1}},
    "allgather": {"backend": "allgather"},
    "allgather, graph-safe": {"backend": "allgather", **SAFE},
    **{
        release: {"backend": {"name": "hybridep" if "hybridep" in release else "deepep", "emulate": release}, **WIRE}
        for release in RELEASES
    },
    "expanded": {"backend": {"name": "deepep", "emulate": True, "expand": True, "deterministic": False}, **WIRE},
    "deepep, graph-safe": {"backend": {"name": "deepep", "emulate": True}, **WIRE, **SAFE},
    "hybridep, graph-safe": {"backend": {"name": "hybridep", "emulate": True}, **WIRE, **SAFE},
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaves_no_group(use: Callable[[dist.ProcessGroup], None]) -> None:
    """Let each rank make a group, use it, and let go of it. No rank may hold the group afterwards."""
    store = HashStore()

    def rank(number: int) -> list[str]:
        group = thread_group(store, number, RANKS)
        alive = weakref.ref(group)
        use(group)
        del group
        return [] if alive() is None else [repr(one)[:200] for one in gc.get_referrers(alive())]

    assert _run_threads(rank, RANKS) == [[]] * RANKS


def config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"num_experts": 8, "top_k": 2, "hidden_size": 16, **fields})


def run_layer(dispatcher: Dispatcher) -> Tensor:
    x = torch.randn(5, dispatcher.config.hidden_size, requires_grad=True)
    weights, ids = torch.rand(5, 8).topk(2)
    sent = dispatcher.dispatch(x, Routing(ids, weights.requires_grad_()), async_op=True).wait()
    y = dispatcher.combine(sent.rows * 2, sent)
    y.sum().backward(retain_graph=True)
    return y


@pytest.mark.parametrize("case", CASES)
def test_a_closed_dispatcher_keeps_no_group(case: str) -> None:
    """Models keep their dispatchers until the end of the program. A backward that comes later is refused."""
    kept: list[Dispatcher] = []
    late: list[Tensor] = []

    def use(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(config(**CASES[case]), group)
        y = run_layer(dispatcher)
        dispatcher.close()
        kept.append(dispatcher)
        if "hybridep" not in case:  # a handle of the emulated library holds what its kernels hold
            late.append(y)

    leaves_no_group(use)
    assert all("closed" in repr(dispatcher) for dispatcher in kept)
    for y in late:
        with pytest.raises(StateError, match=r"after close\(\)"):
            y.sum().backward()


def slot_weights(group: dist.ProcessGroup) -> None:
    dispatcher = build_dispatcher(
        config(backend="alltoall", balance={"name": "manual", "spare_experts_per_rank": 1}), group
    )
    matrices = torch.randn(4, 16, 16, requires_grad=True)
    dispatcher.place(ExpertPlacement(8, ((0, 1, 2, 3, 4), (4, 5, 6, 7, 0))))
    for _ in range(2):
        x = torch.randn(5, 16, requires_grad=True)
        values, ids = torch.rand(5, 8).topk(2)
        sent = dispatcher.dispatch(x, Routing(ids, values))
        sent, outputs = SlotWeights(dispatcher).run(sent, lambda part, w: part.grouped_mm(part.rows, w), matrices)
        dispatcher.combine(outputs, sent).sum().backward()
    dispatcher.close()


def replay(group: dist.ProcessGroup) -> None:
    ids = torch.tensor([0, 1]).expand(1, 4, 1, 2)
    RoutingTable.from_padded([group.rank()], ids, torch.ones(1, 4, dtype=torch.bool), num_experts=8).gathered(group)


def transformers(group: dist.ProcessGroup) -> None:
    """The function stays in transformers' registry, whoever closes its dispatcher."""
    function = ExpertsFunction(config(backend="alltoall"), group, lambda *call: call[1])
    registry.append(function)
    function.dispatcher.close()
    function.ranks.let_go()  # as at the end of the process


registry: list[ExpertsFunction] = []


@pytest.mark.parametrize("use", [slot_weights, replay, transformers], ids=lambda use: use.__name__)
def test_no_group_is_left_by(use: Callable[[dist.ProcessGroup], None]) -> None:
    leaves_no_group(use)


ENDS = """
import torch, torch.distributed as dist, weakref
from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch.communication import Communicator

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = [Communicator(dist.group.WORLD)]  # as integrations keep it
for backend in ("alltoall", {"name": "hybridep", "emulate": True}, {"name": "deepep", "emulate": True}):
    config = DispatcherConfig(backend=backend, num_experts=4, top_k=1, hidden_size=256, wire="bfloat16")
    kept.append(build_dispatcher(config, dist.group.WORLD))
    kept[-1].plan(like=torch.ones(3, 256))
import atexit, gc
gc.disable()
alive = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
atexit._run_exitfuncs()
print("kept" if alive() else "gone", flush=True)
kept[-1].close()  # as a function may that was registered before ours
"""


def test_open_dispatchers_let_go_when_the_process_ends() -> None:
    finished = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (0, "gone\n"), finished.stderr
