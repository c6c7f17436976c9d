"""A small training with experts on a mesh of their own, which reduces and clips by hand; and faults planted in it."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch_testing.prove import Setup

HIDDEN, INNER, EXPERTS, TOP_K, SIZES = 16, 8, 8, 2, (7, 3, 5, 9)
MESH = {"copies": 2, "ep": 2}
CONFIG = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)


class Experts(Dispatcher):
    """The experts of this rank, of experts that all ranks draw alike."""

    def __init__(self, group: DeviceMesh, seat: int) -> None:
        super().__init__(CONFIG, group)
        drawn = torch.randn(2, EXPERTS, HIDDEN, INNER) * HIDDEN**-0.5
        up, down = drawn.chunk(group.size(), dim=1)[seat].unbind()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.mT.clone())

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.grouped_mm(F.silu(sent.grouped_mm(sent.rows, self.up)), self.down)


class Block(nn.Module):
    def __init__(self, group: DeviceMesh, seat: int, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(group, seat)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        weights, ids = scores.topk(TOP_K)
        chosen_E = torch.zeros_like(scores).scatter(1, ids, 1.0).mean(0)
        return x + self.dropout(self.experts(x, Routing(ids, weights))), EXPERTS * (chosen_E * scores.mean(0)).sum()


class Estimating(torch.optim.SGD):
    """SGD whose step depends on all gradients of the process, as Prodigy's does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            group["lr"] *= 1 + get_total_norm(gradients).item()
        return super().step(closure)


class Training(nn.Module):
    """Two blocks and a head, with the set-up around them. ``fault`` plants one."""

    def __init__(self, mesh: DeviceMesh, fault: str) -> None:
        super().__init__()
        self.mesh: Any
        self.last: Experts
        self.__dict__["mesh"], self.fault = mesh, fault
        seat, rank = mesh["ep"].get_local_rank(), dist.get_rank()
        if fault == "wrong place" and mesh.size() > 1:
            seat = mesh["ep"].size() - 1 - seat
        if fault != "start":
            torch.manual_seed(5)
        first, last = (Block(mesh["ep"], seat, 0.5 if fault == "dropout" else 0.0) for _ in range(2))
        self.blocks, self.head = nn.ModuleList([first, last]), nn.Linear(HIDDEN, HIDDEN)
        self.__dict__["last"] = last.experts
        if fault == "frozen" and rank == 1:
            last.experts.up.requires_grad_(False)
        held = nn.Linear(HIDDEN, HIDDEN) if fault == "unheld" else self.head
        groups: list[dict[str, Any]] = [{"params": [*self.blocks.parameters()]}]
        groups += [{"params": [*held.parameters()], "weight_decay": 0.0}]
        kinds: dict[str, Any] = {"one stack": torch.optim.Adafactor, "by rank": Estimating}
        kind: Any = kinds.get(fault, torch.optim.AdamW)
        self.optimizer = kind(groups, lr=1e-2 * (2 if fault == "options" and rank == 2 else 1))
        if fault == "state" and rank == 2:  # as if it had loaded another checkpoint
            for parameter in self.head.parameters():
                state = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(parameter)}
                self.optimizer.state[parameter] = state | {"exp_avg_sq": torch.ones_like(parameter)}

    def is_expert(self, name: str) -> bool:
        return ".experts." in name

    def reduce(self) -> None:
        """Sum gradients over the ranks that hold the same."""
        mesh, fault = self.mesh, self.fault
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            dims = ("copies",) if self.is_expert(name) else ("copies", "ep")
            if fault == "unreduced" and name == "blocks.0.router.weight":
                continue
            if fault == "wrong group" and not self.is_expert(name):
                dims = ("ep",)
            for dim in dims:
                dist.all_reduce(parameter.grad, group=mesh[dim].get_group())
            if fault == "divided" and self.is_expert(name):
                parameter.grad.div_(mesh["copies"].size())
            if fault == "means":
                parameter.grad.div_(mesh.size())
            if fault == "scaled":
                parameter.grad.mul_(mesh.size())
            if fault == "missing" and dist.get_rank() == 3 and name == "blocks.1.router.weight":
                parameter.grad = None

    def clip(self, max_norm: float) -> Tensor:
        mesh, fault = self.mesh, self.fault
        named = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        experts = [grad for name, grad in named.items() if self.is_expert(name)]
        squared = get_total_norm(experts).square()
        if fault not in ("clipped alone", "clipped unseen"):
            dist.all_reduce(squared, group=mesh["ep"].get_group())
        squared += get_total_norm([grad for name, grad in named.items() if not self.is_expert(name)]).square()
        if fault == "counted twice":
            squared = get_total_norm([*named.values()]).square()
            dist.all_reduce(squared)
        norm = squared.sqrt()
        for grad in named.values():
            grad.mul_((max_norm / norm).clamp(max=1.0))
        return norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, of_block = block(x)
            auxiliary = auxiliary + of_block
        return self.head(x), auxiliary


def build(mesh: DeviceMesh, *, fault: str = "") -> Training:
    return Training(mesh, fault)


def step(training: Training, x: Tensor, *, fault: str = "", max_norm: float = 0.1) -> dict[str, Tensor]:
    rows = torch.tensor(float(len(x)))
    dist.all_reduce(rows)
    if fault == "hangs" and dist.get_rank() == 1:
        training.optimizer.zero_grad()
        time.sleep(600)
    y, auxiliary = training(x)
    if fault == "raises" and dist.get_rank() == 2:
        raise ArithmeticError("a mistake of the user")
    loss = y.square().mean(1).sum() / (len(x) if fault == "means" else rows)
    total = loss.detach().clone()
    dist.all_reduce(total)
    numbers = {"loss": total / (dist.get_world_size() if fault == "means" else 1)}
    if fault in ("auxiliary", "auxiliary unseen"):
        (loss + 0.1 * auxiliary / dist.get_world_size()).backward()
        numbers |= {} if fault == "auxiliary unseen" else {"auxiliary": auxiliary.detach()}
    else:
        loss.backward()
    training.reduce()
    norm = training.clip(max_norm)
    numbers |= {} if fault == "clipped unseen" else {"norm": norm}
    training.optimizer.step()
    training.optimizer.zero_grad()
    if fault == "copies apart" and dist.get_rank() == 3:
        with torch.no_grad():
            training.last.down.mul_(1.01)
    return numbers


def batches(number: int) -> list[Tensor]:
    return [torch.randn(rows, HIDDEN) for rows in SIZES]


def setup(fault: str = "", **fields: Any) -> Setup:
    return Setup(
        build=functools.partial(build, fault=fault),
        step=functools.partial(step, fault=fault),
        batches=batches,
        mesh=MESH,
        **fields,
    )
