"""Collectives and host syncs of a training step of a model with four MoE layers, for each way to settle row counts.

With top_k=1 nothing looks for duplicate experts, which the host reads on a CPU only.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from moe_dispatch import Plan, Rows, build_dispatcher
from moe_dispatch_testing import HostRead, count_collectives, count_host_syncs
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config

LAYERS, ROWS = 4, 5
POLICIES = ("agree", "check", "assume", "static")

ALLTOALL = {"alltoall_base": 5 * LAYERS}  # counts, rows, and back; backwards of both
ALLGATHER = {"allgather_base": 2 * LAYERS, "reduce_scatter_base": 2 * LAYERS}

# backend, policy, with a plan -> collectives and host syncs per rank of one step
TABLE: list[tuple[str, str, bool, dict[str, int], int]] = [
    *(("alltoall", policy, planned, ALLTOALL, LAYERS) for policy in POLICIES for planned in (True, False)),
    *(("allgather", policy, planned, ALLGATHER, LAYERS) for policy in POLICIES[2:] for planned in (True, False)),
    *(("allgather", policy, True, {**ALLGATHER, "allreduce": 1}, LAYERS + 1) for policy in POLICIES[:2]),
    *(("allgather", policy, False, {**ALLGATHER, "allreduce": LAYERS}, LAYERS) for policy in POLICIES[:2]),
]


def _step(layers: list[Any], x: torch.Tensor, plan: Plan | None) -> None:
    way = random_routing(ROWS, top_k=1)
    for layer in layers:
        sent = layer.dispatch(x, way, plan)
        x = layer.combine(sent.rows, sent)
    x.sum().backward()


@pytest.mark.parametrize(("backend", "policy", "planned", "collectives", "syncs"), TABLE)
def test_a_step_of_four_layers(
    backend: str, policy: str, planned: bool, collectives: dict[str, int], syncs: int
) -> None:
    config = small_config(backend, row_counts=policy, max_tokens_per_rank=8, top_k=1)

    def body(group: Group) -> tuple[Counter[str], int]:
        layers = [build_dispatcher(config, group) for _ in range(LAYERS)]
        x = random_rows(ROWS).requires_grad_()
        before = _reads_here(reads)
        with count_collectives() as seen:
            _step(layers, x, layers[0].plan(Rows(), like=x) if planned else None)
        return seen.counts, _reads_here(reads) - before

    with count_host_syncs() as reads:
        assert on_ranks(body, 2) == [(Counter(collectives), syncs)] * 2


def _reads_here(reads: list[HostRead]) -> int:
    """By this rank."""
    return sum(read.thread == threading.current_thread().name for read in reads)
