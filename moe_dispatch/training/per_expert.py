"""Step stacks of experts expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_dispatch.errors import ConfigError
from moe_dispatch.training.gradients import local_part


@final
class PerExpert(Optimizer):
    """Step each expert of a stack as a parameter of its own.

    ``PerExpert(stacks, torch.optim.Muon, lr=0.01)`` steps stacks that Muon refuses, because it takes matrices. Other
    optimizers, such as Adafactor, take a stack for one tensor, and then experts decide about each other's steps.

    The state of a stack is the stack of the states of its experts, so ``Setup.state`` saves it. A stack may be a plain
    tensor, or a DTensor of ``Setup.shard``, whose experts are never cut. Groups and learning rates are those of any
    optimizer.

    Args:
        stacks: Parameters whose dimension 0 counts experts, or groups of them.
        kind: Class of the optimizer, which is called with groups of the experts.
        **options: Its options.

    Raises:
        ConfigError: A DTensor is sharded along another dimension, so that no rank holds a whole expert.

    Cost: one parameter for each expert, so one step of the optimizer for each of them unless it has a foreach form.
    """

    def __init__(self, stacks: Iterable[Any], kind: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(stacks, options)
        for stack in self._stacks():
            if isinstance(stack, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in stack.placements):
                raise ConfigError(
                    f"PerExpert: a stack must hold whole experts on each rank, got placements {stack.placements}. Use "
                    "an optimizer that steps each number alone, such as AdamW."
                )
        self._inner = kind([self._group(group)[0] for group in self.param_groups], **options)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group |= {key: value for key, value in inner.items() if key != "params"}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the experts of all stacks that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        built = [self._group(group) for group in self.param_groups]
        self._inner.param_groups = [group for group, _ in built]
        self._inner.state.clear()
        experts = {stack: views for _, of_group in built for stack, views in of_group.items()}
        for stack, views in experts.items():
            for key, value in self.state[stack].items() if stack in self.state else ():
                for view, row in zip(views, local_part(value), strict=True):
                    self._inner.state[view][key] = row
        self._inner.step()
        for stack, views in experts.items():
            self._keep(stack, [self._inner.state[view] for view in views])
        return loss

    def _stacks(self) -> list[Tensor]:
        return [stack for group in self.param_groups for stack in group["params"]]

    def _group(self, group: dict[str, Any]) -> tuple[dict[str, Any], dict[Tensor, list[nn.Parameter]]]:
        """Return a group of the experts of this rank with its options, and the experts by stack."""
        experts = dict[Tensor, list[nn.Parameter]]()
        for stack in group["params"]:
            experts[stack] = [nn.Parameter(expert, stack.requires_grad) for expert in local_part(stack)]
            if stack.grad is not None:
                for view, gradient in zip(experts[stack], local_part(stack.grad), strict=True):
                    view.grad = gradient
        return {**group, "params": [view for views in experts.values() for view in views]}, experts

    def _keep(self, stack: Tensor, states: list[dict[str, Any]]) -> None:
        """Store the states of the experts of a stack. Most are changed in place already."""
        kept = self.state[stack]
        for key in states[0] if states else ():
            if key in kept:
                for row, state in zip(local_part(kept[key]), states, strict=True):
                    if row.data_ptr() != state[key].data_ptr():
                        row.copy_(state[key])
                continue
            value = torch.stack([torch.as_tensor(state[key]) for state in states])
            if isinstance(stack, DTensor) and value.shape == local_part(stack).shape:
                mesh, places = stack.device_mesh, stack.placements
                value = DTensor.from_local(
                    value, mesh, places, run_check=False, shape=stack.shape, stride=stack.stride()
                )
            kept[key] = value
