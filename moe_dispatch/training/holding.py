"""Which tensors of a model belong to its experts, and which part of a whole tensor a rank holds.

``read_holdings`` needs the model of this rank and the ranks of its dispatchers, and no mesh. The table of ``Setup``
adds what each dimension of the mesh means, and ``moe_dispatch_testing.prove`` puts the whole tensors together again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_dispatch.communication import real_group
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.training.wrappers import Managed

Kind = Literal["dense", "expert"]
ROUTERS = frozenset({"router", "gate"})
UNCLEAR = -1  # the number of an expert of which nothing but the rank is known
Stack = tuple[tuple[int, ...], int]
Belonging = tuple[Dispatcher | None, int | None, Stack | None]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holding:
    """A parameter or buffer, as the part of a whole tensor that this rank holds.

    Attributes:
        name: Name in the model of this rank.
        saved_as: Name in the model of one process: with the number among all experts if an expert is a module of its
            own, and without a trace of ``OnParts``.
        tensor: What this rank holds.
        dispatcher: The dispatcher to whose experts it belongs, or None if it is dense.
        expert: Number on this rank of the expert that it belongs to alone, or ``UNCLEAR``; None if it is dense, or of
            all experts of the rank.
        adapter: Whether it is a part of an adapter of PEFT.
        stack: Shape and number of a dimension that counts the experts of this rank, if the tensor is a stack of them
            that is no DTensor of all experts.
        modelled: Ranks along each dimension of the mesh of a DTensor which no wrapper has made.
    """

    name: str
    saved_as: str
    tensor: Tensor
    dispatcher: Dispatcher | None = None
    expert: int | None = None
    adapter: bool = False
    stack: Stack | None = None
    modelled: tuple[tuple[int, ...], ...] = ()

    @property
    def experts(self) -> range | None:
        """Numbers of the experts that it belongs to, or None if it is dense."""
        if self.dispatcher is None:
            return None
        held = num_held(self.dispatcher)
        first = rank_in(self.dispatcher) * held
        if self.expert in (None, UNCLEAR):
            return range(first, first + held)
        return range(first + self.expert, first + self.expert + 1)

    def elements(self) -> tuple[tuple[int, ...], Tensor]:
        """Return the shape of the whole tensor, and the numbers in it of the elements of this rank, flat int64."""
        shape = [*self.tensor.shape]
        numbers = torch.arange(self.tensor.numel()).view(shape)
        if self.stack is not None and self.dispatcher is not None:
            view, dim = self.stack
            place, size = rank_in(self.dispatcher), len(ranks_of(self.dispatcher))
            everything = (*view[:dim], view[dim] * size, *view[dim + 1 :])
            numbers = torch.arange(numbers.numel() * size).view(everything)
            numbers = numbers.narrow(dim, place * view[dim], view[dim]).reshape(shape)
            shape[-1 if dim else 0] *= size
        if isinstance(self.tensor, DTensor):
            mesh, placements = self.tensor.device_mesh, self.tensor.placements
            numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
        return (*shape,), numbers.flatten()


@final
class Reader:
    """Reads what this rank holds of each tensor of a model.

    Args:
        model: The model, without DistributedDataParallel around it.
        managed: What wrappers do with its parameters, of ``managed_parameters``.
        kinds: As in ``Setup``.
    """

    def __init__(self, model: nn.Module, managed: Mapping[int, Managed], kinds: Mapping[str, Kind]) -> None:
        self.modules = dict(model.named_modules())
        self.dispatchers = {name: one for name, one in self.modules.items() if isinstance(one, Dispatcher)}
        self.managed, self.kinds = managed, kinds
        self.inside = tuple(name for name, module in self.modules.items() if getattr(module, "cuts_sequences", False))

    def holding(self, name: str, tensor: Tensor) -> Holding:
        """Return what this rank holds of a tensor.

        Raises:
            ConfigError: It cannot be told whether the tensor belongs to the experts.
        """
        managed = self.managed.get(id(tensor))
        lines = lines_of(tensor) if isinstance(tensor, DTensor) else ()
        modelled = tuple(ranks for ranks in lines if managed is None or not {*ranks} <= {*managed.ranks})
        tuner = self._tuner(name)
        dispatcher, expert, stack = self._adapted(name, tensor, tuner) or self._belongs(name, tensor, modelled)
        if stack is not None and (covers(modelled, dispatcher) or is_mixed(managed, dispatcher)):
            stack = None
        return Holding(
            name=name,
            saved_as=self._saved_as(name, dispatcher, expert),
            tensor=tensor,
            dispatcher=dispatcher,
            expert=expert,
            adapter=tuner != "",
            stack=stack,
            modelled=modelled,
        )

    def _belongs(self, name: str, tensor: Tensor, modelled: Sequence[tuple[int, ...]]) -> Belonging:
        """Return the dispatcher whose experts a tensor belongs to, the number of its expert, and its stack.

        A router below a dispatcher belongs to no expert, and neither does a stack that has the experts of all ranks.
        """
        above = [path for path in self.dispatchers if name.startswith(f"{path}.") or not path]
        kind = next((kind for pattern, kind in self.kinds.items() if fnmatchcase(name, pattern)), None)
        if kind == "dense" or (kind is None and not above):
            return None, None, None
        if not self.dispatchers:
            raise ConfigError(
                f"Setup: kinds call {name} an expert, but the model has no dispatcher. Add it to the model."
            )
        path = max(above or self.dispatchers, key=lambda path: _common(path, name))
        dispatcher = self.dispatchers[path]
        held, everything = num_held(dispatcher), dispatcher.config.num_experts
        lists = self._lists_above(name, held)
        if lists and (kind == "expert" or not path or f"{lists[-1]}.".startswith(f"{path}.")):
            return dispatcher, int(name[len(lists[-1]) + 1 :].partition(".")[0]), None
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows == held or covers(modelled, dispatcher):
            return dispatcher, None, ((*tensor.shape,), 0)
        if kind == "expert":
            return dispatcher, UNCLEAR, None
        if rows == everything or ROUTERS & {*name.split(".")} or held == everything:
            return None, None, None
        raise ConfigError(
            f"Setup: it cannot be told whether {name} belongs to the experts of the dispatcher {path!r}. Its shape is "
            f"{tuple(tensor.shape)}, and this rank holds {held} of {everything} experts. Say what it is, such as "
            f"Setup(mesh, kinds={{{name!r}: 'dense'}}) or 'expert'."
        )

    def _adapted(self, name: str, tensor: Tensor, tuner: str) -> Belonging | None:
        """Return what an adapter belongs to: what it adapts. PEFT keeps the factors of a stack in two matrices.

        A, (experts x r, in), has the experts one after another, and B, (out, r x experts), has them side by side.
        """
        if not tuner:
            return None
        base, field = f"{tuner}.base_layer", getattr(self.modules[tuner], "parameter_name", "weight")
        while isinstance(getattr(self.modules[base], "base_layer", None), nn.Module):
            base += ".base_layer"
        adapted = getattr(self.modules[base], field, None)
        if not isinstance(adapted, Tensor):
            return None
        dispatcher, expert, stack = self._belongs(f"{base}.{field}", adapted, ())
        if dispatcher is None or stack is None:
            return dispatcher, expert, None
        factor = name[len(tuner) + 1 :].partition(".")[0]
        if tensor.dim() == 2 and factor == "lora_A":
            return dispatcher, None, ((*tensor.shape,), 0)
        if tensor.dim() == 2 and factor == "lora_B":
            return dispatcher, None, ((len(tensor), tensor.shape[1] // num_held(dispatcher), num_held(dispatcher)), 2)
        return dispatcher, UNCLEAR, None

    def _tuner(self, name: str) -> str:
        """Return the path of the module of PEFT that holds a tensor as part of an adapter, or ""."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if isinstance(getattr(self.modules.get(path), "base_layer", None), nn.Module):
                return path if parts[end] != "base_layer" else ""
        return ""

    def _saved_as(self, name: str, dispatcher: Dispatcher | None, expert: int | None) -> str:
        if dispatcher is not None and expert == UNCLEAR:
            name += f"@{rank_in(dispatcher)}"
        elif dispatcher is not None and expert is not None:
            held = num_held(dispatcher)
            *_, prefix = self._lists_above(name, held)
            _, _, rest = name[len(prefix) + 1 :].partition(".")
            name = f"{prefix}.{rank_in(dispatcher) * held + expert}.{rest}"
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


def ranks_of(dispatcher: Dispatcher) -> tuple[int, ...]:
    """Return the ranks of the group of a dispatcher, in its order."""
    group = dispatcher._lease.channel.communicator.group
    return (0,) if group is None else (*dist.get_process_group_ranks(real_group(group)),)


def rank_in(dispatcher: Dispatcher) -> int:
    """Return the number of this rank in the group of a dispatcher."""
    return dispatcher._lease.channel.communicator.rank


def num_held(dispatcher: Dispatcher) -> int:
    """Return the number of experts of this rank."""
    return dispatcher.config.num_experts // len(ranks_of(dispatcher))


def lines_of(tensor: DTensor) -> tuple[tuple[int, ...], ...]:
    """Return the ranks along each dimension of the mesh of a DTensor."""
    mesh = tensor.device_mesh
    return tuple((*dist.get_process_group_ranks(mesh.get_group(number)),) for number in range(mesh.ndim))


def covers(lines: Sequence[tuple[int, ...]], dispatcher: Dispatcher | None) -> bool:
    """Whether a DTensor over these ranks lies over all ranks that share the experts of a dispatcher."""
    group = {*ranks_of(dispatcher)} if dispatcher is not None else {0}
    along = [len(ranks) for ranks in lines if {*ranks} <= group]
    return len(group) > 1 and math.prod(along) == len(group)


def is_mixed(managed: Managed | None, dispatcher: Dispatcher | None) -> bool:
    """Whether a wrapper takes different experts for parts of one tensor."""
    ranks = {*ranks_of(dispatcher)} if dispatcher is not None else set()
    return managed is not None and len(ranks & {*managed.ranks}) > 1


def _common(path: str, name: str) -> int:
    """Return how many modules two paths have in common from the root on."""
    pairs = zip(path.split("."), name.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
