"""What a user says about a training: how to build it, its step, its batches, and its mesh."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_dispatch.errors import ConfigError, did_you_mean


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A training set-up. ``prove`` runs it on the ranks of ``mesh`` and on one process.

    Attributes:
        build: ``build(mesh)`` returns the model, or a tuple that begins with it, such as model and optimizer. The
            model may be a list of modules, which are the pipeline stages of a rank. On one process every dimension of
            the mesh has one rank.
        step: ``step(*built, batch)`` runs forward, loss, backward, clipping and optimizer. It returns the loss, the
            loss and the norm of the gradients, a dictionary of numbers, or None. The loss is that of the whole batch or
            of the rank's own.
        batches: ``batches(number)`` returns the batches of a step, one for each rank that takes data of its own. Let
            their sizes differ. It is called with a fixed seed.
        mesh: Sizes by name, such as ``{"copies": 2, "ep": 2}``.
        same_batch: Dimensions of the mesh whose ranks take the same batch.
        join: ``join(batches)`` makes the batch of one process. By default it joins tensors along their first dimension,
            also inside of tuples, lists and dictionaries.
        build_one: Builds the model of one process, if ``build`` cannot.
        name: ``name(own, model)`` returns the name in the model of one process. Pipeline stages need it that number
            their layers from 0.
        places: ``places(model)`` says by name which elements a rank holds, as ``(name, numbers)``: the name of a whole
            tensor, and an int64 tensor, in the shape of the parameter, with numbers of elements of the flattened whole.
        value: Returns what a rank holds of a parameter.
        gradient: Returns its gradient, or None. By default ``.grad``, and without it ``.main_grad``.
        tolerance: Largest difference that counts as rounding, relative. By default 1e-5 in float64, else 2e-3.
    """

    build: Callable[[DeviceMesh], Any]
    step: Callable[..., Any]
    batches: Callable[[int], Sequence[Any]]
    mesh: Mapping[str, int]
    same_batch: tuple[str, ...] = ("tp", "cp", "pp", "sp", "etp")
    join: Callable[[Sequence[Any]], Any] | None = None
    build_one: Callable[[DeviceMesh], Any] | None = None
    name: Callable[[str, nn.Module], str] | None = None
    places: Callable[[nn.Module], Mapping[str, tuple[str, Tensor]]] | None = None
    value: Callable[[nn.Parameter], Tensor] | None = None
    gradient: Callable[[nn.Parameter], Tensor | None] | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        """Refuse a mesh that is none.

        Raises:
            ConfigError: ``mesh`` is not a dictionary of names and positive sizes.
        """
        sizes = [*self.mesh.values()] if isinstance(self.mesh, Mapping) else []
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ConfigError(
                "prove: mesh must be a dictionary of names and numbers of ranks, such as {'copies': 2, 'ep': 2}, got "
                f"{self.mesh!r}."
            )
        object.__setattr__(self, "mesh", MappingProxyType(dict(self.mesh)))

    def __reduce__(self) -> Any:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return _made, (given | {"mesh": dict(self.mesh)},)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return torch.Size(self.mesh.values()).numel()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank along each dimension of the mesh."""
        place = [*itertools.product(*map(range, self.mesh.values()))][rank]
        return dict(zip(self.mesh, place, strict=True))

    def batch_number(self, rank: int) -> int:
        """Return which batch a rank takes."""
        number = 0
        for name, index in self.coordinates(rank).items():
            number = number if name in self.same_batch else number * self.mesh[name] + index
        return number

    def make_mesh(self) -> DeviceMesh:
        """Make the mesh of the ranks, or of one process."""
        sizes = tuple(self.mesh.values()) if dist.get_world_size() > 1 else (1,) * len(self.mesh)
        return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(self.mesh))

    def batches_of(self, number: int) -> list[Any]:
        """Return the batches of a step.

        Raises:
            ConfigError: There are more or fewer than ranks that take data of their own.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            found = [*self.batches(number)]
        wanted = 1 + max(map(self.batch_number, range(self.num_ranks)))
        if len(found) != wanted:
            apart = [name for name in self.mesh if name not in self.same_batch]
            raise ConfigError(
                f"prove: batches({number}) must return {wanted} batches, one for each rank along {apart}, got "
                f"{len(found)}. Name dimensions whose ranks take the same batch in same_batch."
            )
        return found

    def joined(self, batches: Sequence[Any]) -> Any:
        """Return the batch of one process."""
        return (self.join or join_rows)(batches)


def _made(given: dict[str, Any]) -> Setup:
    return Setup(**given)


def join_rows(batches: Sequence[Any]) -> Any:
    """Join tensors along their first dimension, also inside of tuples, lists and dictionaries.

    Raises:
        ConfigError: A batch holds something else that differs.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return type(first)({key: join_rows([batch[key] for batch in batches]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        return type(first)(join_rows(parts) for parts in zip(*batches, strict=True))
    if any(batch != first for batch in batches):
        raise ConfigError(f"prove: define join(batches), because a batch holds a {type(first).__name__} that differs.")
    return first


def load_setup(path: Path) -> Setup:
    """Read a set-up from a file of Python, whose functions and values have the names of the fields of ``Setup``.

    Raises:
        ConfigError: The file is missing, or lacks a name.
    """
    if not path.is_file():
        raise ConfigError(f"prove: {path} is not a file.")
    name = f"proven_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"prove: {path} must be a file of Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    found = {field.name: getattr(module, field.name) for field in fields(Setup) if hasattr(module, field.name)}
    lacking = [name for name in ("build", "step", "batches", "mesh") if name not in found]
    if lacking:
        near = did_you_mean(lacking[0], vars(module))
        raise ConfigError(f"prove: {path} must define build, step, batches and mesh, and has no {lacking[0]}.{near}")
    return Setup(**found)
