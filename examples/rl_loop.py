"""A reinforcement-learning loop on packed sequences: rollouts of any length, cut by a token budget on each rank.

Run it on one rank with ``python examples/rl_loop.py``. ``MOE_DISPATCH_BACKEND`` changes the backend of the whole loop.
A test runs it on 4 ranks. docs/integrations/trainers.md explains the rules that the loop follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Plan, Routing
from moe_dispatch.layouts import bshd_to_thd, padded_length, sequence_multiple, thd_to_bshd

Group = dist.ProcessGroup | None
VOCABULARY, HIDDEN, EXPERTS = 29, 32, 8
# Tensor and context parallelism need sequences of such lengths. The dispatcher itself needs no padding.
MULTIPLE = sequence_multiple(tp=4, sequence_parallel=True)


def load_config() -> DispatcherConfig:
    """Return a config that names no backend: the environment does. A call without a layout is an error."""
    return DispatcherConfig.load(num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, infer_layout=False)


class MoE(Dispatcher):
    def __init__(self, config: DispatcherConfig, group: Group, name: str) -> None:
        super().__init__(config, group, name=name)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        own = torch.randn(EXPERTS, HIDDEN, HIDDEN).chunk(self.ep_size)[self.ep_rank]
        self.weight_EDD = nn.Parameter(own * HIDDEN**-0.5)

    def run_experts(self, sent: Dispatched) -> Tensor:
        return torch.tanh(sent.grouped_mm(sent.rows, self.weight_EDD))

    def layer(self, x: Tensor, plan: Plan) -> Tensor:
        weights_TK, ids_TK = self.router(x).softmax(1).topk(2)
        y: Tensor = self(x, Routing(ids_TK, weights_TK), plan)
        return x + y


class Policy(nn.Module):
    def __init__(self, config: DispatcherConfig, group: Group = None) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank draws equal weights; a real loop loads a checkpoint
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.mix = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.moes = [MoE(config, group, f"layers.{index}.moe") for index in range(2)]
        self.layers = nn.ModuleList(self.moes)
        self.double()

    def forward(self, ids_T: Tensor, layout: THD, plan: Plan) -> Tensor:
        x: Tensor = self.embed(ids_T)
        if len(x):  # a GRU takes no packed rows, see docs/layouts.md
            ends, owned = layout.cu_seqlens, layout.cu_seqlens_padded
            x_BSD = thd_to_bshd(x, ends, cu_seqlens_padded=owned, max_seqlen=layout.max_seqlen)
            x = x + bshd_to_thd(self.mix(x_BSD)[0], ends, cu_seqlens_padded=owned)
        for moe in self.moes:
            x = moe.layer(x, plan)
        logits_TV: Tensor = self.head(x)
        return logits_TV


def cut(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the indices of the sequences of each micro-batch. Only a single long sequence may exceed the budget."""
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not batches or length > room:
            batches, room = [*batches, []], budget
        batches[-1].append(index)
        room -= length
    return batches


def as_many_as_the_busiest(batches: list[list[int]], group: Group) -> list[list[int]]:
    """Append empty micro-batches, so that all ranks run as many forwards: an MoE layer is collective."""
    count = torch.tensor(len(batches))
    if group:
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    return batches + [[]] * (int(count) - len(batches))


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, THD]:
    """Return the packed ids, a mask of the tokens that have a next token, and the layout. Pad sequences to MULTIPLE."""
    lengths = [len(sequence) for sequence in sequences]
    owned = [padded_length(length, MULTIPLE) for length in lengths]
    cu_seqlens, cu_padded = torch.tensor([0, *lengths]).cumsum(0), torch.tensor([0, *owned]).cumsum(0)
    ids_T = torch.zeros(sum(owned), dtype=torch.int64)
    predicts_T = torch.zeros(sum(owned), dtype=torch.bool)
    for sequence, start in zip(sequences, cu_padded.tolist(), strict=False):
        ids_T[start : start + len(sequence)] = sequence
        predicts_T[start : start + len(sequence) - 1] = True
    return ids_T, predicts_T, THD(cu_seqlens, cu_padded, max(lengths, default=0))


def logprobs(policy: Policy, sequences: Sequence[Tensor]) -> Tensor:
    """Return the log-probability of each next token of a micro-batch. One plan serves all layers and the backward."""
    ids_T, predicts_T, layout = pack(sequences)
    plan = policy.moes[0].plan(layout)
    logits_TV = policy(ids_T, layout, plan)[predicts_T]
    next_T = ids_T.roll(-1)[predicts_T]
    return -F.cross_entropy(logits_TV, next_T, reduction="none")


def step(
    policy: Policy,
    rollouts: Sequence[Tensor],
    advantages: Tensor,
    *,
    group: Group = None,
    budget: int,
    logprob_budget: int | None = None,
) -> float:
    """Compute the gradients of one policy-gradient step with PPO's clipping, and return the loss.

    The loss is a sum over tokens, divided by the tokens of all micro-batches and ranks. So the gradients depend neither
    on the cut nor on the padding.
    """
    lengths = [len(sequence) for sequence in rollouts]
    old: dict[int, Tensor] = {}
    with torch.no_grad():
        for batch in as_many_as_the_busiest(cut(lengths, logprob_budget or budget), group):
            found = logprobs(policy, [rollouts[index] for index in batch])
            old.update(zip(batch, found.split([lengths[index] - 1 for index in batch]), strict=bool(batch)))

    tokens = torch.tensor(sum(lengths) - len(lengths))
    if group:
        dist.all_reduce(tokens, group=group)
    total = 0.0
    for batch in as_many_as_the_busiest(cut(lengths, budget), group):
        new = logprobs(policy, [rollouts[index] for index in batch])
        ratio = (new - torch.cat([old[index] for index in batch] or [new.detach()])).exp()
        gain = torch.cat([advantages[index].expand(lengths[index] - 1) for index in batch] or [new.detach()])
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum() / tokens
        loss.backward()  # also without tokens: every rank takes part in every backward
        total += float(loss.detach())
    reduce_gradients(policy, group)
    return total


def reduce_gradients(policy: Policy, group: Group) -> None:
    """Sum gradients over ranks: the loss is already divided. DDP takes a mean, so multiply its loss by its ranks."""
    for name, weight in policy.named_parameters():
        if group and not name.endswith("weight_EDD"):  # gradients of experts include all ranks already
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad, group=group)


def report(policy: Policy) -> dict[str, object]:
    """Return metrics of this rank. Reading them waits for the device, so do not do so in every micro-batch."""
    seen = policy.moes[0].metrics()
    return {
        "backend": seen.backend,
        "tokens": int(seen.real_tokens_per_expert.sum()),
        "busiest expert over the mean": seen.imbalance,
        "padding not sent": sum(seen.rows_skipped.values()),
    }


def draw() -> tuple[list[Tensor], Tensor]:
    """Return random rollouts and their advantages."""
    generator = torch.Generator().manual_seed(1)
    lengths = (40, 3, 17, 25, 9, 60, 2, 31)
    rollouts = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    return rollouts, torch.randn(len(rollouts), generator=generator, dtype=torch.float64)


if __name__ == "__main__":
    policy = Policy(load_config())
    print(step(policy, *draw(), budget=64, logprob_budget=128), report(policy))
