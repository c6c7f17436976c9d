"""One rank's part of a training step of the model, with the library, and the gradients of all ranks put together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Plan, Routing, build_dispatcher
from moe_dispatch_testing import count_collectives
from tests.sharded.grid import Grid, Ranks, group_of
from tests.sharded.model import Experts, Sizes, Step, Weights, expert, layer, leaning, loss, parameters
from tests.sharded.packing import Packed


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training step of the model.

    Attributes:
        expert_groups: the ranks over which experts lie.
        etp: neighbours in such a group that hold shards of the same experts.
        fields: of the dispatchers' config, beside the model's sizes.
    """

    grid: Grid
    sizes: Sizes
    step: Step
    expert_groups: Ranks
    etp: int = 1
    dtype: torch.dtype = torch.float32
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ep(self) -> int:
        return len(self.expert_groups[0]) // self.etp


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
    counted: Any = nullcontext() if rank else count_collectives(part.control)
    with counted as seen:
        tensors = part.step()
    tensors |= part.gradients()
    for dispatcher in part.dispatchers:
        dispatcher.close()
    total = _total(tensors)
    return Outcome(tensors={} if rank else total, agreements={} if rank else dict(seen.counts))


@final
class Part:
    """This rank's part of the weights of all layers, and a dispatcher for each layer."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.place = job, job.grid.place(rank)
        self.control, group = (group_of(rank, job.expert_groups, purpose) for purpose in ("control", "experts"))
        everything, shards = slice(None), job.etp
        self.held = _nth(job.sizes.experts, group.rank() // shards, job.ep)
        inner = _nth(job.sizes.inner, group.rank() % shards, shards)
        self.parts: dict[str, tuple[slice, ...]] = {
            "router": (everything, everything),
            "up": (self.held, everything, inner),
            "down": (self.held, inner, everything),
        }
        self.weights = [
            {name: whole[self.parts[name]].to(job.dtype).clone().requires_grad_() for name, whole in weights.items()}
            for weights in parameters(job.sizes)
        ]
        config = DispatcherConfig(
            num_experts=job.sizes.experts * shards,
            top_k=job.sizes.top_k * shards,
            hidden_size=job.sizes.hidden,
            **job.fields,
        )
        self.dispatchers = [build_dispatcher(config, group, control_group=self.control) for _ in self.weights]

    def step(self) -> dict[str, Tensor]:
        """Run all micro-batches. Return gradients of inputs, and real outputs, at the rows that this rank holds."""
        job, found = self.job, dict[str, Tensor]()
        for number, micro_batch in enumerate(job.step):
            for dp, batch in enumerate(micro_batch):
                x, y = torch.zeros(2, batch.num_rows, job.sizes.hidden, dtype=torch.float64)
                if dp == self.place.dp:
                    rows = batch.held_rows(job.grid, self.place)
                    x_TD = batch.random(job.sizes.hidden)[rows].to(job.dtype).requires_grad_()
                    y_TD = self.forward(x_TD, batch, rows)
                    loss(y_TD, batch.real_T[rows], job.step).backward()
                    assert x_TD.grad is not None, f"micro-batch {number}: no gradient of x"
                    x[rows], y[rows] = x_TD.grad.double(), y_TD.detach().double()
                found |= {f"x.{number}.{dp}": x, f"y.{number}.{dp}": y * batch.real_T.unsqueeze(1)}
        return found

    def forward(self, x_TD: Tensor, batch: Packed, rows: list[int]) -> Tensor:
        """One micro-batch, with one plan for all layers."""
        grid, place, sizes = self.job.grid, self.place, self.job.sizes
        plan = self.dispatchers[0].plan(batch.layout.shard(place.cp, grid.cp, "zigzag").shard(place.tp, grid.tp))
        for index, (weights, dispatcher) in enumerate(zip(self.weights, self.dispatchers, strict=True)):
            leaning_TE = leaning(batch, sizes, index)[rows].to(x_TD.dtype)
            x_TD = layer(x_TD, weights, leaning_TE, sizes.top_k, self._experts(dispatcher, plan))
        return x_TD

    def _experts(self, dispatcher: Dispatcher, plan: Plan) -> Experts:
        def experts(x_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
            sent = dispatcher.dispatch(x_TD, self._to_shards(ids_TK, shares_TK), plan)
            return dispatcher.combine(apply_experts(sent, weights["up"], weights["down"]), sent)

        return experts

    def _to_shards(self, ids_TK: Tensor, shares_TK: Tensor) -> Routing:
        """A slot for each shard of an expert, whose outputs add up; the rank that holds it counts it as its own."""
        etp, num_local = self.job.etp, self.job.sizes.experts // self.job.ep
        owner, local = ids_TK // num_local, ids_TK % num_local
        ids = [(owner * etp + shard) * num_local + local for shard in range(etp)]
        return Routing(torch.cat(ids, 1), torch.cat([shares_TK] * etp, 1))

    def gradients(self) -> dict[str, Tensor]:
        """In the shape of the whole parameter, zero where other ranks hold it; and the tokens of experts."""
        sizes, found = self.job.sizes, dict[str, Tensor]()
        for index, weights in enumerate(self.weights):
            for name, leaf in weights.items():
                assert leaf.grad is not None, f"layer {index}: no gradient of {name}"
                whole = found[f"{index}.{name}"] = torch.zeros(sizes.shapes[name], dtype=torch.float64)
                whole[self.parts[name]] = leaf.grad.double()
        counts = found["tokens"] = torch.zeros(sizes.experts, dtype=torch.float64)
        counts[self.held] = self.dispatchers[0].metrics().real_tokens_per_expert.double()
        return found


def _nth(length: int, index: int, size: int) -> slice:
    return slice(index * length // size, (index + 1) * length // size)


def apply_experts(sent: Dispatched, up_LDF: Tensor, down_LFD: Tensor) -> Tensor:
    assert sent.tokens_per_expert_list is not None
    parts = sent.rows.split(sent.tokens_per_expert_list)
    return torch.cat([expert(*held) for held in zip(parts, up_LDF, down_LFD, strict=True)])


def _total(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all ranks: each has zeros where it holds nothing, and a part of the sum where others hold the same."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    # Copies: what goes home is pickled with all of the memory that it is a view of.
    return {name: part.view_as(tensor).clone() for (name, tensor), part in zip(tensors.items(), parts, strict=True)}
