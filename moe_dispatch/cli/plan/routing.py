"""The routing that a plan is made for: drawn at random, or recorded in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.traces import Trace

# Expert ids of each rank in one dispatch, int64 (T, K); -1 where a slot goes nowhere.
Dispatch = Sequence[Tensor]

# A random routing is simulated in as many dispatches as have this many tokens together, within the bounds.
_SIMULATED_TOKENS, _FEWEST_DISPATCHES, _MOST_DISPATCHES = 2**21, 4, 256
_LARGEST_EXPONENT = 8.0
_ATTEMPTS = 4  # at drawing another expert than those that a token already has
_TOKENS_AT_ONCE = 2**14


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """Where the routing of a plan comes from.

    Attributes:
        text: description for people.
        dispatches: makes the dispatches of a shape in which each rank brings a number of tokens.
        simulated: whether the dispatches are drawn at random, so that figures of them have a standard error.
        tokens: most rows that a rank brings, if the routing is recorded; else None.
    """

    text: str
    dispatches: Callable[[MoEShape, int], Iterable[Dispatch]]
    simulated: bool = False
    tokens: int | None = None


def random_routing(name: str, *, seed: int = 0) -> Source:
    """Tokens that choose experts at random, each on its own.

    Args:
        name: "uniform", or "zipf:1.2" for experts whose popularity falls with that exponent.
        seed: seed of the order of popularity and of all draws.

    Raises:
        ConfigError: the name is another, or the exponent is no number from 0 to 8.
    """
    kind, _, given = name.partition(":")
    if kind not in ("uniform", "zipf") or (kind == "uniform" and given):
        raise ConfigError(
            f'plan: routing must be "uniform", "zipf" or "zipf:EXPONENT", got {name!r}. Give one of them.'
        )
    exponent = 0.0 if kind == "uniform" else _exponent(given or "1")

    def dispatches(shape: MoEShape, tokens: int) -> Iterator[Dispatch]:
        generator = torch.Generator().manual_seed(seed)
        odds_E = popularity(shape.num_experts, exponent, generator)
        everyone = tokens * shape.ep_size
        count = min(max(_SIMULATED_TOKENS // everyone, _FEWEST_DISPATCHES), _MOST_DISPATCHES)
        return (draw_experts(odds_E, shape.top_k, everyone, generator).split(tokens) for _ in range(count))

    order = f" with exponent {exponent:g} over experts in an order drawn with seed {seed}" if exponent else ""
    return Source(
        text=f"{kind}{order}: tokens choose at random, each on its own", dispatches=dispatches, simulated=True
    )


def _exponent(text: str) -> float:
    try:
        exponent = float(text)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ConfigError(
            f"plan: the exponent of zipf must be a number from 0 to {_LARGEST_EXPONENT:g}, got {text!r}. "
            "Routers in training are often near 1."
        )
    return exponent


def popularity(num_experts: int, exponent: float, generator: Generator) -> Tensor:
    """Odds of each expert, float64 (E,): equal, or Zipf's ``rank ** -exponent`` in a drawn order."""
    odds = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu").pow(-exponent)
    return (odds / odds.sum())[torch.randperm(num_experts, generator=generator, device="cpu")]


def draw_experts(odds_E: Tensor, top_k: int, num_tokens: int, generator: Generator) -> Tensor:
    """Draw the experts of tokens, int64 (T, K): one after the other without repetition, in proportion to their odds.

    ``torch.multinomial`` draws the same, but its time grows with E. Here a token draws any expert, and draws again if
    it already has that one. Only tokens that repeat themselves too often take the rest from ``torch.multinomial``.
    """
    cumulative_E = odds_E.cumsum(0)

    def draw(count: int) -> Tensor:
        drawn = torch.rand(count, dtype=torch.float64, generator=generator)
        return torch.searchsorted(cumulative_E, drawn * cumulative_E[-1], right=True).clamp_(max=len(odds_E) - 1)

    ids_KT = torch.empty(top_k, num_tokens, dtype=torch.int64)
    done_T = torch.zeros(num_tokens, dtype=torch.bool)
    for slot in range(top_k):
        drawn_T = draw(num_tokens)
        ids_KT[slot] = torch.where(done_T, ids_KT[slot], drawn_T)
        again = ((ids_KT[:slot] == ids_KT[slot]).any(0) & ~done_T).nonzero().flatten()
        for _ in range(_ATTEMPTS if len(again) else 0):
            ids_KT[slot, again] = draw(len(again))
            again = again[(ids_KT[:slot, again] == ids_KT[slot, again]).any(0)]
        done_T[again] = True
        for some in again.split(_TOKENS_AT_ONCE):
            left_TE = odds_E.expand(len(some), -1).scatter(1, ids_KT[:slot, some].t(), 0)
            ids_KT[slot:, some] = torch.multinomial(left_TE, top_k - slot, generator=generator).t()
    return ids_KT.t()


def recorded_routing(dispatches: Sequence[Dispatch], text: str) -> Source:
    """The routing of recorded dispatches. Rows that are no tokens are left out or have ids of -1.

    Raises:
        ConfigError: there are no dispatches, or they have another number of ranks than the plan.
    """
    if not dispatches:
        raise ConfigError(f"plan: {text} must hold a dispatch, got none. Record a step.")

    def checked(shape: MoEShape, tokens: int) -> Sequence[Dispatch]:
        size = len(dispatches[0])
        if size != shape.ep_size:
            raise ConfigError(f"plan: {text} is of {size} ranks, got ep_size {shape.ep_size}. Give --ep {size}.")
        return dispatches

    return Source(text=text, dispatches=checked, tokens=max(len(ids) for ranks in dispatches for ids in ranks))


def traced_routing(path: Path, config: DispatcherConfig, *, ep_size: int | None, cut: bool) -> tuple[Source, int]:
    """The routing of a trace, and its number of ranks.

    Args:
        path: path of the trace.
        config: config that the trace must fit.
        ep_size: number of ranks that the trace must have; None takes the trace's.
        cut: whether rows that are no tokens are left out if the host knew them; else their slots go nowhere.

    Raises:
        TraceError: the trace cannot be read or has other sizes.
    """
    trace = Trace.load(path)
    trace.require_whole("plan")
    trace.check_ids("plan")
    trace.check(config, ep_size=trace.ep_size if ep_size is None else ep_size)
    dispatches = [[part.sent_ids(cut=cut and part.on_host) for part in call.parts] for call in trace.calls]
    text = f"{path.name}: {len(dispatches)} dispatches, of {len(trace.layers)} layers in {trace.steps} steps"
    return recorded_routing(dispatches, text), trace.ep_size
