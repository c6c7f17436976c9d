"""transformers' Qwen3.5-MoE on packed rows: gated delta nets on a padded batch made of them, experts on the rows.

Ranks run it in processes of their own; what they return is compared by the test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Plan, Routing
from moe_dispatch.integrations.packing import packing_for
from moe_dispatch.layouts import bshd_to_thd, thd_to_bshd
from moe_dispatch.replay import Cut as CutOfTable
from moe_dispatch.replay import RoutingTable, replayed

LENGTHS = (70, 5, 33, 1, 64, 18, 90, 7, 12, 41)  # the net works in chunks of 64
VOCABULARY, HIDDEN, EXPERTS, TOP_K = 31, 32, 8, 2
LAYERS = ("linear_attention", "full_attention", "linear_attention")
CONFIG = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, infer_layout=False)


@dataclass(kw_only=True)
class MicroBatch:
    """What the layers of one forward share; the loop sets it."""

    layout: THD | None = None
    plan: Plan | None = None
    replay: CutOfTable | None = None


@final
class PaddedForward(nn.Module):
    """A layer that takes [B, S, D], in a model whose rows are packed [1, T, D]."""

    def __init__(self, layer: nn.Module, micro_batch: MicroBatch) -> None:
        super().__init__()
        self.layer, self.micro_batch = layer, micro_batch

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layout = self.micro_batch.layout
        assert layout is not None
        x_BSD = thd_to_bshd(
            hidden_states[0],
            layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            cu_seqlens_padded=layout.cu_seqlens_padded,
        )
        y_BSD = self.layer(x_BSD)
        return bshd_to_thd(y_BSD, layout.cu_seqlens, cu_seqlens_padded=layout.cu_seqlens_padded)[None]


@final
class PackedExperts(Dispatcher):
    """The model's MoE block: its router and shared expert as they are, a rank's part of its experts."""

    def __init__(self, block: Any, micro_batch: MicroBatch, group: dist.ProcessGroup, number: int) -> None:
        super().__init__(CONFIG, group, name=f"layers.{number}")
        self.block, self.micro_batch, self.number = block, micro_batch, number
        held = EXPERTS // group.size()
        mine = slice(group.rank() * held, (group.rank() + 1) * held)
        block.experts.num_experts = held
        for name, weight in block.experts.named_parameters():
            setattr(block.experts, name, nn.Parameter(weight[mine].clone()))

    def run_experts(self, sent: Dispatched) -> Tensor:
        ids_R = torch.arange(len(sent.tokens_per_expert)).repeat_interleave(sent.tokens_per_expert)
        ones_R1 = sent.rows.new_ones(len(ids_R), 1)
        rows_RD: Tensor = self.block.experts(sent.rows, ids_R[:, None], ones_R1)
        return rows_RD

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        logits_TE, weights_TK, ids_TK = self.block.gate(x)
        routing = Routing(ids_TK, weights_TK)
        if (cut := self.micro_batch.replay) is not None:
            scores_TE = logits_TE.softmax(1, dtype=torch.float)
            routing = replayed(cut.routing_for(self.number), scores_TE, normalize=True, own_ids_TK=ids_TK)
        shared = torch.sigmoid(self.block.shared_expert_gate(x)) * self.block.shared_expert(x)
        y: Tensor = super().forward(x, routing, self.micro_batch.plan) + shared
        return y


def make_model(dtype: torch.dtype) -> Any:
    """The untouched model, seeded."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        initializer_range=0.2,  # so that routing is not a tie, and what one layer does shows in the next
        experts_implementation="eager",
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return Qwen3_5MoeForCausalLM(config).to(dtype)


def convert(model: Any, micro_batch: MicroBatch, group: dist.ProcessGroup) -> list[PackedExperts]:
    """Packed rows in, packed rows out; its MoE layers."""
    layers = model.model.layers
    packing = packing_for(model.config.model_type, framework="transformers")
    for number, layer in enumerate(layers):
        if layer.block_type == "linear_attention" and not packing.packed:
            layer.linear_attn = PaddedForward(layer.linear_attn, micro_batch)
        layer.mlp = PackedExperts(layer.mlp, micro_batch, group, number)
    return [layer.mlp for layer in layers]


class _Float64ForFloat32(TorchFunctionMode):
    """Where the model's code asks for float32, it gets float64: so a float64 model is one in every place."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def as_wide_as(dtype: torch.dtype) -> Any:
    return _Float64ForFloat32() if dtype == torch.float64 else nullcontext()


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the sequences are divided, and how far they are padded.

    Attributes:
        ranks: of each rank, its micro-batches; of each, the sequences.
        longest: S of the padded batch; the longest sequence of the micro-batch if None.
        owned_multiple: packed sequences have gaps behind them, up to a multiple of this.
        mean: the loss is averaged over each micro-batch: what must not be done.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    longest: int | None = None
    owned_multiple: int = 1
    mean: bool = False


EVEN = (((0, 1, 2),), ((3, 4),), ((5, 6, 7),), ((8, 9),))
CUTS = {
    "a micro-batch for each rank": Cut(ranks=EVEN),
    "padded further": Cut(ranks=EVEN, longest=200),
    "gaps between packed sequences": Cut(ranks=EVEN, owned_multiple=16),
    "a sequence for each micro-batch": Cut(ranks=(((0,), (4,), (8,)), ((1,), (5,), (9,)), ((2,), (6,)), ((3,), (7,)))),
    "by a budget of 100 tokens": Cut(ranks=(((0, 1, 7), (2, 9)), ((4, 5, 8),), ((6, 3),), ())),
    "all on one rank, in another order": Cut(ranks=(((9, 3, 6, 1, 8, 0, 2, 7, 5, 4),), (), (), ())),
    "a mean for each micro-batch": Cut(ranks=(((0, 1, 7), (2, 9)), ((4, 5, 8),), ((6, 3),), ()), mean=True),
}

REPLAYED = ("gaps between packed sequences", "by a budget of 100 tokens")
JOBS = {
    torch.float32: ["a micro-batch for each rank", "a sequence for each micro-batch"],
    torch.float64: list(CUTS),
}

UNTOUCHED = [(torch.float32, False), (torch.float64, False), (torch.float64, True)]  # of the first ranks; dtype, forced


def tokens_of(sequence: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + sequence)
    return torch.randint(VOCABULARY, (LENGTHS[sequence],), generator=generator)


def packed(sequences: Sequence[int], cut: Cut) -> tuple[Tensor, Tensor, Tensor, THD]:
    """Ids, targets (-1 for none) and positions, (T,), and the layout. Without a sequence: one row that is no token."""
    lengths = [LENGTHS[sequence] for sequence in sequences] or [0]
    owned = [max(1, -(-length // cut.owned_multiple) * cut.owned_multiple) for length in lengths]
    ids, targets = torch.full((sum(owned),), VOCABULARY - 1), torch.full((sum(owned),), -1)
    starts = torch.tensor([0, *owned]).cumsum(0)
    for sequence, start in zip(sequences, starts.tolist(), strict=False):
        tokens = tokens_of(sequence)
        ids[start : start + len(tokens)] = tokens
        targets[start : start + len(tokens) - 1] = tokens[1:]
    positions = torch.cat([torch.arange(length) for length in owned])
    longest = max(cut.longest or max(lengths), 1)
    return ids, targets, positions, THD(torch.tensor([0, *lengths]).cumsum(0), starts, longest)


def loss_of(logits_TV: Tensor, targets_T: Tensor, cut: Cut) -> Tensor:
    """Summed over targets, as a part of all targets of the step."""
    total = F.cross_entropy(logits_TV, targets_T, ignore_index=-1, reduction="sum")
    targets = sum(LENGTHS) - len(LENGTHS)
    return total / ((targets_T >= 0).sum().clamp(min=1) if cut.mean else targets)


def routing_of_an_engine(sequence: int) -> Tensor:
    """Ids (S - 1, L, K) that an engine gave, without the last token: not what the router would choose."""
    generator = torch.Generator().manual_seed(200 + sequence)
    return torch.rand(LENGTHS[sequence] - 1, len(LAYERS), EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]


def table_of_an_engine() -> RoutingTable:
    ids = {sequence: routing_of_an_engine(sequence) for sequence in range(len(LENGTHS))}
    return RoutingTable(ids, num_experts=EXPERTS, last_missing=True)


def step(
    cut: Cut, dtype: torch.dtype, group: dist.ProcessGroup, *, table: RoutingTable | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of one step over all ranks, by the untouched model's names; tokens that each expert saw."""
    model, micro_batch = make_model(dtype), MicroBatch()
    layers = convert(model, micro_batch, group)
    micro_batches = cut.ranks[group.rank()]
    for turn in range(max(map(len, cut.ranks))):  # ranks with fewer take part without tokens
        sequences = micro_batches[turn] if turn < len(micro_batches) else ()
        ids, targets, positions, layout = packed(sequences, cut)
        micro_batch.layout, micro_batch.plan = layout, layers[0].plan(layout)
        if table is not None:
            micro_batch.replay = table.cut(layout, sequences or [None])
        loss_of(model(ids[None], position_ids=positions[None], use_cache=False).logits[0], targets, cut).backward()
    seen = layers[0].metrics(gather=True).real_tokens_per_expert
    if table is not None:
        table.check_used(group=group)
        assert min(layers[0].metrics(gather=True).replay_drift.values()) > 0.3
    gradients = dict(gathered(model, group))
    for layer in layers:
        layer.close()
    return gradients, seen.tolist()


def gathered(model: nn.Module, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Summed over ranks, or where each holds a part, put together."""
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        plain = name.replace(".block.", ".").replace("linear_attn.layer.", "linear_attn.")
        if ".experts." in name:
            parts = [torch.empty_like(weight.grad) for _ in range(group.size())]
            dist.all_gather(parts, weight.grad, group=group)
            yield plain, torch.cat(parts)
        else:
            dist.all_reduce(weight.grad, group=group)
            yield plain, weight.grad


def untouched(dtype: torch.dtype, *, forced: bool = False) -> dict[str, Tensor]:
    """Gradients of the untouched model on one sequence at a time: nothing is packed, padded or sent.

    If ``forced``, its routers are made to choose what the engine chose.
    """
    model = make_model(dtype)
    for sequence in range(len(LENGTHS)):
        for number, layer in enumerate(model.model.layers):
            if forced:
                layer.mlp.gate.forward = partial(forced_gate, layer.mlp.gate, routing_of_an_engine(sequence)[:, number])
        ids = tokens_of(sequence)
        targets = torch.cat([ids[1:], torch.tensor([-1])])
        loss_of(model(ids[None]).logits[0], targets, CUTS["a micro-batch for each rank"]).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def forced_gate(gate: Any, ids_SK: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The model's router, with given experts in all positions but the last."""
    logits_SE = F.linear(hidden_states.reshape(-1, HIDDEN), gate.weight)
    scores_SE = logits_SE.softmax(1, dtype=torch.float)
    ids_SK = torch.cat([ids_SK, scores_SE[-1:].topk(TOP_K).indices])
    weights_SK = scores_SE.gather(1, ids_SK)
    return logits_SE, weights_SK / weights_SK.sum(1, keepdim=True), ids_SK


def refusals() -> dict[str, str]:
    """What the untouched model does with packed rows, told of the sequences and not."""
    model = make_model(torch.float32)
    ids, _, positions, layout = packed((1, 2), CUTS["a micro-batch for each rank"])
    cu = torch.as_tensor(layout.cu_seqlens, dtype=torch.int32)
    try:
        told = str(model(ids[None], position_ids=positions[None], cu_seq_lens_q=cu, use_cache=False))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    together = model(ids[None], position_ids=positions[None], use_cache=False).logits[0, LENGTHS[1] :]
    apart = model(tokens_of(2)[None]).logits[0]
    return {"told": told, "not told": f"{(together - apart).norm() / apart.norm():.3f}"}


def rank_body(rank: int) -> dict[str, Any]:
    """Everything the test looks at, in one start of the processes. Ranks share the runs of the untouched model."""
    group = dist.group.WORLD
    assert group is not None
    told, handler = list[str](), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_dispatch").addHandler(handler)
    found: dict[str, Any] = {}
    for dtype, cuts in JOBS.items():
        with as_wide_as(dtype):
            found[str(dtype)] = {name: step(CUTS[name], dtype, group) for name in cuts}
    with as_wide_as(torch.float64):
        found["replayed"] = {
            name: step(CUTS[name], torch.float64, group, table=table_of_an_engine()) for name in REPLAYED
        }
    if rank == len(UNTOUCHED):
        found["refusals"] = refusals()
    else:
        dtype, forced = UNTOUCHED[rank]
        with as_wide_as(dtype):
            found["untouched"] = untouched(dtype, forced=forced)
    found["announced"] = told
    return {name: value for name, value in found.items() if rank == 0 or name in ("untouched", "refusals", "announced")}
