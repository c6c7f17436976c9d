"""Adapters from ``sent.quantised`` to the grouped GEMMs of torch, torchao, transformer-engine and DeepGEMM.

Each function takes the result of a dispatch with ``wire.deliver="quantised"``, and imports its library when it is
called. The first two results are part of the autograd graph: their gradient, in the model's dtype, is the gradient of
the rows.
DeepGEMM and torch's function have no backward, so ``grouped_gemm`` gives them one.

Legend: R rows, D columns, L experts, H outputs of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch.capabilities.quantised.formats import FORMATS, Mxfp8, quantise
from moe_dispatch.capabilities.quantised.rows import QuantisedRows, quantised_form, widen
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.permutation.grouped_mm import ALIGNED_BYTES, experts_of_rows, grouped_mm, matrix_gradient, wanted
from moe_dispatch.permutation.index import round_up
from moe_dispatch.permutation.strides import dense

DEEP_GEMM_ROWS = 128
"""Default of ``deep_gemm.get_mk_alignment_for_contiguous_layout()``."""

_BLOCK_ROWS, _BLOCK_COLUMNS = 128, 4  # scales that a tensor core reads together


def mx_tensor(sent: Dispatched, *, kernel_preference: Any = None) -> Tensor:
    """Return the rows as an ``MXTensor`` of torchao, for ``_to_mxfp8_then_scaled_grouped_mm(..., wgrad_with_hp=True)``.

    Args:
        sent: Result of a dispatch with "mxfp8".
        kernel_preference: A ``KernelPreference`` of torchao, which the GEMM must be given too; None for AUTO.

    Returns:
        (R, D) in the model's dtype. Nothing is copied.

    Raises:
        InputError: The rows are not quantised as "mxfp8".

    Source: torchao 0.18.0, ``MXTensor.from_qdata_and_scales``.
    """
    from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: PLC0415 - optional
    from torchao.quantization.quantize_.common import KernelPreference  # noqa: PLC0415

    rows = _rows(sent, "mx_tensor", ("mxfp8",))
    preference = KernelPreference.AUTO if kernel_preference is None else kernel_preference

    def make() -> Tensor:
        made: Tensor = MXTensor.from_qdata_and_scales(
            rows.values, rows.scales, rows.edge.dtype, kernel_preference=preference
        )
        return made

    return _connected(rows, make)


def te_grouped_tensor(sent: Dispatched) -> Tensor:
    """Return the rows as a ``GroupedTensor`` of transformer-engine, for ``te.ops.GroupedLinear``.

    The operation takes ``sent.tokens_per_expert`` as its second argument. It quantises the rows anew, by column, for
    the gradient of its weights.

    Args:
        sent: Result of a dispatch with "mxfp8", whose ``pad_multiple`` is a multiple of 128.

    Returns:
        (R, D) in the model's dtype. Nothing is copied.

    Raises:
        InputError: The rows are not quantised as "mxfp8", not padded to 128, or D is no multiple of 128.

    Source: transformer-engine main of 2026-08 (d0067d0), pytorch/tensor/grouped_tensor.py; **not run**.
    """
    rows = _rows(sent, "te_grouped_tensor", ("mxfp8",), multiple=128)
    counts, hidden = rows.tokens_per_expert, rows.values.shape[1]
    if hidden % 128:
        raise InputError(
            f"te_grouped_tensor: hidden_size must be a multiple of 128, got {hidden}. Use another adapter."
        )
    import transformer_engine_torch as tex  # noqa: PLC0415 - optional
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor  # noqa: PLC0415
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer  # noqa: PLC0415

    def make() -> Tensor:
        made: Tensor = GroupedTensor(
            shape=tuple(rows.values.shape),
            dtype=rows.edge.dtype,
            num_tensors=counts.shape[0],
            quantizer=MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False),
            data=rows.values.view(torch.uint8).view(-1),
            scale_inv=rows.scales.view(torch.uint8).view(-1),
            first_dims=counts,
            tensor_offsets=F.pad((counts * hidden).cumsum(0), (1, 0)),
            with_gemm_swizzled_scales=False,
        )
        return made

    return _connected(rows, make)


def torch_arguments(sent: Dispatched, weights: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of ``torch.nn.functional.scaled_grouped_mm`` for rows and weights.

    The function has no backward: call it inside ``grouped_gemm``.

    Args:
        sent: Result of a dispatch with "mxfp8".
        weights: (L, D, H), a matrix for each expert. They are quantised here, along D.

    Raises:
        InputError: The rows are not quantised as "mxfp8", or the weights have another L or D than the rows.

    Cost: no host sync; the scales are copied once, and with padding to less than 128 rows once more.

    Source: torch 2.13, ``_meta_grouped_mm_common``; blocks as in the layout of scales that cuBLAS 12.9 documents.
    """
    rows = _rows(sent, "torch_arguments", ("mxfp8",))
    num_experts, hidden, width = weights.shape
    if (num_experts, hidden) != (expected := (rows.tokens_per_expert.shape[0], rows.values.shape[1])):
        raise InputError(
            f"torch_arguments: weights must be (L, D, H) with (L, D) {expected}, got {tuple(weights.shape)}."
        )
    values, scales = quantise(weights.transpose(1, 2).reshape(-1, hidden), Mxfp8)
    by_expert = scales.view(num_experts, width, -1).view(torch.uint8)
    # The swizzle is the same for each expert, because its rows begin at a whole block.
    padded = F.pad(by_expert, (0, 0, 0, round_up(width, _BLOCK_ROWS) - width))
    blocked = _blocked(padded.flatten(0, 1)).view(num_experts, -1)
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return {
        "mat_a": rows.values,
        "mat_b": values.view(num_experts, width, hidden).transpose(1, 2),
        "scale_a": blocked_scales(rows.scales, rows.offs, aligned=sent.pad_multiple % _BLOCK_ROWS == 0),
        "scale_recipe_a": recipe,
        "scale_b": blocked.view(torch.float8_e8m0fnu),
        "scale_recipe_b": recipe,
        "swizzle_a": swizzle,
        "swizzle_b": swizzle,
        "offs": rows.offs,
        "output_dtype": torch.bfloat16,
    }


def blocked_scales(scales: Tensor, offs: Tensor, *, aligned: bool = False) -> Tensor:
    """Return scales in blocks of 128 rows and 4 columns, the swizzled layout of MX grouped GEMMs.

    The rows of each expert begin at a whole block, so there are up to 127 unused rows behind each expert.

    Args:
        scales: float8_e8m0fnu (R, D / 32), row-major, as in ``QuantisedRows``.
        offs: int32 (L,), the end of each expert's rows.
        aligned: Whether the rows of each expert are a multiple of 128 already.

    Returns:
        float8_e8m0fnu, (R, D / 32) rounded up to whole blocks; with ``aligned=False`` there are up to L more blocks of
        rows. No size depends on ``offs``.

    Cost: no host sync.
    """
    given, count = scales.view(torch.uint8), scales.shape[0]
    if not aligned:
        rows_R = torch.arange(count, dtype=offs.dtype, device=offs.device)
        counts = F.pad(offs, (1, 0)).diff()
        unused = F.pad((-counts % _BLOCK_ROWS).cumsum(0), (1, 0))  # before each expert, and behind the last
        at_R = rows_R + unused.index_select(0, torch.searchsorted(offs, rows_R, right=True))
        padded = given.new_zeros(count + _BLOCK_ROWS * offs.shape[0], given.shape[1])
        given = padded.index_copy_(0, at_R, given)
    return _blocked(F.pad(given, (0, 0, 0, -given.shape[0] % _BLOCK_ROWS))).view(torch.float8_e8m0fnu)


def _blocked(scales: Tensor) -> Tensor:
    """Put scales, uint8 and a multiple of 128 rows, into blocks; columns are filled up with 0 to a multiple of 4.

    In a block, the scale of row r and column c stands at ``(r % 32) * 16 + (r // 32) * 4 + c``.
    """
    scales = F.pad(scales, (0, -scales.shape[1] % _BLOCK_COLUMNS))
    count, columns = scales.shape
    blocks = scales.view(count // _BLOCK_ROWS, 4, 32, columns // _BLOCK_COLUMNS, _BLOCK_COLUMNS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(count, columns)


def deep_gemm_pair(sent: Dispatched) -> tuple[Tensor, Tensor]:
    """Return the pair ``a`` of DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``: values, and scales in its layout.

    With "float8_e4m3fn", for SM90, scales are float32 (R, D / 128). With "mxfp8", for SM100 and ``recipe_a=(1, 32)``,
    they are int32 (R, D / 128), four e8m0 scales in each. Both are MN-major, with columns of a multiple of 16 bytes, as
    ``get_mn_major_tma_aligned_tensor`` makes them. The function has no backward: call it inside ``grouped_gemm``.

    Raises:
        InputError: The rows are not quantised, or not padded to a multiple of 128.

    Cost: one copy of the scales; no host sync.

    Source: DeepGEMM 54e2261, csrc/jit_kernels/impls/smxx_layout.hpp; **not run**.
    """
    rows = _rows(sent, "deep_gemm_pair", ("float8_e4m3fn", "mxfp8"), multiple=DEEP_GEMM_ROWS)
    scales = rows.scales
    if rows.recipe == "mxfp8":
        scales = F.pad(scales.view(torch.uint8), (0, -scales.shape[1] % 4)).view(torch.int32)
    count, columns = scales.shape
    out = torch.empty_strided((count, columns), (1, round_up(count, 4)), dtype=scales.dtype, device=scales.device)
    return rows.values, out.copy_(scales)


def deep_gemm_layout(sent: Dispatched, *, psum: bool = False) -> Tensor:
    """Return ``grouped_layout`` for DeepGEMM's contiguous GEMMs.

    Args:
        sent: Result of a dispatch. With ``psum``, its ``pad_multiple`` must be 128: DeepGEMM computes the beginnings of
            experts from its own alignment.
        psum: Whether the GEMM is called with ``use_psum_layout=True``.

    Returns:
        int32 (R,), the expert of each row, -1 on padding and slack; with ``psum`` int32 (L,), the end of each expert's
        rows without padding.

    Raises:
        InputError: ``psum`` is given, and ``pad_multiple`` is not 128.

    Cost: no host sync.
    """
    offs, padding = sent.offs, sent._padding
    if psum:
        if sent.pad_multiple != DEEP_GEMM_ROWS:
            raise InputError(
                f"deep_gemm_layout: psum needs pad_multiple={DEEP_GEMM_ROWS}, the alignment of DeepGEMM, got "
                f"{sent.pad_multiple}. Use psum=False."
            )
        assert padding is not None
        return offs - padding.int()
    expert_R = experts_of_rows(offs, padding, sent.in_graph.shape[0])
    return torch.where(expert_R < offs.shape[0], expert_R, -1).int()


def grouped_gemm(sent: Dispatched, weights: Tensor, forward: Callable[[Dispatched, Tensor], Tensor]) -> Tensor:
    """Run a GEMM that has no backward, and give it one: both gradients are computed in the dtype of the weights.

    The gradient of the weights is computed from the widened rows. Their other direction would have to be quantised
    anew, which rounds twice.

    Args:
        sent: Result of a dispatch with ``wire.deliver="quantised"``.
        weights: (L, D, H), a matrix for each expert, in the model's dtype.
        forward: Function of ``sent`` and ``weights`` that returns the products, (R, H). It is called once, with
            gradients off.

    Returns:
        The products, (R, H).

    Raises:
        InputError: The rows are not quantised, or the weights are float64.
        StateError: The backward itself is differentiated.

    Cost: the backward widens the rows, and runs two grouped GEMMs of torch.
    """
    rows = _rows(sent, "grouped_gemm", tuple(FORMATS))
    if weights.dtype == torch.float64:
        raise InputError("grouped_gemm: weights must be bfloat16, float16 or float32, got float64.")
    outputs: Tensor = _Gemm.apply(rows.edge, weights, sent, forward)  # type: ignore[no-untyped-call]
    return outputs


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weights: Tensor, sent: Dispatched, forward: Callable[..., Tensor]) -> Tensor:
        assert sent.quantised is not None
        ctx.dtype, ctx.offs, ctx.padding = edge.dtype, sent.offs, sent._padding
        ctx.save_for_backward(sent.quantised.values, sent.quantised.scales, weights)
        # This copy does not share ``rows``, which may outlive their use: they take twice the memory of values.
        return forward(replace(sent, quantised=replace(sent.quantised)), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StateError("grouped_gemm: double backward is not supported. Use create_graph=False.")
        values, scales, weights = ctx.saved_tensors
        grad = dense(grad.to(weights.dtype))
        grad_rows = grad_weights = None
        if wanted(ctx, 0):
            grad_rows = grouped_mm(grad, weights.transpose(1, 2), ctx.offs).to(ctx.dtype)
        if wanted(ctx, 1):
            rows = widen((values, scales), weights.dtype)
            width = grad.shape[1]
            grad = F.pad(grad, (0, -width % (ALIGNED_BYTES // grad.element_size())))
            grad_weights = matrix_gradient(rows, grad, ctx.offs, ctx.padding)[:, :, :width]
        return grad_rows, grad_weights, None, None


def quantised_gradient(sent: Dispatched, gradient: Tensor) -> Dispatched | None:
    """Return the gradient of the experts' outputs as it travelled. Call this in the backward of their last GEMM.

    Args:
        sent: Result of a dispatch with ``wire.gradients``, ``wire.deliver="quantised"`` and ``weights="experts"``.
        gradient: The gradient that autograd hands to the backward: (R, D), widened.

    Returns:
        ``sent`` with the gradient in place of the rows, for the other functions of this module. None if ``gradient`` is
        not what ``combine`` sent back: if the config does not ask for it, the dispatch was compiled, or there is
        something between the GEMM and ``combine``, such as a multiplication by the weights or a second use. A change
        of ``gradient.data`` in place, as by ``gradient.data.mul_()``, is not noticed: the old rows are returned.
    """
    found = quantised_form(gradient)
    if sent.quantised is None or found is None:
        return None
    values, scales = found
    return replace(
        sent, in_graph=gradient, quantised=replace(sent.quantised, values=values, scales=scales, edge=gradient)
    )


def gradient_as(sent: Dispatched, outputs: Tensor, adapter: Callable[[Dispatched], Tensor]) -> Tensor:
    """Return the outputs of a GEMM whose backward takes a quantised gradient: ``adapter`` makes it from what travelled.

    Args:
        sent: As in ``quantised_gradient``.
        outputs: (R, D), which nothing but ``combine`` may use.
        adapter: Function such as ``mx_tensor``. It gets the result of ``quantised_gradient``.

    Returns:
        The outputs.

    Raises:
        InputError: The config does not ask for such gradients.
        StateError: In the backward, ``quantised_gradient`` returns None.
    """
    _rows(sent, "gradient_as", tuple(FORMATS))
    config = sent.state.lease.enter().config
    gradients = config.wire_options is not None and config.wire_options.of_gradients is not None
    if not gradients or config.weights != "experts":
        raise InputError(
            'gradient_as: gradients arrive quantised with wire.gradients=True and weights="experts", got '
            f"{gradients} and {config.weights!r}."
        )
    same: Tensor = _GradientAs.apply(outputs, sent, adapter)  # type: ignore[no-untyped-call]
    return same


class _GradientAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, sent: Dispatched, adapter: Callable[[Dispatched], Tensor]) -> Tensor:
        rows, edge = sent.quantised, sent.in_graph  # the edge has no memory, and the backward does not need the rows
        assert rows is not None
        ctx.sent = replace(sent, quantised=replace(rows, values=edge, scales=edge))
        ctx.adapter = adapter
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if (found := quantised_gradient(ctx.sent, grad)) is None:
            raise StateError(
                "gradient_as: the gradient is not what combine sent back. Pass the result to combine, to nothing else, "
                "and outside of torch.compile."
            )
        return ctx.adapter(found), None, None


class _Connected(torch.autograd.Function):
    """Make a tensor of another library at the place of the rows in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _connected(rows: QuantisedRows, make: Callable[[], Tensor]) -> Tensor:
    connected: Tensor = _Connected.apply(rows.edge, make)  # type: ignore[no-untyped-call]
    return connected


def _rows(sent: Dispatched, where: str, recipes: tuple[str | None, ...], multiple: int = 1) -> QuantisedRows:
    """Return the quantised rows of a dispatch, and refuse those that the GEMM does not take."""
    offered = " or ".join(map(repr, recipes))
    if sent.quantised is None:
        raise InputError(
            f'{where}: the rows are not quantised. Set wire.deliver="quantised" and wire.dtype to {offered}.'
        )
    sent.quantised._check_values()
    if sent.quantised.recipe not in recipes:
        raise InputError(f"{where}: wire.dtype must be {offered}, got {sent.quantised.recipe!r}.")
    if sent.pad_multiple % multiple:
        raise InputError(f"{where}: pad_multiple must be a multiple of {multiple}, got {sent.pad_multiple}.")
    return sent.quantised
