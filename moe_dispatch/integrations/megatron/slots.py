"""Run the experts of an MoE layer on the expert slots of a balanced dispatch.

Own experts run as Megatron runs them, on the parameters themselves. Copies run in the same module, with fetched weights
in the place of its parameters. Gradients of copies reach a parameter in the same backward as its own gradient, so hooks
of data parallelism see each parameter once, with the whole gradient.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moe_dispatch.dispatched import Dispatched
from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher

# "local_experts.3.linear_fc1.weight" of SequentialMLP, and "linear_fc1.weight3" of TEGroupedMLP
_OF_EXPERT = re.compile(r"(local_experts\.|linear_fc\d\.[a-z]+)(\d+)(.*)")
# Attributes of the linear layers of Megatron and transformer-engine that add gradients of weights to ``main_grad``.
_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")


@final
class SlotExperts:
    """A replacement of the ``forward`` of a layer's experts, for own experts and copies.

    Args:
        experts: A SequentialMLP, or a TEGroupedMLP without op fuser.

    Raises:
        ConfigError: A parameter belongs to no single expert.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = copy.copy(experts)  # the same submodules and parameters, with the forward of the class
        self._experts.__dict__.pop("forward", None)
        self._names: dict[str, list[str]] = defaultdict(list)  # by kind of parameter: one name for each expert
        for name, _ in experts.named_parameters():
            if (found := _OF_EXPERT.fullmatch(name)) is None:
                raise ConfigError(
                    f"MegatronDispatcher: balance needs parameters for each expert, got {name!r} in "
                    f"{type(experts).__name__}. Use SequentialMLP or TEGroupedMLP, without moe_single_grouped_weight "
                    "and adapters, or leave balance out."
                )
            self._names[found[1] + found[3]].append(name)

    def run(
        self, dispatcher: MegatronDispatcher, rows_RD: Tensor, tokens_per_expert: Tensor, probs_R: Tensor
    ) -> tuple[Tensor, None]:
        """Run the experts on the dispatch in flight. Arguments after the first are those of Megatron's experts.

        Cost: that of ``SlotWeights.run`` after the rows have arrived. Meanwhile, and in the backward, there is a copy
        of the parameters.
        """
        from moe_dispatch.capabilities.balance.slot_weights import slot_weights_of  # noqa: PLC0415 - only layers with balance need it

        named, config = self._gathered_parameters(), self._experts.config
        parameters = [[named[name] for name in names] for names in self._names.values()]
        apart = config.gradient_accumulation_fusion or getattr(config, "delay_wgrad_compute", False)
        stacked = [_Stack.apply(apart, *of_experts) for of_experts in parameters]  # type: ignore[no-untyped-call]
        own_weights = stacked[0].data_ptr()

        def run(part: Dispatched, *weights: Tensor) -> Tensor:
            if weights[0].data_ptr() != own_weights:
                return self._run_copies(part, weights)
            output_RD: Tensor = self._experts(part.rows, torch.tensor(part.host_counts, device="cpu"), part.weights)[0]
            return output_RD

        sent = dataclasses.replace(dispatcher.in_flight("experts"), in_graph=rows_RD, weights=probs_R)
        outputs_RD = slot_weights_of(dispatcher.dispatcher).run(sent, run, *stacked)[1]
        if outputs_RD.requires_grad:
            outputs_RD = _Return.apply(outputs_RD, parameters, *stacked)  # type: ignore[no-untyped-call]
            if torch._C._current_graph_task_id() == -1:  # otherwise a recomputation, whose backward follows
                for stack in stacked:
                    stack.untyped_storage().resize_(0)
        return outputs_RD, None

    def _run_copies(self, part: Dispatched, weights: Sequence[Tensor]) -> Tensor:
        """Run copies, as many at a time as there are own experts. The module runs no rows for those that lack."""
        assert part.host_counts is not None
        outputs, own = [], len(next(iter(self._names.values())))
        counts = [part.host_counts[first : first + own] for first in range(0, len(part.host_counts), own)]
        sizes = [sum(some) for some in counts]
        held = zip(*(weight.split(own) for weight in weights), strict=True)
        parts = zip(counts, part.rows.split(sizes), part.weights.split(sizes), held, strict=True)
        with _plain_gradients(self._experts):
            for some, rows_RD, probs_R, stacks in parts:
                lacking, named = own - len(some), dict[str, Tensor]()
                for names, stack in zip(self._names.values(), stacks, strict=True):
                    named |= dict(zip(names, [*stack, *[stack[0]] * lacking], strict=True))
                rows_of_each = torch.tensor([*some, *[0] * lacking], device="cpu")
                outputs.append(functional_call(self._experts, named, (rows_RD, rows_of_each, probs_R))[0])
        return torch.cat(outputs)

    def _gathered_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name. The hooks that wait for their all-gather run first."""
        for module in self._experts.modules():
            for number, hook in module._forward_pre_hooks.items():
                if module is not self._experts and number not in module._forward_pre_hooks_with_kwargs:
                    hook(module, ())
        parameters = dict(self._experts.named_parameters())
        if any(hasattr(parameter, "__fsdp_param__") for parameter in parameters.values()):
            raise ConfigError(
                "MegatronDispatcher: balance needs whole parameters, got those of Megatron-FSDP. Use "
                "DistributedDataParallel, or leave balance out."
            )
        return parameters


@contextmanager
def _plain_gradients(experts: nn.Module) -> Iterator[None]:
    """Let linear layers return the gradients of weights at once: fetched weights have no ``main_grad`` to wait for."""
    changes = [(module, name, False) for module in experts.modules() for name in _FUSED if getattr(module, name, False)]
    for module in experts.modules():
        if (store := getattr(module, "wgrad_store", None)) is not None:
            changes.append((module, "wgrad_store", type(store)()))  # of transformer-engine; this one delays nothing
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


class _Stack(torch.autograd.Function):
    """Stack the parameters of experts. The gradient of the result is that of copies on other ranks.

    Linear layers with ``gradient_accumulation_fusion`` add their own gradients to ``main_grad``, and hooks of data
    parallelism then ignore ``grad``. With ``delay_wgrad_compute``, they set ``grad`` later. In both cases the backward
    adds these gradients to ``main_grad`` too, and returns none. The hooks run once, after both.
    """

    @staticmethod
    def forward(ctx: Any, apart: bool, *parameters: Tensor) -> Tensor:
        ctx.main = parameters if apart else ()
        return torch.stack(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.main:
            return None, *grad.unbind()
        for parameter, of_copies in zip(ctx.main, grad, strict=True):
            parameter.main_grad.add_(of_copies)
        return None, *[None] * len(ctx.main)


class _Return(torch.autograd.Function):
    """Return the outputs of experts. The backward stacks the parameters again, as their memory was freed meanwhile."""

    @staticmethod
    def forward(ctx: Any, outputs_RD: Tensor, parameters: list[list[Tensor]], *stacked: Tensor) -> Tensor:
        ctx.parameters = parameters
        ctx.save_for_backward(*stacked)
        return outputs_RD.view_as(outputs_RD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for stack, of_experts in zip(ctx.saved_tensors, ctx.parameters, strict=True):
            memory = stack.untyped_storage()
            if memory.nbytes() == 0:
                memory.resize_(stack.numel() * stack.element_size())
                torch.stack(of_experts, out=stack.data)  # ``data``, so that autograd sees no other version
        return grad, None, *[None] * len(ctx.parameters)
