"""A token dispatcher for the MoE layers of torchtitan, and two ways to put it into the config of a model.

Importing this module imports torchtitan. ``moe_dispatch.types`` explains the suffixes T, K, D and R.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.capabilities.replay.entries import UNKNOWN
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.integrations.checks import check_version, refuse_chunks, refuse_quantised_rows, refuse_spare_slots
from moe_dispatch.integrations.slot_experts import clean_gradients, has_spare_slots, needs_clean_gradients, run_layer
from moe_dispatch.layouts import Rows
from moe_dispatch.permutation.grouped_mm import leaves_idle_groups
from moe_dispatch.replay import Cut, replayed
from moe_dispatch.types import Routing

check_version("torchtitan")  # before the imports, whose errors explain less

from torchtitan.config import override  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh  # noqa: E402
from torchtitan.models.common.moe import MoE, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher  # noqa: E402

__all__ = ["MoEDispatchTokenDispatcher", "RoutingReplay", "moe_dispatch_override", "use_moe_dispatch"]

# Fields that torchtitan's config sets. And "weights": torchtitan's experts ignore scores, so combine applies them.
_NOT_OPTIONS = ("backend", "hidden_size", "num_experts", "top_k", "weights")
# Fields of torchtitan's dispatchers that ask for static shapes, and our fields that replace them.
_STATIC = {
    "cudagraphable": "graph_safe=True",
    "non_blocking_capacity_factor": 'graph_safe={"capacity_factor": ...}, a multiple of the balanced load,',
}
# Fields of torchtitan's dispatchers that are copied, and our names for them.
_TAKEN_OVER = {"pad_multiple": "pad_multiple", "num_max_tokens_per_rank": "max_tokens_per_rank"}


@final
class MoEDispatchTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """A Dispatcher with the interface of torchtitan's token dispatchers.

    ``RoutedExperts.parallelize`` sets its expert-parallel mesh. Without a mesh it serves one rank. It is no module, so
    it adds no state-dict keys.

    Raises:
        ConfigError: An option is unknown, wrong, or must come from torchtitan; or it delivers quantised rows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """Config with torchtitan's ``num_experts`` and ``top_k``, and these fields.

        Attributes:
            hidden_dim: D, the ``dim`` of the experts.
            backend: Backend, as in ``DispatcherConfig``.
            options: Other fields of ``DispatcherConfig``, by name.
            name: Path of the layer in the model, which errors show.
        """

        hidden_dim: int
        backend: str | dict[str, Any] = "auto"
        options: dict[str, Any] = field(default_factory=dict)
        name: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if clash := sorted(set(_NOT_OPTIONS) & set(config.options)):
            raise ConfigError(
                f"MoEDispatchTokenDispatcher: options must not set {', '.join(_NOT_OPTIONS)}, which come from other "
                f"fields of this config (combine applies weights), got {', '.join(clash)}. Leave these out."
            )
        self._config = DispatcherConfig(
            backend=config.backend,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_dim,
            **config.options,
        )
        refuse_quantised_rows("MoEDispatchTokenDispatcher", self._config)
        self._name = config.name
        self._dispatcher: Dispatcher | None = None
        self.drift: Tensor | None = None  # of the routing of this micro-batch, if it is replayed

    def init_buffer(self) -> None:
        """Build the dispatcher on the expert-parallel mesh, or for one rank if there is none. Collective."""
        self._dispatcher = build_dispatcher(self._config, self.ep_mesh, name=self._name)

    @property
    def dispatcher(self) -> Dispatcher:
        """The Dispatcher, for ``metrics``, ``check`` and ``grow``."""
        if self._dispatcher is None:
            self.init_buffer()
        assert self._dispatcher is not None
        return self._dispatcher

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Send rows to their experts.

        Args:
            x_TD: Rows of this rank, any number. Under sequence parallelism they are its share of the sequence.
            topk_scores_TK: Weights, which ``combine`` applies in float32.
            topk_expert_ids_TK: Expert ids, int64.
            num_local_tokens_per_expert_E: Counts of the router. Only their number is checked.

        Returns:
            Rows (R, D); number of rows of each local expert with padding, int64; and ``metadata`` for ``combine``.

        Raises:
            ConfigError: The config has spare expert slots or ``chunks``, which need ``MoEDispatchRoutedExperts``.
            InputError: The router has another number of experts. Other errors are those of ``Dispatcher.dispatch``.

        Cost: that of ``Dispatcher.dispatch`` without a plan.
        """
        refuse_spare_slots(where := "MoEDispatchTokenDispatcher.dispatch in RoutedExperts", self._config)
        refuse_chunks(where, self._config, "give it to use_moe_dispatch or moe_dispatch_override")
        routing = self.routing(topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        sent = self.dispatcher.dispatch(x_TD, routing, Rows())
        return sent.rows, sent.tokens_per_expert, sent

    def routing(self, scores_TK: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Routing:
        """Return the routing of a call of ``dispatch`` with these arguments."""
        if (counted := counts_E.numel()) != self.num_experts:
            raise InputError(
                f"MoEDispatchTokenDispatcher.dispatch: num_experts ({self.num_experts}) must be that of the router, "
                f"got counts of {counted} experts. Give the dispatcher and the router the same num_experts."
            )
        routing, self.drift = Routing(ids_TK, scores_TK, self.drift), None
        return routing

    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """Send expert outputs back and sum them, weighted by their scores: (T, D)."""
        return self.dispatcher.combine(routed_output_RD, metadata)


@final
class MoEDispatchRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """Routed experts that run in chunks, for ``chunks``, or on the expert slots of a placement.

    ``balance`` needs expert slots. Then ``inner_experts`` are called with the weights of
    slots in the place of their parameters, so a class with another ``_grouped_mm`` keeps it. Their parameters must have
    one entry for each expert, and one dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """Config of ``RoutedExperts`` with a ``MoEDispatchTokenDispatcher.Config``."""

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Send rows and weights of experts, run the experts, and combine: (B, L, D). FSDP has unsharded the weights.

        Cost: that of ``SlotWeights.run`` or of ``run_in_chunks``.
        """
        ours, experts = self.token_dispatcher, self.inner_experts
        config = ours.dispatcher.config
        if not (has_spare_slots(config) or config.chunks is not None or leaves_idle_groups(x_BLD.device)):
            theirs = x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            return RoutedExperts.forward(self, *theirs)  # type: ignore[no-any-return]
        scores_TK, ids_TK = topk_scores_BLK.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
        routing = ours.routing(scores_TK, ids_TK, num_local_tokens_per_expert_E)
        names, weights = zip(*experts.named_parameters(), strict=True)
        local = [_local(weight) for weight in weights]

        def run(part: Dispatched, *slots: Tensor) -> Tensor:
            held = dict(zip(names, slots or local, strict=True))
            if needs_clean_gradients(part):
                held = clean_gradients(held, part)
            with maybe_set_sparse_mesh():
                output_RD: Tensor = functional_call(experts, held, (part.rows, part.tokens_per_expert))
            return output_RD

        return run_layer(ours.dispatcher, run, local, x_BLD.flatten(0, 1), routing, Rows()).view(x_BLD.shape)


@override(target=RoutedExperts.Config, description="moe-dispatch moves the tokens of routed experts.")  # type: ignore[untyped-decorator]
def moe_dispatch_override(
    cfg: RoutedExperts.Config, *, backend: str | dict[str, Any] = "auto", name: str = "", **options: Any
) -> RoutedExperts.Config:
    """Return a copy of ``cfg`` with our token dispatcher. Use it in ``override.imports``, or call it.

    Args:
        cfg: Config of routed experts. The copy has its ``num_experts`` and ``top_k``, the ``dim`` of its experts, and
            its ``pad_multiple`` and ``num_max_tokens_per_rank`` if they are set.
        backend: Backend, as in ``DispatcherConfig``.
        name: Path of the layer in the model, which errors show.
        **options: Other fields of ``DispatcherConfig``. With ``balance`` or ``chunks``,
            the copy is a ``MoEDispatchRoutedExperts.Config``.

    Raises:
        ConfigError: The replaced dispatcher and the experts disagree, that dispatcher asks for static shapes, or chunks
            or spare expert slots are asked for with a subclass of ``RoutedExperts``.
    """
    theirs, experts = cfg.token_dispatcher, cfg.inner_experts
    where = name or "moe_dispatch_override"
    if theirs.num_experts != experts.num_experts:
        raise ConfigError(
            f"{where}: the token dispatcher and the experts must have the same num_experts, got {theirs.num_experts} "
            f"and {experts.num_experts}. Correct the config of the model."
        )
    for asked, instead in _STATIC.items():
        if value := getattr(theirs, asked, None):
            raise ConfigError(
                f"{where}: {type(theirs).__qualname__} must leave out {asked}, got {value!r}. Set {instead} instead."
            )
    taken = {ours: value for given, ours in _TAKEN_OVER.items() if (value := getattr(theirs, given, None)) is not None}
    ours = MoEDispatchTokenDispatcher.Config(
        num_experts=theirs.num_experts,
        top_k=theirs.top_k,
        hidden_dim=experts.dim,
        backend=backend,
        options={**taken, **options},
        name=name,
    )
    if type(cfg) in (RoutedExperts.Config, MoEDispatchRoutedExperts.Config):
        return derive(cfg, MoEDispatchRoutedExperts.Config, token_dispatcher=ours)
    if any(map(options.get, ("balance", "chunks"))):
        raise ConfigError(
            f"{where}: experts in chunks or with spare expert slots must be RoutedExperts, got "
            f"{type(cfg).__qualname__}. Leave chunks and balance out."
        )
    return dataclasses.replace(cfg, token_dispatcher=ours)


def use_moe_dispatch(
    model_config: Any, *, backend: BackendName | str | Mapping[str, Any] = "auto", **options: Any
) -> list[str]:
    """Replace the token dispatchers of all MoE layers in a model's config, in place, before the model is built.

    Args:
        model_config: A torchtitan config that holds MoE layers.
        backend: Backend, as in ``DispatcherConfig``.
        **options: Other fields of ``DispatcherConfig``.

    Returns:
        The paths of the layers. Errors of a layer show its path.

    Raises:
        ConfigError: There is no MoE layer, or a router and its dispatcher disagree.
    """
    layers = {name or "moe": layer for name, layer, _, _ in model_config.traverse(MoE.Config)}
    if not layers:
        raise ConfigError(
            f"use_moe_dispatch: {type(model_config).__qualname__} has no MoE layer. Pass the config of a model with "
            "experts."
        )
    for name, layer in layers.items():
        theirs, router = layer.routed_experts.token_dispatcher, layer.router
        if (theirs.num_experts, theirs.top_k) != (router.num_experts, router.top_k):
            raise ConfigError(
                f"{name}: the token dispatcher must have the num_experts and top_k of its router, got "
                f"{theirs.num_experts} and {theirs.top_k} for {router.num_experts} and {router.top_k}. Correct the "
                "config of the model."
            )
        layer.routed_experts = moe_dispatch_override(
            layer.routed_experts, backend=backend, name=f"{name}.routed_experts", **options
        )
    return list(layers)


@final
class RoutingReplay:
    """The replay of a routing in the routers of a model. Call ``micro_batch`` around each forward and backward.

    The weights are the router's own scores at the replayed experts, with its normalisation and scale, so the router
    keeps its gradient. Rows that the table does not know, and padding, take the router's own choice.

    Args:
        model: A torchtitan model that is built, or the part of a pipeline stage.
        first: Number of its first MoE layer in the whole model, which has the MoE layers 0, 1 and so on.

    Raises:
        ConfigError: The model has no MoE layers.
    """

    def __init__(self, model: nn.Module, *, first: int = 0) -> None:
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        if not layers:
            raise ConfigError(
                f"RoutingReplay: {type(model).__name__} has no MoE layers. Pass a model of torchtitan with experts."
            )
        self._cut: Cut | None = None
        self._closed = False
        self._hooks = [
            layer.router.register_forward_hook(functools.partial(self._replay, number, layer.routed_experts))
            for number, layer in enumerate(layers, first)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutingReplay:
        """Return the object itself: a copy of the model is replayed in the blocks of this object too."""
        return self

    @contextmanager
    def micro_batch(self, cut: Cut) -> Iterator[None]:
        """Replay a cut in the block. The backward must be in the block too if activations are recomputed in it.

        Args:
            cut: The result of ``RoutingTable.cut``, for the layout of this rank's ``[B, L, D]``.

        Raises:
            InputError: The table has entries in which only some slots name an expert.
        """
        cut.table.check_slots()
        before, self._cut = self._cut, cut
        try:
            yield
        finally:
            self._cut = before

    def close(self) -> None:
        """Let the routers choose on their own again, also those of copies of the model."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()

    def _replay(
        self, number: int, routed_experts: Any, router: Any, args: Any, routed: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange the experts of a router, and their scores, as a forward hook."""
        if self._closed:
            return routed
        if self._cut is None:
            raise StateError(
                "RoutingReplay: forward() was called outside `with replay.micro_batch(...)`. Wrap the forward and "
                "backward in it, or call replay.close()."
            )
        own_TK, scores_TE = (_local(tensor).flatten(0, 1) for tensor in routed[1:])
        ids_TK = self._cut.routing_for(number)
        routing = replayed(
            torch.where(ids_TK < 0, UNKNOWN, ids_TK),
            scores_TE,
            normalize=router.route_norm,
            own_ids_TK=own_TK,
            scale=router.route_scale,
        )
        if isinstance(routed_experts.token_dispatcher, MoEDispatchTokenDispatcher):
            routed_experts.token_dispatcher.drift = routing.drift
        return _like(routing.topk_weights, routed[0]), _like(routing.topk_ids, routed[1]), routed[2]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(new_TK: Tensor, old_BLK: Tensor) -> Tensor:
    """Give rows of this rank the shape of a router's output, and its placement if it is distributed."""
    shaped = new_TK.view(_local(old_BLK).shape)
    if not isinstance(old_BLK, DTensor):
        return shaped
    placed: Tensor = DTensor.from_local(shaped, old_BLK.device_mesh, old_BLK.placements)
    return placed
