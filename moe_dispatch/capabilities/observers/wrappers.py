"""Look for DistributedDataParallel and FSDP around the parameters of experts."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.capabilities.instances import instances_of
from moe_dispatch.communication import real_group
from moe_dispatch.seams.observers import Observer, is_plain, parameters_behind

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel, Lease

Managed = tuple[str, str, list[int]]  # name of the wrapper, name of a parameter, and the ranks that share it


@final
class WrapperObserver(Observer):
    """Warn if DistributedDataParallel or FSDP manages parameters of experts over ranks that hold different ones.

    It overwrites the experts of one rank with those of another, or takes parts of both for one tensor. A module does
    not know that it is wrapped, and the names of parameters do not say which ones belong to experts. But torch knows
    the wrappers, and the autograd graph shows which parameters the experts used. Frozen stacks of experts, which are
    not in the graph, are recognised by their number of experts.

    Cost: a walk over the autograd graph of the experts, and over the modules with FSDP2, once for each dispatcher.
    """

    def __init__(self, channel: Channel) -> None:
        self._group = channel.communicator.group
        self._num_experts = channel.config.num_experts
        self._num_held = channel.config.num_experts // channel.shape.ep_size
        self._told = self._told_split = False
        self._seen: weakref.WeakKeyDictionary[Lease, tuple[bool, int, bool]] = weakref.WeakKeyDictionary()

    def combined(self, lease: Lease, rows: Tensor) -> None:
        """Look at the parameters behind the rows, unless those of the dispatcher were looked at before."""
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch has no public name for it
        fsdp1 = "torch.distributed.fsdp._flat_param" in sys.modules and not is_plain(lease)
        wrappers = ddp is not None, len(_composable_state._module_state_mapping), fsdp1
        if self._group is None or rows.grad_fn is None or self._seen.get(lease) == wrappers:
            return
        self._seen[lease] = wrappers
        ranks = set[int]()
        with suppress(KeyError):  # torch.distributed does not know a group that was made by hand
            ranks = {*dist.get_process_group_ranks(real_group(self._group))}
        used = {id(parameter): parameter for parameter in parameters_behind(rows) if not self._is_whole(parameter)}
        found = [*(_by_ddp(ddp, used) if ddp is not None else ()), *self._by_fsdp(lease, used), *_by_fsdp1(used)]
        mixed = [(by, name) for by, name, shared in found if len(ranks.intersection(shared)) > 1]
        for by in dict.fromkeys(by for by, _ in mixed):
            names = [name for of, name in mixed if of == by]
            warnings.warn(
                f"Dispatcher.combine: {by} must leave out the parameters of experts, got {len(names)} that it manages "
                f"({', '.join(names[:3])}) among ranks that hold different experts. It overwrites or mixes them, and "
                "averages their gradients. Wrap the model with Setup(mesh).ddp or shard of moe_dispatch.training.",
                UserWarning,
                stacklevel=4,
            )
        by = [*dict.fromkeys(["DistributedDataParallel"] * (ddp is not None) + ["fully_shard"] * _reshards())]
        if by and not self._told_split and (schedule := splitting_schedule()):
            self._told_split = True
            why = {
                "DistributedDataParallel": "averages the first stage only",
                "fully_shard": "has freed the parameters by then, so gradients get lost",
            }
            what = {
                "DistributedDataParallel": "Leave stages unwrapped, and call start and reduce of",
                "fully_shard": "Pass reshard_after_forward=False, or call shard of",
            }
            warnings.warn(
                f"Dispatcher.combine: {schedule} computes the gradients of weights after those of inputs, and {by[0]} "
                f"{why[by[0]]}, without an error. {what[by[0]]} moe_dispatch.training.Setup.",
                UserWarning,
                stacklevel=4,
            )
        if not self._told and (alone := _unmanaged_adapters()):
            self._told = True
            warnings.warn(
                f"Dispatcher.combine: fully_shard does not average the gradients of {len(alone)} adapters, which were "
                f"added after it ({alone[0]}, ...). Ranks start and train them apart. Call start of "
                "moe_dispatch.training.Setup before the first forward and reduce in each step, or average them "
                "yourself.",
                UserWarning,
                stacklevel=4,
            )

    def _is_whole(self, parameter: Tensor) -> bool:
        """Return whether a parameter is a stack of the experts of all ranks, of which each rank runs some."""
        return parameter.dim() > 2 and parameter.shape[0] == self._num_experts != self._num_held

    def _by_fsdp(self, lease: Lease, used: dict[int, Any]) -> Iterator[Managed]:
        """Yield what ``fully_shard`` manages of the parameters that the experts used, and of frozen stacks."""
        wrapped = {module: reference() for module, reference in _composable_state._module_state_mapping.items()}
        dispatchers = [inner for module in wrapped for inner in module.modules() if _lease_of(inner) is lease]
        below = {id(parameter) for dispatcher in dispatchers for parameter in dispatcher.parameters()}
        for state in wrapped.values():
            groups = [group for group in getattr(state, "_fsdp_param_groups", ()) if group is not None]
            for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
                here, sharded = id(getattr(parameter, "_unsharded_param", None)), parameter.sharded_param
                stack = sharded.dim() > 2 and sharded.shape[0] == self._num_held
                frozen = stack and not sharded.requires_grad and not below.isdisjoint((here, id(sharded)))
                if frozen or here in used:
                    name = parameter._param_fqn or parameter._module_info.param_name
                    yield "fully_shard", name, parameter.mesh_info.mesh.mesh.flatten().tolist()


def splitting_schedule() -> str:
    """Return the name of a pipeline schedule of this process that splits the backward, or ""."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    if module is None:
        return ""
    halves = {module.BACKWARD_INPUT, module.BACKWARD_WEIGHT}
    kinds = [module.PipelineScheduleMulti]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    for schedule in instances_of(*kinds):
        actions = itertools.chain.from_iterable((getattr(schedule, "pipeline_order", None) or {}).values())
        if any(action is not None and action.computation_type in halves for action in actions):
            return type(schedule).__name__
    return ""


def _reshards() -> bool:
    """Whether fully_shard frees the parameters of a module after its forward."""
    states = [reference() for reference in _composable_state._module_state_mapping.values()]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ()) if group]
    return any(group.post_forward_mesh_info is not None for group in groups)


def _unmanaged_adapters() -> list[str]:
    """Return the names of adapters in modules with FSDP2 that it does not manage, and that no Setup has started."""
    wrapped = {module: reference() for module, reference in _composable_state._module_state_mapping.items()}
    groups = [group for state in wrapped.values() for group in getattr(state, "_fsdp_param_groups", ()) if group]
    managed = {id(getattr(of, "_unsharded_param", None)) for group in groups for of in group.fsdp_params}
    named = {id(p): (name, p) for module in wrapped for name, p in module.named_parameters() if ".lora_" in name}
    return [
        name
        for key, (name, parameter) in named.items()
        if key not in managed and parameter.requires_grad and not isinstance(parameter, DTensor)
        if not getattr(parameter, "started_by_setup", False)
    ]


def _lease_of(module: Any) -> Any:
    return getattr(module, "_lease", None)


def _by_ddp(wrapper: Any, used: dict[int, Any]) -> Iterator[Managed]:
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    for name, parameter in wrapper.module.named_parameters():
        if id(parameter) in used and name not in wrapper.parameters_to_ignore:
            yield "DistributedDataParallel", name, ranks


def _by_fsdp1(used: dict[int, Any]) -> Iterator[Managed]:
    """Yield what FullyShardedDataParallel manages. It computes with views of flat parameters, which only it knows."""
    if any(hasattr(parameter, "_is_flat_param") for parameter in used.values()):
        for handle in instances_of(sys.modules["torch.distributed.fsdp._flat_param"].FlatParamHandle):
            if id(handle.flat_param) in used:
                ranks = dist.get_process_group_ranks(handle.process_group)
                for name in getattr(handle.flat_param, "_fqns", ()):
                    yield "FullyShardedDataParallel", name, ranks
