"""Which slots a graph-safe dispatch keeps, in plain Python, and what comes out without those that it drops."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch_testing.rank_context import padding_rows, poison, poison_gradient
from tests.dispatchers.layer import NUM_EXPERTS, TOP_K, Group, local_part, random_rows, small_config

NAN, TOKENS = float("nan"), 8
# Source rank, token, expert: what is left of slots once an expert that a row names twice is one slot.
Slot = tuple[int, int, int]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Load:
    """Ids and weights of all ranks. Weights have few bits, so that sums of two are exact and ties are ties."""

    ids: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return len(self.ids)

    def slots(self) -> dict[Slot, float]:
        """The weight of each slot, in order of source rank, token, slot."""
        found: dict[Slot, float] = {}
        for rank, (ids, weights) in enumerate(zip(self.ids, self.weights, strict=True)):
            for token, (of_token, with_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
                for expert, weight in zip(of_token, with_weights, strict=True):
                    if expert >= 0:
                        found[rank, token, expert] = found.get((rank, token, expert), 0) + weight
        return found

    def owner(self, slot: Slot) -> int:
        """The rank of the slot's expert."""
        return slot[2] // (NUM_EXPERTS // self.size)

    def demand(self) -> tuple[int, int]:
        """Slots of the busiest rank, and rows of the busiest pair of ranks, if nothing is dropped."""
        slots = self.slots()
        to_rank = Counter(map(self.owner, slots))
        pairs = Counter((source, to) for source, _, to in {(s[0], s[1], self.owner(s)) for s in slots})
        return max(to_rank.values(), default=0), max(pairs.values(), default=0)

    def kept(self, rows: int, pair_rows: int | None = None) -> set[Slot]:
        """What is not dropped: first rows are left behind at home, then slots where they arrive."""
        slots = self.slots()
        if pair_rows is not None:
            slots = self._sent(slots, pair_rows)
        arriving = defaultdict(list)
        for slot in slots:
            arriving[self.owner(slot)].append(slot)
        # Sorting is stable: of equal weights those come first that stand first.
        return {slot for there in arriving.values() for slot in sorted(there, key=lambda s: -slots[s])[:rows]}

    def _sent(self, slots: dict[Slot, float], pair_rows: int) -> dict[Slot, float]:
        heaviest: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for slot, weight in slots.items():
            tokens = heaviest[slot[0], self.owner(slot)]
            tokens[slot[1]] = max(weight, tokens.get(slot[1], weight))
        sent = {pair: set(sorted(by, key=lambda t: -by[t])[:pair_rows]) for pair, by in heaviest.items()}
        return {slot: weight for slot, weight in slots.items() if slot[1] in sent[slot[0], self.owner(slot)]}


def load(tokens: Sequence[int], kind: str = "skewed", *, seed: int = 0, top_k: int = TOP_K) -> Load:
    """Random loads, skewed; weights also "ties" of two, "close", or of both "signs"; "holes" are -1 and duplicates."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.arange(1, NUM_EXPERTS + 1).double().pow(-1.5)
    ids, weights = [], []
    for count in tokens:
        drawn = torch.multinomial(odds.expand(max(count, 1), -1), top_k, generator=generator)[:count]
        low, high = {"ties": (1, 3), "signs": (-16, 16)}.get(kind, (1, 64))
        values = torch.randint(low, high, (count, top_k), generator=generator) / 64
        if kind == "close":
            values = 0.5 + values / 1024
        if kind == "holes":
            drawn[::3] = drawn[::3, :1]
            drawn[torch.rand(count, top_k, generator=generator) < 0.25] = -1
            drawn[5::6] = -1
        ids.append(drawn)
        weights.append(torch.where(drawn < 0, NAN, values))
    return Load(tuple(ids), tuple(weights))


def inputs(load: Load, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x, and the gradient that y receives."""
    count = len(load.ids[rank])
    return random_rows(count, seed=rank, dtype=dtype), random_rows(count, seed=rank + 50, dtype=dtype)


def expected(load: Load, kept: set[Slot], weights_EDD: Tensor) -> Tensors:
    """Every kept slot for itself, in float64."""
    is_kept = [
        [(rank, token, expert) in kept for expert in of_token]
        for rank, ids in enumerate(load.ids)
        for token, of_token in enumerate(ids.tolist())
    ]
    given = [inputs(load, rank) for rank in range(load.size)]
    x, upstream = (torch.cat(parts) for parts in zip(*given, strict=True))
    leaves = {"x": x, "weights": torch.cat(load.weights).double(), "experts": weights_EDD.detach().clone()}
    x, weights_NK, experts_EDD = (leaf.requires_grad_() for leaf in leaves.values())
    outputs_NKD = torch.tanh(torch.einsum("nd,nkde->nke", x, experts_EDD[torch.cat(load.ids).clamp(min=0)]))
    y = (outputs_NKD * torch.where(torch.tensor(is_kept), weights_NK, 0).unsqueeze(2)).sum(1)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], upstream), strict=True))}


def apply_poisoned(sent: Dispatched, weights_LDD: Tensor) -> Tensor:
    """As ``apply_experts``, with NaN in padding and slack of the outputs and of the gradients."""
    is_padding = padding_rows(sent)
    counts = sent.tokens_per_expert.tolist()
    *parts, slack = poison_gradient(sent.rows, is_padding).split([*counts, len(sent.rows) - sum(counts)])
    outputs = [torch.tanh(part @ weights) for part, weights in zip(parts, weights_LDD, strict=True)]
    return poison(torch.cat([*outputs, torch.full_like(slack, NAN)]), is_padding)


def run_layer(dispatcher: Dispatcher, load: Load, weights_EDD: Tensor, group: Group) -> Tensors:
    """One rank's y, gradients of x, weights and its experts, and the real rows of each of them."""
    rank = 0 if group is None else group.rank()
    x, upstream = inputs(load, rank)
    experts, weights = local_part(weights_EDD, group), load.weights[rank].clone().requires_grad_()
    sent = dispatcher.dispatch(x.requires_grad_(), Routing(load.ids[rank], weights))
    y = dispatcher.combine(apply_poisoned(sent, experts), sent)
    y.backward(upstream)
    leaves = {"x": x, "weights": weights, "experts": experts}
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"y": y.detach(), **grads, "real": sent.real_tokens_per_expert}


def expect_same(results: list[Tensors], wanted: Tensors) -> None:
    """Equal up to rounding in float64; the gradient of a weight, which is float32, up to that. Zeros are zeros."""
    for name, theirs in wanted.items():
        mine = torch.cat([result[name] for result in results])
        tolerance = 1e-6 if name == "weights" else 1e-12
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
        assert not mine[theirs == 0].any()


def safe_config(
    backend: str,
    *,
    rows: int | None = None,
    pair_rows: int | None = None,
    on_overflow: str | None = None,
    **fields: Any,
) -> DispatcherConfig:
    """A graph-safe config with room for exactly so many rows; None for the worst case."""
    most, size = fields.pop("max_tokens_per_rank", TOKENS), fields.pop("size", 1)
    options: dict[str, Any] = {"name": backend}
    room: dict[str, Any] = {"on_overflow": on_overflow}
    if pair_rows is not None:
        local = NUM_EXPERTS // size
        none_there = math.comb(NUM_EXPERTS - local, TOP_K) / math.comb(NUM_EXPERTS, TOP_K)
        options["pair_rows"] = (pair_rows - 0.5) / (most * (1 - none_there))
    if rows is not None:
        room["capacity_factor"] = (rows - 0.5) / (most * TOP_K)
    if rows is not None or pair_rows is not None:
        room["on_overflow"] = on_overflow or "drop"
    return small_config(options, graph_safe=room, max_tokens_per_rank=most, **fields)
