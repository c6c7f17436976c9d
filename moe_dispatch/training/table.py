"""Who holds what: for each parameter, along which dimensions of a mesh it is the same, a part, or one's own.

``table_of`` derives the table from a model on this rank, without communication. The other functions of this folder, and
whoever compares a set-up with one process, read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.training.holding import Holding, Kind, Reader, Stack, lines_of, ranks_of
from moe_dispatch.training.wrappers import Managed, managed_parameters

Dims = tuple[str, ...]  # names of dimensions of the mesh that have more than one rank, in its order


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What this rank holds of a parameter or buffer, and what must still be done with its gradient.

    Each dimension of the mesh with more than one rank stands in ``same``, ``part`` or ``own``.

    Attributes:
        name: Name in the model.
        kind: "expert" if it belongs to the experts of a dispatcher. Ranks along the expert-parallel dimensions then
            hold different experts, and those along the dimensions in ``same`` hold copies.
        adapter: Whether it is a part of an adapter of PEFT.
        is_buffer: Whether it is a buffer, and not a parameter.
        trained: Whether it is a parameter that requires gradients.
        same: Ranks along these dimensions hold equal tensors.
        part: Ranks along these dimensions hold other parts of one tensor. It is a DTensor, or a stack of this rank's
            experts, which are a part of all experts along dimension 0, in the order of the ranks.
        own: Ranks along these dimensions hold another tensor under this name: that of another pipeline stage, or of
            another expert that is a module of its own.
        experts: Numbers of the experts of this rank that it belongs to, if its kind is "expert".
        stack: Shape, and number of the dimension that counts the experts of this rank, if it is a stack of them that is
            no DTensor of all experts. PEFT's factor B of a stack is one of the shape (out, r, experts).
        summed_over: Dimensions along which the gradients of the ranks must be added up after the backward. Neither
            the exchange of rows, nor a wrapper, nor a DTensor has done it.
        scale: What the sum is multiplied by. The result is the gradient of the mean of all losses.
        wrapper: "DistributedDataParallel" or "fully_shard" if that reduces its gradient, else "".
        saved_as: Name in a checkpoint. It has the number among all experts if an expert is a module of its own, and no
            trace of ``OnParts``.
    """

    name: str
    kind: Kind
    adapter: bool
    is_buffer: bool
    trained: bool
    same: Dims
    part: Dims
    own: Dims
    experts: range | None
    stack: Stack | None
    summed_over: Dims
    scale: float
    wrapper: str
    saved_as: str

    def word(self, dim: str) -> str:
        """Return "same", "part" or "own" for a dimension."""
        return "same" if dim in self.same else "part" if dim in self.part else "own" if dim in self.own else "-"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table(Mapping[str, Held]):
    """What this rank holds of each parameter and buffer of a model, by name. ``print`` shows it.

    Attributes:
        rows: What it holds, by the names of ``model.named_parameters()`` and ``model.named_buffers()``.
        tensors: The parameters and buffers.
        axes: The mesh.
    """

    rows: Mapping[str, Held]
    tensors: Mapping[str, Tensor]
    axes: Axes

    def __getitem__(self, name: str) -> Held:
        return self.rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def ranks(self, dims: Dims) -> tuple[int, ...]:
        """Return the ranks of the job along some dimensions, through this rank; in the order of the mesh."""
        return self.axes.ranks(dims)

    def whole(self, name: str, tensor: Tensor | None = None) -> Tensor:
        """Gather a parameter, or a tensor that is held as it is, such as its gradient, from the ranks with its parts.

        Collective. A DTensor gathers itself. Stacks are joined along the dimension that counts the experts.
        """
        held, tensor = self.rows[name], self.tensors[name] if tensor is None else tensor
        tensor = tensor.detach()
        dims = held.part
        if isinstance(tensor, DTensor):
            dims = tuple(dim for dim in dims if dim not in self.axes.dims_of_dtensor(tensor))
            tensor = tensor.full_tensor()
        view, along = held.stack or ((*tensor.shape,), 0)
        shape, tensor = tensor.shape, tensor.reshape(view)
        for dim in reversed(dims):  # the last dimension runs fastest over the experts
            group = self.axes.group(dim)
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts, along)
        return tensor if along == 0 else tensor.reshape(*shape[:-1], -1)

    def __str__(self) -> str:
        dims = self.axes.dims
        lines = [["parameter", "kind", *dims, "gradient"]]
        for held in self.rows.values():
            kind = f"{held.kind} adapter" if held.adapter else held.kind
            todo = f"sum over {' and '.join(held.summed_over)}, " if held.summed_over else ""
            todo += f"times {held.scale:.4g}" if held.scale != 1 else "" if todo else "as it is"
            words = [held.word(dim) for dim in dims]
            lines.append([held.name, kind, *words, todo.removesuffix(", ") if held.trained else "none"])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


@final
class Axes:
    """The dimensions of a mesh, and how sets of ranks lie along them. Without a mesh there are none."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.sizes: dict[str, int] = {}
        if mesh is not None:
            names = mesh.mesh_dim_names or tuple(str(number) for number in range(mesh.ndim))
            self.sizes = dict(zip(names, mesh.mesh.shape, strict=True))
            coordinates = mesh.get_coordinate()
            if coordinates is None:
                raise ConfigError(f"Setup: the mesh must hold every rank of the model, but not rank {dist.get_rank()}.")
            self._here = dict(zip(names, coordinates, strict=True))
            self._coordinates = {
                int(mesh.mesh[place]): place for place in itertools.product(*map(range, mesh.mesh.shape))
            }
        self.dims = tuple(name for name, size in self.sizes.items() if size > 1)

    def size(self, dims: Sequence[str]) -> int:
        """Return the number of ranks along dimensions."""
        return torch.Size(self.sizes[dim] for dim in dims).numel()

    def group(self, dim: str) -> dist.ProcessGroup:
        """Return the group of the ranks along one dimension."""
        assert self.mesh is not None
        return self.mesh.get_group(list(self.sizes).index(dim))

    def place(self, dims: Sequence[str]) -> str:
        """Return where this rank stands along dimensions, such as "ep1"."""
        return ",".join(f"{dim}{self._here[dim]}" for dim in dims)

    def is_first(self, dims: Sequence[str]) -> bool:
        """Whether this rank is the first one along all of the dimensions."""
        return all(self._here[dim] == 0 for dim in dims)

    def ranks(self, dims: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks along dimensions, through this rank."""
        if self.mesh is None:
            return (0,)
        where = tuple(slice(None) if name in dims else self._here[name] for name in self.sizes)
        return (*self.mesh.mesh[where].flatten().tolist(),)

    def along(self, ranks: Sequence[int], where: str) -> Dims:
        """Return the dimensions along which ranks lie. Raise ConfigError if they are not all ranks along some."""
        if len(ranks) == 1:
            return ()
        places = [self._coordinates.get(rank) for rank in ranks] if self.mesh is not None else [None]
        if None not in places:
            varies = [len(set(column)) > 1 for column in zip(*places, strict=True)]
            dims = tuple(name for name, does in zip(self.sizes, varies, strict=True) if does)
            if sorted(ranks) == sorted(self.ranks(dims)):
                return dims
        raise ConfigError(
            f"Setup: {where} must be all ranks along some dimensions of the mesh, got ranks {list(ranks)} and {self}. "
            "Pass Setup(mesh) a mesh of all ranks that has a dimension for each group."
        )

    def dims_of_dtensor(self, tensor: DTensor) -> dict[str, bool]:
        """Return the dimensions of the mesh on which a DTensor lies, and whether it is replicated along them."""
        where, found = f"the mesh of a DTensor, {tensor.device_mesh},", dict[str, bool]()
        for ranks, placement in zip(lines_of(tensor), tensor.placements, strict=True):
            found |= dict.fromkeys(self.along(ranks, where), isinstance(placement, Replicate))
        return found

    def __str__(self) -> str:
        return f"a mesh of {self.sizes}" if self.sizes else "no mesh"


def table_of(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    stages: Sequence[str],
    one_loss: Sequence[str],
    on_parts: Sequence[str] | None,
    kinds: Mapping[str, Kind],
) -> Table:
    """Derive the table of a model. ``Setup`` has the arguments.

    Raises:
        ConfigError: The set-up is not one in which gradients can be right, or it cannot be told. The text names the
            parameter.
    """
    managed = managed_parameters(model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    reader = Reader(model, managed, kinds)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    axes = _axes_for(mesh, tensors.values(), reader.dispatchers.values())

    def sees_part(holding: Holding, modelled: Iterable[str]) -> bool:
        """Whether each rank along the dimensions of one loss computes a part of the gradient of a parameter."""
        name = holding.name
        if any(dim in modelled for dim in one_loss):
            return True
        if on_parts is not None:
            return any(fnmatchcase(name, pattern) for pattern in on_parts)
        if reader.inside:
            return any(name.startswith(f"{module}.") or not module for module in reader.inside)
        raise ConfigError(
            f"Setup: ranks along {(*one_loss,)} compute one loss, and it cannot be told whether each of them sees a "
            f"part of what {name} computes, or all of it. Name the parameters that see parts, such as "
            "Setup(mesh, on_parts=['*.router.*', '*.experts.*']), or wrap their modules in OnParts."
        )

    def held(name: str, tensor: Tensor) -> Held:
        by = managed.get(id(tensor))
        by_wrapper = axes.along(by.ranks, f"the ranks of {by.by} for {name}") if by else ()
        holding = reader.holding(name, tensor)
        spread = _spread(axes, holding)
        _refuse(name, by, {*spread} & {*by_wrapper})
        placed = axes.dims_of_dtensor(tensor) if isinstance(tensor, DTensor) else {}
        modelled = [dim for dim in placed if dim not in by_wrapper]
        apart = {*spread} - {*placed}
        in_stack = holding.expert is None  # or a tensor of one expert
        part = {dim for dim, same in placed.items() if not same} | (apart if in_stack else set())
        own = {dim for dim in axes.dims if dim in stages} | (set() if in_stack else apart)
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        losses = [dim for dim in axes.dims if dim not in stages]
        if trained and any(dim in one_loss for dim in losses) and sees_part(holding, modelled):
            losses = [dim for dim in losses if dim not in one_loss]
        done = {*stages, *spread, *by_wrapper, *modelled}
        return Held(
            name=name,
            kind="dense" if holding.dispatcher is None else "expert",
            adapter=holding.adapter,
            is_buffer=not isinstance(tensor, nn.Parameter),
            trained=trained,
            same=tuple(dim for dim in axes.dims if dim not in own | part),
            part=tuple(dim for dim in axes.dims if dim in part),
            own=tuple(dim for dim in axes.dims if dim in own),
            experts=holding.experts,
            stack=holding.stack,
            summed_over=tuple(dim for dim in axes.dims if dim not in done),
            scale=(by.divisor if by else 1) / axes.size(losses),
            wrapper=by.by if by else "",
            saved_as=holding.saved_as,
        )

    rows = {name: held(name, tensor) for name, tensor in tensors.items()}
    for name, dispatcher in reader.dispatchers.items():
        below = any(held.startswith(f"{name}.") or not name for held in rows)
        if len(ranks_of(dispatcher)) > 1 and not below and "expert" not in kinds.values():
            raise ConfigError(
                f"Setup: no parameter is below the dispatcher {name!r}, so its experts cannot be told from other "
                "parameters. Name them, such as Setup(mesh, kinds={'*.experts.*': 'expert'})."
            )
    return Table(rows=rows, tensors=tensors, axes=axes)


def _axes_for(mesh: DeviceMesh | None, tensors: Iterable[Tensor], dispatchers: Iterable[Dispatcher]) -> Axes:
    """Return the axes of the mesh, or of one that the model itself names: a mesh of all ranks of a DTensor, or none."""
    if mesh is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return Axes(mesh)
    size = dist.get_world_size()
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    if whole := [mesh for mesh in meshes if mesh.size() == size]:
        return Axes(max(whole, key=lambda mesh: mesh.ndim))
    if all(len(ranks_of(dispatcher)) in (1, size) for dispatcher in dispatchers):
        device = next((tensor.device.type for tensor in tensors), "cpu")
        return Axes(dist.init_device_mesh(device, (size,), mesh_dim_names=("ep",)))
    raise ConfigError(
        f"Setup: pass the mesh of all {size} ranks. The group of a dispatcher has fewer, and the model does not tell "
        "whether the other ranks hold copies of its experts or other layers."
    )


def _spread(axes: Axes, holding: Holding) -> Dims:
    """Return the dimensions along which ranks hold different experts of the dispatcher of a tensor."""
    if holding.dispatcher is None:
        return ()
    ranks = ranks_of(holding.dispatcher)
    dims = axes.along(ranks, f"the group of the dispatcher of {holding.name}")
    if dims and ranks != axes.ranks(dims):
        raise ConfigError(
            f"Setup: the group of the dispatcher of {holding.name} must have its ranks in the order of the mesh, got "
            f"{list(ranks)} and {list(axes.ranks(dims))}. Make the group of the mesh."
        )
    return dims


def _refuse(name: str, managed: Managed | None, mixed: set[str]) -> None:
    """Raise an error if a wrapper gives wrong gradients of a parameter."""
    if managed is None:
        return
    if mixed:
        raise ConfigError(
            f"Setup: {managed.by} must not reduce {name} over ranks that hold different experts, got the "
            f"dimensions {sorted(mixed)} of the mesh. It averages their gradients, and may have overwritten the "
            "experts. Let it manage experts over the ranks with copies of them only, as docs/training.md shows."
        )
    if managed.twice:
        raise ConfigError(
            f"Setup: torch divides the gradient of {name} twice by the factor of set_gradient_divide_factor, "
            "because its mesh has one rank. Reduce it in float32 there, without set_force_sum_reduction_for_comms."
        )
