"""One rank's part of the model, over tensor, context, data, pipeline and expert parallelism, with the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Plan, Routing, build_dispatcher
from moe_dispatch.testing import count_collectives
from tests.sharded.grid import Grid, Place, Ranks, group_of
from tests.sharded.model import Experts, Sizes, Step, View, Weights, expert, layer, leanings, loss, parameters
from tests.sharded.packing import Packed


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training step of the model.

    Attributes:
        expert_groups: the ranks over which experts lie; each in one stage.
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
class Seat:
    """A rank and the groups it is in."""

    rank: int
    place: Place
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    experts: dist.ProcessGroup
    control: dist.ProcessGroup


def take_seat(rank: int, job: Job) -> Seat:
    grid = job.grid
    return Seat(
        rank=rank,
        place=grid.place(rank),
        tp=group_of(rank, grid.groups("tp"), "model"),
        cp=group_of(rank, grid.groups("cp"), "model"),
        experts=group_of(rank, job.expert_groups, "experts"),
        control=group_of(rank, job.expert_groups, "control"),
    )


@final
class Stage:
    """The layers of one pipeline stage, this rank's part of their weights, and a dispatcher for each."""

    def __init__(self, job: Job, seat: Seat) -> None:
        self.job, self.seat = job, seat
        per_stage = job.sizes.layers // job.grid.pp
        self.layers = range(seat.place.pp * per_stage, (seat.place.pp + 1) * per_stage)
        self.parts = {name: self._part(name) for name in job.sizes.shapes}
        self.weights = [self._cut(weights) for weights in parameters(job.sizes)]
        config = DispatcherConfig(
            num_experts=job.sizes.experts * job.etp,
            top_k=job.sizes.top_k * job.etp,
            hidden_size=job.sizes.hidden,
            **job.fields,
        )
        self.dispatchers = [build_dispatcher(config, seat.experts, control_group=seat.control) for _ in self.layers]

    def _part(self, name: str) -> tuple[slice, ...]:
        """Columns or rows of attention by tensor-parallel rank; experts, and shards of them, by rank of their group."""
        sizes, place, at = self.job.sizes, self.seat.place, self.seat.experts.rank()
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

    def plan(self, batch: Packed) -> Plan:
        """The sizes of one micro-batch, for all layers of the stage."""
        grid, place = self.job.grid, self.seat.place
        layout = batch.layout.shard(place.cp, grid.cp, "zigzag").shard(place.tp, grid.tp)
        return self.dispatchers[0].plan(layout)

    def forward(self, x_TD: Tensor, batch: Packed) -> Tensor:
        view, plan = self._view(batch), self.plan(batch)
        for index, dispatcher in zip(self.layers, self.dispatchers, strict=True):
            experts = self._experts(dispatcher, plan)
            x_TD = layer(x_TD, index, self.weights[index], view=view, sizes=self.job.sizes, experts=experts)
        return x_TD

    def _view(self, batch: Packed) -> View:
        grid, place = self.job.grid, self.seat.place
        held = batch.held_rows(grid, place)

        def of_cp_rank(cp: int) -> list[int]:
            places = [Place(tp=tp, cp=cp, dp=place.dp, pp=place.pp) for tp in range(grid.tp)]
            return [row for there in places for row in batch.held_rows(grid, there)]

        keys = [row for cp in range(grid.cp) for row in of_cp_rank(cp)]
        return View(
            sees_TS=batch.sees(of_cp_rank(place.cp), keys),
            leaning_TE=[leaning_TE[held].to(self.job.dtype) for leaning_TE in leanings(batch, self.job.sizes)],
            tp=self.seat.tp,
            cp=self.seat.cp,
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
        for index in range(job.sizes.layers):
            for name, shape in job.sizes.shapes.items():
                whole = found[f"{index}.{name}"] = torch.zeros(shape, dtype=torch.float64)
                if index in self.layers:
                    leaf = self.weights[index][name]
                    assert leaf.grad is not None, f"layer {index}: no gradient of {name}"
                    whole[self.parts[name]] = leaf.grad.double()
        for number in range(job.grid.pp):
            counts = found[f"tokens.{number}"] = torch.zeros(job.sizes.experts, dtype=torch.float64)
            if number == self.seat.place.pp:
                held = _nth(job.sizes.experts, self.seat.experts.rank() // job.etp, job.ep)
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
        found = {}
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
    agreements = _counted(pipeline.run, seat.control) if rank % job.grid.stage_size == 0 else pipeline.run()
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
