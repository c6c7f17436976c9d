"""One layer on the simulated devices, whose verbs are recorded one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import BSHD, Dispatcher, DispatcherConfig, Plan, Routing, Rows, build_dispatcher
from moe_dispatch.layouts import Layout
from tests.simulated_cuda.device import Record, recorded

EXPERTS, TOP_K, HIDDEN, BATCH, LENGTH = 8, 2, 256, 2, 12
VERBS = ("dispatch", "combine", "combine.backward", "dispatch.backward")
Records = dict[str, list[Record]]


def dispatcher_of(backend: Any, group: dist.ProcessGroup | None, **fields: Any) -> Dispatcher:
    config = DispatcherConfig(
        backend=backend, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, **{"pad_multiple": 16, **fields}
    )
    return build_dispatcher(config, None if backend == "local" else group)


def inputs() -> tuple[Tensor, Routing]:
    x = torch.randn(BATCH * LENGTH, HIDDEN, device="cuda").bfloat16().requires_grad_()
    weights, ids = torch.rand(BATCH * LENGTH, EXPERTS, device="cuda").topk(TOP_K)
    return x, Routing(ids, weights.requires_grad_())


class Recorder:
    """Records what the device of rank 0 is asked for during one verb, while the other ranks run the same verb.

    Args:
        size: Number of ranks.
        collect: Function that returns a context, which yields the list of what is recorded inside.
    """

    def __init__(self, size: int, collect: Callable[[], AbstractContextManager[list[Any]]] = recorded) -> None:
        self._barrier, self._collect = threading.Barrier(size), collect

    def __call__(self, rank: int, action: Callable[[], None]) -> list[Any]:
        """Run ``action``. Return the records on rank 0, nothing on other ranks."""
        self._barrier.wait()
        with nullcontext(list[Any]()) if rank else self._collect() as found:
            action()
            self._barrier.wait()
        self._barrier.wait()
        return [record for record in found if record.device == 0]


def record_verbs(
    group: dist.ProcessGroup, recorder: Recorder, backend: Any, layout: str, fields: dict[str, Any]
) -> Records:
    """Run a layer twice. Return the records of each verb in the second run."""
    rank, device = group.rank(), torch.device("cuda", group.rank())
    dispatcher, generator = dispatcher_of(backend, group, **fields), torch.Generator(device).manual_seed(rank)
    plan: Layout | Plan = BSHD(lengths=[7, LENGTH]) if layout == "bshd" else Rows()
    shape = (BATCH, LENGTH, HIDDEN) if layout == "bshd" else (BATCH * LENGTH, HIDDEN)
    scores = torch.rand(BATCH * LENGTH, EXPERTS, generator=generator, device=device)
    weights, ids = scores.topk(TOP_K)
    x = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
    weights.requires_grad_()
    step = Step(dispatcher, x, Routing(ids, weights), plan)
    for verb in VERBS:
        recorder(rank, partial(step.run, verb))
    found = {verb: recorder(rank, partial(step.run, verb)) for verb in VERBS}
    dispatcher.close()
    return found


class Step:
    """Forward and backward of a layer whose experts do nothing, verb by verb."""

    def __init__(self, dispatcher: Dispatcher, x: Tensor, routing: Routing, plan: Layout | Plan) -> None:
        self._dispatcher, self._x, self._routing, self._plan = dispatcher, x, routing, plan
        self._upstream = torch.ones_like(x)

    def run(self, verb: str) -> None:
        """Run one verb. The verbs must be run in the order of ``VERBS``."""
        if verb == "dispatch":
            self.sent = self._dispatcher.dispatch(self._x, self._routing, self._plan)
            self._outputs = self._experts().requires_grad_()
        elif verb == "combine":
            self._y = self._dispatcher.combine(self._outputs, self.sent)
        elif verb == "combine.backward":
            self._grads = torch.autograd.grad(self._y, (self._outputs, self.sent.weights), self._upstream)
        else:
            leaves = self._x, self._routing.topk_weights
            torch.autograd.grad((self.sent.in_graph, self.sent.weights), leaves, self._grads)

    def _experts(self) -> Tensor:
        """Return the outputs of experts: their rows; or memory with any values if rows are quantised, to read none."""
        edge = self.sent.in_graph
        if self.sent.quantised is None:
            return edge.detach()
        return torch.empty(edge.shape, dtype=edge.dtype, device=edge.device)
