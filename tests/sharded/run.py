"""One training step of the model on one rank, and the gradients of all ranks put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import count_collectives
from tests.sharded.model import loss
from tests.sharded.part import Job, Part


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Of one rank.

    Attributes:
        tensors: as in ``Whole``, summed over all ranks; on rank 0 only. "tokens" has the tokens of each expert.
        agreements: collectives on the control group during the step, by operator; on rank 0 only: others would import
            a compiler of torch for it, which takes them seconds.
    """

    tensors: dict[str, Tensor]
    agreements: dict[str, int]


def run_job(rank: int, job: Job) -> Outcome:
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler for it
    part = Part(job, rank)
    if rank:
        tensors, agreements = step(part), {}
    else:
        with count_collectives(part.control) as seen:
            tensors = step(part)
        agreements = dict(seen.counts)
    tensors |= part.results()
    part.close()
    total = _total(tensors)
    return Outcome(tensors={} if rank else total, agreements=agreements)


def step(part: Part) -> dict[str, Tensor]:
    """Run all micro-batches. Return gradients of inputs, and real outputs, at the rows that this rank holds."""
    job, found = part.job, dict[str, Tensor]()
    for number, micro_batch in enumerate(job.step):
        for dp, batch in enumerate(micro_batch):
            x, y = torch.zeros(2, batch.num_rows, job.sizes.hidden, dtype=torch.float64)
            if dp == part.place.dp:
                held = batch.held_rows(job.grid, part.place)
                x_TD = batch.random(job.sizes.hidden)[held].to(job.dtype).requires_grad_()
                y_TD = part.forward(x_TD, batch)
                loss(y_TD, batch.real_T[held], job.step).backward()
                assert x_TD.grad is not None, f"micro-batch {number}: no gradient of x"
                x[held] = x_TD.grad.double()
                y[held] = y_TD.detach().double()
            found |= {f"x.{number}.{dp}": x, f"y.{number}.{dp}": y * batch.real_T.unsqueeze(1)}
    return found


def _total(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all ranks: each has zeros where it holds nothing, and a part of the sum where others hold the same."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    # Copies: what goes home is pickled with all of the memory that it is a view of.
    return {name: part.view_as(tensor).clone() for (name, tensor), part in zip(tensors.items(), parts, strict=True)}
