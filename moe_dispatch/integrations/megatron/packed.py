"""Packed sequences, as Megatron carries them: ``PackedSeqParams`` on their way through transformer layers."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from moe_dispatch.integrations.megatron.core import MoELayer, TransformerBlock, TransformerLayer
from moe_dispatch.integrations.megatron.dispatcher import MegatronDispatcher
from moe_dispatch.layouts import THD, Layout
from moe_dispatch.types import Plan


def follow_packed_sequences(model: nn.Module) -> None:
    """Let a model's ``packed_seq_params`` reach its MoE layers; ``convert`` has done so, for specs it is to be called.

    Rows in the gaps between padded sequences become padding to every transformer layer with an MoE layer: its router
    leaves them out of its losses, as it does for a ``padding_mask``, and they go to no expert. And the MoE layers of a
    transformer block settle their sizes once per forward, with packed sequences or without.

    Cost: with gaps, a few small kernels per layer; no host sync.
    """
    for module in model.modules():
        if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
            if not any(hook is _mark_gaps for hook in module._forward_pre_hooks.values()):
                module.register_forward_pre_hook(_mark_gaps, with_kwargs=True)
        elif isinstance(module, TransformerBlock):
            _share_plans(module)


def packed_layout(params: Any, *, tp_group: Any = None, cp_group: Any = None) -> Layout:
    """The layout of the rows of this rank.

    Args:
        params: PackedSeqParams; their cu_seqlens are of whole sequences.
        tp_group: where sequence parallelism divides the rows, else None.
        cp_group: of context parallelism, or None.
    """
    layout: Layout = THD(params.cu_seqlens_q, params.cu_seqlens_q_padded)
    if cp_group is not None:
        layout = layout.shard(cp_group.rank(), cp_group.size(), "zigzag")
    return layout if tp_group is None else layout.shard(tp_group.rank(), tp_group.size())


def _mark_gaps(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a transformer layer's forward, and its recomputation, which is why a tensor of the call carries it."""
    params = kwargs.get("packed_seq_params")
    if params is None or params.qkv_format != "thd" or params.cu_seqlens_q_padded is None:
        return args, kwargs
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    groups = layer.pg_collection
    layout = packed_layout(
        params,
        tp_group=groups.tp if layer.config.sequence_parallel else None,
        cp_group=params.cp_group or getattr(groups, "cp", None),
    )
    num_rows = layout.rows_of(hidden.shape)
    layout.check(num_rows)
    valid_T = layout.valid_T(num_rows, hidden.device)
    assert valid_T is not None  # there is a cu_seqlens_q_padded
    padding: Tensor = ~valid_T.unsqueeze(0)
    given = kwargs.get("padding_mask")
    return args, {**kwargs, "padding_mask": padding if given is None else given.bool() | padding}


@final
class _PlanScope:
    """The plans of a block's MoE layers, from the beginning to the end of a forward.

    A recomputation runs outside of it, and settles sizes layer by layer: what another micro-batch agreed on is not for
    it.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    def open(self, block: Any, args: Any) -> None:
        self._set({})

    def close(self, block: Any, args: Any, output: Any) -> None:
        self._set(None)

    def _set(self, plans: dict[str, Plan] | None) -> None:
        for layer in self._layers:
            if isinstance(layer.token_dispatcher, MegatronDispatcher):
                layer.token_dispatcher.plans = plans


def _share_plans(block: Any) -> None:
    if any(isinstance(getattr(hook, "__self__", None), _PlanScope) for hook in block._forward_pre_hooks.values()):
        return
    chunks = [getattr(block.config, f"mlp_chunks_for_{phase}", 1) for phase in ("training", "prefill")]
    if max(chunks) > 1:
        return  # an MoE layer is called in pieces, and how many rows each has is no matter of agreement
    scope = _PlanScope([module for module in block.modules() if isinstance(module, MoELayer)])
    block.register_forward_pre_hook(scope.open)
    block.register_forward_hook(scope.close, always_call=True)
