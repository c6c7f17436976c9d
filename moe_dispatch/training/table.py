"""Who holds what: for each parameter, along which dimensions of a mesh it is the same, a part, or one's own.

``table_of`` derives the table from a model on this rank, without communication. The other functions of this folder, and
whoever compares a set-up with one process, read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moe_dispatch.communication import real_group
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.training.wrappers import Managed, managed_parameters

Kind = Literal["dense", "expert"]
Dims = tuple[str, ...]  # names of dimensions of the mesh that have more than one rank, in its order

ROUTERS = frozenset({"router", "gate"})


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
        experts: Numbers of the experts, if it is a plain tensor of the kind "expert": of all in a stack, or of one.
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

        Collective. A DTensor gathers itself. Stacks of experts are joined along dimension 0.

        Raises:
            ConfigError: The tensor is one of the ranks along an expert-parallel dimension, not a part.
        """
        held, tensor = self.rows[name], self.tensors[name] if tensor is None else tensor
        tensor = tensor.detach()
        dims = held.part
        if isinstance(tensor, DTensor):
            dims = tuple(dim for dim in dims if dim not in self.axes.dims_of_dtensor(tensor))
            tensor = tensor.full_tensor()
        for dim in reversed(dims):  # the last dimension runs fastest over the experts
            group = self.axes.group(dim)
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts)
        return tensor

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
        mesh, found = tensor.device_mesh, dict[str, bool]()
        for number, placement in enumerate(tensor.placements):
            ranks = dist.get_process_group_ranks(mesh.get_group(number))
            replicated = isinstance(placement, Replicate)
            found |= dict.fromkeys(self.along(ranks, f"the mesh of a DTensor, {mesh},"), replicated)
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
    if isinstance(model, nn.parallel.DistributedDataParallel):
        managed, model = managed_parameters(model), model.module
    else:
        managed = managed_parameters(model)
    dispatchers = {name: module for name, module in model.named_modules() if isinstance(module, Dispatcher)}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    axes = _axes_for(mesh, tensors.values(), dispatchers.values())
    reader = _Reader(model, axes, dispatchers, managed, tuple(stages), tuple(one_loss), on_parts, kinds)
    rows = {name: reader.held(name, tensor) for name, tensor in tensors.items()}
    for name, dispatcher in dispatchers.items():
        below = any(held.startswith(f"{name}.") or not name for held in rows)
        if len(ranks_of(dispatcher)) > 1 and not below and "expert" not in kinds.values():
            raise ConfigError(
                f"Setup: no parameter is below the dispatcher {name!r}, so its experts cannot be told from other "
                "parameters. Name them, such as Setup(mesh, kinds={'*.experts.*': 'expert'})."
            )
    return Table(rows=rows, tensors=tensors, axes=axes)


def ranks_of(dispatcher: Dispatcher) -> tuple[int, ...]:
    """Return the ranks of the group of a dispatcher, in its order."""
    group = dispatcher._lease.channel.communicator.group
    return (0,) if group is None else (*dist.get_process_group_ranks(real_group(group)),)


def _axes_for(mesh: DeviceMesh | None, tensors: Any, dispatchers: Any) -> Axes:
    """Return the axes of the mesh, or of one that the model itself names: a mesh of all ranks of a DTensor, or none."""
    if mesh is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return Axes(mesh)
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    whole = [mesh for mesh in meshes if mesh.size() == dist.get_world_size()]
    if whole:
        return Axes(max(whole, key=lambda mesh: mesh.ndim))
    size = dist.get_world_size()
    if all(len(ranks_of(dispatcher)) in (1, size) for dispatcher in dispatchers):
        device = next((tensor.device.type for tensor in tensors), "cpu")
        return Axes(dist.init_device_mesh(device, (size,), mesh_dim_names=("ep",)))
    raise ConfigError(
        f"Setup: pass the mesh of all {size} ranks. The group of a dispatcher has fewer, and the model does not tell "
        "whether the other ranks hold copies of its experts or other layers."
    )


@final
class _Reader:
    """Reads what this rank holds of each tensor of a model."""

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        dispatchers: Mapping[str, Dispatcher],
        managed: Mapping[int, Managed],
        stages: Dims,
        one_loss: Dims,
        on_parts: Sequence[str] | None,
        kinds: Mapping[str, Kind],
    ) -> None:
        self.modules = dict(model.named_modules())
        self.axes, self.dispatchers, self.managed, self.kinds = axes, dispatchers, managed, kinds
        self.on_parts = on_parts
        self.stages = tuple(dim for dim in axes.dims if dim in stages)
        self.one_loss = tuple(dim for dim in axes.dims if dim in one_loss)
        self.inside = tuple(name for name, module in self.modules.items() if getattr(module, "cuts_sequences", False))

    def held(self, name: str, tensor: Tensor) -> Held:
        axes, managed = self.axes, self.managed.get(id(tensor))
        by_wrapper = axes.along(managed.ranks, f"the ranks of {managed.by} for {name}") if managed else ()
        placed = axes.dims_of_dtensor(tensor) if isinstance(tensor, DTensor) else {}
        modelled = [dim for dim in placed if dim not in by_wrapper]
        dispatcher, expert = self._expert(name, tensor, modelled)
        spread = () if dispatcher is None else self._spread(dispatcher, name)
        if managed is not None and (mixed := {*spread} & {*by_wrapper}):
            raise ConfigError(
                f"Setup: {managed.by} must not reduce {name} over ranks that hold different experts, got the "
                f"dimensions {sorted(mixed)} of the mesh. It averages their gradients, and may have overwritten the "
                "experts. Let it manage experts over the ranks with copies of them only, as docs/training.md shows."
            )
        if managed is not None and managed.twice:
            raise ConfigError(
                f"Setup: torch divides the gradient of {name} twice by the factor of set_gradient_divide_factor, "
                "because its mesh has one rank. Reduce it in float32 there, without set_force_sum_reduction_for_comms."
            )
        in_stack = expert is None  # or a tensor of one expert
        part = {dim for dim, same in placed.items() if not same} | ({*spread} - {*placed} if in_stack else set())
        own = {*self.stages} | (set() if in_stack else {*spread} - {*placed})
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        losses = [dim for dim in axes.dims if dim not in self.stages]
        if trained:
            losses = [dim for dim in losses if dim not in self.one_loss or not self._on_part(name, dim in modelled)]
        done = {*self.stages, *spread, *by_wrapper, *modelled}
        return Held(
            name=name,
            kind="dense" if dispatcher is None else "expert",
            adapter=self._tuner(name) != "",
            is_buffer=not isinstance(tensor, nn.Parameter),
            trained=trained,
            same=tuple(dim for dim in axes.dims if dim not in own | part),
            part=tuple(dim for dim in axes.dims if dim in part),
            own=tuple(dim for dim in axes.dims if dim in own),
            experts=None if dispatcher is None or {*spread} & {*placed} else _numbers(dispatcher, expert),
            summed_over=tuple(dim for dim in axes.dims if dim not in done),
            scale=(managed.divisor if managed else 1) / axes.size(losses),
            wrapper=managed.by if managed else "",
            saved_as=self._saved_as(name, dispatcher, expert),
        )

    def _saved_as(self, name: str, dispatcher: Dispatcher | None, expert: int | None) -> str:
        if dispatcher is not None and expert is not None:
            held, rank = _num_held(dispatcher), dispatcher._lease.channel.communicator.rank
            if expert < 0:
                name += f"@{rank}"
            else:
                *_, prefix = self._lists_above(name, held)
                _, _, rest = name[len(prefix) + 1 :].partition(".")
                name = f"{prefix}.{rank * held + expert}.{rest}"
        for module in reversed(self.inside):  # the inner ones first
            name = name.replace(f"{module}.block.".lstrip("."), f"{module}.".lstrip("."), 1)
        return name

    def _lists_above(self, name: str, length: int) -> list[str]:
        """Return the paths of lists of modules of some length that hold a tensor."""
        return [
            path
            for path, module in self.modules.items()
            if isinstance(module, nn.ModuleList) and len(module) == length and name.startswith(f"{path}.")
        ]

    def _spread(self, dispatcher: Dispatcher, name: str) -> Dims:
        """Return the dimensions along which ranks hold different experts of a dispatcher."""
        ranks = ranks_of(dispatcher)
        dims = self.axes.along(ranks, f"the group of the dispatcher of {name}")
        if dims and ranks != self.axes.ranks(dims):
            raise ConfigError(
                f"Setup: the group of the dispatcher of {name} must have its ranks in the order of the mesh, got "
                f"{list(ranks)} and {list(self.axes.ranks(dims))}. Make the group of the mesh."
            )
        return dims

    def _on_part(self, name: str, by_dtensor: bool) -> bool:
        """Whether each rank along the dimensions of one loss computes a part of the gradient of a parameter."""
        if by_dtensor:
            return True
        if self.on_parts is not None:
            return any(fnmatchcase(name, pattern) for pattern in self.on_parts)
        if self.inside:
            return any(name.startswith(f"{module}.") or not module for module in self.inside)
        raise ConfigError(
            f"Setup: ranks along {self.one_loss} compute one loss, and it cannot be told whether each of them sees a "
            f"part of what {name} computes, or all of it. Name the parameters that see parts, such as "
            "Setup(mesh, on_parts=['*.router.*', '*.experts.*']), or wrap their modules in OnParts."
        )

    def _expert(self, name: str, tensor: Tensor, modelled: Sequence[str]) -> tuple[Dispatcher | None, int | None]:
        """Return the dispatcher whose experts a tensor belongs to, and the number of its expert on this rank.

        The number is None for a stack of all experts of the rank, and -1 for a tensor that is of all of them but not
        a stack. A router below a dispatcher belongs to no expert, and neither does a stack that has the experts of all
        ranks.
        """
        tuner = self._tuner(name)
        if tuner:  # an adapter belongs to what it adapts
            base, field = f"{tuner}.base_layer", getattr(self.modules[tuner], "parameter_name", "weight")
            while isinstance(getattr(self.modules[base], "base_layer", None), nn.Module):
                base += ".base_layer"
            adapted = getattr(self.modules[base], field, None)
            if isinstance(adapted, Tensor):
                dispatcher, expert = self._expert(f"{base}.{field}", adapted, ())
                return dispatcher, -1 if expert is None and dispatcher is not None else expert
        above = [path for path in self.dispatchers if name.startswith(f"{path}.") or not path]
        kind = next((kind for pattern, kind in self.kinds.items() if fnmatchcase(name, pattern)), None)
        if kind == "dense" or (kind is None and not above):
            return None, None
        if not self.dispatchers:
            raise ConfigError(
                f"Setup: kinds call {name} an expert, but the model has no dispatcher. Add it to the model."
            )
        path = max(above or self.dispatchers, key=lambda path: _common(path, name))
        dispatcher = self.dispatchers[path]
        held, everything = _num_held(dispatcher), dispatcher.config.num_experts
        lists = self._lists_above(name, held)
        if lists and (kind == "expert" or not path or f"{lists[-1]}.".startswith(f"{path}.")):
            return dispatcher, int(name[len(lists[-1]) + 1 :].partition(".")[0])
        rows = tensor.shape[0] if tensor.dim() else 0
        spread = self._spread(dispatcher, name)
        if rows == held or {*spread} <= {*modelled} != set():
            return dispatcher, None
        if kind == "expert":
            return dispatcher, -1
        if rows == everything or ROUTERS & {*name.split(".")} or held == everything:
            return None, None
        raise ConfigError(
            f"Setup: it cannot be told whether {name} belongs to the experts of the dispatcher {path!r}. Its shape is "
            f"{tuple(tensor.shape)}, and this rank holds {held} of {everything} experts. Say what it is, such as "
            f"Setup(mesh, kinds={{{name!r}: 'dense'}}) or 'expert'."
        )

    def _tuner(self, name: str) -> str:
        """Return the path of the module of PEFT that holds a tensor as part of an adapter, or ""."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if isinstance(getattr(self.modules.get(path), "base_layer", None), nn.Module):
                return path if parts[end] != "base_layer" else ""
        return ""


def _common(path: str, name: str) -> int:
    """Return how many modules two paths have in common from the root on."""
    pairs = zip(path.split("."), name.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _num_held(dispatcher: Dispatcher) -> int:
    return dispatcher.config.num_experts // len(ranks_of(dispatcher))


def _numbers(dispatcher: Dispatcher, expert: int | None) -> range:
    """Return the numbers of all experts of this rank, or of one."""
    held = _num_held(dispatcher)
    first = dispatcher._lease.channel.communicator.rank * held
    return range(first, first + held) if expert in (None, -1) else range(first + expert, first + expert + 1)
