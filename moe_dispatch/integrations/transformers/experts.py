"""The functions that transformers calls instead of an experts module's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.slot_experts import (
    clean_gradients,
    has_spare_slots,
    needs_clean_gradients,
    own_weights,
    run_layer,
    stacked_weights,
    view_of,
)
from moe_dispatch.integrations.transformers.batch_slice import BatchSlice
from moe_dispatch.integrations.transformers.forwards import plan_in_force, recorded_as_batch
from moe_dispatch.integrations.transformers.model_config import check_agreement, shape_said
from moe_dispatch.types import Routing

# module or view, hidden states (R, D), local expert ids (R, K), weights (R, K) -> (R, D), weighted and summed over K
ExpertsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
WIRED = "_moe_dispatch"
_LOOP = "eager"  # transformers' name for the model's own loop over experts, which also runs if no name is set
_LAYER = "_moe_dispatch_layer"  # attribute of an experts module: its own dispatcher beside that of an ExpertsFunction


@final
class ExpertParallel:
    """One experts module, of which each rank holds L of E experts. ``EPImplementationInterface`` builds it.

    The module holds the weights of this rank only. The ranks of ``ep_mesh`` together hold all experts, and the ranks of
    ``tp_mesh`` hold the same batch.
    """

    def __init__(self, config: DispatcherConfig, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        _check_held_experts(experts, config, ep_mesh.size(), held=_held(experts) * ep_mesh.size())
        _check_implementation(experts, config)
        if has_spare_slots(config):
            own_weights("register", experts)
        self.dispatcher = Dispatcher(config, ep_mesh, name=type(experts).__name__)  # until attach knows its path
        self.slices = BatchSlice(tp_mesh.get_group())
        self.drift: Tensor | None = None  # of the routing that comes next, if it is replayed
        self._experts, self._forward = experts, experts.forward
        setattr(experts, WIRED, self)  # for attach
        experts.__deepcopy__ = partial(_twin_of, experts)  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(
            f"moe_dispatch experts: {type(self._experts).__name__} is wired to process groups, which cannot be saved. "
            "Save model.state_dict(), or call model.save_pretrained. copy.deepcopy(model) works."
        )

    def twin(self, experts: nn.Module, memo: dict[int, Any]) -> ExpertParallel:
        """Return the wiring of a copy of the module. It shares the channel, so nothing is exchanged."""
        twin = object.__new__(ExpertParallel)
        twin.dispatcher, twin.slices, twin.drift = copy.deepcopy(self.dispatcher, memo), self.slices, None
        twin._experts, twin._forward = experts, _bound_anew(self._forward, memo)
        return twin

    def dispatcher_of(self, experts: nn.Module) -> Dispatcher:
        """Return the dispatcher of the module."""
        return self.dispatcher

    def give_name(self, experts: nn.Module, name: str) -> None:
        """Name the dispatcher after its module."""
        self.dispatcher.name = name

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts on the batch of this rank (T, D), with global ids and weights (T, K)."""
        _check_implementation(self._experts, self.dispatcher.config)  # a model may change it at any time
        drift, self.drift = self.drift, None
        shared = None if drift is None else self.slices.share(drift)
        routing = Routing(self.slices.cut(top_k_index), self.slices.take(top_k_weights), shared)
        with recorded_as_batch(self.dispatcher, hidden_states, Routing(top_k_index, top_k_weights)):
            y_TD = _through(self.dispatcher, self._run, self._experts, self.slices.take(hidden_states), routing)
        return self.slices.put_together(y_TD, len(hidden_states))

    def _run(self, experts: Any, *rows: Tensor) -> Tensor:
        forward: Any = self._forward  # bound to the module, whose attribute of this name is transformers' by now
        y_RD: Tensor = forward(*rows) if experts is self._experts else forward.__func__(experts, *rows)
        return y_RD


@final
class ExpertsFunction:
    """All experts modules of a model, for the registry ``ALL_EXPERTS_FUNCTIONS``, which does not know about ranks.

    A module may hold all E experts or only the L experts of this rank. This rank runs its L experts in both cases.
    ``implementation`` is the function of transformers that runs experts.
    """

    def __init__(
        self, config: DispatcherConfig, group: dist.ProcessGroup | DeviceMesh, implementation: Callable[..., Tensor]
    ) -> None:
        if config.graph_safe:
            raise ConfigError(
                "register: graph_safe must be False with group=, because transformers' experts functions read all "
                "rows, also slack, got True. Leave graph_safe out, or use DistributedConfig."
            )
        self.dispatcher = Dispatcher(config, group)
        self.ranks = Communicator(group.get_group() if isinstance(group, DeviceMesh) else group)
        self.slices = BatchSlice()
        self.drift: Tensor | None = None  # of the routing that comes next, if it is replayed
        self._implementation = implementation

    def dispatcher_of(self, experts: nn.Module) -> Dispatcher:
        """Return the dispatcher that ``give_name`` made for the module; without one, that of all modules."""
        own: Dispatcher | None = experts.__dict__.get(_LAYER)
        # A model may change its experts function. Then the module's dispatcher may be of another config or group.
        return self.dispatcher if own is None or own._lease.channel is not self.dispatcher._lease.channel else own

    def give_name(self, experts: nn.Module, name: str) -> None:
        """Give a module a dispatcher of its own, with its name. It shares the channel, so nothing is exchanged."""
        if self.dispatcher_of(experts) is self.dispatcher:
            own = copy.deepcopy(self.dispatcher)
            own.name = name
            experts.__dict__[_LAYER] = own  # not as a submodule, because it is no part of the model

    def __call__(self, experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts on the batch of this rank (T, D), with global ids and weights (T, K)."""
        routing, self.drift = Routing(top_k_index, top_k_weights, self.drift), None
        dispatcher = self.dispatcher_of(experts)
        with recorded_as_batch(dispatcher, hidden_states, routing):
            return _through(dispatcher, self._implementation, self.local(experts), hidden_states, routing)

    def local(self, experts: nn.Module) -> Any:
        """Return the module, or a view of it with the experts of this rank. Raise ConfigError if it lacks any."""
        held, total = _held(experts), self.dispatcher.config.num_experts
        if held * self.ranks.size == total:
            return experts
        _check_held_experts(experts, self.dispatcher.config, self.ranks.size, held=held)
        local = total // self.ranks.size
        own = slice(self.ranks.rank * local, (self.ranks.rank + 1) * local)
        weights = {name: weight[own] for name, weight in stacked_weights(experts).items()}
        return view_of(experts, weights, num_experts=local)


def _twin_of(experts: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy an experts module with its wiring, for ``copy.deepcopy``, which finds this in the module's attributes.

    transformers installs a forward that is a closure over the module. A plain copy would run the original's experts.
    """
    if (of_class := getattr(type(experts), "__deepcopy__", None)) is not None:
        return of_class(experts, memo)  # such as that of FSDP2, which refuses copies
    twin = memo[id(experts)] = object.__new__(type(experts))
    state = dict(vars(experts))
    wiring, forward = state.pop(WIRED), state.pop("forward", None)
    del state["__deepcopy__"]
    vars(twin).update(copy.deepcopy(state, memo))
    memo[id(wiring)] = vars(twin)[WIRED] = wiring.twin(twin, memo)
    vars(twin)["__deepcopy__"] = partial(_twin_of, twin)
    if forward is not None:
        vars(twin)["forward"] = _bound_anew(forward, memo)
    return twin


def _bound_anew(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function, perhaps a method or a closure, with the copies in ``memo`` in the place of their originals."""
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)
    cells = tuple(
        CellType(_bound_anew(held, memo) if isinstance(held, FunctionType | MethodType) else memo.get(id(held), held))
        for held in (cell.cell_contents for cell in function.__closure__ or ())
    )
    anew = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    anew.__kwdefaults__ = function.__kwdefaults__
    vars(anew).update(vars(function))
    return anew


def _check_held_experts(experts: nn.Module, config: DispatcherConfig, ep_size: int, *, held: int) -> None:
    """Raise ConfigError if ``ep_size`` ranks that hold ``held`` experts together do not fit the config."""
    where = f"register: {type(experts).__name__}"
    if held != config.num_experts:
        raise ConfigError(
            f"{where}: the {ep_size} ranks must hold num_experts ({config.num_experts}) together, got {held}. Register "
            "config_for(model.config), and shard every weight of the experts."
        )
    if hasattr(experts, "config"):
        check_agreement(where, config.model_dump(), shape_said(experts.config), experts.config)


def _check_implementation(experts: nn.Module, config: DispatcherConfig) -> None:
    """Raise ConfigError if the experts function that the model has set cannot run the rows of a dispatch."""
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None) or _LOOP
    if config.graph_safe and name == _LOOP:
        raise ConfigError(
            f"register: {type(experts).__name__} must have an experts_implementation of fixed shapes with "
            f"graph_safe=True, got {name!r}, a loop that reads the routing on the host, and gives experts without rows "
            "no gradient. Load the model with experts_implementation='grouped_mm'."
        )


def _held(experts: nn.Module) -> int:
    held: Any = experts.num_experts
    return int(held)


def _through(
    dispatcher: Dispatcher, forward: ExpertsForward, experts: nn.Module, x_TD: Tensor, routing: Routing
) -> Tensor:
    """Dispatch rows, run this rank's experts on the rows that arrive, and combine their outputs: (T, D).

    With spare expert slots, views of the experts run with the weights of the slots.
    """
    config = dispatcher.config
    own = own_weights("moe_dispatch experts", experts) if has_spare_slots(config) else {}
    if config.chunk_options is not None and config.chunk_options.recompute:
        # transformers puts local tensors in the place of DTensors, and PEFT adds adapters, but not in the backward.
        experts = view_of(experts, stacked_weights(experts))

    def run(part: Dispatched, *weights: Tensor) -> Tensor:
        if weights:
            view = view_of(experts, dict(zip(own, weights, strict=True)), num_experts=len(weights[0]))
            return _run(forward, view, config, part)
        return _run(forward, experts, config, part)

    return run_layer(dispatcher, run, list(own.values()), x_TD, routing, plan_in_force(config))


def _run(forward: ExpertsForward, experts: Any, config: DispatcherConfig, sent: Dispatched) -> Tensor:
    """Run experts on the rows of a dispatch, or of some of its slots.

    In graph-safe mode, rows after those of the last expert get the id L, and transformers skips them. No host sync.
    """
    rows_RD = sent.rows
    # Without a row, the parameters of the experts would get no gradient on this rank, and FSDP would wait for one.
    lacks_rows = not len(rows_RD)
    if lacks_rows:
        rows_RD = F.pad(rows_RD, (0, 0, 0, 1))
    positions_R = torch.arange(len(rows_RD), dtype=torch.int32, device=rows_RD.device)
    ids_R = torch.zeros_like(positions_R) if lacks_rows else torch.searchsorted(sent.offs, positions_R, right=True)
    # transformers' functions expect the weight 0 where the id is L.
    weights_R = sent.weights if config.weights == "experts" and not lacks_rows else ids_R < len(sent.tokens_per_expert)
    if needs_clean_gradients(sent):
        experts = view_of(experts, clean_gradients(stacked_weights(experts), sent))
    y_RD = forward(experts, rows_RD, ids_R.to(torch.int64).unsqueeze(1), weights_R.to(rows_RD.dtype).unsqueeze(1))
    _check_backward(experts, rows_RD, y_RD)
    return y_RD[: len(sent.rows)]


def _check_backward(experts: Any, rows_RD: Tensor, y_RD: Tensor) -> None:
    """Raise StateError if experts that are trained gave an output without a backward: nothing would be trained."""
    if torch.is_grad_enabled() and not y_RD.requires_grad:
        trained = [name for name, parameter in experts.named_parameters() if parameter.requires_grad]
        if trained or rows_RD.requires_grad:
            name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
            what = trained[0] if trained else "its input"
            raise StateError(
                f"moe_dispatch experts: experts_implementation={name!r} must have a backward, because {what} of "
                f"{type(experts).__name__} needs a gradient, got outputs without one. Set another "
                "experts_implementation to train, or run the model under torch.no_grad()."
            )
