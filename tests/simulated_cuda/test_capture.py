"""A captured call takes nothing from the host and gives it nothing: no copy to or from host memory, and no wait.

A replay would repeat such a copy with memory that has been reused. CUDA refuses a wait in a capture, and torch 2.12.1 a
copy of pageable memory. Nothing refuses a copy of pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import BSHD, Dispatcher, Plan, Rows
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import choose_permutation
from tests.simulated_cuda.device import Record, recorded
from tests.simulated_cuda.layer import BATCH, HIDDEN, LENGTH, VERBS, Step, dispatcher_of, inputs
from tests.simulated_cuda.ranks import NcclRanks

# torch warns of the run before the capture, in which a leaf is used on two streams.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
RANKS = NcclRanks()
BACKENDS = ("local", "alltoall", "allgather")
LENGTHS = [7, LENGTH]
MakePlan = Callable[[Dispatcher, Tensor], Layout | Plan]
LAYOUTS: dict[str, MakePlan] = {
    "rows": lambda dispatcher, x: Rows(),
    "lengths on the device": lambda dispatcher, x: BSHD(lengths=torch.tensor(LENGTHS, device="cuda")),
    "lengths on the host, with a plan": lambda dispatcher, x: dispatcher.plan(BSHD(lengths=LENGTHS), like=x),
}
DROPS: dict[str, Any] = {"graph_safe": {"capacity_factor": 0.5, "on_overflow": "drop"}}


def captured(backend: str, make_plan: MakePlan, fields: dict[str, Any]) -> list[Record]:
    """Capture all verbs of a layer on one rank, over NCCL except for ``local``. Return the records of the capture."""

    def body(group: dist.ProcessGroup) -> list[Record]:
        dispatcher = dispatcher_of(backend, group, **{"graph_safe": True, "max_tokens_per_rank": 32, **fields})
        rows, routing = inputs()
        x = rows.detach().view(BATCH, LENGTH, HIDDEN).requires_grad_()
        step = Step(dispatcher, x, routing, make_plan(dispatcher, x))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for verb in VERBS:
                step.run(verb)
        torch.cuda.current_stream().wait_stream(side)
        with recorded() as found, torch.cuda.graph(torch.cuda.CUDAGraph()):
            for verb in VERBS:
                step.run(verb)
        dispatcher.close()
        return [record for record in found if record.capture]

    (records,) = RANKS.run(body, 1)
    return records


def with_the_host(records: list[Record]) -> list[str]:
    """Return the copies to and from host memory, and the waits, each with its line."""
    within = ("copy", "device to device")
    return [
        f"{each.kind} {each.detail}, at {each.place}"
        for each in records
        if each.kind == "sync" or (each.kind.startswith("copy") and (each.kind, each.detail) != within)
    ]


# Each backend with each layout, and each of both with room for the worst case and with dropped rows.
CAPTURED = [
    (backend, layout, (row + column) % 2 == 1)
    for row, backend in enumerate(BACKENDS)
    for column, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("backend", "layout", "drops"), CAPTURED)
def test_a_captured_layer_exchanges_nothing_with_the_host(backend: str, layout: str, drops: bool) -> None:
    records = captured(backend, LAYOUTS[layout], DROPS if drops else {})
    assert "kernel" in {each.kind for each in records}
    assert not with_the_host(records)


def test_a_planted_copy_of_pinned_memory_is_found() -> None:
    permutation = choose_permutation("auto", "cuda")
    merge_slots = permutation.merge_slots

    def with_a_number_of_the_host(ids: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(1, dtype=ids.dtype, pin_memory=True)
        merged: tuple[Tensor, Tensor] = merge_slots(ids + zero.to(ids.device, non_blocking=True), weights, **options)
        return merged

    with patch.object(permutation, "merge_slots", with_a_number_of_the_host):
        (found,) = with_the_host(captured("local", LAYOUTS["rows"], {}))
    assert found.startswith("copy pinned to device")
    assert "dispatchers/" in found
