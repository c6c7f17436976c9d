"""Replay a RoutingTable in the routers of a Megatron model.

Megatron's routers ask an object for their experts, ``router.router_replay``. Megatron's own object keeps queues of ids.
The object of this module looks ids up by sequence, position and layer, so recomputation and pipelines need no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from moe_dispatch.capabilities.replay.entries import NOWHERE, UNKNOWN
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.megatron.core import MoELayer, TransformerBlock
from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.integrations.megatron.layers import packed_layout
from moe_dispatch.integrations.megatron.settings import overlaps
from moe_dispatch.replay import Cut, RoutingTable, SequenceId, replayed

_NO_TOP_K = ("sinkhorn", "quantile_balancing")  # kinds of load balancing that choose experts without a top-k


@final
class RoutingReplay:
    """The replay of a table in all MoE layers of a model. Call ``micro_batch`` before each forward.

    The weights are made by Megatron's router from its own scores at the replayed experts, so the router keeps its
    gradient. Rows that the table does not know, and padding, take the router's own choice. Layers for multi-token
    prediction are not replayed.

    Args:
        model: A GPTModel, wrapped or not, or the chunks of this pipeline stage.
        table: The table. Its layers are the MoE layers of the whole model, from 0.

    Raises:
        ConfigError: The model has no MoE layers or a router without a top-k, the table is of another model, or
            pipeline stages recompute MoE layers alone.
        InputError: The table has entries in which only some slots name an expert.

    Cost: each router computes its own choice too.
    """

    def __init__(self, model: nn.Module | Iterable[nn.Module], table: RoutingTable) -> None:
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        blocks = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerBlock)]
        layers = [layer for block in blocks for layer in block.layers if isinstance(layer.mlp, MoELayer)]
        if not layers:
            raise ConfigError(
                "RoutingReplay: the model has no MoE layers in a TransformerBlock. Pass the chunks of this stage, and "
                "make no replay on a stage of dense layers."
            )
        config = layers[0].config
        _check_table(config, table)
        self._table = table
        self._readers = [_Reader(layer, _moe_number(layer)) for layer in layers]
        absent = sorted({reader.number for reader in self._readers} - {*table.layers})
        if absent:
            raise ConfigError(
                f"RoutingReplay: the table must have all MoE layers of this stage, got none for {absent}, and "
                f"{list(table.layers)} in the table. Count MoE layers of the whole model from 0."
            )
        # Megatron's overlapped schedule calls the attention of a layer, but not the layer.
        called = [reader.layer.self_attention if overlaps(config) else reader.layer for reader in self._readers]
        self._hooks = [
            module.register_forward_pre_hook(reader.take_cut, with_kwargs=True)
            for module, reader in zip(called, self._readers, strict=True)
        ]
        for reader in self._readers:
            reader.router_before = reader.layer.mlp.router.router_replay
            reader.layer.mlp.router.router_replay = reader

    def micro_batch(self, packed_seq_params: Any, sequences: Sequence[SequenceId | None], *, step: int = 0) -> None:
        """Name the sequences of a micro-batch. The names stay with its ``packed_seq_params``, also in a recomputation.

        Args:
            packed_seq_params: The PackedSeqParams with which the model will be called.
            sequences: The name of each sequence, in order. None stands for a sequence that the table does not have,
                such as one of padding.
            step: Number of the training step, for ``RoutingTable.check_used``.

        Cost: the first layer cuts the table for all layers. If the offsets are on a device, it reads them, which is a
        host sync.
        """
        numbers = tuple(sorted({reader.number for reader in self._readers}))
        packed_seq_params.moe_dispatch_replay = _Named(self._table, tuple(sequences), numbers, step)

    def close(self) -> None:
        """Give the routers back what they had before."""
        for hook in self._hooks:
            hook.remove()
        for reader in self._readers:
            reader.layer.mlp.router.router_replay = reader.router_before


@final
class _Named:
    """The names of a micro-batch, and its cut once a layer has made it."""

    def __init__(
        self, table: RoutingTable, sequences: tuple[SequenceId | None, ...], numbers: tuple[int, ...], step: int
    ) -> None:
        self._table, self._sequences, self._numbers, self._step = table, sequences, numbers, step
        self._cut: Cut | None = None

    def cut(self, layer: Any, params: Any, hidden: Tensor) -> Cut:
        if self._cut is None:
            layout = packed_layout(layer, params, hidden, host=True)
            names = [*self._sequences, None]  # the layout has one more sequence, of the rows behind the last one
            self._cut = self._table.cut(layout, names, like=hidden, layers=self._numbers, step=self._step)
        return self._cut


@final
class _Reader:
    """The ``router_replay`` of one router."""

    def __init__(self, layer: Any, number: int) -> None:
        self.layer, self.number = layer, number
        self.router_before: Any = None
        self._cut: Cut | None = None

    def take_cut(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the cut that belongs to the arguments of this call, as a forward pre-hook of the layer or a part."""
        params = kwargs.get("packed_seq_params")
        named = getattr(params, "moe_dispatch_replay", None)
        if named is None:
            raise StateError(
                "RoutingReplay: forward() was called without replay.micro_batch(...) before it. Call micro_batch with "
                "the packed_seq_params of the forward, or call replay.close()."
            )
        self._cut = named.cut(self.layer, params, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids (T, K) of the experts. Megatron's router calls this instead of its own top-k."""
        assert default_compute_topk is not None
        assert self._cut is not None  # the layer that calls the router took it
        with torch.no_grad():
            own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids_TK = self._cut.routing_for(self.number)
        # A row of padding must name experts too. It is taken out afterwards, by the padding mask.
        routing = replayed(torch.where(ids_TK == NOWHERE, UNKNOWN, ids_TK), scores, normalize=False, own_ids_TK=own_TK)
        dispatcher = self.layer.mlp.token_dispatcher
        if isinstance(dispatcher, MegatronDispatcher):
            dispatcher.drift = routing.drift
        return routing.topk_weights, routing.topk_ids


def _check_table(config: Any, table: RoutingTable) -> None:
    for name, asked, found in (
        ("num_moe_experts", config.num_moe_experts, table.num_experts),
        ("moe_router_topk", config.moe_router_topk, table.top_k),
    ):
        if asked != found:
            raise ConfigError(
                f"RoutingReplay: the table must have the {name} of the model ({asked}), got {found}. Record the "
                "routing of this model."
            )
    kind = config.moe_router_load_balancing_type
    if getattr(config, "moe_router_fusion", False) or kind in _NO_TOP_K:
        raise ConfigError(
            "RoutingReplay: the router must choose experts by its own top-k, got moe_router_fusion="
            f"{config.moe_router_fusion} and moe_router_load_balancing_type={kind!r}. Set moe_router_fusion=False and "
            "another kind of load balancing."
        )
    selective = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    if selective and config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "RoutingReplay: on pipeline stages, recomputation must call whole layers, got recompute_modules="
            f"{config.recompute_modules}. An MoE layer alone would replay the ids of a later micro-batch. Leave 'moe' "
            "out, or set recompute_granularity='full'."
        )
    table.check_slots()


def _moe_number(layer: Any) -> int:
    """Return the number of a layer among the MoE layers of the whole model, from 0."""
    frequency, before = layer.config.moe_layer_freq, layer.layer_number - 1
    if isinstance(frequency, int):
        return len(range(0, before, frequency))
    return sum(1 for value in frequency[:before] if value)
