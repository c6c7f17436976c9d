"""A token dispatcher for the MoE layers of torchtitan, and ways to put it into the config of a model.

Importing this module imports torchtitan: a release with ``inner_experts``, or its main branch, whose ``RoutedExperts``
hold the weights themselves (``w13``, ``w2``) and which has ``TokenDispatcherTransform``. ``moe_dispatch.types``
explains the suffixes T, K, D and R.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
from moe_dispatch.errors import ConfigError, InputError, IntegrationError, StateError
from moe_dispatch.integrations.checks import (
    check_version,
    parse_version,
    refuse_chunks,
    refuse_quantised_rows,
    refuse_spare_slots,
)
from moe_dispatch.integrations.slot_experts import clean_gradients, has_spare_slots, needs_clean_gradients, run_layer
from moe_dispatch.layouts import Rows
from moe_dispatch.permutation.grouped_mm import leaves_idle_groups
from moe_dispatch.replay import Cut, replayed
from moe_dispatch.types import Routing

try:
    from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
    from torchtitan.models.common.moe import MoE, RoutedExperts
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
except ImportError:
    check_version("torchtitan")  # its error explains more, if torchtitan is missing or too old
    raise
try:
    from torchtitan.config.override import override
except ImportError:  # a main branch that chooses dispatchers by transforms alone
    override = None

__all__ = [
    "MoEDispatchRoutedExperts",
    "MoEDispatchTokenDispatcher",
    "RoutingReplay",
    "leave_out_padding",
    "moe_dispatch_override",
    "use_moe_dispatch",
]

# Fields that torchtitan's config sets. And "weights": torchtitan's experts ignore scores, so combine applies them.
_NOT_OPTIONS = ("backend", "hidden_size", "num_experts", "top_k", "weights")
# Fields of torchtitan's dispatchers that ask for static shapes, and our fields that replace them.
_STATIC = {
    "cudagraphable": "graph_safe=True",
    "non_blocking_capacity_factor": 'graph_safe={"capacity_factor": ...}, a multiple of the balanced load,',
}
# Fields of torchtitan's dispatchers that are copied, and our names for them.
_TAKEN_OVER = {"pad_multiple": "pad_multiple", "num_max_tokens_per_rank": "max_tokens_per_rank"}


def _check_seam() -> bool:
    """Return whether experts are a module of their own, as in the releases, or weights of RoutedExperts, as in main.

    The main branch calls itself 0.2.2, so its (T, D) and the fields of a config tell, not the version.

    Raises:
        IntegrationError: It is a version between them, without either seam.
    """
    fields = {each.name for each in dataclasses.fields(RoutedExperts.Config)}
    try:
        found = version("torchtitan")
    except PackageNotFoundError:  # a checkout on the path
        found = "of a checkout"
    if "inner_experts" not in fields and not ({"w13", "w2"} <= fields and find_spec("torchtitan.config.transform")):
        raise IntegrationError(
            f"torchtitan {found} lies between release 0.3.0 and the main branch with TokenDispatcherTransform: its "
            f"RoutedExperts.Config must have inner_experts, or w13 and w2 beside that transform, got "
            f"{', '.join(sorted(fields))}. Install torchtitan 0.3.0, or a newer main branch."
        )
    is_main = "x_TD" in inspect.signature(RoutedExperts.forward).parameters
    if not is_main or parse_version(found)[0] >= (0, 3):
        check_version("torchtitan")
    return "inner_experts" in fields


_HAS_INNER_EXPERTS = _check_seam()


@final
class MoEDispatchTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """A Dispatcher with the interface of torchtitan's token dispatchers.

    Releases set its expert-parallel mesh in ``RoutedExperts.parallelize``; in the main branch it asks for the mesh of
    the running block. Without a mesh it serves one rank. It adds no state-dict keys.

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
            num_max_tokens_per_rank: Default of ``max_tokens_per_rank`` in ``options``. Torchtitan's transform fills it.
        """

        hidden_dim: int
        backend: str | Mapping[str, Any] = "auto"
        options: dict[str, Any] = field(default_factory=dict)
        name: str = ""
        num_max_tokens_per_rank: int | None = None

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
            **{"max_tokens_per_rank": config.num_max_tokens_per_rank, **config.options},
        )
        refuse_quantised_rows("MoEDispatchTokenDispatcher", self._config)
        self._name = config.name
        self._dispatcher: Dispatcher | None = None
        self.drift: Tensor | None = None  # of the routing of this micro-batch, if it is replayed

    def init_buffer(self) -> None:
        """Build the dispatcher on the expert-parallel mesh, or for one rank if there is none. Collective.

        The main branch also calls this where no mesh is set yet. Then the first dispatch builds it.
        """
        if _HAS_INNER_EXPERTS or self.ep_mesh is not None:
            self._build()

    @property
    def dispatcher(self) -> Dispatcher:
        """The Dispatcher, for ``metrics``, ``check`` and ``grow``."""
        return self._dispatcher or self._build()

    def _build(self) -> Dispatcher:
        built = build_dispatcher(self._config, self.ep_mesh, name=self._name)
        self.__dict__["_dispatcher"] = built  # not as a submodule, which torchtitan would refuse
        return built

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

    ``balance`` needs expert slots. Then the experts are called with the weights of
    slots in the place of their parameters, so a class with another ``_grouped_mm`` keeps it. Their parameters must have
    one entry for each expert, and one dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """Config of ``RoutedExperts`` with a ``MoEDispatchTokenDispatcher.Config``."""

    @functools.wraps(RoutedExperts.forward, assigned=())  # torchtitan finds the placements of arguments by their names
    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts_E: Tensor, **options: Any) -> Tensor:
        """Send rows and weights of experts, run the experts, and combine. FSDP has unsharded the weights.

        Args:
            x: (B, L, D) in release 0.3.0, (T, D) in the main branch.
            scores: (B, L, K) or (T, K).
            ids: As scores, int64.
            counts_E: Counts of the router.
            **options: Other arguments of ``RoutedExperts.forward``.

        Returns:
            The shape of x.

        Cost: that of ``SlotWeights.run`` or of ``run_in_chunks``.
        """
        ours = self.token_dispatcher
        config = ours.dispatcher.config
        if not (has_spare_slots(config) or config.chunks is not None or leaves_idle_groups(x.device)):
            return RoutedExperts.forward(self, x, scores, ids, counts_E, **options)  # type: ignore[no-any-return]
        routing = ours.routing(scores.flatten(0, -2), ids.flatten(0, -2), counts_E)
        experts = self.inner_experts if _HAS_INNER_EXPERTS else _without_exchange(self)
        names, weights = zip(*experts.named_parameters(), strict=True)
        local = [_local(weight) for weight in weights]

        def run(part: Dispatched, *slots: Tensor) -> Tensor:
            held = dict(zip(names, slots or local, strict=True))
            if needs_clean_gradients(part):
                held = clean_gradients(held, part)
            output_RD: Tensor
            if not _HAS_INNER_EXPERTS:
                output_RD = functional_call(experts, held, (part.rows, None, None, part.tokens_per_expert), options)
                return output_RD
            with maybe_set_sparse_mesh():
                output_RD = functional_call(experts, held, (part.rows, part.tokens_per_expert))
            return output_RD

        return run_layer(ours.dispatcher, run, local, x.flatten(0, -2), routing, Rows()).view(x.shape)


class _NoExchange:
    """The dispatcher of experts whose rows have arrived."""

    def dispatch(self, rows_RD: Tensor, scores: Any, ids: Any, counts_L: Tensor) -> tuple[Tensor, Tensor, None]:
        return rows_RD, counts_L, None

    def combine(self, rows_RD: Tensor, metadata: None, x_RD: Tensor) -> Tensor:
        return rows_RD


def _without_exchange(experts: RoutedExperts) -> RoutedExperts:
    """Return RoutedExperts that share the weights of ``experts`` and compute rows that have arrived."""
    bare: RoutedExperts = object.__new__(RoutedExperts)
    nn.Module.__init__(bare)  # without the hooks of these experts, which have run
    fields = vars(bare)
    fields |= {name: value for name, value in vars(experts).items() if name not in fields and name != "forward"}
    bare._modules = {name: child for name, child in experts._modules.items() if name != "token_dispatcher"}
    bare._parameters, fields["token_dispatcher"] = experts._parameters, _NoExchange()
    return bare


def moe_dispatch_override(
    cfg: RoutedExperts.Config, *, backend: str | Mapping[str, Any] = "auto", name: str = "", **options: Any
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
    theirs = cfg.token_dispatcher
    where = name or "moe_dispatch_override"
    if _HAS_INNER_EXPERTS and theirs.num_experts != cfg.inner_experts.num_experts:
        raise ConfigError(
            f"{where}: the token dispatcher and the experts must have the same num_experts, got {theirs.num_experts} "
            f"and {cfg.inner_experts.num_experts}. Correct the config of the model."
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
        hidden_dim=cfg.inner_experts.dim if _HAS_INNER_EXPERTS else cfg.w13.in_features,
        backend=backend,
        options={**taken, **options},
        name=name,
    )
    if type(cfg) in (RoutedExperts.Config, MoEDispatchRoutedExperts.Config):
        kept = {each.name: getattr(cfg, each.name) for each in dataclasses.fields(cfg) if each.init}
        return MoEDispatchRoutedExperts.Config(**{**kept, "token_dispatcher": ours})
    if any(map(options.get, ("balance", "chunks"))):
        raise ConfigError(
            f"{where}: experts in chunks or with spare expert slots must be RoutedExperts, got "
            f"{type(cfg).__qualname__}. Leave chunks and balance out."
        )
    return dataclasses.replace(cfg, token_dispatcher=ours)


if override is not None:
    moe_dispatch_override = override(
        target=RoutedExperts.Config, description="moe-dispatch moves the tokens of routed experts."
    )(moe_dispatch_override)


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


def leave_out_padding(model: nn.Module) -> None:
    """Leave the rows that a ``padding_mask`` marks out of every exchange; the routed experts give them zeros.

    Routers of torchtitan's main branch leave padding out of their counts, but send it to experts. Call this once a
    model is built.

    Args:
        model: A model of torchtitan, or the part of a pipeline stage.

    Raises:
        ConfigError: A router takes no mask, as in torchtitan 0.3.0, or the model has no MoE layers.

    Cost: one launch in each layer.
    """
    for layer in _layers_of("leave_out_padding", model):
        if not any("padding_mask" in name for name in inspect.signature(type(layer.router).forward).parameters):
            raise ConfigError(
                f"leave_out_padding: the routers of this torchtitan must take a padding mask, got "
                f"{type(layer.router).__qualname__} without one. Use torchtitan's main branch, or pack the sequences."
            )
        layer.router.register_forward_hook(_to_no_expert, with_kwargs=True)


def _to_no_expert(router: Any, args: Any, kwargs: dict[str, Any], routed: tuple[Tensor, Tensor, Any]) -> Any:
    """Set the ids of padding to -1, as a forward hook of a router."""
    masks = [mask for name, mask in kwargs.items() if name.startswith("padding_mask") and mask is not None]
    if not masks:
        return routed
    scores, ids, rest = routed
    return scores, ids.masked_fill(masks[0].reshape(*ids.shape[:-1], 1), -1), rest


def _layers_of(where: str, model: nn.Module) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ConfigError(
            f"{where}: {type(model).__name__} has no MoE layers. Pass a model of torchtitan with experts."
        )
    return layers


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
        self._cut: Cut | None = None
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        for number, layer in enumerate(_layers_of("RoutingReplay", model), first):
            router, experts = layer.router, layer.routed_experts
            if _HAS_INNER_EXPERTS:
                hook = router.register_forward_hook(functools.partial(self._replay, number, experts))
                self._undo.append(hook.remove)
                continue
            # The main branch counts, and saves for recomputation, what this method chooses.
            if not hasattr(router, "_select_experts"):
                raise IntegrationError(
                    f"RoutingReplay: routers of torchtitan's main branch must have _select_experts, got "
                    f"{type(router).__qualname__} without it. Install a newer torchtitan."
                )
            router._select_experts = functools.partial(self._choose, number, experts, router)
            self._undo.append(functools.partial(delattr, router, "_select_experts"))

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
        while self._undo:
            self._undo.pop()()

    def _replay(
        self, number: int, routed_experts: Any, router: Any, args: Any, routed: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange the experts of a router, and their scores, as a forward hook."""
        if self._closed:
            return routed
        own_TK, scores_TE = (_local(tensor).flatten(0, -2) for tensor in routed[1:])
        routing = self._routing(number, routed_experts, router, own_TK, scores_TE)
        return _like(routing.topk_weights, routed[0]), _like(routing.topk_ids, routed[1]), routed[2]

    def _choose(
        self, number: int, routed_experts: Any, router: Any, scores_TE: Tensor, *args: Any, **kw: Any
    ) -> Tensor:
        """Choose the replayed experts in the place of a router's method. The router itself weighs and counts them."""
        own_TK: Tensor = type(router)._select_experts(router, scores_TE, *args, **kw)
        if self._closed:
            return own_TK
        return self._routing(number, routed_experts, router, own_TK, scores_TE).topk_ids

    def _routing(self, number: int, routed_experts: Any, router: Any, own_TK: Tensor, scores_TE: Tensor) -> Routing:
        if self._cut is None:
            raise StateError(
                "RoutingReplay: forward() was called outside `with replay.micro_batch(...)`. Wrap the forward and "
                "backward in it, or call replay.close()."
            )
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
        return routing


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(new_TK: Tensor, old_BLK: Tensor) -> Tensor:
    """Give rows of this rank the shape of a router's output, and its placement if it is distributed."""
    shaped = new_TK.view(_local(old_BLK).shape)
    if not isinstance(old_BLK, DTensor):
        return shaped
    placed: Tensor = DTensor.from_local(shaped, old_BLK.device_mesh, old_BLK.placements)
    return placed
