"""A reinforcement-learning loop on one set of ranks: rollout, release, training on the rollout's routes, and again.

    torchrun --nproc-per-node 4 examples/rl_loop.py --steps 2
    MOE_DISPATCH_BACKEND=allgather torchrun --nproc-per-node 2 examples/rl_loop.py  # another backend for the whole loop

A Qwen3-MoE of transformers, with random weights, samples answers with ``generate``. Each rank has prompts of its own,
in its own number. The routes of the rollout go into a table, and training replays them: packed, cut by a token budget,
under FSDP2, and recomputed on the routes of the forward. A test runs the loop on 2 and 4 ranks, and compares its
gradients with those of one dense process. docs/integrations/trainers.md explains the rules that the loop follows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_dispatch import THD
from moe_dispatch.dispatchers import release
from moe_dispatch.integrations.transformers import RoutingReplay, attach, config_for, dispatchers_of, register
from moe_dispatch.layouts import padded_length
from moe_dispatch.replay import RoutingTable, Turn
from moe_dispatch.training import Setup

VOCABULARY, HIDDEN, EXPERTS, PAD, END = 61, 32, 8, 0, 2
NEW = 12  # most tokens of an answer
MULTIPLE = 8  # rows of a pack, as tensor parallelism or float8 would ask for


@dataclass(frozen=True)
class Rollout:
    """What one rank sampled: the tokens of each sequence by name, the length of its prompt, and all routes."""

    tokens: dict[str, Tensor]
    prompts: dict[str, int]
    table: RoutingTable


# ---- the model ----


def dense_model() -> Qwen3MoeForCausalLM:
    """Build the model in one process. Every rank draws equal weights; a real loop loads a checkpoint."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return Qwen3MoeForCausalLM(config)


def build() -> tuple[Qwen3MoeForCausalLM, Setup]:
    """Build the model on all ranks: experts by moe_dispatch, weights sharded by FSDP2, layers recomputed."""
    model = dense_model()
    # The environment names the backend: MOE_DISPATCH_BACKEND. Without it, "auto" chooses.
    register(config_for(model.config), group=dist.group.WORLD)
    model.set_experts_implementation("moe_dispatch")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    attach(model, keep_routes=True, only_added=True)
    setup = Setup(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",)))
    setup.shard(model, blocks=[*model.model.layers])
    return model, setup


# ---- the rollout ----


@torch.no_grad()
def sample(model: Qwen3MoeForCausalLM, prompts: dict[str, Tensor], *, seed: int) -> Rollout:
    """Sample an answer to each prompt of this rank. Ranks may have different numbers of prompts, but one at least."""
    torch.manual_seed(seed)
    longest = max(map(len, prompts.values()))
    ids = torch.stack([F.pad(prompt, (longest - len(prompt), 0), value=PAD) for prompt in prompts.values()])
    model.eval()
    with RoutingTable.record([*dispatchers_of(model).values()]) as recording:
        recording.micro_batch([*prompts], cached=True)
        # A rank whose answers have ended goes on until the others' have: its experts serve their tokens.
        found = model.generate(
            ids, attention_mask=(ids != PAD).long(), do_sample=True, max_new_tokens=NEW, synced_gpus=True
        )
    model.train()
    recorded, tokens = recording.table(), dict[str, Tensor]()
    for name, row in zip(prompts, found, strict=True):
        answer = row[longest:]
        ends = (answer == END).nonzero()
        tokens[name] = torch.cat([prompts[name], answer[: int(ends[0]) + 1] if len(ends) else answer])
    # Tokens that were fed behind the end of an answer are no part of it, and the last token was never fed.
    turns = {name: (ids, [Turn(ids, recorded.entries(name)[: len(ids) - 1])]) for name, ids in tokens.items()}
    table = RoutingTable.from_turns(turns, num_experts=EXPERTS)
    return Rollout(tokens, {name: len(prompt) for name, prompt in prompts.items()}, table)


# ---- the training ----


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


def as_many_as_the_busiest(batches: list[list[int]]) -> list[list[int]]:
    """Append empty micro-batches, so that all ranks run as many forwards: an MoE layer is collective."""
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return batches + [[]] * (int(count) - len(batches))


@dataclass(frozen=True)
class Pack:
    """Sequences one behind another, and padding behind the last one; or one row of padding for no sequence at all."""

    names: Sequence[str | None]
    tokens_T: Tensor
    layout: THD
    predicts_T: Tensor  # whether the next token of the row was generated

    @classmethod
    def of(cls, rollout: Rollout, names: Sequence[str]) -> Pack:
        ends = torch.tensor([0, *(len(rollout.tokens[name]) for name in names)]).cumsum(0)
        if not names:
            ends = torch.tensor([0, 0])
        size = padded_length(max(int(ends[-1]), 1), MULTIPLE)
        tokens_T, predicts_T = torch.full((size,), PAD), torch.zeros(size, dtype=torch.bool)
        for name, start in zip(names, ends.tolist(), strict=False):
            tokens = rollout.tokens[name]
            tokens_T[start : start + len(tokens)] = tokens
            predicts_T[start + rollout.prompts[name] - 1 : start + len(tokens) - 1] = True
        return cls(names or [None], tokens_T, THD(ends, torch.cat([ends[:-1], torch.tensor([size])])), predicts_T)


def logprobs(
    model: Qwen3MoeForCausalLM, pack: Pack, replay: RoutingReplay, table: RoutingTable, step: int = 0
) -> Tensor:
    """Return the log-probability of each generated token of a pack, on the routes of its rollout."""
    rows = len(pack.tokens_T)
    bounds = torch.as_tensor(pack.layout.cu_seqlens_padded)
    starts = bounds[:-1].repeat_interleave(bounds.diff())
    with replay.micro_batch(table.cut(pack.layout, pack.names, like=(rows, HIDDEN), step=step)):
        logits_TV = model(
            input_ids=pack.tokens_T[None],
            position_ids=(torch.arange(rows) - starts)[None],  # they restart, so attention stays inside a sequence
            cu_seq_lens_q=pack.layout.cu_seqlens,  # rows behind its last entry go to no expert
            use_cache=False,
        ).logits[0]
    next_T = pack.tokens_T.roll(-1)[pack.predicts_T]
    return -F.cross_entropy(logits_TV[pack.predicts_T], next_T, reduction="none")


def train(
    model: Qwen3MoeForCausalLM,
    rollout: Rollout,
    advantages: dict[str, Tensor],
    *,
    budget: int,
    old_budget: int | None = None,
    step: int = 0,
) -> float:
    """Compute the gradients of one policy-gradient step with PPO's clipping, and return this rank's part of the loss.

    The loss is a sum over tokens, divided by the generated tokens of all micro-batches and ranks. So the gradients
    depend neither on the cut nor on the padding.
    """
    names = [*rollout.tokens]
    lengths = [len(tokens) for tokens in rollout.tokens.values()]
    replay, old = RoutingReplay(model), dict[str, Tensor]()

    def packs(budget: int) -> list[Pack]:
        found = as_many_as_the_busiest(cut(lengths, budget))
        return [Pack.of(rollout, [names[index] for index in batch]) for batch in found]

    answers = {name: len(tokens) - rollout.prompts[name] for name, tokens in rollout.tokens.items()}
    with torch.no_grad():  # in the mode of training, because evaluation computes other things in some models
        for pack in packs(old_budget or budget):
            found = logprobs(model, pack, replay, rollout.table, step)
            mine = [name for name in pack.names if name is not None]
            old.update(zip(mine, found.split([answers[name] for name in mine]), strict=bool(mine)))

    generated = torch.tensor(sum(answers.values()))
    dist.all_reduce(generated)
    total = 0.0
    for pack in packs(budget):
        mine = [name for name in pack.names if name is not None]
        new = logprobs(model, pack, replay, rollout.table, step)
        before = torch.cat([old[name] for name in mine] or [new.detach()])
        gain = torch.cat([advantages[name].expand(answers[name]) for name in mine] or [new.detach()])
        ratio = (new - before).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum() / generated
        # FSDP takes the mean over the ranks. Also without tokens: every rank takes part in every backward.
        (loss * dist.get_world_size()).backward()
        total += float(loss.detach())
    replay.close()
    return total


# ---- the loop ----


def prompts_of(rank: int, step: int) -> dict[str, Tensor]:
    """Draw the prompts of a rank: one more on each rank, of any length."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(2, 9, (rank + 1,), generator=drawn).tolist()
    return {
        f"step {step}, rank {rank}, {number}": torch.randint(3, VOCABULARY, (length,), generator=drawn)
        for number, length in enumerate(lengths)
    }


def reward(tokens: Tensor) -> Tensor:
    """Judge an answer. Here: the share of even tokens, less a half."""
    return (tokens % 2 == 0).float().mean() - 0.5


def loop(steps: int, *, budget: int = 32, seen: Callable[..., Any] | None = None) -> None:
    """Run the loop. ``seen`` is called before each step of the optimizer, with what a test compares."""
    model, setup = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        release([*dispatchers_of(model).values()])  # what training held, so that the rollout has the memory
        rollout = sample(model, prompts_of(dist.get_rank(), step), seed=dist.get_rank())
        advantages = {name: reward(tokens[rollout.prompts[name] :]) for name, tokens in rollout.tokens.items()}
        release([*dispatchers_of(model).values()])  # what the rollout held; the next dispatch opens again
        loss = train(model, rollout, advantages, budget=budget, old_budget=2 * budget, step=step)
        rollout.table.check_used()  # once, in this step
        if seen is not None:
            seen(model, rollout, advantages, loss)
        setup.clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = next(iter(dispatchers_of(model).values())).metrics(gather=True)
        if dist.get_rank() == 0:
            drift = max(report.replay_drift.values())
            print(f"step {step + 1}: loss {loss:.4f}, busiest expert over the mean {report.imbalance:.2f}, ", end="")
            print(f"backend {report.backend}, router drift {drift:.4f}", flush=True)
    for dispatcher in dispatchers_of(model).values():
        dispatcher.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop(parser.parse_args().steps)
    dist.destroy_process_group()
