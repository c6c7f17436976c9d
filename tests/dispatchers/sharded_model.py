"""A model with attention and a mixture of experts, whole in float64 without the library, and in pieces with it.

Eight ranks: 2 halves of the data x 2 context-parallel (zigzag) x 2 tensor-parallel with sequence parallelism. Experts
lie over the two halves of the data, so that ranks of one expert-parallel group hold different sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import THD, DispatcherConfig, Routing, build_dispatcher
from tests.dispatchers.layer import apply_experts

HIDDEN, EXPERTS, TOP_K = 16, 8, 2
DP, CP, TP = 2, 2, 2

# Real and padded lengths of each half's sequences; padded to multiples of 2 * cp * tp, and not all to the next one.
LENGTHS = [[5, 8, 1], [13, 0, 7]]
PADDED = [[8, 8, 16], [16, 8, 8]]


@dataclass(frozen=True)
class Half:
    """A data-parallel rank's packed sequences: where they begin, with and without padding, and their hidden states."""

    cu: list[int]
    cu_padded: list[int]
    x: Tensor

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(sequence, position) of each row; position beyond the length is padding."""
        padded = [end - begin for begin, end in zip(self.cu_padded, self.cu_padded[1:], strict=False)]
        return [(i, position) for i, length in enumerate(padded) for position in range(length)]

    @property
    def real(self) -> Tensor:
        lengths = [end - begin for begin, end in zip(self.cu, self.cu[1:], strict=False)]
        return torch.tensor([position < lengths[i] for i, position in self.tokens])


def half(index: int) -> Half:
    generator = torch.Generator().manual_seed(index)
    cu, cu_padded = ([0, *accumulate(lengths[index])] for lengths in (LENGTHS, PADDED))
    return Half(cu, cu_padded, torch.randn(cu_padded[-1], HIDDEN, generator=generator, dtype=torch.float64))


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {"query": (HIDDEN, HIDDEN), "router": (HIDDEN, EXPERTS), "experts": (EXPERTS, HIDDEN, HIDDEN)}
    made = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) / 4 for name, shape in shapes.items()}
    return {name: parameter.requires_grad_() for name, parameter in made.items()}


def held_rows(batch: Half, cp_rank: int, tp_rank: int) -> list[int]:
    """Rows of one rank, written out: chunk ``cp_rank`` and its mirror of each sequence, then half of all that."""
    rows: list[int] = []
    for begin, end in zip(batch.cu_padded, batch.cu_padded[1:], strict=False):
        chunk = (end - begin) // (2 * CP)
        for which in (cp_rank, 2 * CP - 1 - cp_rank):
            rows += range(begin + which * chunk, begin + (which + 1) * chunk)
    part = len(rows) // TP
    return rows[tp_rank * part : (tp_rank + 1) * part]


def attention(x_TD: Tensor, keys_SD: Tensor, query_DD: Tensor, sees_TS: Tensor) -> Tensor:
    """Causal within a sequence; what a row sees depends on where it really stands, so a wrong shard shows."""
    scores = (x_TD @ query_DD @ keys_SD.t() / HIDDEN**0.5).masked_fill(~sees_TS, -1e9)
    return torch.addmm(x_TD, scores.softmax(1), keys_SD)


def sees(batch: Half, rows: list[int], others: list[int]) -> Tensor:
    at, real = batch.tokens, batch.real.tolist()
    return torch.tensor(
        [[at[r][0] == at[o][0] and at[o][1] <= at[r][1] and (real[o] or o == r) for o in others] for r in rows]
    )


def route(h_TD: Tensor, router_DE: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(h_TD @ router_DE, 1), TOP_K)


def whole_gradients() -> dict[str, Tensor]:
    """Of the unsharded model: plain torch, a loop over experts."""
    held = parameters()
    inputs = [half(index).x.clone().requires_grad_() for index in range(DP)]
    total = sum(map(sum, LENGTHS))
    for index, x_TD in enumerate(inputs):
        batch = half(index)
        rows = list(range(len(x_TD)))
        h_TD = attention(x_TD, x_TD, held["query"], sees(batch, rows, rows))
        weights_TK, ids_TK = route(h_TD, held["router"])
        y_TD = h_TD
        for expert in range(EXPERTS):
            share_T = (weights_TK * (ids_TK == expert)).sum(1, keepdim=True)
            y_TD = y_TD + share_T * torch.tanh(h_TD @ held["experts"][expert])
        (y_TD[batch.real].square().sum() / total).backward()
    gradients = {name: parameter.grad for name, parameter in held.items()}
    gradients |= {f"x{index}": x.grad for index, x in enumerate(inputs)}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def sharded_gradients(rank: int, backend: str) -> dict[str, list[Any]]:
    """This rank's part, with replicated parameters summed over the ranks that hold them; as lists, for the way home."""
    torch.use_deterministic_algorithms(True)
    dp, cp, tp = rank // (CP * TP), rank // TP % CP, rank % TP
    batch, layout = half(dp), THD(half(dp).cu, half(dp).cu_padded)
    rows = held_rows(batch, cp, tp)
    sequence_group = _group_of(rank, [[d * CP * TP + i for i in range(CP * TP)] for d in range(DP)])
    expert_group = _group_of(rank, [[i, i + CP * TP] for i in range(CP * TP)])
    held, x_TD = parameters(), batch.x[rows].clone().requires_grad_()

    others = [row for c in range(CP) for t in range(TP) for row in held_rows(batch, c, t)]
    keys_SD = _gather(x_TD, sequence_group)
    h_TD = attention(x_TD, keys_SD, held["query"], sees(batch, rows, others))
    weights_TK, ids_TK = route(h_TD, held["router"])

    config = DispatcherConfig(backend=backend, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, pad_multiple=4)
    dispatcher = build_dispatcher(config, expert_group)
    plan = dispatcher.plan(layout.shard(cp, CP, "zigzag").shard(tp, TP), like=h_TD)
    sent = dispatcher.dispatch(h_TD, Routing(ids_TK, weights_TK), plan)
    experts_LDD = held["experts"].chunk(DP)[dp].detach().clone().requires_grad_()
    y_TD = h_TD + dispatcher.combine(apply_experts(sent, experts_LDD), sent)

    (y_TD[batch.real[rows]].square().sum() / sum(map(sum, LENGTHS))).backward()
    gradients = {name: held[name].grad for name in ("query", "router")} | {"experts": experts_LDD.grad, "x": x_TD.grad}
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    dist.all_reduce(found["query"])
    dist.all_reduce(found["router"])
    dist.all_reduce(found["experts"], group=sequence_group)
    return {name: gradient.tolist() for name, gradient in found.items()}


class _Gather(torch.autograd.Function):
    """Rows of all ranks of a group; the gradient of a rank's rows is summed over all that used them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x_TD) for _ in range(group.size())]
        dist.all_gather(parts, x_TD.detach().contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def _gather(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Gather.apply(x_TD, group)  # type: ignore[no-untyped-call]
    return result


def _group_of(rank: int, members: list[list[int]]) -> dist.ProcessGroup:
    mine: dist.ProcessGroup | None = None
    for ranks in members:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    assert mine is not None
    return mine
