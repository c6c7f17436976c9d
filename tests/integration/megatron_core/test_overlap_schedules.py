"""Megatron's whole schedules with overlap, ``combined_1f1b``: without a pipeline, and with two chunks on each stage."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.jobs import require
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.schedule import simulated_streams
from tests.integration.megatron_core.training import Training
from tests.integration.needs import needs

pytestmark = needs("megatron")

MICRO_BATCHES = 4
JOBS = {
    "pp 2 with 2 chunks, ep 2": Training(ep=2, pp=2, vpp=2),
    # On one stage, Megatron's schedule adds both gradients of the embedding in another order.
    "pp 2 with 2 chunks, multi-token prediction": Training(
        ep=2, pp=2, vpp=2, config={"mtp_num_layers": 1, "overlap_p2p_comm": True}, masked=True
    ),
    "tp 2, padding mask": Training(ep=4, tp=2, masked=True),
}


def step(job: Training, overlaps: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Losses and reduced gradients of one step, and the nodes that ran with their collectives."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from moe_dispatch.integrations.megatron import convert

    # Each stage of two has one peer. In a batch, gloo would match its activations with gradients.
    unchecked = {"overlap_moe_expert_parallel_comm": overlaps, "batch_p2p_comm": False}
    job = replace(job, config={"num_layers": 4, **job.config}, unchecked=unchecked)
    with job.global_groups():
        models = job.chunks()
        convert(models)
        chunks = [DistributedDataParallel(model.config, DistributedDataParallelConfig(), model) for model in models]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        with simulated_streams(watch_memory=False) as seen:
            found = job.step(chunks, range(MICRO_BATCHES))
        for chunk in chunks:
            chunk.finish_grad_sync()
    gradients = {
        f"{number} {name}": parameter.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    losses = {f"loss {number}": one["loss"] for number, one in enumerate(found)}
    return losses | gradients, seen.collectives


def compared(rank: int, job: Training) -> dict[str, Any]:
    (plain, _), (overlapped, collectives) = step(job, False), step(job, True)
    assert plain.keys() == overlapped.keys()
    unequal = [name for name, tensor in plain.items() if not torch.equal(overlapped[name], tensor)]
    return {"unequal": unequal, "collectives": collectives, "losses": sum("loss" in name for name in plain)}


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_megatron({name: functools.partial(compared, job=job) for name, job in JOBS.items()})


@pytest.mark.parametrize("name", JOBS)
def test_a_step_has_the_bits_of_one_without_overlap(name: str) -> None:
    found, of_last_stage = require(results()[name]), 4 // JOBS[name].pp
    for outcome in found:
        assert outcome["unequal"] == []
    assert [outcome["losses"] for outcome in found] == [0] * (4 - of_last_stage) + [MICRO_BATCHES] * of_last_stage


@pytest.mark.parametrize("name", JOBS)
def test_ranks_of_a_stage_start_the_same_exchanges_in_nodes(name: str) -> None:
    found, job = require(results()[name]), JOBS[name]
    for first in range(0, 4, job.ep):
        orders = [outcome["collectives"] for outcome in found[first : first + job.ep]]
        assert all(order == orders[0] for order in orders)
        is_last = first + job.ep == 4
        layers = 4 // job.pp + is_last * job.config.get("mtp_num_layers", 0)
        for node in ("moe_dispatch forward: dispatch", "moe_combine backward: combine.backward"):
            assert orders[0].count(node) == layers * MICRO_BATCHES
