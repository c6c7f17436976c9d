"""Replay a RoutingTable in the routers of a model.

Each family of models computes its weights in another way, but its router chooses experts by one ``torch.topk`` over the
scores of all experts. While a router runs, this call returns the replayed experts and their scores. From these the
router makes the weights with its own code, as it does from experts of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_dispatch.capabilities.replay.entries import NOWHERE, UNKNOWN
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.transformers.forwards import (
    WRAPPED,
    cut_for_forwards,
    cut_in_force,
    keep_in_checkpoints,
)
from moe_dispatch.integrations.transformers.registration import experts_of, module_with_mask, wiring_of
from moe_dispatch.replay import Cut, replayed

_ROUTERS = ("gate", "router")  # what models call the module beside their experts


@final
class RoutingReplay:
    """The replay of a routing in the routers of a model. Call ``micro_batch`` around each forward.

    The weights are made by the model's router from its own scores at the replayed experts, so the router keeps its
    gradient. Rows that the table does not know, and padding, take the router's own choice. The experts may be wired to
    a dispatcher or not.

    Args:
        model: A model of transformers. Its MoE layers have the numbers 0, 1 and so on, in the order of its modules.

    Raises:
        ConfigError: The model has no MoE layers, a router is not called ``gate`` or ``router``, or a router sets the
            scores of experts to 0 before it chooses. Also raised by a forward in which a layer runs a second time.

    Cost: each router computes its own choice too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        found = experts_of("RoutingReplay", model)
        self._layers = [
            _Layer(self, number, *_router_beside(model, name), experts)
            for number, (name, experts) in enumerate(found.items())
        ]
        self._closed = False
        self._ran: set[int] | None = None  # the layers that have run, inside of a forward of the module that holds them
        owners = dict.fromkeys(owner for name in found if (owner := module_with_mask(model, name)) is not None)
        self._hooks = [owner.register_forward_pre_hook(self._begin) for owner in owners]
        self._hooks += [owner.register_forward_hook(self._end, always_call=True) for owner in owners]

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutingReplay:
        """Return the object itself: a copy of the model is replayed in the blocks of this object too."""
        return self

    @contextmanager
    def micro_batch(self, cut: Cut) -> Iterator[None]:
        """Replay a cut in the forwards of the block. The backward may follow after the block.

        A layer that is recomputed gets the ids of its own forward, if it is checkpointed by the switch of transformers
        or by torch's ``checkpoint_wrapper``.

        Args:
            cut: The result of ``RoutingTable.cut``, for the layout of this rank's ``[B, S, D]``. Ranks of a
                tensor-parallel group make the same cut of their common batch.

        Raises:
            InputError: The table has entries in which only some slots name an expert.
        """
        cut.table.check_slots()
        keep_in_checkpoints(self._model)
        with cut_for_forwards(self, cut):
            yield

    def close(self) -> None:
        """Let the routers choose on their own again, also those of copies of the model."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.close()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._ran = set()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._ran = None


@final
class _Layer:
    """The router of one MoE layer, whose hooks replace its choice."""

    def __init__(self, replay: RoutingReplay, number: int, path: str, router: nn.Module, experts: nn.Module) -> None:
        self._replay, self._number, self._experts = replay, number, experts
        self._name = f"{path} ({type(router).__name__})"
        self._choice: _Choice | None = None  # while the router runs
        self._hooks = [
            router.register_forward_pre_hook(self._before_router),
            router.register_forward_hook(self._after_router, always_call=True),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_router(self, router: nn.Module, args: Any) -> None:
        if self._replay._closed:
            return
        cut = cut_in_force(self._replay)
        if cut is None:
            raise StateError(
                f"RoutingReplay: forward() of {self._name} was called outside `with replay.micro_batch(...)`. Wrap the "
                "forward in it, checkpoint layers with transformers' switch, or call replay.close()."
            )
        ran = self._replay._ran
        if ran is not None and torch._C._current_graph_task_id() == -1:  # else a backward recomputes the layer
            if self._number in ran:
                raise ConfigError(
                    f"RoutingReplay: {self._name} must run once in a forward, got a second run. A table has one entry "
                    "for each layer and position, so a model that repeats its layers cannot replay one. Call replayed "
                    "in a block of your own."
                )
            ran.add(self._number)
        self._choice = _Choice(cut, self._number)
        self._choice.__enter__()  # type: ignore[no-untyped-call]

    def _after_router(self, router: nn.Module, args: Any, output: Any) -> Any:
        """Check that the choice was replaced. This hook also runs if the router or a pre-hook raised."""
        choice, self._choice = self._choice, None
        if choice is None:
            return output
        choice.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is None:
            return output
        if len(choice.drifts) != 1:
            seen = ", ".join(choice.calls) or "none"
            raise ConfigError(
                f"RoutingReplay: {self._name} must choose experts by one torch.topk of {choice.wanted}, as the table "
                f"has it, got {seen}. Replay the table of this model, and call replayed in a block of your own if the "
                "router chooses in another way."
            )
        wiring = wiring_of(self._experts)
        if wiring is not None:
            wiring.drift = choice.drifts[0]
        return choice.without_vanished(output)


@final
class _Choice(TorchFunctionMode):
    """While it is entered, the top-k over the scores of all experts returns the replayed experts of one layer.

    Top-ks over groups of experts, and over scores within a group, stay as they are.
    """

    def __init__(self, cut: Cut, number: int) -> None:
        super().__init__()
        self._cut, self._number = cut, number
        self.wanted = f"{cut.table.top_k} of {cut.table.num_experts} experts"
        self.calls: list[str] = []
        self.drifts: list[Tensor | None] = []
        self._vanished_T1: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and exchange its result if it is the choice of experts."""
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, own = args[0], found.indices
        self.calls.append(f"{own.shape[-1]} of {tuple(scores.shape)}")
        table = self._cut.table
        if scores.dim() != 2 or (scores.shape[1], own.shape[1]) != (table.num_experts, table.top_k):
            return found
        ids_TK = self._cut.routing_for(self._number)
        # A row of padding must name experts too. Experts that are wired to a dispatcher do not get it.
        ids_TK = torch.where(ids_TK == NOWHERE, UNKNOWN, ids_TK)
        routing = replayed(ids_TK, scores, normalize=False, own_ids_TK=own)
        self.drifts.append(routing.drift)
        self._vanished_T1 = _vanished(routing.topk_weights, scores)
        weights_TK = torch.where(self._vanished_T1, 1, routing.topk_weights)
        return torch.return_types.topk((weights_TK, routing.topk_ids))

    def without_vanished(self, output: Any) -> Any:
        """Return the output of the router with weights of 0 where all probabilities at the replayed experts are 0.

        There the router got ones, so its normalisation did not divide by 0, and made equal weights of them. Routers
        that take weights from elsewhere have others.
        """
        if not isinstance(output, tuple) or self._vanished_T1 is None:
            return output
        shape = (len(self._vanished_T1), self._cut.table.top_k)
        return tuple(
            torch.where(self._vanished_T1 & (item == item[:, :1]).all(1, keepdim=True), 0, item)
            if isinstance(item, Tensor) and item.is_floating_point() and item.shape == shape
            else item
            for item in output
        )


def _vanished(chosen_TK: Tensor, scores_TE: Tensor) -> Tensor:
    """Return whether scores are probabilities, and 0 at all chosen experts of a row, bool (T, 1)."""
    with torch.no_grad():
        tiny = torch.finfo(scores_TE.dtype).tiny
        low_T1, high_T1 = torch.aminmax(scores_TE, dim=1, keepdim=True)
        return (chosen_TK < tiny).all(1, keepdim=True) & (low_T1 >= 0) & (high_T1 > tiny)


def _router_beside(model: nn.Module, experts: str) -> tuple[str, nn.Module]:
    """Return the router that belongs to an experts module, and its path."""
    while experts.endswith(f".{WRAPPED}"):  # an adapter stands around the experts
        experts = experts.removesuffix(f".{WRAPPED}")
    path = experts.rpartition(".")[0]
    owner = model.get_submodule(path)
    found = [(name, module) for name, module in owner.named_children() if name in _ROUTERS]
    if len(found) != 1:
        names = ", ".join(name for name, _ in owner.named_children())
        raise ConfigError(
            f"RoutingReplay: {path} ({type(owner).__name__}) must hold one module called {' or '.join(_ROUTERS)}, got "
            f"{names}. Call replayed in a block of your own."
        )
    (name, router), *_ = found
    if getattr(router, "topk_method", None) == "group_limited_greedy":
        raise ConfigError(
            f"RoutingReplay: {path}.{name} ({type(router).__name__}) must keep the scores of all experts, got "
            "topk_method='group_limited_greedy', which sets the scores of other groups to 0. Call replayed in a block "
            "of your own."
        )
    return f"{path}.{name}", router
