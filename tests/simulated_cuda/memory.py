"""The device memory that the verbs of a layer allocate, beside what ``Plan.bytes`` says."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from tests.simulated_cuda.deep_ep import deep_ep_on_devices
from tests.simulated_cuda.layer import VERBS
from tests.simulated_cuda.ranks import NcclRanks

TOKENS, HIDDEN, TOP_K, EXPERTS = 64, 1024, 8, 32
CARRY = {"adapter": torch.int64, "domain": torch.int32}
DISPATCH = ("rows", "weights", "index", "wire", "carried")


@dataclass(frozen=True, slots=True)
class Case:
    """A layer in graph-safe mode.

    Attributes:
        backend: Backend of the config.
        ranks: Number of ranks.
        fields: Further fields of the config.
        release: Release of the vendor's library that is emulated, if the backend calls one.
        carry: Whether data travels with the rows.
    """

    backend: Any
    ranks: int
    fields: dict[str, Any] = field(default_factory=dict)
    release: str | None = None
    carry: bool = False


def measure(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most bytes that each verb holds at one time on device 0, and those that ``Plan.bytes`` says."""
    barrier, release = threading.Barrier(case.ranks), case.release
    with nullcontext() if release is None else deep_ep_on_devices(release):
        return NcclRanks().run(partial(_on_rank, case, barrier), case.ranks)[0]


def _settled(device: torch.device) -> int:
    """Return the bytes in use when nothing is freed any more: the thread of a backward outlives its result a little."""
    found = [-1]
    while len(set(found[-5:])) > 1 or len(found) < 6:
        time.sleep(0.01)
        gc.collect()
        found.append(torch.cuda.memory_stats(device)["requested_bytes.all.current"])
    return found[-1]


def _on_rank(case: Case, barrier: threading.Barrier, group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
    rank = group.rank()
    device, generator = torch.device("cuda", rank), torch.Generator().manual_seed(rank)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
    given = {"pad_multiple": 16, "graph_safe": True, **sizes, **case.fields}
    dispatcher = build_dispatcher(DispatcherConfig(backend=case.backend, **given), group if case.ranks > 1 else None)
    weights, ids = (each.to(device) for each in torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K))
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device).requires_grad_()
    routing, upstream, plan = Routing(ids, weights.requires_grad_()), torch.ones_like(x), dispatcher.plan(like=x)
    carry = {name: torch.zeros(TOKENS, dtype=dtype, device=device) for name, dtype in CARRY.items()}
    found = dict[str, int]()

    def held(verb: str, action: Callable[[], Any]) -> Any:
        gc.collect()
        barrier.wait()
        before = _settled(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = action()
        barrier.wait()
        found[verb] = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
        return result

    for _ in range(2):  # the first run compiles, and fills caches
        more = {"carry": carry} if case.carry else {}
        sent = held(VERBS[0], partial(dispatcher.dispatch, x, routing, plan, **more))
        edge = sent.in_graph
        rows = edge.detach() if sent.quantised is None else torch.empty(edge.shape, dtype=edge.dtype, device=device)
        y = held(VERBS[1], partial(dispatcher.combine, rows.requires_grad_(), sent))
        grads = held(VERBS[2], partial(torch.autograd.grad, y, (rows, sent.weights), upstream, allow_unused=True))
        grads = [torch.zeros_like(sent.weights) if grad is None else grad for grad in grads]
        del y, rows
        held(VERBS[3], partial(torch.autograd.grad, (edge, sent.weights), (x, weights), grads))
        del sent, edge, grads
    told = plan.bytes(x.dtype, CARRY if case.carry else None)
    dispatcher.close()
    of_dispatch = sum(told.get(purpose, 0) for purpose in DISPATCH)
    return found, {VERBS[0]: of_dispatch, **{verb: told[verb] for verb in VERBS[1:]}}
