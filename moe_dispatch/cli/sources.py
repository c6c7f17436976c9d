"""The routing that a plan is asked for: random by a name, or recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from torch import Tensor

from moe_dispatch.backends.base import MoEShape
from moe_dispatch.cli.loads import Loads, expected_loads, known_loads
from moe_dispatch.cli.picks import popularity
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.traces import Trace

_LARGEST_EXPONENT = 8.0


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """Where loads come from.

    Attributes:
        text: for people.
        loads: of one dispatch or several, of a shape, where each rank brings so many rows.
        tokens: the most rows that a rank brings, where the routing says; else None.
    """

    text: str
    loads: Callable[[MoEShape, int], list[Loads]]
    tokens: int | None = None


def random_routing(name: str, *, seed: int = 0) -> Source:
    """Tokens that choose at random: "uniform", or "zipf:1.2" for experts whose popularity falls with that exponent.

    Raises:
        ConfigError: another name, or an exponent that is no number from 0 to 8.
    """
    kind, _, given = name.partition(":")
    if kind not in ("uniform", "zipf") or (kind == "uniform" and given):
        raise ConfigError(
            f'plan: routing must be "uniform", "zipf" or "zipf:EXPONENT", got {name!r}. Give one of them.'
        )
    exponent = 0.0 if kind == "uniform" else _exponent(given or "1")

    def loads(shape: MoEShape, tokens: int) -> list[Loads]:
        return [expected_loads(popularity(shape.num_experts, exponent, seed), tokens, shape, seed=seed)]

    order = f" with exponent {exponent:g} over experts in an order drawn with seed {seed}" if exponent else ""
    return Source(text=f"{kind}{order}: tokens choose at random, each on its own", loads=loads)


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


def recorded_routing(dispatches: Sequence[Sequence[Tensor]], text: str) -> Source:
    """Ids of several dispatches, each of all ranks: int64 (T, K). What is no token is left out, or has ids of -1.

    Raises:
        ConfigError: there are none, or of another number of ranks than the plan's.
    """
    if not dispatches:
        raise ConfigError(f"plan: {text} must hold a dispatch, got none. Record a step.")
    return Source(
        text=text,
        loads=partial(_recorded_loads, dispatches, text),
        tokens=max(len(ids) for ranks in dispatches for ids in ranks),
    )


def traced_routing(path: Path, config: DispatcherConfig, *, ep_size: int | None, cut: bool) -> tuple[Source, int]:
    """That of a trace, and its number of ranks.

    Args:
        path: of the trace.
        config: that the trace must fit.
        ep_size: likewise; None takes the trace's.
        cut: rows that are no tokens are left out, where it was known on the host which; else they go nowhere.

    Raises:
        TraceError: it cannot be read, or is of other sizes.
    """
    trace = Trace.load(path)
    trace.require_whole("plan")
    trace.check_ids("plan")
    trace.check(config, ep_size=trace.ep_size if ep_size is None else ep_size)
    dispatches = [[part.sent_ids(cut=cut and part.on_host) for part in call.parts] for call in trace.calls]
    text = f"{path.name}: {len(dispatches)} dispatches, of {len(trace.layers)} layers in {trace.steps} steps"
    return recorded_routing(dispatches, text), trace.ep_size


def _recorded_loads(dispatches: Sequence[Sequence[Tensor]], text: str, shape: MoEShape, tokens: int) -> list[Loads]:
    for ranks in dispatches:
        if len(ranks) != shape.ep_size:
            raise ConfigError(
                f"plan: {text} is of {len(ranks)} ranks, got ep_size {shape.ep_size}. Give --ep {len(ranks)}."
            )
    return [known_loads(ranks, shape) for ranks in dispatches]
