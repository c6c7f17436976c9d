"""Training on one rank. A single process without a group trains on the union of all ranks' data, with the same losses.

Dimensions: ``T`` bytes of this rank, ``E`` experts in the whole group.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_dispatch import DispatcherConfig
from moe_dispatch_tools.traces import RunLog, Trace
from packed_text.documents import Pack, batches, join
from packed_text.model import ByteLanguageModel, Group

BYTES_PER_RANK = 320
MAX_LENGTH = 768
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 10
PRINT_STEPS = 8
BALANCE = 0.3
SEED = 2024
# The first steps allocate buffers and memory pages. They count in the curves, but not in tokens/s.
UNTIMED_STEPS = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training. Two tasks that differ only in the backend of the config give the same losses.

    Attributes:
        config: Config of every dispatcher of the model.
        steps: Number of training steps.
        packs: Number of packs in a batch: one for each rank. A single process trains on their union.
        trace: File for the routing of all steps, or None.
        log: Directory for the counts of each step, or None.
    """

    config: DispatcherConfig
    steps: int
    packs: int
    trace: Path | None = None
    log: Path | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The results of one training: plain numbers, because they travel between processes.

    Attributes:
        losses: Mean cross-entropy of every step, in nats per byte.
        tokens_per_expert: [step][layer][expert], summed over ranks.
        bytes_per_step: Mean number of bytes that the dispatchers of all ranks send to other ranks in a step.
        rows_padded: Number of rows without a token, by cause, summed over ranks, layers and steps.
        tokens_per_second: Summed over ranks.
    """

    backend: str
    wire: str | None
    emulated: bool
    ranks: int
    losses: list[float]
    tokens_per_expert: list[list[list[int]]]
    bytes_per_step: float
    rows_padded: dict[str, int]
    tokens_per_second: float


def train(task: Task, group: Group, device: torch.device) -> Run:
    """Train a model. Rank 0 prints the loss every few steps. Collective."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    torch.manual_seed(SEED)  # every rank draws the whole model, and its dispatchers keep their experts
    model = ByteLanguageModel(task.config, group).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    data = batches(ranks=task.packs, bytes_per_rank=BYTES_PER_RANK, max_length=MAX_LENGTH, seed=SEED)
    losses, tokens_per_expert, num_tokens, ends = [], [], [], [time.perf_counter()]
    first = model.dispatchers[0]  # all dispatchers share one channel, so the first one counts for all
    with (
        nullcontext() if task.trace is None else Trace.record(first, task.trace, steps=task.steps),
        nullcontext() if task.log is None else RunLog.record(first, task.log) as log,
    ):
        for step, packs in enumerate(islice(data, task.steps)):
            num_tokens.append(sum(map(len, packs)))
            pack = join(packs) if group is None else packs[rank]
            loss, chosen = compute_gradients(model, pack, num_tokens[-1], group)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(sum_over_ranks(loss, group).item())
            tokens_per_expert.append(chosen.long().tolist())
            ends.append(time.perf_counter())
            if log is not None:
                log.step()
            if rank == 0 and (step + 1 == task.steps or (step + 1) % PRINT_STEPS == 0):
                print(f"{first.backend_name:>10}: step {step + 1:>3}, loss {losses[-1]:.3f}", flush=True)
    metrics = first.metrics(gather=True)
    model.close()
    wire = task.config.wire_options
    untimed = min(UNTIMED_STEPS, task.steps - 1)
    return Run(
        backend=metrics.backend,
        wire=None if wire is None else wire.dtype,
        emulated=bool(getattr(task.config.backend_options, "emulate", False)),
        ranks=size,
        losses=losses,
        tokens_per_expert=tokens_per_expert,
        bytes_per_step=sum(metrics.bytes_sent.values()) / task.steps,
        rows_padded=metrics.rows_padded,
        tokens_per_second=sum(num_tokens[untimed:]) / (ends[-1] - ends[untimed]),
    )


def compute_gradients(
    model: ByteLanguageModel, pack: Pack, num_tokens: int, group: Group, balance: float = BALANCE
) -> tuple[Tensor, Tensor]:
    """Run forward and backward on the pack of this rank, and sum gradients over ranks. Collective.

    Args:
        model: The model, whose gradients are None.
        pack: Sequences of this rank.
        num_tokens: Number of bytes in the packs of all ranks.
        group: All ranks, or None for a single process.
        balance: Weight of the load-balancing loss.

    Returns:
        The part of the mean cross-entropy that comes from this rank; and float32 (layers, E): how many slots of all
        ranks chose each expert.

    Source: the load-balancing loss is that of Switch Transformer (arXiv:2101.03961), over the batch of all ranks.
    """
    device = model.head.weight.device
    logits, loads = model(pack.inputs.to(device), pack.cu_seqlens)
    loss = F.cross_entropy(logits, pack.targets.to(device), reduction="sum") / num_tokens
    mine, probabilities = loads.unbind(1)
    chosen = sum_over_ranks(mine, group)
    share = chosen / chosen.sum(dim=1, keepdim=True)
    imbalance = chosen.shape[1] * (share * probabilities / num_tokens).sum(dim=1).mean()
    (loss + balance * imbalance).backward()  # each rank adds its part of the sum over tokens
    for parameter in model.replicated_parameters():
        assert parameter.grad is not None
        parameter.grad = sum_over_ranks(parameter.grad, group)
    return loss.detach(), chosen


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of a tensor over ranks, without gradient. Collective."""
    total = x.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
