"""Megatron's hybrid context-parallel schedule, whose ranks have different numbers of micro-batches.

A block of MoE layers without attention runs, because attention over dynamic context-parallel groups needs
transformer-engine, which needs a GPU. Megatron's scheduler, groups, schedule and steps are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch.dispatchers import even_rounds
from tests.integration.jobs import require
from tests.integration.megatron_core.layer import HIDDEN, Case, Parallel, gradients_of
from tests.integration.megatron_core.model import moe_block
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = needs("megatron")

LENGTHS = (16, 3, 12, 8, 4, 12, 4, 3, 7, 3)  # sequences of more than 8 tokens are cut between two ranks
Step = Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]
wait = dist.barrier

STEPS = [[1, 1, 2, 2], [1, 1, 3, 2]]  # of each rank, between two barriers


def sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn((LENGTHS[index], 1, HIDDEN), generator=generator)


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run this rank's part of a sequence. Losses of parts add up to the loss of the sequence."""
    from megatron.core import parallel_state

    given = next(data)
    size = int(given["local_cp_size"])
    rank = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size).rank() if size > 1 else 0
    output = model(given["hidden"].chunk(size)[rank].clone().requires_grad_(), None)
    return output.square().sum(), lambda loss: (loss, torch.tensor(1, dtype=torch.int), {"loss": loss.detach()})


class Rounds:
    """Steps of the schedule between two barriers. At a barrier, a rank that is done runs steps without a loss.

    They have one token, because Megatron's router takes no empty batch.
    """

    def __init__(self, forward_step: Step, model: nn.Module) -> None:
        self.run, self.model = forward_step, model
        self.data: Iterator[Any] | None = None
        self.begin()

    def begin(self) -> None:
        empty = {"hidden": sample(0)[:1], "local_cp_size": 1}
        self.rounds = even_rounds(iter(self.following, None), empty, dist.group.WORLD)

    def following(self) -> Any:
        """The next sample of the schedule; None at its barrier."""
        return None if self.data is None else next(self.data)

    def forward_step(self, data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        self.data = data
        result = self.run(iter([next(self.rounds)]), model)
        self.data = None
        return result

    def end(self) -> None:
        for empty in self.rounds:
            (0 * self.run(iter([empty]), self.model)[0]).backward()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.end()
        wait(*args, **kwargs)
        self.begin()


def compared(rank: int) -> dict[str, Any]:
    """Train on all sequences with the schedule, and with Megatron's dispatcher, where each rank runs all sequences."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func, hybrid_cp_schedule

    from moe_dispatch.integrations.megatron import convert

    with patch.object(torch.cuda, "synchronize"), patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", None):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=4, hybrid_context_parallel=True)
    fields = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    block = moe_block(Case(parallel=Parallel(ep=4), config=fields, unchecked={"hybrid_context_parallel": True}))
    block.model_type = ModelType.encoder_or_decoder
    for index in range(len(LENGTHS)):
        block(sample(index).requires_grad_(), None).square().sum().backward()
    want = gradients_of(block)
    assert any("experts" in name for name in want)
    block.zero_grad()

    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    scheduler = hybrid_cp_schedule.BalancedCPScheduler(8, dp_cp)
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(LENGTHS)), block.config)
    steps = [[len(samples) for samples in group] for group in groups]

    def finalize(models: list[Any], *others: Any, **named: Any) -> None:
        """Reduce gradients as Megatron does, when no rank makes calls any more."""
        rounds.end()
        for name, parameter in models[0].named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)

    block.config.finalize_model_grads_func = finalize
    convert(block, watchdog=60)
    batch = [{"hidden": sample(index)} for index in range(len(LENGTHS))]
    rounds = Rounds(forward_step, block)
    with patch.object(dist, "barrier", rounds.barrier):
        losses = get_forward_backward_func()(
            forward_step_func=rounds.forward_step,
            data_iterator=iter([(batch, groups)]),
            model=block,
            num_microbatches=1,
            seq_length=max(LENGTHS),
            micro_batch_size=1,
        )
    parallel_state.destroy_model_parallel()
    # Each rank has sent all sequences to the experts of Megatron's dispatcher.
    expected = {name: grad / 4 if "experts" in name else grad for name, grad in want.items()}
    return {"error": difference(gradients_of(block), expected), "steps": steps, "losses": len(losses)}


def test_gradients_are_those_of_megatrons_own_dispatcher() -> None:
    found = require(run_megatron({"compared": compared})["compared"])
    for rank, outcome in enumerate(found):
        assert outcome["steps"] == STEPS
        assert outcome["losses"] == sum(group[rank] for group in STEPS)
        assert outcome["error"] < 1e-5
