"""Wrap a model in DistributedDataParallel or ``fully_shard``, so that neither touches different experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.training.gradients import start_alike
from moe_dispatch.training.table import Axes, Dims, Held, Table


def under_ddp(table: Table, model: nn.Module, dims: Dims, options: Mapping[str, Any]) -> DistributedDataParallel:
    """Wrap a model over the ranks along dimensions. ``Setup.ddp`` has the arguments."""
    start_alike(table)
    experts = [name for name, held in table.items() if {*dims} - {*held.same}]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    group = flat_mesh(table.axes, dims).get_group() if dims else None
    return DistributedDataParallel(model, **{"process_group": group, **options})


def under_fsdp(
    table: Table,
    model: nn.Module,
    dims: Dims,
    replicate: Sequence[str],
    blocks: Sequence[nn.Module],
    policy: MixedPrecisionPolicy,
    router_policy: MixedPrecisionPolicy,
    options: Mapping[str, Any],
) -> FSDPModule:
    """Shard a model over the ranks along dimensions. ``Setup.shard`` has the arguments."""
    axes, modules = table.axes, dict(model.named_modules())
    if axes.mesh is None:
        raise ConfigError("Setup.shard: fully_shard needs torch.distributed and the mesh. Pass Setup(mesh).")
    start_alike(table)
    ranks = flat_mesh(axes, tuple(dim for dim in dims if dim not in replicate))
    if replicate:
        ranks = DeviceMesh._concatenate([flat_mesh(axes, tuple(dim for dim in dims if dim in replicate)), ranks])
    # PEFT adds the adapters of a stack to it outside of the forwards of modules, so both stay whole.
    tuners = [name.partition(".lora_")[0] for name, held in table.items() if held.adapter and held.stack is not None]
    adapted = {name for name in table if any(name.startswith(f"{tuner}.") for tuner in tuners)}
    options = {**options, "ignored_params": {*options.get("ignored_params", ()), *map(table.tensors.get, adapted)}}
    of_experts = dict[str, Held]()  # by path of the module to shard
    for name, held in table.items():
        if held.kind == "expert" and not held.is_buffer and name not in adapted:
            path, _, last = name.rpartition(".")
            if held.part and not isinstance(table.tensors[name], DTensor):
                part = nn.Parameter(as_part(table.tensors[name].data, axes, held), held.trained)
                setattr(modules[path], last, part)
            above = _dispatcher_above(modules, path)
            if held.trained or above not in of_experts:
                of_experts[above] = held
    kept = {name for name, held in table.items() if held.is_buffer or name in adapted}
    dense = {name.rpartition(".")[0] for name, held in table.items() if held.kind == "dense" and name not in kept}
    if both := of_experts.keys() & dense:
        raise ConfigError(
            f"Setup.shard: a dispatcher must hold parameters that are no experts in a module of their own, but "
            f"{sorted(both)} hold both. Move them, such as a router into a Linear."
        )
    for path in sorted(dense):
        of_router = path.rpartition(".")[2] == "router"
        if of_router or any(path.startswith(f"{above}.") for above in of_experts):
            fully_shard(modules[path], mesh=ranks, mp_policy=router_policy if of_router else policy, **options)
    as_given = dataclasses.replace(policy, cast_forward_inputs=False)
    for path, held in of_experts.items():
        tensor = table.tensors[held.name]
        copies = _copies_mesh(axes, tuple(dim for dim in dims if dim in held.same), tensor)
        reduced_in = policy.reduce_dtype or policy.param_dtype or tensor.dtype
        if copies.size() == 1 and reduced_in == torch.float16:  # torch 2.13 would divide twice; and nothing is sent
            as_given = dataclasses.replace(as_given, reduce_dtype=torch.float32)
        experts = fully_shard(modules[path], mesh=copies, mp_policy=as_given, **options)
        if copies.size() > 1 or reduced_in != torch.float64:  # which it would divide twice too: `reduce` does it
            experts.set_gradient_divide_factor(1 / held.scale)  # not by the number of copies
        if copies.device_type == "cpu" and copies.size() > 1:  # gloo cannot scale while it sums
            experts.set_force_sum_reduction_for_comms(True)
    for block in blocks:
        fully_shard(block, mesh=ranks, mp_policy=policy, **options)
    if isinstance(model, FSDPModule):  # a dispatcher that is the whole model
        return model
    return fully_shard(model, mesh=ranks, mp_policy=policy, **options)


def as_part(tensor: Tensor, axes: Axes, held: Held) -> Tensor:
    """Return what this rank holds of a stack of experts as a part of the stack of all experts, in the same memory.

    ``fully_shard`` may have cut the stack of this rank's experts once more, over the ranks with copies.
    """
    cut = axes.dims_of_dtensor(tensor) if isinstance(tensor, DTensor) else {}
    spread = tuple(dim for dim in held.part if dim not in cut)
    view, dim = held.stack or ((*tensor.shape,), 0)
    if axes.mesh is None or not spread:
        return tensor if isinstance(tensor, DTensor) else tensor.view(view)
    mesh = axes.mesh[spread]
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor.view(view), mesh, [Shard(dim)] * mesh.ndim)
    outer = [_StridedShard(0, split_factor=mesh.size()) if p.is_shard(0) else p for p in tensor.placements]
    both = DeviceMesh._concatenate([tensor.device_mesh, mesh])
    whole = torch.empty((tensor.shape[0] * mesh.size(), *tensor.shape[1:]), device="meta")
    placements = [*outer, *[Shard(0)] * mesh.ndim]
    return DTensor.from_local(tensor.to_local(), both, placements, shape=whole.shape, stride=whole.stride())


def flat_mesh(axes: Axes, dims: Dims) -> DeviceMesh:
    """Return the ranks along dimensions as a mesh of one dimension."""
    assert axes.mesh is not None
    if len(dims) == 1:
        return axes.mesh[dims[0]]
    if axes.size(dims) == dist.get_world_size():  # without a new group
        return init_device_mesh(axes.mesh.device_type, (dist.get_world_size(),))
    return axes.mesh[dims]._flatten()


def _copies_mesh(axes: Axes, dims: Dims, tensor: Tensor) -> DeviceMesh:
    """Return the ranks with copies of the same experts as a mesh, which has one rank if there is one copy."""
    if dims:
        return flat_mesh(axes, dims)
    taken = (tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None) or ()
    alone = next((dim for dim, size in axes.sizes.items() if size == 1 and dim not in taken), None)
    if axes.mesh is None or alone is None:
        raise ConfigError(
            f"Setup.shard: there is one copy of the experts, so fully_shard needs a dimension of one rank, got {axes}. "
            'Make one more, such as ("copies", 1).'
        )
    return axes.mesh[alone]


def _dispatcher_above(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the path of the dispatcher that is or holds a module, or the path itself."""
    parts = path.split(".")
    above = (".".join(parts[:end]) for end in range(len(parts) + 1))
    return next((at for at in above if isinstance(modules[at], Dispatcher)), path)
