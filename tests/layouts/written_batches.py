"""Batches written out token by token, as an oracle that shares no code with the layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch.layouts import BSHD, SBHD, THD, Layout
from moe_dispatch_testing import refuse_host_syncs

NO_TOKEN = -1.0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences by their real length and the rows each owns; tokens are numbered from 0 over the batch."""

    lengths: list[int]
    owned: list[int]

    def sequences(self) -> list[Tensor]:
        """(owned, 1) for each sequence, the token's number or ``NO_TOKEN``."""
        starts = running_sums(self.lengths)
        return [
            torch.tensor([start + i if i < real else NO_TOKEN for i in range(rows)]).view(rows, 1)
            for start, real, rows in zip(starts, self.lengths, self.owned, strict=False)
        ]

    @property
    def num_real(self) -> int:
        return sum(self.lengths)


def running_sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def build(form: str, batch: Batch, dtype: torch.dtype = torch.int32) -> Layout:
    """The layout of a batch in one of the forms ``BSHD``, ``SBHD`` and ``THD``."""
    if form == "THD":
        return THD(
            torch.tensor(running_sums(batch.lengths), dtype=dtype), torch.tensor(running_sums(batch.owned), dtype=dtype)
        )
    return {"BSHD": BSHD, "SBHD": SBHD}[form](torch.tensor(batch.lengths, dtype=dtype))


def assemble(form: str, sequences: list[Tensor]) -> Tensor:
    """The model's tensor in one of the three forms."""
    if form == "THD":
        return torch.cat(sequences)
    return torch.stack(sequences, dim=0 if form == "BSHD" else 1)


def zigzag(sequence: Tensor, index: int, size: int) -> Tensor:
    """A rank's chunks of one sequence, by slicing."""
    chunks = sequence.chunk(2 * size) if len(sequence) else [sequence] * (2 * size)
    return torch.cat([chunks[index], chunks[2 * size - 1 - index]])


@st.composite
def batches(draw: st.DrawFn, *, equal: bool, multiple: int = 1) -> Batch:
    """Up to four sequences, each owning a multiple of ``multiple`` rows, the same number where ``equal``."""
    count = draw(st.integers(1, 4))
    sizes = st.integers(0, 3).map(lambda chunks: chunks * multiple)
    owned = [draw(sizes)] * count if equal else [draw(sizes) for _ in range(count)]
    return Batch(lengths=[draw(st.integers(0, rows)) for rows in owned], owned=owned)


@contextmanager
def on_device(*, may_sync: bool = False) -> Iterator[None]:
    """Within it CPU tensors count as a device's, and nothing may wait for them unless ``may_sync``."""
    with ExitStack() as patches:
        for module in ("base", "conversion", "rows", "thd"):
            patches.enter_context(mock.patch(f"moe_dispatch.layouts.{module}.is_host", return_value=False))
        if not may_sync:
            patches.enter_context(refuse_host_syncs())
        yield
