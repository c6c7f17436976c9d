"""The state of a model and its optimizer for torch.distributed.checkpoint, on any number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_dispatch.training.table import Table
from moe_dispatch.training.wrap import as_part

Optimizers = Optimizer | Iterable[Optimizer]
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # a list of parameters would be that of one stage
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # which torch leaves out of its names


@final
class TrainingState(Stateful):
    """A model and its optimizers, as ``torch.distributed.checkpoint`` saves and loads them.

    Stacks of experts are parts of a stack of all experts, and an expert that is a module of its own has its number
    among all experts in its name. Names that several pipeline stages use get the number of the stage.
    """

    def __init__(self, table: Table, model: nn.Module, optimizers: Optimizers) -> None:
        self._table, self._model = table, model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
        self._held = {_clean(name): held for name, held in table.items()}
        self._tensors = {_clean(name): tensor for name, tensor in table.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the state of the optimizer. Collective if the mesh has pipeline stages."""
        weights, moments = get_state_dict(self._model, self._optimizers, options=_FLAT)
        moments |= self._without_steps()
        names = self._names()
        return {
            "model": {names.get(name, name): self._as_saved(name, value) for name, value in weights.items()},
            "optimizer": dict(self._saved_moment(names, name, value) for name, value in moments.items()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take weights and the state of the optimizer that were loaded."""
        weights, moments = get_state_dict(self._model, self._optimizers, options=_FLAT)
        names = self._names()
        for name in weights:
            weights[name] = _like(weights[name], state_dict["model"][names.get(name, name)])
        for name, value in moments.items():
            key, _ = self._saved_moment(names, name, value)
            moments[name] = _like(value, state_dict["optimizer"][key])
        set_state_dict(self._model, self._optimizers, model_state_dict=weights, optim_state_dict=moments, options=_FLAT)

    def _without_steps(self) -> dict[str, Any]:
        """Return zeros as the state of parameters that have had no gradient yet.

        An optimizer that loads has a state of all its parameters: torch makes it by a step with zeros.
        """
        found = {}
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        for optimizer in self._optimizers:
            parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            stepped = next((parameter for parameter in parameters if optimizer.state.get(parameter)), None)
            for parameter in parameters:
                if stepped is not None and parameter.requires_grad and not optimizer.state.get(parameter):
                    for field, value in optimizer.state[stepped].items():
                        like = parameter if getattr(value, "shape", ()) == stepped.shape else value
                        zeros = torch.zeros_like(like, dtype=value.dtype) if isinstance(value, Tensor) else 0
                        found[f"state.{names[id(parameter)]}.{field}"] = zeros
        return found

    def _names(self) -> dict[str, str]:
        """Return the name of each parameter and buffer in a checkpoint, which no other tensor of any rank has."""
        names = {name: held.saved_as for name, held in self._held.items()}
        axes = self._table.axes
        for dim in axes.dims:
            if all(dim in held.own for held in self._held.values()):  # a dimension of stages
                group = axes.group(dim)
                of_stages: list[Any] = [None] * group.size()
                dist.all_gather_object(of_stages, {*names.values()}, group=group)
                several = {key for key, times in Counter(itertools.chain(*of_stages)).items() if times > 1}
                names = {name: f"{key}@{dim}{group.rank()}" if key in several else key for name, key in names.items()}
        return names

    def _as_saved(self, name: str, value: Any) -> Any:
        """Return a tensor of the shape of a parameter or buffer as part of the tensor of all experts, if it is one."""
        held = self._held.get(name)
        if held is None or held.kind == "dense" or not isinstance(value, Tensor):
            return value
        return as_part(value, self._table.axes, held)

    def _saved_moment(self, names: Mapping[str, str], key: str, value: Any) -> tuple[str, Any]:
        """Return the name and the value to save of an item of the state of an optimizer."""
        section, _, rest = key.partition(".")
        name = next(name for name in _prefixes(rest) if name in self._held)
        held, tensor, key = self._held[name], self._tensors[name], f"{section}.{names[name]}{rest[len(name) :]}"
        if not isinstance(value, Tensor) or value.shape == tensor.shape:
            return key, self._as_saved(name, value)
        if value.dim() and held.part and not isinstance(value, DTensor):  # a part in a form that nobody can cut anew
            key += f"@{self._table.axes.place(held.part)}"
        return key, value


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _prefixes(name: str) -> Iterator[str]:
    """Yield the paths above a name, the longest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _like(mine: Any, loaded: Any) -> Any:
    """Return what was loaded in the form that the model has: a plain tensor, or a DTensor of fewer ranks."""
    if not isinstance(loaded, Tensor) or (type(mine) is type(loaded) and mine.shape == loaded.shape):
        return loaded
    local = loaded.to_local() if isinstance(loaded, DTensor) else loaded
    if not isinstance(mine, DTensor):
        return local.reshape(mine.shape)
    return DTensor.from_local(
        local, mine.device_mesh, mine.placements, run_check=False, shape=mine.shape, stride=mine.stride()
    )
