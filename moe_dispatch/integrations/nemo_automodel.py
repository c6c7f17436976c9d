"""A token dispatcher for the MoE layers of NeMo Automodel.

Importing this module imports Automodel. ``moe_dispatch.types`` explains the suffixes T, K, D and R.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from moe_dispatch.backends.registry import BackendName
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.checks import check_version, checked_options, refuse_quantised_rows
from moe_dispatch.integrations.slot_experts import (
    clean_gradients,
    has_spare_slots,
    needs_clean_gradients,
    own_weights,
    run_layer,
    stacked_weights,
    view_of,
)
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Routing

check_version("nemo-automodel")  # before the imports, whose errors explain less

from nemo_automodel.components.moe import experts  # noqa: E402

__all__ = ["AutomodelDispatcher", "use_moe_dispatch"]

# Fields that Automodel's config sets. And "weights": its experts apply the probabilities that they are given.
_NOT_OPTIONS = ("hidden_size", "num_experts", "top_k", "weights")


def use_moe_dispatch(*, backend: BackendName | str | Mapping[str, Any] = "auto", **options: Any) -> None:
    """Make the grouped experts of models that are built from now on use our token dispatcher.

    Set ``dispatcher: hybridep`` in Automodel, whatever the backend here is: with ``torch``, Automodel uses experts that
    have no token dispatcher, and with ``deepep`` it opens a buffer of deep_ep.

    Args:
        backend: Backend, as in DispatcherConfig.
        **options: Other fields of DispatcherConfig. With ``balance``, experts also run with the weights of
            other ranks. This and ``chunks`` need ``experts: torch_mm``, and slots no adapters.

    Raises:
        ConfigError: An option is unknown or wrong, must come from Automodel, or delivers quantised rows.
    """
    if clash := sorted(set(_NOT_OPTIONS) & set(options)):
        raise ConfigError(
            f"use_moe_dispatch: options must not set {', '.join(_NOT_OPTIONS)}, which come from Automodel's config, "
            f"got {', '.join(clash)}. Leave these out."
        )
    config = checked_options(backend=backend, weights="experts", **options)
    refuse_quantised_rows("use_moe_dispatch", config)
    experts.GroupedExpertsDeepEP.forward = _forward
    experts.MoEFlexTokenDispatcher = functools.partial(AutomodelDispatcher, backend=backend, **options)


def _runs_experts(config: DispatcherConfig) -> bool:
    """Return whether ``_forward`` must call the experts, for some rows or with some weights at a time."""
    return has_spare_slots(config) or config.chunks is not None


_THEIR_FORWARD: Callable[..., Tensor] = experts.GroupedExpertsDeepEP.forward


def _forward(layer: Any, x: Tensor, token_mask: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Run Automodel's experts on the rows that arrive, perhaps in chunks or with the weights of expert slots.

    Each part of the rows goes through Automodel's own forward, on a view of the layer.
    """
    ours = layer.token_dispatcher
    if not isinstance(ours, AutomodelDispatcher):
        return _THEIR_FORWARD(layer, x, token_mask, weights, indices)
    own = own_weights("use_moe_dispatch", layer) if has_spare_slots(ours._config) else {}
    # Without rows, Automodel multiplies the weights by 0 times a first row, which may be padding and hold anything.
    no_row = x.new_zeros(1, x.shape[-1])

    def run(part: Dispatched, *slots: Tensor) -> Tensor:
        held = dict(zip(own, slots, strict=True))
        if needs_clean_gradients(part):
            held = clean_gradients(held or {name: local(w) for name, w in stacked_weights(layer).items()}, part)
        arrived = SimpleNamespace(
            token_permutation2=lambda **_: (part.rows, part.tokens_per_expert, part.weights),
            token_unpermutation=lambda rows: rows.reshape(-1, x.shape[-1])[: len(part.rows)],
        )
        shown = {name: SimpleNamespace(to_local=lambda weight=weight: weight) for name, weight in held.items()}
        return _THEIR_FORWARD(view_of(layer, shown, token_dispatcher=arrived), no_row, token_mask, weights, indices)

    def local(weight: Any) -> Tensor:
        found: Tensor = weight.to_local()
        return found

    dispatcher = ours.dispatcher(x.shape[-1])
    routing = Routing(indices.masked_fill(~token_mask.unsqueeze(-1), -1), weights)
    return run_layer(dispatcher, run, [local(weight).to(x.dtype) for weight in own.values()], x, routing, Rows())


@final
class AutomodelDispatcher:
    """A Dispatcher with the three methods of Automodel's ``MoEFlexTokenDispatcher``. Its experts apply the weights.

    Args:
        num_local_experts: Number of experts of this rank.
        local_expert_indices: Their ids. Automodel places experts in order of rank.
        config: Automodel's TokenDispatcherConfig. The number of experts and ``moe_router_topk`` are used.
        ep_group: Expert-parallel group.
        **options: Fields of a DispatcherConfig.

    Raises:
        ConfigError: An option is unknown or wrong.

    Automodel's config has no hidden size, so the first call of ``token_permutation2`` builds the Dispatcher. That call
    is collective.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        ep_group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        sizes = {"num_experts": config.num_moe_experts, "top_k": config.moe_router_topk}
        self._config = checked_options(**sizes, weights="experts", **options)
        self._ranks = Communicator(ep_group)  # which lets go of the group when the process ends
        self._dispatcher: Dispatcher | None = None
        self._sent: Dispatched | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AutomodelDispatcher:
        """Return a dispatcher for a copy of the layer, on the same ranks. Nothing is exchanged."""
        twin = copy.copy(self)
        twin._dispatcher, twin._sent = copy.deepcopy(self._dispatcher, memo), None
        return twin

    def dispatcher(self, hidden_size: int) -> Dispatcher:
        """Return the Dispatcher. The first call builds it, which is collective."""
        if self._dispatcher is None:
            self._dispatcher = build_dispatcher(self._config.replace(hidden_size=hidden_size), self._ranks.group)
        return self._dispatcher

    def token_permutation2(
        self, hidden_states: Tensor, num_local_tokens: int, token_probs: Tensor, token_indices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send rows to their experts. Automodel gives masked tokens the id -1, so they are not sent.

        Args:
            hidden_states: Rows (T, D).
            num_local_tokens: T.
            token_probs: Weights (T, K), with autograd.
            token_indices: Global expert ids (T, K).

        Returns:
            Rows (R, D); number of rows of each local expert; and weights (R,).

        Raises:
            ConfigError: The config has spare expert slots or ``chunks``, but these experts run only once, with
                their own weights.
        """
        if _runs_experts(self._config):
            raise ConfigError(
                "AutomodelDispatcher: balance and chunks need Automodel's "
                "GroupedExpertsDeepEP, got other experts. Set experts: torch_mm, without adapters, or leave balance "
                "and chunks out."
            )
        dispatcher = self.dispatcher(hidden_states.shape[-1])
        rows_TD = hidden_states.reshape(num_local_tokens, -1)
        sent = self._sent = dispatcher.dispatch(rows_TD, Routing(token_indices, token_probs), Rows())
        return sent.rows, sent.tokens_per_expert, sent.weights

    def token_unpermutation(self, hidden_states: Tensor) -> Tensor:
        """Send the outputs of experts back, and sum them for each token: (T, D)."""
        if self._sent is None or self._dispatcher is None:
            raise StateError(
                "AutomodelDispatcher.token_unpermutation: token_permutation2 must come before it, got nothing in "
                "flight. Call the two methods in turn."
            )
        sent, self._sent = self._sent, None
        if not len(sent.rows):  # Automodel then computes one row of zeros, so that every parameter gets a gradient
            hidden_states = hidden_states.reshape(-1, sent.rows.shape[1])[:0]
        return self._dispatcher.combine(hidden_states, sent)

    def get_pipeline_runtime_initializers(self, **sizes: Any) -> tuple[()]:
        """Return an empty result. Automodel asks here for HybridEP buffers that must exist before a pipeline step."""
        return ()
