"""The calls of other dispatchers, each beside the calls of this library that replace it, and the experts of both.

docs/your-model.md has the names of both sides in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch import SBHD, DispatcherConfig, Routing, build_dispatcher

EXPERTS, TOP_K = 8, 2
MoE = Callable[[Tensor, Tensor, Tensor], Tensor]


@final
class Layer:
    """The experts of one rank: each is ``tanh(rows @ matrix)``."""

    def __init__(self, rank: int, ranks: int, *, hidden: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(99)
        matrices_EDD = torch.randn(EXPERTS, hidden, hidden, generator=generator) / hidden**0.5
        self.matrices_LDD = matrices_EDD.chunk(ranks)[rank].to(dtype).requires_grad_()

    @staticmethod
    def inputs(rank: int, tokens: int, *, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, ids and float32 weights of one rank."""
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
        return x, ids, torch.rand(tokens, TOP_K, generator=generator)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.matrices_LDD[index])

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([self.expert(index, part) for index, part in enumerate(parts)])

    def dense(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What a layer with all experts on one rank computes, summed in float32."""
        y = torch.zeros(x.shape)
        for index in range(EXPERTS):
            weight_T1 = (weights * (ids == index)).sum(1, keepdim=True)
            y = y + self.expert(index, x).float() * weight_T1
        return y.to(x.dtype)


def megatron(layer: Layer, *, transformer_config: Any, pg_collection: Any) -> MoE:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    held, rank = EXPERTS // pg_collection.ep.size(), pg_collection.ep.rank()
    mine = list(range(rank * held, (rank + 1) * held))
    dispatcher = MoEAlltoAllTokenDispatcher(held, mine, config=transformer_config, pg_collection=pg_collection)

    def moe(x: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        rows, probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        rows = layer.experts(rows, counts) * probs.unsqueeze(1)
        rows = dispatcher.combine_preprocess(rows)
        rows = dispatcher.token_combine(rows)
        y: Tensor = dispatcher.combine_postprocess(rows)
        return y

    return moe


def instead_of_megatron(layer: Layer, ep_group: Any) -> MoE:
    dispatcher = build_dispatcher(_config(layer, weights="experts"), ep_group)

    def moe(x: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing.from_map(routing_map, probs, top_k=TOP_K), SBHD())
        assert sent.weights is not None
        return dispatcher.combine(layer.experts(sent.rows, sent.tokens_per_expert) * sent.weights.unsqueeze(1), sent)

    return moe


def torchtitan(layer: Layer, ep_mesh: Any) -> MoE:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K).build()
    dispatcher.wire_meshes(ep_mesh=ep_mesh)

    def moe(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, counts)
        y: Tensor = dispatcher.combine(layer.experts(rows, counts), metadata, x)
        return y

    return moe


def instead_of_torchtitan(layer: Layer, ep_mesh: Any) -> MoE:
    dispatcher = build_dispatcher(_config(layer), ep_mesh)

    def moe(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, scores))
        return dispatcher.combine(layer.experts(sent.rows, sent.tokens_per_expert), sent)

    return moe


def deep_ep(layer: Layer, ep_group: Any) -> MoE:
    """DeepEP v1.2.1, where the caller groups the rows and multiplies them by the weights."""
    import deep_ep

    buffer = deep_ep.Buffer(ep_group, num_nvl_bytes=64 << 20)

    def moe(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        rows, local_ids, local_weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
        )
        sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for index in range(EXPERTS // ep_group.size()):
            row, slot = (local_ids == index).nonzero(as_tuple=True)
            outputs = layer.expert(index, rows[row]).float() * local_weights[row, slot].unsqueeze(1)
            sums.index_add_(0, row, outputs)
        y, _, _ = buffer.combine(sums.to(x.dtype), handle)
        result: Tensor = y
        return result

    return moe


def instead_of_deep_ep(layer: Layer, ep_group: Any) -> MoE:
    dispatcher = build_dispatcher(_config(layer, backend={"name": "deepep", "emulate": "v1.2.1"}), ep_group)

    def moe(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        return dispatcher.combine(layer.experts(sent.rows, sent.tokens_per_expert), sent)

    return moe


def _config(layer: Layer, **fields: Any) -> DispatcherConfig:
    hidden = layer.matrices_LDD.shape[1]
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": hidden}
    return DispatcherConfig(**{"backend": "alltoall", **sizes, **fields})


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if not got.numel():
        return 0.0
    return float((got - want).detach().abs().max() / want.detach().abs().max())
