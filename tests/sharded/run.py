"""Stages in a pipeline: micro-batches go through them, and every rank's part of the gradients adds up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import count_collectives
from tests.sharded.model import loss
from tests.sharded.stage import Job, Stage, take_seat


@final
class Pipeline:
    """Micro-batches through the stages, one forward and one backward at a time, as Megatron schedules them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.grid, self.place, self.rank = stage.job.grid, stage.seat.place, stage.seat.rank
        self.batches = [micro_batch[self.place.dp] for micro_batch in stage.job.step]
        self.held = [batch.held_rows(self.grid, self.place) for batch in self.batches]
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.sent: list[tuple[Any, Tensor]] = []  # what travels must live until it has arrived

    @property
    def is_first(self) -> bool:
        return self.place.pp == 0

    @property
    def is_last(self) -> bool:
        return self.place.pp == self.grid.pp - 1

    def run(self) -> None:
        ahead = self.grid.pp - 1 - self.place.pp
        for turn in range(len(self.batches) + ahead):
            if turn < len(self.batches):
                self._forward(turn)
            if turn >= ahead:
                self._backward(turn - ahead)
        for work, _ in self.sent:
            work.wait()

    def results(self) -> dict[str, Tensor]:
        """Gradients of inputs, and outputs where they are real, at the rows that this rank holds."""
        found: dict[str, Tensor] = {}
        for number, micro_batch in enumerate(self.stage.job.step):
            for dp, batch in enumerate(micro_batch):
                x, y = torch.zeros(2, batch.num_rows, self.stage.job.sizes.hidden, dtype=torch.float64)
                if dp == self.place.dp and self.is_first:
                    grad = self.inputs[number].grad
                    assert grad is not None, f"micro-batch {number}: no gradient of x"
                    x[self.held[number]] = grad.double()
                if dp == self.place.dp and self.is_last:
                    y[self.held[number]] = self.outputs[number].detach().double()
                    y *= batch.real_T.unsqueeze(1)
                found |= {f"x.{number}.{dp}": x, f"y.{number}.{dp}": y}
        return found

    def _forward(self, number: int) -> None:
        x_TD = self._own_input(number) if self.is_first else self._receive(number, self.rank - self.grid.stage_size)
        self.inputs[number] = x_TD.requires_grad_()
        self.outputs[number] = self.stage.forward(x_TD, self.batches[number])
        if not self.is_last:
            self._send(self.outputs[number].detach(), self.rank + self.grid.stage_size)

    def _backward(self, number: int) -> None:
        y_TD = self.outputs[number]
        if self.is_last:
            loss(y_TD, self.batches[number].real_T[self.held[number]], self.stage.job.step).backward()
        else:
            y_TD.backward(self._receive(number, self.rank + self.grid.stage_size))
        if not self.is_first:
            grad = self.inputs[number].grad
            assert grad is not None, f"micro-batch {number}: no gradient of the stage's input"
            self._send(grad, self.rank - self.grid.stage_size)

    def _own_input(self, number: int) -> Tensor:
        x_TD = self.batches[number].random(self.stage.job.sizes.hidden)
        return x_TD[self.held[number]].to(self.stage.job.dtype)

    def _receive(self, number: int, source: int) -> Tensor:
        rows = torch.empty(len(self.held[number]), self.stage.job.sizes.hidden, dtype=self.stage.job.dtype)
        dist.recv(rows, source)
        return rows

    def _send(self, rows: Tensor, target: int) -> None:
        rows = rows.contiguous()
        self.sent.append((dist.isend(rows, target), rows))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Of one rank.

    Attributes:
        tensors: as in ``Whole``, summed over all ranks; on rank 0 only.
        agreements: collectives on the control group during the step, by operator; on the first rank of each stage
            only: others would import a compiler of torch for it, which takes them seconds.
    """

    tensors: dict[str, Tensor]
    agreements: dict[str, int] | None


def run_job(rank: int, job: Job) -> Outcome:
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler for it
    seat = take_seat(rank, job)
    stage = Stage(job, seat)
    pipeline = Pipeline(stage)
    agreements = None
    if rank % job.grid.stage_size == 0:
        agreements = _counted(pipeline.run, seat.control)
    else:
        pipeline.run()
    tensors = stage.results() | pipeline.results()
    stage.close()
    total = _total(tensors)
    return Outcome(tensors=total if rank == 0 else {}, agreements=agreements)


def _counted(run: Callable[[], None], group: dist.ProcessGroup) -> dict[str, int]:
    with count_collectives(group) as seen:
        run()
    return dict(seen.counts)


def _total(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all ranks: each has zeros where it holds nothing, and a part of the sum where others hold the same."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    # Copies: what goes home is pickled with all of the memory that it is a view of.
    return {name: part.view_as(tensor).clone() for (name, tensor), part in zip(tensors.items(), parts, strict=True)}
