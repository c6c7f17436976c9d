"""Build stages of torch's pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from moe_dispatch.capabilities.pipelining.packs import holds_layouts, read_layout
from moe_dispatch.errors import InputError

Tensors = Tensor | tuple[Tensor, ...]


def build_stage(
    module: nn.Module,
    index: int,
    num_stages: int,
    *,
    inputs: Tensors,
    outputs: Tensors | None = None,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> PipelineStage:
    """Build a stage whose module is not run to learn shapes.

    ``PipelineStage`` without example tensors runs the module once more in the first step, in train mode: the first
    stage on its first micro-batch, the others on memory that nobody has written. Dispatchers count none of it, but
    other buffers and counters of the module do.

    Args:
        module: The layers of the stage.
        index: Number of the stage, from 0.
        num_stages: Number of all stages.
        inputs: What the module is called with for one micro-batch. Only shapes and dtypes are read, so
            ``torch.empty(tokens, hidden, device="meta")`` is enough.
        outputs: What it returns; None if that has the shapes of ``inputs``.
        device: Device of the stage.
        group: Group of the stages.
        **options: Other arguments of ``PipelineStage``, such as ``dw_builder``.

    Returns:
        The stage. Floating outputs, and floating inputs of all stages but the first, require grad.

    Raises:
        InputError: In the first step, if a keyword of ``step`` such as ``cu_seqlens`` holds offsets of the whole batch,
            which the schedule has cut, or more layouts than micro-batches. Every rank that passed it raises.
    """
    return _Stage(
        module,
        index,
        num_stages,
        torch.device(device),
        input_args=_examples(inputs, device, requires_grad=index > 0),
        output_args=_examples(inputs if outputs is None else outputs, device, requires_grad=True),
        group=group,
        **options,
    )


class _Stage(PipelineStage):
    """A stage that refuses layouts and offsets which the schedule has not cut into micro-batches."""

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, *options: Any, **named: Any
    ) -> Any:
        for name, value in (kwargs or {}).items():
            if holds_layouts(value):
                read_layout(value)
            if name.startswith("cu_seq") and isinstance(value, Tensor):
                _check_offsets(name, value, num_microbatches)
        return super()._prepare_forward_infra(num_microbatches, args, kwargs, *options, **named)


def _check_offsets(name: str, part: Tensor, num_parts: int) -> None:
    """Raise InputError if the schedule has cut the offsets of which this is the first part. May sync."""
    whole = part._base
    if whole is None or whole.dim() != 1 or len(part) != -(-len(whole) // num_parts) or len(part) == len(whole):
        return
    if int(whole[len(part)]) != 0:  # the offsets of the next micro-batch would begin at 0
        raise InputError(
            f"build_stage: offsets of sequences must be those of a micro-batch, got {name} of {len(whole)} entries, "
            f"which the schedule has cut into {num_parts} parts. Pass the result of share_layouts in its place."
        )


def _examples(tensors: Tensors, device: torch.device | str, *, requires_grad: bool) -> tuple[Tensor, ...]:
    """Return tensors of the same shapes and dtypes on the device, which take no memory until they are written."""
    given = (tensors,) if isinstance(tensors, Tensor) else tensors
    made = (torch.empty(each.shape, dtype=each.dtype, device=device) for each in given)
    return tuple(each.requires_grad_(requires_grad and each.is_floating_point()) for each in made)
