"""Case 3: layers that refuse packed input, in a model whose data stays packed. areal-project/AReaL#1384.

The model is transformers' Qwen3.5-MoE: gated delta nets on a padded batch made of the rows, experts on the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_dispatch import THD, Dispatched, Dispatcher, Plan, Routing
from moe_dispatch.integrations.packing import packing_for
from moe_dispatch.integrations.transformers import config_for
from moe_dispatch.layouts import bshd_to_thd, thd_to_bshd
from tests.integration.needs import needs
from tests.integration.transformers.models import EXPERTS, LAYERS, TOP_K, VOCABULARY, build
from tests.pages import flat, relative
from tests.ranks import run_ranks

pytestmark = [
    *needs("transformers"),
    pytest.mark.skipif(find_spec("fla") is not None, reason="with flash-linear-attention nothing is refused"),
]

FAMILY, RANKS = "qwen3_5_moe_text", 4
LENGTHS = (70, 5, 33, 1, 64, 18, 90, 7, 12, 41)  # the net works in chunks of 64
Dealt = tuple[tuple[tuple[int, ...], ...], ...]  # of each rank, its micro-batches; of each, the sequences
BY_BUDGET: Dealt = (((0, 1, 7), (2, 9)), ((4, 5, 8),), ((6, 3),), ())
# Packed sequences may have gaps behind them, up to a multiple, and the padded batch may be longer than its sequences.
CUTS: dict[str, tuple[Dealt, int, int | None]] = {
    "a micro-batch for each rank, padded further": ((((0, 1, 2),), ((3, 4),), ((5, 6, 7),), ((8, 9),)), 1, 200),
    "by a budget of 100 tokens, with gaps": (BY_BUDGET, 16, None),
    "all on one rank, in another order": ((((9, 3, 6, 1, 8, 0, 2, 7, 5, 4),), (), (), ()), 1, None),
}


@final
class PaddedForward(nn.Module):
    """A layer that takes [B, S, D], in a model whose rows are packed [1, T, D]."""

    def __init__(self, layer: nn.Module, micro_batch: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.micro_batch = layer, micro_batch

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layout: THD = self.micro_batch["layout"]
        owned: dict[str, Any] = {"cu_seqlens_padded": layout.cu_seqlens_padded}
        x_BSD = thd_to_bshd(hidden_states[0], layout.cu_seqlens, max_seqlen=layout.max_seqlen, **owned)
        return bshd_to_thd(self.layer(x_BSD), layout.cu_seqlens, **owned)[None]


@final
class PackedExperts(Dispatcher):
    """The model's MoE block: its router and shared expert as they are, a rank's part of its experts."""

    def __init__(self, block: Any, config: Any, micro_batch: dict[str, Any], group: dist.ProcessGroup) -> None:
        super().__init__(config, group)
        self.block, self.micro_batch = block, micro_batch
        block.experts.num_experts = EXPERTS // RANKS
        for name, weight in block.experts.named_parameters():
            setattr(block.experts, name, nn.Parameter(weight.chunk(RANKS)[group.rank()].clone()))

    def run_experts(self, sent: Dispatched) -> Tensor:
        ids_R = torch.arange(len(sent.tokens_per_expert)).repeat_interleave(sent.tokens_per_expert)
        rows_RD: Tensor = self.block.experts(sent.rows, ids_R[:, None], sent.rows.new_ones(len(ids_R), 1))
        return rows_RD

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        _, weights_TK, ids_TK = self.block.gate(x)
        plan: Plan = self.micro_batch["plan"]
        shared = torch.sigmoid(self.block.shared_expert_gate(x)) * self.block.shared_expert(x)
        y: Tensor = super().forward(x, Routing(ids_TK, weights_TK), plan) + shared
        return y


def untouched() -> Any:
    model = build(FAMILY, max_position_embeddings=512)
    model.set_experts_implementation("eager")
    return model


def tokens_of(sequence: int) -> Tensor:
    return torch.randint(VOCABULARY, (LENGTHS[sequence],), generator=torch.Generator().manual_seed(100 + sequence))


def packed(sequences: Sequence[int], multiple: int, longest: int | None) -> tuple[Tensor, Tensor, Tensor, THD]:
    """Ids, targets (-1 for none) and positions, (T,), and the layout. Without a sequence: one row that is no token."""
    lengths = [LENGTHS[sequence] for sequence in sequences] or [0]
    owned = [max(1, -(-length // multiple) * multiple) for length in lengths]
    ids, targets = torch.zeros(sum(owned), dtype=torch.int64), torch.full((sum(owned),), -1)
    starts = torch.tensor([0, *owned]).cumsum(0)
    for sequence, start in zip(sequences, starts.tolist(), strict=False):
        tokens = tokens_of(sequence)
        ids[start : start + len(tokens)] = tokens
        targets[start : start + len(tokens) - 1] = tokens[1:]
    positions = torch.cat([torch.arange(length) for length in owned])
    return ids, targets, positions, THD(torch.tensor([0, *lengths]).cumsum(0), starts, longest or max(*lengths, 1))


def loss_of(logits_TV: Tensor, targets_T: Tensor, *, mean: bool = False) -> Tensor:
    """Summed over targets, as a part of all targets of the step; ``mean``: of the micro-batch, as must not be done."""
    total = F.cross_entropy(logits_TV, targets_T, ignore_index=-1, reduction="sum")
    return total / ((targets_T >= 0).sum().clamp(min=1) if mean else sum(LENGTHS) - len(LENGTHS))


def step(model: Any, cut: str, group: dist.ProcessGroup, *, mean: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of one step on this rank, by the untouched model's names; tokens that each expert saw on all ranks."""
    model, micro_batch, (dealt, multiple, longest) = copy.deepcopy(model), dict[str, Any](), CUTS[cut]
    packing = packing_for(model.config.model_type, framework="transformers")
    config = config_for(model.config, backend="alltoall")
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn") and not packing.packed:
            layer.linear_attn = PaddedForward(layer.linear_attn, micro_batch)
        layer.mlp = PackedExperts(layer.mlp, config, micro_batch, group)
    experts, mine = [layer.mlp for layer in model.model.layers], dealt[group.rank()]
    for turn in range(max(map(len, dealt))):  # ranks with fewer micro-batches take part without tokens
        ids, targets, positions, layout = packed(mine[turn] if turn < len(mine) else (), multiple, longest)
        micro_batch |= {"layout": layout, "plan": experts[0].plan(layout)}
        logits = model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        loss_of(logits, targets, mean=mean).backward()
    seen = experts[0].metrics(gather=True).real_tokens_per_expert.tolist()
    for layer in experts:
        layer.close()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name.replace(".block.", ".").replace("attn.layer.", "attn."): grad for name, grad in grads.items()}, seen


def gradients(cut: str, *, mean: bool = False) -> tuple[dict[str, Tensor], list[int]]:
    """Of all ranks: summed, or where each holds a part, put together; tokens that each expert saw."""
    model = untouched()
    by_rank = run_ranks(lambda group: step(model, cut, group, mean=mean), RANKS)
    parts = {name: [grads[name] for grads, _ in by_rank] for name in by_rank[0][0]}
    return {name: torch.cat(of) if ".experts." in name else sum(of) for name, of in parts.items()}, by_rank[0][1]  # type: ignore[misc]


@pytest.fixture(scope="module")
def wanted() -> dict[str, Tensor]:
    """Gradients of the untouched model on one sequence at a time: nothing is packed, padded or sent."""
    model = untouched()
    for tokens in map(tokens_of, range(len(LENGTHS))):
        loss_of(model(tokens[None]).logits[0, :-1], tokens[1:]).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_by_hand_packed_rows_are_refused_or_mixed() -> None:
    model = untouched()
    ids, _, positions, layout = packed((1, 2), 1, None)
    ends = torch.as_tensor(layout.cu_seqlens, dtype=torch.int32)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids[None], position_ids=positions[None], cu_seq_lens_q=ends, use_cache=False)
    together = model(ids[None], position_ids=positions[None], use_cache=False).logits[0, LENGTHS[1] :]
    apart = model(tokens_of(2)[None]).logits[0]
    assert relative(together, apart) > 0.1, "the second sequence should have seen the first"


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_do_not_depend_on_how_micro_batches_are_cut(cut: str, wanted: dict[str, Tensor]) -> None:
    found, seen = gradients(cut)
    assert found.keys() == wanted.keys()
    assert relative(flat(found), flat(wanted)) < 3e-6  # sums of other lengths round differently
    # Padding is no token: neither what attention is padded to nor gaps reach a router's statistics.
    assert sum(seen) == sum(LENGTHS) * TOP_K * LAYERS


def test_a_mean_for_each_micro_batch_does_depend_on_it(wanted: dict[str, Tensor]) -> None:
    """What the loop has to do itself; and the comparison above would see it."""
    found, _ = gradients("by a budget of 100 tokens, with gaps", mean=True)
    assert relative(flat(found), flat(wanted)) > 0.1
