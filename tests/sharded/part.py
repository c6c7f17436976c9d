"""One rank's part of the model, over tensor, context and expert parallelism, with the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Plan, Routing, build_dispatcher
from tests.sharded.grid import Grid, Place, Ranks, group_of
from tests.sharded.model import Experts, Sizes, Step, View, Weights, expert, layer, leanings, parameters
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
class Part:
    """This rank's part of the weights of all layers, the groups that it is in, and a dispatcher for each layer."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.place = job, job.grid.place(rank)
        self.tp, self.cp = (group_of(rank, job.grid.groups(axis), "model") for axis in ("tp", "cp"))
        self.experts = group_of(rank, job.expert_groups, "experts")
        self.control = group_of(rank, job.expert_groups, "control")
        self.parts = {name: self._part(name) for name in job.sizes.shapes}
        self.weights = [self._cut(weights) for weights in parameters(job.sizes)]
        config = DispatcherConfig(
            num_experts=job.sizes.experts * job.etp,
            top_k=job.sizes.top_k * job.etp,
            hidden_size=job.sizes.hidden,
            **job.fields,
        )
        self.dispatchers = [build_dispatcher(config, self.experts, control_group=self.control) for _ in self.weights]

    def _part(self, name: str) -> tuple[slice, ...]:
        """Columns or rows of attention by tensor-parallel rank; experts, and shards of them, by rank of their group."""
        sizes, place, at = self.job.sizes, self.place, self.experts.rank()
        wide = _nth(sizes.heads * sizes.head, place.tp, self.job.grid.tp)
        held = _nth(sizes.experts, at // self.job.etp, self.job.ep)
        inner = _nth(sizes.inner, at % self.job.etp, self.job.etp)
        everything = slice(None)
        return {
            "query": (everything, wide),
            "key": (everything, wide),
            "value": (everything, wide),
            "out": (wide, everything),
            "router": (everything, everything),
            "up": (held, everything, inner),
            "down": (held, inner, everything),
        }[name]

    def _cut(self, weights: Weights) -> dict[str, Tensor]:
        return {
            name: whole[self.parts[name]].to(self.job.dtype).clone().requires_grad_() for name, whole in weights.items()
        }

    def forward(self, x_TD: Tensor, batch: Packed) -> Tensor:
        """One micro-batch, with one plan for all layers."""
        grid, place, view = self.job.grid, self.place, self._view(batch)
        plan = self.dispatchers[0].plan(batch.layout.shard(place.cp, grid.cp, "zigzag").shard(place.tp, grid.tp))
        for index, dispatcher in enumerate(self.dispatchers):
            experts = self._experts(dispatcher, plan)
            x_TD = layer(x_TD, index, self.weights[index], view=view, sizes=self.job.sizes, experts=experts)
        return x_TD

    def _view(self, batch: Packed) -> View:
        grid, place = self.job.grid, self.place
        held = batch.held_rows(grid, place)

        def of_cp_rank(cp: int) -> list[int]:
            places = [Place(tp=tp, cp=cp, dp=place.dp) for tp in range(grid.tp)]
            return [row for there in places for row in batch.held_rows(grid, there)]

        keys = [row for cp in range(grid.cp) for row in of_cp_rank(cp)]
        return View(
            sees_TS=batch.sees(of_cp_rank(place.cp), keys),
            leaning_TE=[leaning_TE[held].to(self.job.dtype) for leaning_TE in leanings(batch, self.job.sizes)],
            tp=self.tp,
            cp=self.cp,
        )

    def _experts(self, dispatcher: Dispatcher, plan: Plan) -> Experts:
        def experts(h_TD: Tensor, weights: Weights, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
            sent = dispatcher.dispatch(h_TD, self._to_shards(ids_TK, shares_TK), plan)
            return dispatcher.combine(apply_experts(sent, weights["up"], weights["down"]), sent)

        return experts

    def _to_shards(self, ids_TK: Tensor, shares_TK: Tensor) -> Routing:
        """A slot for each shard of an expert, whose outputs add up; the rank that holds it counts it as its own."""
        etp, num_local = self.job.etp, self.job.sizes.experts // self.job.ep
        owner, local = ids_TK // num_local, ids_TK % num_local
        ids = [(owner * etp + shard) * num_local + local for shard in range(etp)]
        return Routing(torch.cat(ids, 1), torch.cat([shares_TK] * etp, 1))

    def results(self) -> dict[str, Tensor]:
        """Gradients in the shape of the whole parameter, zero where other ranks hold it, and the tokens of experts."""
        job, found = self.job, {}
        for index, weights in enumerate(self.weights):
            for name, leaf in weights.items():
                assert leaf.grad is not None, f"layer {index}: no gradient of {name}"
                whole = found[f"{index}.{name}"] = torch.zeros(job.sizes.shapes[name], dtype=torch.float64)
                whole[self.parts[name]] = leaf.grad.double()
        counts = found["tokens"] = torch.zeros(job.sizes.experts, dtype=torch.float64)
        held = _nth(job.sizes.experts, self.experts.rank() // job.etp, job.ep)
        counts[held] = self.dispatchers[0].metrics().real_tokens_per_expert.double()
        return found

    def close(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.close()


def _nth(length: int, index: int, size: int) -> slice:
    return slice(index * length // size, (index + 1) * length // size)


def apply_experts(sent: Dispatched, up_LDF: Tensor, down_LFD: Tensor) -> Tensor:
    assert sent.tokens_per_expert_list is not None
    parts = sent.rows.split(sent.tokens_per_expert_list)
    return torch.cat([expert(*held) for held in zip(parts, up_LDF, down_LFD, strict=True)])
