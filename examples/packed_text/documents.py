"""Real text of very different lengths, packed: the help topics that CPython ships, as bytes.

Dimensions: ``T`` bytes of a pack, ``n`` sequences of a pack.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pydoc_data.topics import topics
from typing import final

import torch
from torch import Tensor

BEGIN = 256
"""The token before the first byte of a document. Every other token is the value of a byte."""
NUM_TOKENS = 257
PARAGRAPH = b"\n\n"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """Sequences one after another, without padding.

    Attributes:
        inputs: int64 (T,). Each is the token before the byte to predict.
        targets: int64 (T,). The bytes to predict.
        cu_seqlens: int32 (n+1,), on the CPU. The first byte of each sequence; the last entry is T.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def __len__(self) -> int:
        """Return T."""
        return len(self.targets)


def pack(documents: Sequence[tuple[int, ...]]) -> Pack:
    """Pack token sequences. The last token of a sequence is predicted and not read."""
    tokens = [torch.tensor(list(document), dtype=torch.int64) for document in documents]
    ends = accumulate((len(sequence) - 1 for sequence in tokens), initial=0)
    return Pack(
        inputs=torch.cat([sequence[:-1] for sequence in tokens]),
        targets=torch.cat([sequence[1:] for sequence in tokens]),
        cu_seqlens=torch.tensor(list(ends), dtype=torch.int32),
    )


def join(packs: Sequence[Pack]) -> Pack:
    """Return one pack with the sequences of all packs, in order."""
    starts = list(accumulate((len(part) for part in packs), initial=0))
    shifted = [part.cu_seqlens[1:] + start for part, start in zip(packs, starts, strict=False)]
    return Pack(
        inputs=torch.cat([part.inputs for part in packs]),
        targets=torch.cat([part.targets for part in packs]),
        cu_seqlens=torch.cat([packs[0].cu_seqlens[:1], *shifted]),
    )


def read_sequences(max_length: int) -> list[tuple[int, ...]]:
    """Return all topics as tokens. Topics of more than ``max_length`` bytes are cut, after a paragraph if possible."""
    return [sequence for name in sorted(topics) for sequence in _cut(topics[name].encode(), max_length)]


def _cut(document: bytes, max_length: int) -> Iterator[tuple[int, ...]]:
    before = BEGIN
    while document:
        end = len(document)
        if end > max_length:
            paragraph = document.rfind(PARAGRAPH, 0, max_length)
            end = max_length if paragraph < 0 else paragraph + len(PARAGRAPH)
        yield (before, *document[:end])
        before, document = document[end - 1], document[end:]


def batches(*, ranks: int, bytes_per_rank: int, max_length: int, seed: int) -> Iterator[list[Pack]]:
    """Yield batches without end. A batch has one pack for each rank, and every caller gets equal batches.

    Every pack holds whole sequences and at least ``bytes_per_rank`` bytes. The packs of a batch differ in length.
    """
    stream = _shuffled(read_sequences(max_length), seed)
    while True:
        lengths: set[int] = set()
        packs = []
        for _ in range(ranks):
            sequences: list[tuple[int, ...]] = []
            while (length := sum(len(tokens) - 1 for tokens in sequences)) < bytes_per_rank or length in lengths:
                sequences.append(next(stream))
            lengths.add(length)
            packs.append(pack(sequences))
        yield packs


def _shuffled(sequences: list[tuple[int, ...]], seed: int) -> Iterator[tuple[int, ...]]:
    for epoch in count():
        yield from random.Random(seed + epoch).sample(sequences, len(sequences))
