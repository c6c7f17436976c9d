"""The calls of a framework's own dispatcher, and those that replace them, give the same outputs and gradients."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import run_processes
from tests import migration
from tests.integration.megatron_core import layer
from tests.integration.megatron_core.on_cpu import megatron_on_cpu
from tests.integration.needs import needs
from tests.migration import EXPERTS, TOP_K, Layer, MoE, largest_error

RANKS, HIDDEN, TOKENS = 2, 32, 6
# Ranks import the framework before they meet, on machines that others use too.
TIMEOUT = datetime.timedelta(seconds=180)

pytestmark = pytest.mark.integration
_, needs_megatron = needs("megatron")
_, needs_torchtitan = needs("torchtitan")


def _side(rank: int, build: Callable[[Layer], MoE], *, dense: bool) -> list[Tensor]:
    """Output and gradients of one side: of the rows, of the weights and of this rank's experts.

    Args:
        rank: this rank.
        build: builds the calls around the experts of a layer.
        dense: whether the routing is a map and probabilities, both (T, E).
    """
    moe_layer = Layer(rank, RANKS, hidden=HIDDEN, dtype=torch.float32)
    x, ids, weights = Layer.inputs(rank, TOKENS, hidden=HIDDEN, dtype=torch.float32)
    x.requires_grad_()
    weights.requires_grad_()
    moe = build(moe_layer)
    if dense:
        routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
        probs = torch.zeros(TOKENS, EXPERTS).scatter(1, ids, weights)
        y = moe(x.view(TOKENS, 1, HIDDEN), routing_map, probs)
    else:
        y = moe(x, weights, ids)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    found = [y.detach(), x.grad, weights.grad, moe_layer.matrices_LDD.grad]
    assert all(tensor is not None for tensor in found)
    return [tensor for tensor in found if tensor is not None]


def _difference(rank: int, *sides: Callable[[Layer], MoE], dense: bool) -> float:
    before, after = (_side(rank, build, dense=dense) for build in sides)
    return max(largest_error(got, want) for got, want in zip(after, before, strict=True))


def _megatron(rank: int) -> float:
    with megatron_on_cpu():
        layer.RANKS, parallel = RANKS, layer.Parallel(ep=RANKS)
        config = {"hidden_size": HIDDEN, "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}
        case = layer.Case(parallel=parallel, config=config)
        names = {"transformer_config": layer.transformer_config(case), "pg_collection": layer.groups(parallel)}
        after = partial(migration.instead_of_megatron, ep_group=dist.group.WORLD)
        return _difference(rank, partial(migration.megatron, **names), after, dense=True)


def _torchtitan(rank: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # torchtitan's default exchanges lists of tensors, which gloo does not take
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    sides = (partial(side, ep_mesh=mesh) for side in (migration.torchtitan, migration.instead_of_torchtitan))
    return _difference(rank, *sides, dense=False)


@needs_megatron
def test_both_sides_of_megatron() -> None:
    assert max(run_processes(_megatron, RANKS, timeout=TIMEOUT)) < 1e-5


@needs_torchtitan
def test_both_sides_of_torchtitan() -> None:
    assert max(run_processes(_torchtitan, RANKS, timeout=TIMEOUT)) < 1e-5
