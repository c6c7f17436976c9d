"""Training on one rank: the same steps whether it is one of many or alone with the union of their data.

Dimensions: ``T`` bytes of this rank, ``E`` experts in the whole group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_dispatch import DispatcherConfig
from moe_dispatch.cli.place import Place
from moe_dispatch.testing.counting import count_collectives
from moe_dispatch.traces import RunLog, Trace
from packed_text.documents import Pack, batches, join
from packed_text.model import ByteLanguageModel

WARM_UP_STEPS = 10
# The first steps pay for the making of buffers and pages; they count in the curves, not in tokens/s.
UNTIMED_STEPS = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to train; two runs of tasks that differ only in the config's backend give the same losses.

    Attributes:
        packs: packs per step: the ranks of a distributed run. A single process takes their union.
        bytes_per_rank: least bytes of a pack.
        max_length: longest sequence; longer documents are cut.
        balance: weight of the load-balancing loss.
        trace: file for the routing of all steps; None to record none.
        log: directory for what the dispatchers counted in each step; None to log none.
    """

    config: DispatcherConfig
    steps: int
    packs: int
    bytes_per_rank: int = 320
    max_length: int = 768
    learning_rate: float = 2e-3
    balance: float = 0.3
    seed: int = 2024
    trace: Path | None = None
    log: Path | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one training came to; plain numbers, so that it travels between processes.

    Attributes:
        losses: mean cross-entropy of every step, in nats per byte.
        tokens_per_expert: [step][layer][expert], over all ranks.
        bytes_per_step: mean bytes sent to other ranks, all ranks together: "model" in forward and backward, by the
            dispatchers (and some 1000 bytes for the balance); "training" for gradients and losses.
        rows_padded: rows without a token, all ranks, layers and steps together, by cause.
        tokens_per_second: of all ranks together.
    """

    backend: str
    wire_dtype: str | None
    emulated: bool
    ranks: int
    losses: list[float]
    tokens_per_expert: list[list[list[int]]]
    bytes_per_step: dict[str, float]
    rows_padded: dict[str, int]
    tokens_per_second: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step came to, on this rank.

    Attributes:
        loss: mean cross-entropy over all ranks' bytes.
        tokens_per_expert: [layer][expert], over all ranks.
        model_bytes: sent by this rank in forward and backward; ``training_bytes`` outside them.
    """

    loss: float
    tokens_per_expert: list[list[int]]
    model_bytes: int
    training_bytes: int


@final
class Trainer:
    """Model and optimizer in their place."""

    def __init__(self, task: Task, place: Place) -> None:
        torch.manual_seed(task.seed)  # every rank draws the whole model, and its dispatchers keep their experts
        self.task = task
        self.place = place
        self.model = ByteLanguageModel(task.config, place).to(place.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), eps=1e-6)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
        )

    def step(self, pack: Pack) -> Step:
        """One step on this rank's pack. Collective."""
        with count_collectives() as before:
            num_tokens = self._num_tokens(pack)
        with count_collectives() as model:
            loss, objective, chosen = self.losses(pack, num_tokens)
            objective.backward()
        with count_collectives() as after:
            self.sum_replicated_gradients()
            total = self.place.sum(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return Step(
            loss=total.item(),
            tokens_per_expert=chosen.long().tolist(),
            model_bytes=model.nbytes,
            training_bytes=before.nbytes + after.nbytes,
        )

    def _num_tokens(self, pack: Pack) -> int:
        """Count the bytes of all ranks, whose packs differ in length."""
        lengths = self._lengths(len(pack))
        assert len(set(lengths)) == self.place.size, f"every rank must have a T of its own, got {lengths}"
        return sum(lengths)

    def _lengths(self, length: int) -> list[int]:
        """Gather the ``length`` of every rank. Cost: one small all-gather and a host sync."""
        if self.place.group is None:
            return [length]
        everyone = torch.empty(self.place.size, dtype=torch.int64, device=self.place.device)
        self.place.group._allgather_base(everyone, torch.full_like(everyone[:1], length)).wait()
        result: list[int] = everyone.tolist()
        return result

    def losses(self, pack: Pack, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Forward. Collective.

        Returns:
            This rank's part of the mean cross-entropy; its part of what is minimised, load balance included (the ranks'
            parts add up to the union's); float32 (layers, E), how many slots of all ranks chose each expert.

        Source: the balance is that of Switch Transformer (arXiv:2101.03961), over the batch of all ranks.
        """
        device = self.place.device
        logits, loads = self.model(pack.inputs.to(device), pack.cu_seqlens)
        loss = F.cross_entropy(logits, pack.targets.to(device), reduction="sum") / num_tokens
        summed: Tensor = _SumOverRanks.apply(loads, self.place)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        chosen, probabilities = summed.unbind(1)
        share = chosen / chosen.sum(dim=1, keepdim=True)
        balance = chosen.shape[1] * (share * probabilities / num_tokens).sum(dim=1).mean()
        # Summed over ranks, the balance is the same number on each of them, so each takes its share.
        return loss, loss + self.task.balance * balance / self.place.size, chosen

    def sum_replicated_gradients(self) -> None:
        """Add up what each rank's tokens gave; experts' gradients hold all ranks' tokens already. Collective."""
        gradients = [parameter.grad for parameter in self.model.replicated_parameters() if parameter.grad is not None]
        flat = self.place.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks. Every rank computes its share of the loss from the sum, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return place.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.place.sum(grad), None


def train(task: Task, place: Place, on_step: Callable[[float], None]) -> Run:
    """Train. Collective; ``on_step(loss)`` is called after every step."""
    trainer = Trainer(task, place)
    data = batches(ranks=task.packs, bytes_per_rank=task.bytes_per_rank, max_length=task.max_length, seed=task.seed)
    steps: list[Step] = []
    tokens, ends = [], [time.perf_counter()]
    first = trainer.model.dispatchers[0]  # the others share its channel
    with (
        nullcontext() if task.trace is None else Trace.record(first, task.trace, steps=task.steps),
        nullcontext() if task.log is None else RunLog.record(first, task.log) as log,
    ):
        for packs in islice(data, task.steps):
            steps.append(trainer.step(join(packs) if place.group is None else packs[place.rank]))
            tokens.append(sum(map(len, packs)))
            ends.append(time.perf_counter())
            if log is not None:
                log.step()
            on_step(steps[-1].loss)
    timed = min(UNTIMED_STEPS, task.steps - 1)
    return Run(
        backend=trainer.model.dispatchers[0].backend_name,
        wire_dtype=task.config.wire_dtype,
        emulated=bool(getattr(task.config.backend_options, "emulate", False)),
        ranks=place.size,
        losses=[step.loss for step in steps],
        tokens_per_expert=[step.tokens_per_expert for step in steps],
        bytes_per_step=_bytes_per_step(steps, place),
        rows_padded=trainer.model.close().rows_padded,
        tokens_per_second=sum(tokens[timed:]) / (ends[-1] - ends[timed]),
    )


def _bytes_per_step(steps: list[Step], place: Place) -> dict[str, float]:
    sent = [sum(step.model_bytes for step in steps), sum(step.training_bytes for step in steps)]
    model, training = place.sum(torch.tensor(sent, dtype=torch.float64, device=place.device)).tolist()
    return {"model": model / len(steps), "training": training / len(steps)}
