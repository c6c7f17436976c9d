"""The routing of a plan: drawn at random, or recorded in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.errors import ConfigError
from moe_dispatch_tools.console import counted
from moe_dispatch_tools.plan.models import GroupLimit, Model
from moe_dispatch_tools.traces import Trace

# Expert ids of each rank in one dispatch, int64 (T, K). The id is -1 if a slot goes nowhere.
Dispatch = Sequence[Tensor]

# A simulation has this number of tokens in all its dispatches together, if the number of dispatches is at most 64.
_SIMULATED_TOKENS, _MOST_DISPATCHES = 2**20, 64
_LARGEST_EXPONENT = 8.0
_DEFAULT_RANKS = 8
_TOKENS_AT_ONCE, _SCORES_AT_ONCE = 2**11, 2**22  # whose scores of all experts fit the cache
# A simulation that exceeds them would take minutes or gigabytes.
_MOST_SCORES, _MOST_CHOICES, _MOST_COUNTS = 2**34, 2**28, 2**24


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingSource:
    """The source of the routing of a plan.

    Attributes:
        text: Description for the output.
        dispatches: Function that makes the dispatches, from a shape and the number of tokens of each rank.
        tokens: Largest number of rows of a rank in a recorded routing; None for a random routing.
    """

    text: str
    dispatches: Callable[[MoEShape, int], Iterable[Dispatch]]
    tokens: int | None = None


def random_routing(name: str, *, seed: int = 0, groups: GroupLimit | None = None) -> RoutingSource:
    """Make a routing in which each token draws its experts at random, independently of all other tokens.

    Args:
        name: "uniform", or for example "zipf:1.2" for experts whose popularity falls with the exponent 1.2.
        seed: Seed of the order of popularity and of all draws.
        groups: Limit of the router to a few groups of experts.

    Raises:
        ConfigError: The name is unknown, or the exponent is not a number from 0 to 8.
    """
    kind, _, given = name.partition(":")
    try:
        exponent = {"uniform": 0.0, "zipf": float(given or "1")}[kind]
        if not 0 <= exponent <= _LARGEST_EXPONENT or (given and kind == "uniform"):
            raise ValueError
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f'plan: routing must be "uniform", "zipf:EXPONENT" with an exponent from 0 to {_LARGEST_EXPONENT:g}, or a '
            f".safetensors file, got {name!r}. Use an exponent near 1 for a router in training."
        ) from error

    def dispatches(shape: MoEShape, tokens: int) -> Iterator[Dispatch]:
        everyone = tokens * shape.ep_size
        for rule, number, most in (
            ("tokens x ep x top_k", everyone * shape.top_k, _MOST_CHOICES),
            ("tokens x ep x num_experts", everyone * shape.num_experts, _MOST_SCORES),
        ):
            if number > most:
                raise ConfigError(
                    f"plan: to simulate a routing, {rule} must be at most {most}, got {number} for {tokens} tokens, "
                    f"ep {shape.ep_size}, {shape.num_experts} experts and top {shape.top_k}. Plan smaller numbers."
                )
        generator = torch.Generator().manual_seed(seed)
        odds_E = popularity(shape.num_experts, exponent, generator)
        count = min(max(_SIMULATED_TOKENS // everyone, 1), _MOST_DISPATCHES)
        count = min(count, max(_MOST_COUNTS // (shape.ep_size * shape.num_experts), 1))
        return (draw_experts(odds_E, shape.top_k, everyone, generator, groups).split(tokens) for _ in range(count))

    order = f" with exponent {exponent:g} over experts in an order drawn with seed {seed}" if exponent else ""
    limit = "" if groups is None else f", in {groups.topk_groups} of {groups.num_groups} groups of experts"
    return RoutingSource(
        text=f"{kind}{order}: each token draws its experts independently{limit}", dispatches=dispatches
    )


def popularity(num_experts: int, exponent: float, generator: Generator) -> Tensor:
    """Return the odds of each expert, float64 (E,): Zipf's ``rank ** -exponent`` in a random order."""
    odds = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu").pow(-exponent)
    return (odds / odds.sum())[torch.randperm(num_experts, generator=generator, device="cpu")]


def draw_experts(
    odds_E: Tensor, top_k: int, num_tokens: int, generator: Generator, groups: GroupLimit | None = None
) -> Tensor:
    """Draw the experts of tokens, int64 (T, K), without repetition, in proportion to their odds.

    The score of an expert is the logarithm of its odds plus Gumbel noise. The best scores have the distribution of
    draws one after the other (``torch.multinomial``, which takes twice the time), and a router that is limited to
    groups of experts chooses among the same scores.
    """
    log_odds_E, found = odds_E.log().float(), [torch.empty(0, top_k, dtype=torch.int64)]
    for some in torch.arange(num_tokens).split(min(_TOKENS_AT_ONCE, max(_SCORES_AT_ONCE // len(odds_E), 1))):
        scores_TE = torch.rand(len(some), len(odds_E), generator=generator).log_().neg_()
        scores_TE = scores_TE.log_().neg_().add_(log_odds_E)
        found.append(scores_TE.topk(top_k).indices if groups is None else choose_experts(scores_TE, top_k, groups))
    return torch.cat(found)


def choose_experts(scores_TE: Tensor, top_k: int, groups: GroupLimit) -> Tensor:
    """Choose the experts of tokens by their scores, int64 (T, K), from the best groups of each token.

    Source: the node-limited routing of DeepSeek-V3 (technical report, section 2.1.2).
    """
    scores_TGL = scores_TE.unflatten(1, (groups.num_groups, -1))
    of_group_TG = scores_TGL.topk(groups.scored_experts, sorted=False).values.sum(2)
    group_TB = of_group_TG.topk(groups.topk_groups, sorted=False).indices
    size = scores_TGL.shape[2]
    allowed_TBL = scores_TGL.gather(1, group_TB.unsqueeze(2).expand(-1, -1, size))
    place_TK = allowed_TBL.flatten(1).topk(top_k).indices
    ids_TK: Tensor = group_TB.gather(1, place_TK // size) * size + place_TK % size
    return ids_TK


def recorded_routing(dispatches: Sequence[Dispatch], text: str) -> RoutingSource:
    """Make a routing of recorded dispatches. Padding rows are left out or have ids of -1."""
    most = max(len(ids) for ranks in dispatches for ids in ranks)
    return RoutingSource(text=text, dispatches=lambda shape, tokens: dispatches, tokens=most)


def routing_of(text: str, file: Path, model: Model, *, ep_size: int | None, seed: int) -> tuple[RoutingSource, int]:
    """Read or draw the routing of a plan, and return it with its number of ranks.

    Args:
        text: Name of a random routing, or path of a trace.
        file: File of the model. If it is a trace, its routing takes the place of "uniform".
        model: Model that a trace must fit.
        ep_size: Number of ranks; None for that of the trace, or for 8.
        seed: Seed of a random routing.

    Raises:
        TraceError: The trace cannot be read, has other sizes or holds no dispatch.
        ConfigError: The random routing is unknown.
    """
    path = file if text == "uniform" else Path(text)
    if path.suffix != ".safetensors":
        return random_routing(text, seed=seed, groups=model.groups), ep_size or _DEFAULT_RANKS
    trace = Trace.load_whole(path, "plan")
    trace.check(model.config, ep_size=ep_size or trace.ep_size)
    cut = not model.config.graph_safe  # graph-safe mode keeps padding rows, whose slots go nowhere
    dispatches = [[part.sent_ids(cut=cut and part.on_host) for part in call.parts] for call in trace.calls]
    of = f"{counted(len(trace.layers), 'layer')} in {counted(trace.steps, 'step')}"
    told = f"{path.name}: {counted(len(dispatches), 'dispatch', 'dispatches')} of {of}"
    return recorded_routing(dispatches, told), trace.ep_size
