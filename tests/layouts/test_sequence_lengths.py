"""What sequences are padded to, over the grid of parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_dispatch.layouts import padded_length, sequence_multiple

GRID = list(product([1, 2, 3, 4, 6], [1, 2, 4, 8], [1, 2, 3, 4], [False, True], [False, True], [1, 64, 128]))


def allowed(multiple_of: int, fp8: bool, parts: int, batch_size: int, row_multiple: int) -> Iterator[int]:
    """Lengths that every rule allows, found by trying one after another."""
    for length in count(1):
        if length % multiple_of or length % parts or (fp8 and length % 16):
            continue
        if batch_size * (length // parts) % row_multiple == 0:
            yield length


def test_the_multiple_is_the_least_that_every_rule_allows() -> None:
    for batch_size, tp, cp, sequence_parallel, fp8, row_multiple in GRID:
        sizes = {"batch_size": batch_size, "tp": tp, "cp": cp, "sequence_parallel": sequence_parallel, "fp8": fp8}
        multiple = sequence_multiple(**sizes, row_multiple=row_multiple)  # type: ignore[arg-type]
        parts = cp * (tp if sequence_parallel else 1)
        lengths = allowed(2 * tp * cp if cp > 1 else tp, fp8, parts, batch_size, row_multiple)
        assert list(islice(lengths, 3)) == [multiple, 2 * multiple, 3 * multiple], (sizes, row_multiple)


@pytest.mark.parametrize(
    ("options", "multiple"),
    [
        ({}, 1),
        ({"tp": 4}, 4),
        ({"tp": 3, "fp8": True}, 48),
        ({"tp": 2, "cp": 2}, 8),
        ({"tp": 2, "cp": 2, "fp8": True}, 16),
        ({"batch_size": 4, "row_multiple": 128}, 32),
        ({"batch_size": 4, "tp": 2, "cp": 2, "sequence_parallel": True, "row_multiple": 128}, 128),
        ({"batch_size": 4, "tp": 2, "cp": 2, "row_multiple": 128}, 64),
    ],
)
def test_are_the_numbers_of_megatron_bridge_3294(options: dict[str, int], multiple: int) -> None:
    assert sequence_multiple(**options) == multiple  # type: ignore[arg-type]


@given(st.integers(0, 200), st.integers(1, 64))
def test_padding_is_the_least_that_will_do(length: int, multiple: int) -> None:
    padded = padded_length(length, multiple)
    assert padded % multiple == 0
    assert 0 <= padded - length < multiple
    assert padded_length(length, multiple, seq_length=length + 1) == padded_length(length + 1, multiple)
