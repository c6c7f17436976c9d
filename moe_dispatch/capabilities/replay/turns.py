"""Join the turns of a rollout: the engine computed some positions of a sequence in one request, others in another.

A turn says which tokens its request had, and where its routes begin. So every route has a position of its own, and
nothing depends on how many rows other turns have. Dimensions are those of ``moe_dispatch.capabilities.replay.table``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.replay.entries import NOWHERE, Entries, integers
from moe_dispatch.errors import InputError

Tokens = Any  # a tensor, an array of numpy or a sequence of integers, one for each position


@final
@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The routes that an inference engine returned for one request.

    Attributes:
        tokens: Ids of all tokens of the request from position 0 on, (n,): the whole context, then what was generated.
        ids: Expert ids of the positions from ``start`` to n - 2, integers (n - 1 - start, L, K); or several of them one
            behind another, such as (prompt, response). The last token has no route, because it was never fed to the
            model. An entry whose ids are all -1 is unknown.
        start: Position of the first route: the ``routed_experts_start_len`` of SGLang, or the number of cached tokens
            if the engine leaves their routes out.
    """

    tokens: Tokens
    ids: Entries
    start: int = 0


def joined(sequences: Mapping[Any, tuple[Tokens, Sequence[Turn]]]) -> dict[Any, Tensor]:
    """Return the ids of each sequence, int64 (S, L, K), with -1 where no turn has a route.

    Raises:
        InputError: What ``RoutingTable.from_turns`` says.
    """
    tokens = {name: _tokens(tokens, f"sequence {name!r}") for name, (tokens, _) in sequences.items()}
    parts = {
        name: [_Part(turn, f"turn {number} of sequence {name!r}", tokens[name]) for number, turn in enumerate(turns)]
        for name, (_, turns) in sequences.items()
    }
    shape, of_first = next(((part.ids.shape[1:], part.of) for each in parts.values() for part in each), ((), ""))
    if not shape:
        raise InputError("RoutingTable.from_turns: at least one sequence must have a turn, got none. Pass its turns.")
    found = {}
    for name, each in parts.items():
        ids_SLK = torch.full((len(tokens[name]), *shape), NOWHERE, dtype=torch.int64, device="cpu")
        for part in each:
            if part.ids.shape[1:] != shape:
                raise InputError(
                    "RoutingTable.from_turns: all turns must have the same layers and top_k, got "
                    f"{tuple(shape)} in {of_first} and {tuple(part.ids.shape[1:])} in {part.of}. Do not mix outputs "
                    "of different models."
                )
            part.write(ids_SLK)
        found[name] = ids_SLK
    return found


@final
class _Part:
    """The routes of one turn that belong to a sequence: those before the first token that differs.

    The route of a position follows from the tokens up to it, and from no later one.
    """

    def __init__(self, turn: Turn, of: str, sequence_S: Tensor) -> None:
        tokens, start = _tokens(turn.tokens, of), turn.start
        self.of, self.ids, self.start = of, integers(turn.ids, of), start
        if start < 0 or len(self.ids) != len(tokens) - 1 - start:
            raise InputError(
                f"RoutingTable.from_turns: a turn must have a route for each position from start ({start}) to the last "
                f"but one ({len(tokens) - 2}), {max(len(tokens) - 1 - start, 0)} in all, got {len(self.ids)} in {of}. "
                "Pass all tokens of the request, and as start the position of the first route. Leave out a row of the "
                "last token, which the engine never computed."
            )
        both = min(len(tokens), len(sequence_S))
        differs = (tokens[:both] != sequence_S[:both]).nonzero()
        self.end = min(int(differs[0]) if len(differs) else both, len(tokens) - 1)
        if len(self.ids) and self.end <= start:
            raise InputError(
                f"RoutingTable.from_turns: a turn must share its tokens up to start ({start}) with the sequence, got "
                f"{self.end} tokens that {of} shares. Leave out turns of other branches, and pass the tokens as the "
                "engine had them, special tokens included."
            )

    def write(self, ids_SLK: Tensor) -> None:
        """Write the routes where none is known, and compare them elsewhere."""
        mine, there = self.ids[: max(self.end - self.start, 0)], ids_SLK[self.start : self.end]
        is_known_SL, knows_SL = ((ids >= 0).any(2) for ids in (there, mine))
        clash_SL = is_known_SL & knows_SL & (there.sort(2).values != mine.sort(2).values).any(2)
        for position, layer in clash_SL.nonzero()[:1].tolist():
            raise InputError(
                "RoutingTable.from_turns: where turns overlap, their routes must agree, got "
                f"{there[position, layer].tolist()} of an earlier turn and {mine[position, layer].tolist()} of "
                f"{self.of} at position {self.start + position}, in layer {layer} of the ids, and "
                f"{int(clash_SL.sum())} such entries. If the engine computed these tokens again, cut the routes that "
                "do not count: pass ids[n:] with start + n."
            )
        there.copy_(torch.where(knows_SL.unsqueeze(2), mine, there))


def _tokens(tokens: Tokens, of: str) -> Tensor:
    """Return token ids on the CPU, int64 (n,)."""
    ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens)
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise InputError(
            f"RoutingTable.from_turns: tokens must be integers (n,), one at least, got {ids.dtype} {tuple(ids.shape)} "
            f"in {of}. Pass the ids of all tokens, from position 0 on."
        )
    return ids.detach().to("cpu", torch.int64)
