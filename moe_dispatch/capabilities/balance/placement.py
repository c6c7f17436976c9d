"""``ExpertPlacement``: the expert that each expert slot of each rank holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, final

from torch import Tensor

from moe_dispatch.errors import ConfigError, shown
from moe_dispatch.seams.slots import Placement
from moe_dispatch.versions import newer_format

FORMAT = 1
_FORMAT_KEY = "moe_dispatch_placement"
EMPTY = -1
"""Stands for the expert of an expert slot that holds none."""


@final
@dataclass(frozen=True)
class ExpertPlacement(Placement):
    """The expert that each expert slot of each rank holds.

    An expert slot is room for the weights of one expert on one rank. Every rank has the same number of them. An expert
    may be in the slots of several ranks: each of them holds a copy. Slots may be empty, so ranks may hold different
    numbers of experts.

    Expert slots are numbered through the whole group: slot i of rank r has the number ``r * slots_per_rank + i``.

    For example, with two ranks of three slots, ``((0, 1, 2), (2, 3, -1))`` puts expert 2 on both ranks, and leaves the
    last slot of rank 1 empty.

    Args:
        num_experts: E, the number of experts of the model.
        slots: The expert in each slot of each rank, from 0 to E-1, or -1 for an empty slot.

    Raises:
        ConfigError: The ranks have different numbers of slots, an expert has no slot, a rank holds an expert twice, or
            a slot holds an id outside -1..E-1.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            slots = tuple(tuple(index(expert) for expert in of_rank) for of_rank in self.slots)
        except TypeError as error:
            raise ConfigError(
                f"ExpertPlacement: slots must be a list of ids for each rank, got {shown(self.slots)}. "
                "Pass [[0, 1], [2, 3]] for two ranks with two slots."
            ) from error
        object.__setattr__(self, "slots", slots)
        if not self.slots or not self.slots[0]:
            raise ConfigError(
                f"ExpertPlacement: there must be at least one rank with one slot, got {shown(self.slots)}. "
                "Pass the slots of every rank."
            )
        for rank, of_rank in enumerate(self.slots):
            if len(of_rank) != len(self.slots[0]):
                raise ConfigError(
                    f"ExpertPlacement: every rank must have the same number of slots, got {len(self.slots[0])} on "
                    f"rank 0 and {len(of_rank)} on rank {rank}. Fill the shorter ranks with -1 (empty)."
                )
        if not 1 <= self.num_experts <= self.num_slots:
            raise ConfigError(
                f"ExpertPlacement: num_experts must lie in 1..{self.num_slots}, the number of slots "
                f"({self.num_ranks} ranks x {self.slots_per_rank}), got {shown(self.num_experts)}. Use more "
                "slots per rank."
            )
        for rank, of_rank in enumerate(self.slots):
            for slot, expert in enumerate(of_rank):
                if not EMPTY <= expert < self.num_experts:
                    raise ConfigError(
                        f"ExpertPlacement: slots must hold ids in -1..{self.num_experts - 1}, got {shown(expert)} in "
                        f"slot {slot} of rank {rank}. Use -1 for an empty slot."
                    )
            twice = next((expert for expert in of_rank if expert != EMPTY and of_rank.count(expert) > 1), None)
            if twice is not None:
                first = of_rank.index(twice)
                raise ConfigError(
                    f"ExpertPlacement: a rank must hold an expert once, got expert {twice} in slots {first} and "
                    f"{of_rank.index(twice, first + 1)} of rank {rank}. Put the copy on another rank."
                )
        missing = sorted(set(range(self.num_experts)).difference(*self.slots))
        if missing:
            told = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ConfigError(
                f"ExpertPlacement: every expert must have a slot, got none for {told} of "
                f"{self.num_experts} experts. Put them in a slot."
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int, *, spare: int = 0) -> ExpertPlacement:
        """Return the placement without copies: rank 0 holds the first experts, rank 1 the next ones, and so on.

        Args:
            num_experts: E.
            num_ranks: P; it must divide E.
            spare: Number of empty slots at the end of each rank.

        Raises:
            ConfigError: The number of ranks does not divide the number of experts, or a number is too small.
        """
        if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
            raise ConfigError(
                f"ExpertPlacement.contiguous: num_experts ({num_experts}) must be divisible by num_ranks "
                f"({num_ranks}). Use other numbers, or ExpertPlacement(...) with empty slots."
            )
        if spare < 0:
            raise ConfigError(f"ExpertPlacement.contiguous: spare must be at least 0, got {spare}. Leave it out.")
        local = num_experts // num_ranks
        own = (range(rank * local, (rank + 1) * local) for rank in range(num_ranks))
        return cls(num_experts, tuple((*experts, *[EMPTY] * spare) for experts in own))

    @classmethod
    def from_slots(cls, experts: Sequence[int] | Tensor, *, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Make a placement from the expert of each slot, numbered through the whole group.

        Args:
            experts: (P * slots_per_rank,), the expert of each slot, or -1.
            num_experts: E.
            num_ranks: P.

        Raises:
            ConfigError: The number of slots is not divisible by the number of ranks; or as the constructor.
        """
        flat = experts.tolist() if isinstance(experts, Tensor) else list(experts)
        if num_ranks < 1 or len(flat) % num_ranks:
            raise ConfigError(
                f"ExpertPlacement.from_slots: the number of slots ({len(flat)}) must be divisible by num_ranks "
                f"({num_ranks}). Fill the last rank with -1 (empty)."
            )
        local = len(flat) // num_ranks
        return cls(num_experts, tuple(tuple(flat[rank * local : (rank + 1) * local]) for rank in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """Number of expert slots of each rank."""
        return len(self.slots[0])

    @property
    def num_slots(self) -> int:
        """Number of expert slots of the whole group."""
        return self.num_ranks * self.slots_per_rank

    @cached_property
    def slots_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the slots that hold each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, expert in enumerate(expert for of_rank in self.slots for expert in of_rank):
            if expert != EMPTY:
                found[expert].append(number)
        return tuple(map(tuple, found))

    @property
    def canonical(self) -> dict[str, Any]:
        """The placement as JSON values. Ranks compare it when it is placed, and ``save`` writes it."""
        return {"num_experts": self.num_experts, "slots": [list(of_rank) for of_rank in self.slots]}

    def save(self, path: str | Path) -> None:
        """Write the placement to a JSON file.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps({_FORMAT_KEY: FORMAT, **self.canonical}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"ExpertPlacement.save: cannot write {path}: {error.strerror}. Use another path."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> ExpertPlacement:
        """Read a placement that ``save`` wrote.

        Raises:
            ConfigError: The file is missing, is not JSON, is no placement, or holds a placement that cannot work. The
                text has the path.
        """
        where = f"ExpertPlacement.load: {path}"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"ExpertPlacement.load: cannot read {path}: {error.strerror}. Check the path.") from error
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or too deep
            raise ConfigError(f"{where}: the file must be JSON, got {error}. Write it with save.") from error
        fields = {_FORMAT_KEY, "num_experts", "slots"}
        if isinstance(found, dict) and (told := newer_format(found.get(_FORMAT_KEY), FORMAT)):
            raise ConfigError(f"{where}: the file must have format {FORMAT}, {told}")
        if not isinstance(found, dict) or set(found) != fields or found[_FORMAT_KEY] != FORMAT:
            names = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise ConfigError(
                f"{where}: the file must hold {sorted(fields)} with {_FORMAT_KEY} {FORMAT}, got {names}. "
                "Write it with save."
            )
        if not isinstance(found["num_experts"], int):
            raise ConfigError(
                f"{where}: num_experts must be an integer, got {shown(found['num_experts'])}. Correct it."
            )
        try:
            return cls(found["num_experts"], found["slots"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
