"""Start ranks alike, add up their gradients, and clip by the norm of all gradients, as a ``Table`` says.

All functions are collective over the ranks of the mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_dispatch.errors import InputError, StateError
from moe_dispatch.permutation.strides import dense
from moe_dispatch.training.table import Axes, Dims, Held, Table


@torch.no_grad()
def start_alike(table: Table) -> None:
    """Give ranks that must hold the same tensor that of the first of them."""
    by_dims = defaultdict[Dims, list[Tensor]](list)
    for name, held in table.items():
        by_dims[held.same].append(local_part(table.tensors[name]))
        table.tensors[name].started_by_setup = True  # type: ignore[attr-defined]  # so the first forward does not warn of adapters
    for dims, tensors in sorted(by_dims.items()):
        _broadcast(table.axes, tensors, dims)


@torch.no_grad()
def reduce_gradients(table: Table) -> None:
    """Make each gradient that of the mean of the losses of all ranks."""
    trained = _trained(table)
    repeated = [held.name for held, parameter in trained if _is_marked(parameter.grad)]
    if repeated:
        raise StateError(
            f"Setup.reduce: no backward has run since the gradient of {repeated[0]} was reduced, so it would be added "
            "up twice. Call reduce once a step, after its last backward."
        )
    by_dims = defaultdict[Dims, list[tuple[Held, Tensor]]](list)
    for held, parameter in trained:
        by_dims[held.summed_over].append((held, parameter))
    for dims, pairs in sorted(by_dims.items(), key=lambda item: item[0]):
        _fill_missing(table.axes, [parameter for _, parameter in pairs], dims)
        for held, parameter in pairs:
            if held.scale != 1 and parameter.grad is not None:
                _gradient_of(parameter).mul_(held.scale)  # before the sum, which then overflows later
        gradients = [_gradient_of(parameter) for _, parameter in pairs if parameter.grad is not None]
        _add_up(table.axes, gradients, dims, dist.ReduceOp.SUM)
    _mark(trained)


@torch.no_grad()
def clip_gradients(
    table: Table, max_norm: float, norm_type: float, *, foreach: bool | None, error_if_nonfinite: bool
) -> Tensor:
    """Scale the gradients so that the norm of all of them is at most ``max_norm``. Return the norm before."""
    trained = [(held, parameter) for held, parameter in _trained(table) if parameter.grad is not None]
    found = [(held, _gradient_of(parameter)) for held, parameter in trained]
    device = next((tensor.device for tensor in table.tensors.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    of_max = norm_type == torch.inf
    for batch in _batches(found, foreach):
        copies = [1 if of_max else table.axes.size(held.same) for held, _ in batch]  # ranks that add the same
        norms = _norms([gradient for _, gradient in batch], norm_type, foreach)
        if of_max:
            total = torch.maximum(total, norms.max().to(device))
        else:
            total += (norms.pow(norm_type) / norms.new_tensor(copies)).sum().to(device)
    _add_up(table.axes, [total], table.axes.dims, dist.ReduceOp.MAX if of_max else dist.ReduceOp.SUM)
    norm = total if of_max else total.pow(1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise InputError(
            f"Setup.clip: the norm of the gradients must be finite, got {norm.item()}. Look for the parameter, or pass "
            "error_if_nonfinite=False."
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for batch in _batches(found, foreach):
        gradients = [gradient for _, gradient in batch]
        here = scale.to(gradients[0].device)
        if foreach is False:
            for gradient in gradients:
                gradient.mul_(here)
        else:
            torch._foreach_mul_(gradients, here)
    _mark(trained)
    return norm


@torch.no_grad()
def spread_infinities(table: Table) -> Tensor:
    """Make all gradients NaN on every rank if one is not finite on any rank. Return whether it is so."""
    trained = [(held, parameter) for held, parameter in _trained(table) if parameter.grad is not None]
    device = next((tensor.device for tensor in table.tensors.values()), torch.device("cpu"))
    found = torch.zeros((), device=device)
    batches = [
        [gradient for _, gradient in batch]
        for batch in _batches([(held, _gradient_of(parameter)) for held, parameter in trained], None)
    ]
    for batch in batches:
        largest = torch.stack(torch._foreach_norm(batch, torch.inf)).max()
        found += (~largest.isfinite()).to(device, found.dtype)
    _add_up(table.axes, [found], table.axes.dims, dist.ReduceOp.MAX)
    factor = torch.where(found > 0, torch.nan, 1.0)
    for batch in batches:
        torch._foreach_mul_(batch, factor.to(batch[0].device, batch[0].dtype))
    _mark(trained)
    return found > 0


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the memory of the tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _trained(table: Table) -> list[tuple[Held, Tensor]]:
    return [(held, table.tensors[name]) for name, held in table.items() if held.trained]


def _gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient. A DTensor whose ranks hold terms of a sum is added up first."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return local_part(gradient)
    if gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def _fill_missing(axes: Axes, parameters: Sequence[Tensor], dims: Dims) -> None:
    """Give a parameter without a gradient here zeros, if another rank has one. Optimizers skip it otherwise."""
    if not dims:
        return
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has = has.to(parameters[0].device)
    _add_up(axes, [has], dims, dist.ReduceOp.MAX)
    for parameter, somewhere in zip(parameters, has.tolist(), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _is_marked(gradient: Tensor | None) -> bool:
    return gradient is not None and getattr(gradient, "_reduced_at", None) == local_part(gradient)._version


def _mark(trained: Sequence[tuple[Held, Tensor]]) -> None:
    """Note on gradients that they are reduced. A backward, and any other change, counts their version up."""
    for held, parameter in trained:
        if parameter.grad is not None and (held.summed_over or held.scale != 1):
            parameter.grad._reduced_at = local_part(parameter.grad)._version  # type: ignore[attr-defined]


def _batches(found: Sequence[tuple[Held, Tensor]], foreach: bool | None) -> Iterator[list[tuple[Held, Tensor]]]:
    """Yield the gradients with elements that one foreach operator takes, or one by one."""
    if foreach is False:
        yield from ([pair] for pair in found if pair[1].numel())
        return
    alike = defaultdict[tuple[torch.device, torch.dtype], list[tuple[Held, Tensor]]](list)
    for held, gradient in found:
        if gradient.numel():
            alike[gradient.device, gradient.dtype].append((held, gradient))
    yield from alike.values()


def _norms(gradients: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of each gradient, float64, computed in at least float32."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if foreach is False:
        norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients]
    else:
        norms = [*torch._foreach_norm(gradients, norm_type, dtype)]
    return torch.stack(norms).double()


def _broadcast(axes: Axes, tensors: Sequence[Tensor], dims: Sequence[str]) -> None:
    """Give the ranks along dimensions the tensors of the first of them."""
    for dim in dims:
        for tensor in tensors:
            if tensor.numel():
                flat = dense(tensor).view(-1).view(torch.uint8)  # gloo does not know all dtypes
                dist.broadcast(flat, group_src=0, group=axes.group(dim))
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _add_up(axes: Axes, tensors: Sequence[Tensor], dims: Sequence[str], op: dist.ReduceOp.RedOpType) -> None:
    """Reduce tensors over the ranks along dimensions. All of them get the same bits.

    The sum over two dimensions is made by the ranks at the start of the first one, and then sent along it: two groups
    that add the same terms may round otherwise.
    """
    if not dims:
        return
    *outer, last = dims
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.contiguous()
        if axes.size(dims) == dist.get_world_size():
            dist.all_reduce(flat, op)
        else:
            for number, dim in enumerate(outer):
                if axes.is_first(outer[:number]):
                    dist.reduce(flat, group_dst=0, op=op, group=axes.group(dim))
            if axes.is_first(outer):
                dist.all_reduce(flat, op, group=axes.group(last))
            for number, dim in reversed([*enumerate(outer)]):
                if axes.is_first(outer[:number]):
                    dist.broadcast(flat, group_src=0, group=axes.group(dim))
        if flat is not tensor:
            tensor.copy_(flat)
