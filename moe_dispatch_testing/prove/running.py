"""Run a set-up on a rank or on one process, and record what it holds: start values, gradients, values after steps."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moe_dispatch import training
from moe_dispatch.capabilities.observers.wrappers import splitting_schedule
from moe_dispatch.errors import ConfigError
from moe_dispatch.training.holding import Holding, Reader
from moe_dispatch.training.wrappers import fsdp_groups, managed_parameters
from moe_dispatch_testing.prove.setup import Setup

STEPS = 2
SEED = 1000
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@final
@dataclass(kw_only=True, slots=True)
class Held:
    """What a rank holds of a parameter or of a buffer.

    Attributes:
        key: Name of the whole tensor.
        shape: Shape of the whole tensor; None if ``places`` says which elements the rank holds.
        numbers: int64, flat. Numbers of the elements of the whole tensor that the rank holds.
        experts: Numbers of the experts whose rows its dispatcher sends to the rank, if it belongs to them.
        mesh_ranks: Ranks over which a DTensor lies.
        start: Values after ``build``, flat; ``after`` has those after each step.
        gradients: Before each step of the optimizer; None without one.
    """

    key: str
    shape: tuple[int, ...] | None
    numbers: Tensor
    experts: range | None
    mesh_ranks: tuple[int, ...]
    start: Tensor
    is_buffer: bool
    trainable: bool
    after: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    options: dict[str, float] = field(default_factory=dict)
    optimizer: str = ""
    decides: tuple[str, ...] = ()  # options that the optimizer has changed in a step
    states: list[dict[str, Tensor]] = field(default_factory=list)


@final
@dataclass(kw_only=True, slots=True)
class Record:
    """What one rank, or one process, came to."""

    rank: int
    held: dict[str, Held]
    numbers: list[dict[str, float]] = field(default_factory=list)
    dropout: list[str] = field(default_factory=list)
    refusal: str = ""  # of moe_dispatch.training, which may be the cause of a difference
    splits_backward: str = ""  # name of a pipeline schedule
    reshards: bool = False


_running: Run | None = None


def look() -> None:
    """Take the gradients as they are now for those of this step. Outside of ``prove`` it does nothing.

    Call it in a step, between clipping and the optimizer, if the optimizer is not one of ``torch.optim`` or steps on
    tensors of its own.
    """
    if _running is not None:
        _running.see_gradients()
        _running.has_looked = True


@final
class Run:
    """A built set-up, and the record of its steps."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        rank, is_one = dist.get_rank(), dist.get_world_size() == 1
        torch.manual_seed(SEED - is_one + rank)  # ranks of a job are not seeded alike either
        build = setup.build_one if is_one and setup.build_one is not None else setup.build
        mesh = setup.make_mesh()
        built = build(mesh)
        self.built: tuple[Any, ...] = built if isinstance(built, tuple) else (built,)
        models = self.built[0] if isinstance(self.built[0], list | nn.ModuleList) else [self.built[0]]
        self.models = [_unwrapped(model) for model in models]
        self.tensors: dict[str, Tensor] = {}
        self.record = Record(rank=rank, held={})
        self.has_looked = False
        self._names: dict[int, str] = {}
        for wrapped, model in zip(models, self.models, strict=True):
            try:
                managed = managed_parameters(wrapped)
                if not is_one:
                    training.Setup(mesh, one_loss=[*setup.same_batch], on_parts=["*"]).table(wrapped)
            except ConfigError as refusal:
                managed = {}
                self.record.refusal = str(refusal)
            self._add(model, Reader(model, managed, {}))
        self.record.splits_backward = splitting_schedule()

    def _add(self, model: nn.Module, reader: Reader) -> None:
        places = {} if self.setup.places is None else self.setup.places(model)
        persistent = model.state_dict(keep_vars=True).keys()
        buffers = {name: one for name, one in model.named_buffers() if name in persistent and one.is_floating_point()}
        for raw, tensor in [*model.named_parameters(), *buffers.items()]:
            name, holding = self._named(raw, model), self._holding(reader, raw, tensor)
            whole, numbers = holding.elements()
            key, shape = self._named(holding.saved_as, model), None if raw in places else whole
            if raw in places:
                key, numbers = places[raw][0], places[raw][1].flatten()
            self.tensors[name], self._names[id(tensor)] = tensor, name
            self.record.held[name] = Held(
                key=key,
                shape=shape,
                numbers=numbers,
                experts=holding.experts,
                mesh_ranks=(*tensor.device_mesh.mesh.flatten().tolist(),) if isinstance(tensor, DTensor) else (),
                start=self._value(tensor),
                is_buffer=raw in buffers,
                trainable=tensor.requires_grad,
            )
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and module.training:
                self.record.dropout.append(f"{name or 'the model'} (p = {module.p})")
            groups = fsdp_groups(module)
            self.record.reshards |= any(group.post_forward_mesh_info is not None for group in groups)

    def _named(self, raw: str, model: nn.Module) -> str:
        name = ".".join(part for part in raw.split(".") if part not in _WRAPPERS)
        return name if self.setup.name is None else self.setup.name(name, model)

    def _holding(self, reader: Reader, name: str, tensor: Tensor) -> Holding:
        """Return what the rank holds; of a tensor about which the model does not tell, its own."""
        try:
            return reader.holding(name, tensor)
        except ConfigError as refusal:
            self.record.refusal = str(refusal)
            return Holding(name=name, saved_as=name, tensor=tensor)

    def _value(self, tensor: Tensor) -> Tensor:
        read = self.setup.value
        value = read(tensor) if read is not None and isinstance(tensor, nn.Parameter) else tensor
        return _local(value.detach()).flatten().clone()

    def see_gradients(self, names: Sequence[str] | None = None) -> None:
        """Record the gradients of all parameters, or of some."""
        for name in self.tensors if names is None else names:
            parameter, held = self.tensors[name], self.record.held[name]
            if isinstance(parameter, nn.Parameter):
                held.gradients[-1] = self._gradient(parameter)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        read = self.setup.gradient
        gradient = _gradient(parameter) if read is None else read(parameter)
        if gradient is None:
            return None
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        return _local(gradient.detach()).flatten().clone()

    def step(self, batch: Any) -> dict[str, float]:
        """Run a step, and return its numbers. Gradients are recorded before the optimizer takes its step."""
        global _running  # look() has no other way to find it
        for held in self.record.held.values():
            held.gradients.append(None)
            held.states.append({})
        self.has_looked = False
        steppers: list[torch.optim.Optimizer] = []

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            mine = [n for group in optimizer.param_groups for p in group["params"] if (n := self._names.get(id(p)))]
            if not self.has_looked:
                self.see_gradients(mine if steppers else None)
            steppers.append(optimizer)
            begun.update({id(group): _options(group) for group in optimizer.param_groups})

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                was = begun[id(group)]
                changed = tuple(key for key, value in _options(group).items() if was.get(key, value) != value)
                for parameter in group["params"]:
                    if name := self._names.get(id(parameter)):
                        held = self.record.held[name]
                        held.optimizer, held.decides = type(optimizer).__name__, changed

        begun = dict[int, dict[str, float]]()
        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        _running = self
        try:
            numbers = _numbers(self.setup.step(*self.built, batch))
        finally:
            _running = None
            for handle in handles:
                handle.remove()
        if not steppers and not self.has_looked:
            self.see_gradients()
        for optimizer in steppers:
            self._see_state(optimizer)
        for name, held in self.record.held.items():
            held.after.append(self._value(self.tensors[name]))
        self.record.numbers.append(numbers)
        return numbers

    def _see_state(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            options = _options(group)
            for parameter in group["params"]:
                if name := self._names.get(id(parameter)):
                    state = optimizer.state.get(parameter, {})
                    tensors = {
                        key: _local(one).flatten().clone() for key, one in state.items() if isinstance(one, Tensor)
                    }
                    self.record.held[name].options, self.record.held[name].states[-1] = options, tensors

    def trains_alike(self) -> bool:
        """Return whether no parameter is frozen on some ranks only, which would leave ranks waiting in a reduction."""
        mine = {name: held.trainable for name, held in self.record.held.items()}
        everyone: list[dict[str, bool]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        return all(mine.get(name, trains) == trains for other in everyone for name, trains in other.items())

    def load(self, values: dict[str, Tensor]) -> None:
        """Set parameters and buffers to flat values, by name."""
        with torch.no_grad():
            for name, value in values.items():
                own = _local(self.tensors[name])
                own.copy_(value.view(own.shape))
                self.record.held[name].start = value.clone()
        for tensor in self.tensors.values():
            tensor.grad = None


def run_rank(
    rank: int, setups: dict[str, Setup], dtype: torch.dtype, folder: Path, seconds: float
) -> dict[str, Record]:
    """Run set-ups on a rank, one after the other. Each gets ``seconds``; a rank that needs more says where it is."""
    records = {}
    for label, setup in setups.items():
        with of_dtype(dtype, folder / f"rank-{rank}", seconds):
            run = Run(setup)
            for number in range(STEPS if run.trains_alike() else 0):
                run.step(setup.batches_of(number)[setup.batch_number(rank)])
            records[label] = run.record
            del run
            gc.collect()
            dist.barrier()
    return records


@contextmanager
def of_dtype(dtype: torch.dtype, path: Path, seconds: float) -> Iterator[None]:
    """Run a block with a default dtype. If it takes too long, write down where it stands, and end this process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _watched(path, seconds):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _watched(path: Path, seconds: float) -> Iterator[None]:
    """End this process if the block does not end in time, after writing down where its main thread stands."""
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        if not ended.wait(seconds):
            frame = sys._current_frames().get(thread)
            path.write_text("".join(traceback.format_stack(frame)))
            ended.wait(2.0)  # the other ranks write too
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside of wrappers such as DistributedDataParallel, which hold it as their ``module``."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and len([*model.children()]) == 1:
        model = inner
    return model  # type: ignore[no-any-return]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    return getattr(parameter, "main_grad", None) if gradient is None else gradient


def _options(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among the options of a group of an optimizer."""
    flat = {f"{key}[{i}]": x for key, v in group.items() if isinstance(v, tuple) for i, x in enumerate(v)}
    return {key: float(value) for key, value in (group | flat).items() if isinstance(value, int | float)}


def _numbers(returned: Any) -> dict[str, float]:
    if returned is None:
        return {}
    if isinstance(returned, dict):
        named = returned
    else:
        values = returned if isinstance(returned, tuple) else (returned,)
        named = dict(zip(("loss", "norm"), values, strict=False))
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in named.items()}
    return {
        key: float(one.detach() if isinstance(one, Tensor) else one) for key, one in whole.items() if one is not None
    }
