"""Lists of ranks, names and numbers, as a sentence has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def listed(values: Iterable[object]) -> str:
    """Return values with commas, and "and" before the last."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def ranks_of(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 0 and 2"."""
    numbers = sorted({*ranks})
    return f"rank{'s' * (len(numbers) > 1)} {listed(numbers)}"


def names_of(names: Sequence[str]) -> str:
    """Return names; of many, two and how many more there are."""
    return listed(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
