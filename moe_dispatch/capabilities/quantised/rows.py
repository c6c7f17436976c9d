"""Quantised rows as experts get them, their gradients, and the autograd functions that widen and join them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError
from moe_dispatch.permutation import choose_permutation
from moe_dispatch.seams.plug_ins import import_whole


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantisedRows:
    """The rows that this rank's experts work on, quantised as they travelled. ``moe_dispatch.quantised`` adapts them.

    Attributes:
        values: float8_e4m3fn (R, D), contiguous, grouped by expert; 0 on padding.
        scales: (R, D / 32) in float8_e8m0fnu for "mxfp8", (R, D / 128) in float32 for "float8_e4m3fn". Contiguous, in
            the order of the rows, not swizzled; 1 on padding. They have no gradient.
        recipe: How the rows were quantised: the ``wire.dtype`` of the config.
        tokens_per_expert: As in ``Dispatched``.
        edge: (R, D) in the model's dtype: the place of these rows in the autograd graph. It has no memory but one NaN,
            at which its strides of 0 point. An autograd function that reads ``values`` and ``scales`` takes the edge as
            one more input, and returns the gradient of the rows for it, in the model's dtype.
    """

    values: Tensor
    scales: Tensor
    recipe: str
    tokens_per_expert: Tensor
    edge: Tensor

    def _check_values(self) -> None:
        """Raise InputError if something has converted the values, as FSDP2 does with the arguments of a module."""
        if self.values.dtype != torch.float8_e4m3fn:
            raise InputError(
                f"QuantisedRows: values must be torch.float8_e4m3fn, got {self.values.dtype}. Give a module that takes "
                "a Dispatched a MixedPrecisionPolicy with cast_forward_inputs=False."
            )

    @property
    def offs(self) -> Tensor:
        """The end of each expert's rows, as ``Dispatched.offs``."""
        return self.tokens_per_expert.cumsum(0, dtype=torch.int32)

    @property
    def rows(self) -> Tensor:
        """The rows in the model's dtype, (R, D). They are widened on the first read and kept."""
        # Kept beside the fields, as cached_property does: a copy by ``dataclasses.replace`` must not share them.
        kept: Tensor | None = self.__dict__.get("_widened")
        if (
            kept is None
            or (torch.is_grad_enabled() and self.edge.requires_grad > kept.requires_grad)
            or (kept.is_inference() and not torch.is_inference_mode_enabled())
        ):
            self._check_values()
            kept = Widen.apply(self.edge, self.values, self.scales)  # type: ignore[no-untyped-call]
            self.__dict__["_widened"] = kept
        assert kept is not None
        return kept

    def part(self, rows: slice, tokens_per_expert: Tensor, edge: Tensor) -> QuantisedRows:
        """Return some of the rows, for experts that get ``tokens_per_expert`` of them, with their part of the edge."""
        values, scales = self.values[rows], self.scales[rows]
        return dataclasses.replace(self, values=values, scales=scales, tokens_per_expert=tokens_per_expert, edge=edge)

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs of parts of the experts. The gradient of each part has its ``quantised_form``."""
        found: Tensor = _Joined.apply(*outputs)  # type: ignore[no-untyped-call]
        return found


@cache
def load_kernels() -> Any:
    """Return the module of the kernels, which needs Triton."""
    return import_whole("moe_dispatch.capabilities.quantised.triton_codes", "triton")


def kernels_for(rows: Tensor) -> Any:
    """Return the module of the kernels if they can read these rows; None if operators of torch do their work.

    They can on a GPU for which ``permutation="auto"`` is "triton". ``torch.compile`` traces operators of torch only.
    """
    if not rows.is_cuda or torch.compiler.is_compiling() or type(rows) not in (Tensor, torch.nn.Parameter):
        return None
    return load_kernels() if choose_permutation("auto", rows.device.type).name == "triton" else None


def as_bytes(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """View values as uint8, and e8m0 scales too: torch writes no number to those, and kernels read no float8."""
    values, scales = rows
    return values.view(torch.uint8), scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def widen(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return quantised rows, values and scales, in ``dtype``. Products are computed in float32.

    Cost: one launch on a GPU with Triton.
    """
    values, scales = rows
    if (kernels := kernels_for(values)) is not None:
        wide = torch.empty(values.shape, dtype=dtype, device=values.device)
        kernels.expand(*as_bytes(rows), wide)
        return wide
    blocks = values.float().view(*scales.shape, values.shape[1] // max(scales.shape[1], 1))
    return blocks.mul_(scales.float().unsqueeze(-1)).view(values.shape).to(dtype)


class Widen(torch.autograd.Function):
    """``widen`` as a function of the edge of the rows in the autograd graph, which gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, edge_RD: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        return widen((values, scales), edge_RD.dtype).data  # no view, so experts may change it in place

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return grad_RD, None, None


def with_form(gradient: Any, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return a gradient for autograd in which ``quantised_form`` finds the rows from which it was widened."""
    gradient.quantised_form = rows, gradient._version
    return gradient  # type: ignore[no-any-return]


def quantised_form(gradient: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows of ``with_form``; None if this is another tensor, or was changed in place."""
    rows, version = getattr(gradient, "quantised_form", (None, None))
    return rows if version == gradient._version else None


class _Joined(torch.autograd.Function):
    """The backward splits a gradient with its ``quantised_form``."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, rows = grad.split(ctx.sizes), quantised_form(grad)
        if rows is None:
            return grads
        return tuple(map(with_form, grads, zip(*(each.split(ctx.sizes) for each in rows), strict=True)))
