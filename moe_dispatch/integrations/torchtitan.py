"""torchtitan: a token dispatcher for its MoE layers, and two ways to put it into a model's config.

Importing this module imports torchtitan. T, K, D and R as in ``moe_dispatch.types``, which torchtitan uses alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch.integrations.versions import check_version
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Dispatched, Routing

check_version("torchtitan", tested=("0.3.0",), lowest="0.3.0")  # before its names are asked for, which say less

from torchtitan.config import override  # noqa: E402
from torchtitan.models.common.moe import MoE, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher  # noqa: E402

# What torchtitan's config says already, and "weights": its experts do not look at scores, so combine must apply them.
_NOT_OPTIONS = ("backend", "hidden_size", "num_experts", "top_k", "weights")
# Fields of torchtitan's own dispatchers that ask for static shapes, and what says so here.
_STATIC = {
    "cudagraphable": "graph_safe=True",
    "non_blocking_capacity_factor": "graph_safe=True and capacity_factor, which counts over the balanced load",
}
# Fields of torchtitan's own dispatchers that are taken over, by their names there.
_TAKEN_OVER = {"pad_multiple": "pad_multiple", "num_max_tokens_per_rank": "max_tokens_per_rank"}


@final
class MoEDispatchTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """A Dispatcher where torchtitan expects a token dispatcher of its own.

    ``RoutedExperts.parallelize`` wires it to the mesh of experts; one that was never wired serves one rank. It is no
    module and has no state-dict keys.

    Raises:
        ConfigError: an option is unknown, wrong, or torchtitan's to say.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """Beside torchtitan's ``num_experts`` and ``top_k``.

        Attributes:
            hidden_dim: D, the ``dim`` of the experts.
            backend: as in ``DispatcherConfig``.
            options: other fields of ``DispatcherConfig``, by name.
            name: of the layer, for errors.
        """

        hidden_dim: int
        backend: str | dict[str, Any] = "auto"
        options: dict[str, Any] = field(default_factory=dict)
        name: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if clash := sorted(set(_NOT_OPTIONS) & set(config.options)):
            raise ConfigError(
                f"MoEDispatchTokenDispatcher: options must leave {', '.join(_NOT_OPTIONS)} to torchtitan's config and "
                f"this one's fields (its scores are applied in combine), got {', '.join(clash)}. Leave it out."
            )
        self._config = DispatcherConfig(
            backend=config.backend,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_dim,
            **config.options,
        )
        self._name = config.name
        self._dispatcher: Dispatcher | None = None

    def init_buffer(self) -> None:
        """Build the dispatcher on the mesh that was wired, None for one rank. Collective."""
        self._dispatcher = build_dispatcher(self._config, self.ep_mesh, name=self._name)

    @property
    def dispatcher(self) -> Dispatcher:
        """What it is made of: for ``metrics``, ``check``, ``grow``."""
        if self._dispatcher is None:
            self.init_buffer()
        assert self._dispatcher is not None
        return self._dispatcher

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Send rows to their experts.

        Args:
            x_TD: this rank's rows, its share of the sequence under sequence parallelism; any count on any rank.
            topk_scores_TK: applied in ``combine``, in float32.
            topk_expert_ids_TK: int64.
            num_local_tokens_per_expert_E: only its length is looked at.

        Returns:
            Rows (R, D), rows per local expert with padding, int64, and what ``combine`` takes as ``metadata``.

        Raises:
            InputError: a router of another number of experts; and as ``Dispatcher.dispatch``.

        Cost: as ``Dispatcher.dispatch`` without a plan.
        """
        if (counted := num_local_tokens_per_expert_E.numel()) != self.num_experts:
            raise InputError(
                f"MoEDispatchTokenDispatcher.dispatch: num_experts ({self.num_experts}) must be the router's, got "
                f"counts of {counted} experts. Give both the same num_experts."
            )
        sent = self.dispatcher.dispatch(x_TD, Routing(topk_expert_ids_TK, topk_scores_TK), Rows())
        return sent.rows, sent.tokens_per_expert, sent

    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """Bring expert outputs back, times their scores: (T, D)."""
        return self.dispatcher.combine(routed_output_RD, metadata)


@override(target=RoutedExperts.Config, description="moe-dispatch moves the tokens of routed experts.")  # type: ignore[untyped-decorator]
def moe_dispatch_override(
    cfg: RoutedExperts.Config, *, backend: str | dict[str, Any] = "auto", name: str = "", **options: Any
) -> RoutedExperts.Config:
    """A copy of ``cfg`` with our token dispatcher. For ``override.imports``, or to be called.

    Args:
        cfg: whose dispatcher is replaced. Its ``num_experts`` and ``top_k``, ``dim`` of the experts, and, where set,
            ``pad_multiple`` and ``num_max_tokens_per_rank`` are taken over.
        backend: as in ``DispatcherConfig``.
        name: of the layer, for errors.
        **options: other fields of ``DispatcherConfig``.

    Raises:
        ConfigError: the replaced dispatcher and the experts disagree, or it asks for static shapes in its own way.
    """
    theirs, experts = cfg.token_dispatcher, cfg.inner_experts
    where = name or "moe_dispatch_override"
    if theirs.num_experts != experts.num_experts:
        raise ConfigError(
            f"{where}: the token dispatcher's num_experts must be that of its experts, got {theirs.num_experts} and "
            f"{experts.num_experts}. Correct the model's config."
        )
    for asked, instead in _STATIC.items():
        if value := getattr(theirs, asked, None):
            raise ConfigError(
                f"{where}: {type(theirs).__qualname__} must leave out {asked}, got {value!r}. Set {instead} here."
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
    return dataclasses.replace(cfg, token_dispatcher=ours)


def use_moe_dispatch(model_config: Any, *, backend: str | dict[str, Any] = "auto", **options: Any) -> list[str]:
    """Replace the token dispatchers of all MoE layers in a model's config; arguments as for the override.

    Args:
        model_config: any torchtitan config that holds MoE layers; changed in place, before it is built.
        backend: as in ``DispatcherConfig``.
        **options: other fields of ``DispatcherConfig``.

    Returns:
        The layers' names, which their errors carry.

    Raises:
        ConfigError: there is no MoE layer, or a router and its dispatcher disagree.
    """
    layers = {name or "moe": layer for name, layer, _, _ in model_config.traverse(MoE.Config)}
    if not layers:
        raise ConfigError(
            f"use_moe_dispatch: the config must hold an MoE layer, got {type(model_config).__qualname__} without one. "
            "Pass the model's config, of a flavour with experts."
        )
    for name, layer in layers.items():
        theirs, router = layer.routed_experts.token_dispatcher, layer.router
        if (theirs.num_experts, theirs.top_k) != (router.num_experts, router.top_k):
            raise ConfigError(
                f"{name}: the token dispatcher must have its router's num_experts and top_k, got {theirs.num_experts} "
                f"and {theirs.top_k} for {router.num_experts} and {router.top_k}. Correct the model's config."
            )
        layer.routed_experts = moe_dispatch_override(
            layer.routed_experts, backend=backend, name=f"{name}.routed_experts", **options
        )
    return list(layers)
