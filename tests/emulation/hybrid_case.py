"""Seeded rows for HybridEP on all ranks, and what must come of them, computed densely from the data of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer

HIDDEN, LOCAL, TOP_K, ROWS = 32, 4, 3, 64
JULY, RAGGED = "hybridep-94a9f8f", "hybridep-746"
CURRENT = pytest.mark.parametrize("release", [JULY, RAGGED])


@dataclass(frozen=True, eq=False)
class Source:
    """What one rank sends: x bfloat16 (T, H), routing bool (T, E), probs float32 (T, E)."""

    x: Tensor
    routing: Tensor
    probs: Tensor


def make_sources(counts: Sequence[int], *, seed: int = 0) -> list[Source]:
    """One ``Source`` per rank; row 1 of each goes nowhere."""
    generator = torch.Generator().manual_seed(seed)
    experts = LOCAL * len(counts)
    made = []
    for count in counts:
        scores = torch.rand(count, experts, generator=generator)
        routing = torch.zeros(count, experts, dtype=torch.bool)
        routing.scatter_(1, scores.argsort(1)[:, :TOP_K], True)
        routing[1:2] = False
        x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        made.append(Source(x, routing, torch.rand(count, experts, generator=generator) * routing))
    return made


def open_buffer(release: str, group: dist.ProcessGroup | None, *, rows: int = 512, **options: Any) -> Any:
    return hybrid_ep_buffer(release)(group, HIDDEN, rows, LOCAL, **options)


def opened(release: str, **sizes: Any) -> Any:
    """A buffer for one rank, with sizes of its own."""
    given = {"hidden_dim": HIDDEN, "max_num_of_tokens_per_rank": ROWS, "num_local_experts": LOCAL} | sizes
    return hybrid_ep_buffer(release)(None, **given)


def sent(buffer: Any, source: Source, *, fused: bool = False, **options: Any) -> Any:
    """dispatch_with_permute of everything that the source has."""
    more = {"fuse_permute_dispatch": True} if fused else {}
    return buffer.dispatch_with_permute(
        hidden=source.x, routing_map=source.routing, probs=source.probs, **more, **options
    )


def returned(buffer: Any, rows: Tensor, handle: Any, probs: Tensor | None = None, *, fused: bool = False) -> Any:
    more = {"fuse_unpermute_combine": True} if fused else {}
    return buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle, **more)


def expert_outputs(sources: Sequence[Source], *, pad: int) -> list[Tensor]:
    """Outputs of all experts by rank, bfloat16: values so far apart that the order of a float32 sum shows in it."""
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for rank in range(len(sources)):
        shape = expected_rows(sources, rank, pad=pad).rows.shape
        small, kind = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
        outputs.append(torch.where(kind < 0.3, 2.0**30 * small.sign(), small).bfloat16())
    return outputs


@dataclass(frozen=True, eq=False)
class Expected:
    """Expert rows of a rank; ``real`` marks rows that are no padding, ``places`` has (source rank, token, expert)."""

    rows: Tensor
    probs: Tensor
    real: Tensor
    counts: list[int]
    places: dict[tuple[int, int, int], int]


def expected_rows(sources: Sequence[Source], rank: int, *, pad: int) -> Expected:
    """By expert, then source rank, then token."""
    places: dict[tuple[int, int, int], int] = {}
    counts: list[int] = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        went = [source.routing[:, expert].nonzero().flatten().tolist() for source in sources]
        slots = [(peer, token, expert) for peer, tokens in enumerate(went) for token in tokens]
        places |= {slot: sum(counts) + at for at, slot in enumerate(slots)}
        counts.append(-(-len(slots) // pad) * pad)
    rows, probs = torch.zeros(sum(counts), HIDDEN, dtype=torch.bfloat16), torch.zeros(sum(counts))
    real = torch.zeros(sum(counts), dtype=torch.bool)
    for (peer, token, expert), row in places.items():
        rows[row], probs[row] = sources[peer].x[token], sources[peer].probs[token, expert]
        real[row] = True
    return Expected(rows, probs, real, counts, places)


def expected_sums(
    sources: Sequence[Source], outputs: Sequence[Tensor], *, pad: int, domain: int | None = None
) -> list[Tensor]:
    """What combine gives each rank for these expert rows: rounded to bfloat16 per rank, and per other node."""
    size = len(sources)
    domain = domain or size
    places = [expected_rows(sources, rank, pad=pad).places for rank in range(size)]
    sums = []
    for home, source in enumerate(sources):
        own, total = home // domain, torch.zeros(len(source.x), HIDDEN)
        # The own node first, then those before it and those behind it, both from the last one on.
        for node in sorted(range(size // domain), key=lambda node: (node != own, node > own, -node)):
            of_node = torch.zeros_like(total)
            for rank in range(node * domain, (node + 1) * domain):
                of_rank = torch.zeros_like(total)
                for (peer, token, _), row in places[rank].items():
                    if peer == home:
                        of_rank[token] += outputs[rank][row].float()
                of_node += of_rank.bfloat16().float()
            total += of_node if node == own else of_node.bfloat16().float()
        sums.append(total.bfloat16())
    return sums
