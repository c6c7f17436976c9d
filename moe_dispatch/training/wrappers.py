"""What DistributedDataParallel and fully_shard do with the parameters of a model, read from torch's own objects.

torch has no public way to ask which mesh shards a parameter, or by what its gradient is divided. The private names of
torch that this folder needs stand in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Managed:
    """What a wrapper does with a parameter.

    Attributes:
        by: Name of the wrapper.
        ranks: Ranks among which it adds up gradients.
        divisor: What it divides the sum by.
        twice: Whether torch 2.13 divides twice by the factor that was set. On a mesh of one rank it divides while it
            copies, and again if it reduces in float16 or must sum.
    """

    by: str
    ranks: tuple[int, ...]
    divisor: float
    twice: bool = False


def managed_parameters(model: nn.Module) -> dict[int, Managed]:
    """Return what DDP or fully_shard does with each parameter that it manages, by ``id`` of the parameter.

    Raises:
        ConfigError: FullyShardedDataParallel manages a parameter.
    """
    found: dict[int, Managed] = {}
    for name, flattened in model.named_parameters():
        if getattr(flattened, "_fsdp_flattened", False):  # set on flat parameters, and on those that went into them
            raise ConfigError(
                "Setup: the model must not be wrapped in FullyShardedDataParallel, which joins parameters of all kinds "
                f"in flat ones, got {name}. Call Setup(mesh).shard instead, which calls fully_shard."
            )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = (*dist.get_process_group_ranks(module.process_group),)
            by_ddp = Managed(by="DistributedDataParallel", ranks=ranks, divisor=len(ranks))
            for name, parameter in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    found[id(parameter)] = by_ddp
        for group in fsdp_groups(module):
            for sharded in group.fsdp_params:
                mesh = sharded.mesh_info.mesh
                ranks = (*mesh.mesh.flatten().tolist(),)
                factor = group.gradient_divide_factor
                twice = factor not in (None, 1) and len(ranks) == 1 and _divides_itself(group, sharded.sharded_param)
                by_fsdp = Managed(by="fully_shard", ranks=ranks, divisor=factor or len(ranks), twice=twice)
                for parameter in (sharded.sharded_param, getattr(sharded, "_unsharded_param", None)):
                    found[id(parameter)] = by_fsdp
    return found


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that fully_shard made for a module."""
    state = getattr(module, "_get_fsdp_state", None)
    return [] if state is None else [group for group in state()._fsdp_param_groups if group is not None]


def _divides_itself(group: Any, parameter: nn.Parameter) -> bool:
    """Whether fully_shard divides gradients by operators of its own, and not in the collective."""
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
    return bool(group.force_sum_reduction_for_comms) or dtype not in (torch.float32, torch.bfloat16)
