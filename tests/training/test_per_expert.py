"""``PerExpert`` steps each expert of a stack as an optimizer steps a parameter of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_dispatch.errors import ConfigError
from moe_dispatch.training import PerExpert
from moe_dispatch_testing import run_processes

KINDS: dict[str, Any] = {
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}),  # its "step" is a tensor without dimensions
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True}),
}


def gradient_of(number: int) -> torch.Tensor:
    """Experts whose gradients differ in size, of which one has none in the second step."""
    scales = torch.tensor([1.0, 0.01, 30.0]).view(3, 1, 1)
    if number == 1:
        scales[1] = 0
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(number)) * scales


@pytest.mark.parametrize("name", KINDS)
def test_experts_step_alone_and_go_on_from_a_state(name: str) -> None:
    kind, options = KINDS[name]
    start = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(9))
    stack, each = nn.Parameter(start.clone()), [nn.Parameter(expert) for expert in start.clone()]
    ours, theirs = PerExpert([stack], kind, **options), kind(each, **options)
    for number in range(4):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.02 / (number + 1)
        stack.grad = gradient_of(number)
        for expert, gradient in zip(each, gradient_of(number), strict=True):
            expert.grad = gradient
        ours.step()
        theirs.step()
        assert torch.equal(stack.detach(), torch.stack([*each]).detach())
        if number == 1:  # as in a checkpoint
            saved = copy.deepcopy(ours.state_dict())
            ours = PerExpert([stack], kind, **options)
            ours.load_state_dict(saved)
    (state,) = ours.state.values()
    assert all(len(value) == 3 for value in state.values())


def test_a_stack_as_one_tensor_steps_otherwise() -> None:
    start = gradient_of(5)
    stacks = [nn.Parameter(start.clone()) for _ in range(2)]
    kind: Any = torch.optim.Adafactor
    for optimizer in (kind(stacks[:1], lr=0.02), PerExpert(stacks[1:], kind, lr=0.02)):
        for stack in stacks:
            stack.grad = gradient_of(0)
        optimizer.step()
    assert (stacks[0] - stacks[1]).norm() > 0.01 * (stacks[1] - start).norm()


def cut(rank: int) -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    stack = nn.Parameter(DTensor.from_local(torch.zeros(2, 3, 4), mesh, [Shard(1)]))
    with pytest.raises(ConfigError) as caught:
        PerExpert([stack], torch.optim.Muon)
    return str(caught.value)


def test_cut_experts_are_refused() -> None:
    for text in run_processes(cut, 2):
        assert text.startswith(
            "PerExpert: a stack must hold whole experts on each rank, got placements (Shard(dim=1),)"
        )
