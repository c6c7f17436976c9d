"""What Setup refuses in a step, and gradients in 16 bits, of frozen parameters and of groups that are made again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, StateError
from moe_dispatch.training import OnParts, Setup, joined_group
from moe_dispatch_testing import run_processes
from tests.training.test_looks import Layer
from tests.training.test_table import mesh_of


def raised(kind: type[MoEDispatchError], call: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def edges(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = mesh_of(copies=1, ep=2)
    group, setup = mesh["ep"].get_group(), Setup(mesh)
    x = torch.randn(5 + rank, 6, generator=torch.Generator().manual_seed(rank))

    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 6), Layer(group))

    plain = model()
    frozen, stack = plain.get_parameter("0.weight"), plain.get_parameter("1.stack.up")
    frozen.requires_grad_(False)
    setup.start(plain)
    plain(x).square().mean().backward()
    setup.reduce(plain)
    found["frozen"] = frozen.grad
    assert stack.grad is not None
    want = stack.grad.clone()
    found["twice"] = raised(StateError, setup.reduce, plain)
    setup.clip(plain, 1.0)
    found["twice, clipped"] = raised(StateError, setup.reduce, plain)
    stack.grad[0, 0, 0] = torch.inf if rank == 0 else 0
    found["infinite"] = raised(InputError, setup.clip, plain, 1.0, error_if_nonfinite=True)
    for dtype in (torch.float16, torch.float32):
        half = model()
        setup.shard(half, MixedPrecisionPolicy(reduce_dtype=dtype))
        half.get_parameter("0.weight").requires_grad_(False)
        half(x).square().mean().backward()
        gradient = half.get_parameter("1.stack.up").grad
        assert isinstance(gradient, DTensor)
        found[f"one copy, {dtype}"] = ((gradient.to_local() - want).norm() / want.norm()).item()
    low = model().bfloat16()
    for parameter in low.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3)
    numbers = sum(p.numel() * (2 if name.endswith("up") else 1) for name, p in low.named_parameters())
    found["bfloat16"] = setup.clip(low, 1e9).item() / (numbers**0.5 * torch.tensor(1 / 3).bfloat16().item())
    both = mesh_of(ep=2, tp=1)
    for _ in range(3):
        made = joined_group(both)
        total = torch.ones(1)
        dist.all_reduce(total, group=made)
        found["joined"] = int(total)
        dist.destroy_process_group(made)
    found["odd"] = raised(InputError, OnParts(nn.Identity(), mesh["ep"]), torch.zeros(1, 3, 6))
    found["no size 1"] = raised(ConfigError, Setup(mesh_of(ep=2)).shard, model())
    mixed = model()
    mixed[1].register_parameter("gate", nn.Parameter(torch.zeros(4)))
    mixed[1].register_parameter("own", nn.Parameter(torch.zeros(2, 6, 6)))
    found["both"] = raised(ConfigError, setup.shard, mixed)
    return found


def test_edges_of_a_step() -> None:
    for found in run_processes(edges, 2, timeout=timedelta(seconds=60)):
        assert found["frozen"] is None
        for case in ("twice", "twice, clipped"):
            assert found[case].startswith("Setup.reduce: no backward has run since the gradient of ")
        assert found["infinite"].startswith("Setup.clip: the norm of the gradients must be finite, got inf.")
        assert found["one copy, torch.float32"] <= 1e-6
        assert found["one copy, torch.float16"] <= 1e-6  # torch divides twice if it reduces in float16 there
        assert found["bfloat16"] == pytest.approx(1, abs=1e-6)  # a norm in bfloat16 has three digits
        assert found["joined"] == 2
        assert found["odd"].startswith("OnParts: the 2 ranks must divide the length of x, got shape (1, 3, 6).")
        assert found["no size 1"].startswith("Setup.shard: there is one copy of the experts, so fully_shard needs")
        assert found["both"].startswith(
            "Setup.shard: a dispatcher must hold parameters that are no experts in a module"
        )


def test_sharding_without_a_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Setup\.shard: fully_shard needs torch\.distributed and the mesh"):
        Setup().shard(nn.Linear(2, 2))
