"""Megatron's whole schedules with overlap, ``combined_1f1b``: without a pipeline, and with two chunks on each stage."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.integration.megatron_core.jobs import require, run_checks
from tests.integration.megatron_core.layer import EXPERTS, Case, Parallel, transformer_config
from tests.integration.megatron_core.model import BATCH, LENGTH, VOCABULARY
from tests.integration.megatron_core.schedule import simulated_streams
from tests.integration.needs import needs

pytestmark = needs("megatron")

MICRO_BATCHES = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """How the four ranks are divided: pipeline stages, their chunks, tensor-parallel ranks and ranks of experts."""

    ep: int
    pp: int = 1
    vpp: int | None = None
    tp: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    masked: bool = False


JOBS = {
    "ep 4": Job(ep=4),
    "pp 2 with 2 chunks, ep 2": Job(ep=2, pp=2, vpp=2),
    # On one stage, Megatron's schedule adds both gradients of the embedding in another order.
    "pp 2 with 2 chunks, multi-token prediction": Job(
        ep=2, pp=2, vpp=2, config={"mtp_num_layers": 1, "overlap_p2p_comm": True}, masked=True
    ),
    "tp 2, padding mask": Job(ep=4, tp=2, masked=True),
}


@contextmanager
def divided(job: Job) -> Iterator[None]:
    from megatron.core import parallel_state

    with (
        patch.object(torch.cuda, "synchronize"),
        patch.object(Tensor, "cuda", lambda tensor: tensor),
        patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", None),
    ):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=job.pp,
            virtual_pipeline_model_parallel_size=job.vpp,
            expert_model_parallel_size=job.ep,
            tensor_model_parallel_size=job.tp,
            expert_tensor_parallel_size=1,
        )
        yield
        parallel_state.destroy_model_parallel()


def chunks_of(job: Job, overlaps: bool) -> list[Any]:
    """The chunks of this stage in DDP, converted; the same weights in any order of building."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe_dispatch.integrations.megatron import convert

    fields = {
        "num_layers": 4,
        "pipeline_model_parallel_size": job.pp,
        "virtual_pipeline_model_parallel_size": job.vpp,
        "pipeline_dtype": torch.float32,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **job.config,
    }
    # Each stage of two has one peer. In a batch, gloo would match its activations with gradients.
    unchecked = {"overlap_moe_expert_parallel_comm": overlaps, "batch_p2p_comm": False}
    config = transformer_config(Case(parallel=Parallel(ep=job.ep, tp=job.tp), config=fields, unchecked=unchecked))
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    stage, number = parallel_state.get_pipeline_model_parallel_rank(), job.vpp or 1
    models = []
    for chunk in range(number):
        torch.manual_seed(10 * stage + chunk)
        vp_stage = chunk if job.vpp else None
        models.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCABULARY,
                max_sequence_length=LENGTH,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == job.pp - 1 and chunk == number - 1,
                share_embeddings_and_output_weights=False,
                vp_stage=vp_stage,
                mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False, vp_stage) if config.mtp_num_layers else None,
            )
        )
    convert(models)
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), model) for model in models]


def forward_step(
    rank: int, job: Job, batches: Iterator[int], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(100 * rank + next(batches))
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    call = model.build_schedule_plan if return_schedule_plan else model
    padding = {"padding_mask": torch.arange(LENGTH) >= torch.tensor([[LENGTH], [2 + rank]])} if job.masked else {}
    output = call(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous(), **padding)

    def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.mean(), {"loss": losses.detach().mean()}

    return output, loss_of


def step(job: Job, overlaps: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Losses and reduced gradients of one step, and the nodes that ran with their collectives."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with divided(job):
        chunks = chunks_of(job, overlaps)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        rank = parallel_state.get_data_parallel_rank()
        with simulated_streams() as seen:
            found = get_forward_backward_func()(
                forward_step_func=functools.partial(forward_step, rank, job),
                data_iterator=[iter(range(MICRO_BATCHES)) for _ in chunks],
                model=chunks,
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
            )
        for chunk in chunks:
            chunk.finish_grad_sync()
    gradients = {
        f"{number} {name}": parameter.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    losses = {f"loss {number}": one["loss"] for number, one in enumerate(found)}
    return losses | gradients, seen.collectives


def compared(rank: int, job: Job) -> dict[str, Any]:
    (plain, _), (overlapped, collectives) = step(job, False), step(job, True)
    assert plain.keys() == overlapped.keys()
    unequal = [name for name, tensor in plain.items() if not torch.equal(overlapped[name], tensor)]
    return {"unequal": unequal, "collectives": collectives, "losses": sum("loss" in name for name in plain)}


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_checks({name: functools.partial(compared, job=job) for name, job in JOBS.items()})


@pytest.mark.parametrize("name", JOBS)
def test_a_step_has_the_bits_of_one_without_overlap(name: str) -> None:
    job, found = JOBS[name], require(results()[name])
    for outcome in found:
        assert outcome["unequal"] == []
    assert [outcome["losses"] for outcome in found] == [0] * (4 - 4 // job.pp) + [MICRO_BATCHES] * (4 // job.pp)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_of_a_stage_start_the_same_exchanges_in_nodes(name: str) -> None:
    job, found = JOBS[name], require(results()[name])
    for first in range(0, 4, job.ep):
        orders = [outcome["collectives"] for outcome in found[first : first + job.ep]]
        assert all(order == orders[0] for order in orders)
        is_last = first + job.ep == 4
        layers = 4 // job.pp + is_last * job.config.get("mtp_num_layers", 0)
        for node in ("moe_dispatch forward: dispatch", "moe_combine backward: combine.backward"):
            assert orders[0].count(node) == layers * MICRO_BATCHES
