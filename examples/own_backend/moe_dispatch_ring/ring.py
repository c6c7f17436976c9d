"""Functions that pass blocks of rows around a ring of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.backends import Communicator


def shift(block: Tensor, communicator: Communicator, label: str) -> Tensor:
    """Send ``block`` to the next rank, and return the block of the previous rank, which has the same shape."""
    size, rank, rows = communicator.size, communicator.rank, len(block)
    to_next = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    from_previous = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    received = torch.empty_like(block)
    communicator.all_to_all(received, block, from_previous, to_next, label=label).wait()
    return received


def gather(block_TD: Tensor, communicator: Communicator, label: str) -> Tensor:
    """Collect the block of every rank: (P, T, D)."""
    size, rank = communicator.size, communicator.rank
    blocks = {rank: block_TD.contiguous()}
    for step in range(1, size):
        blocks[(rank - step) % size] = shift(blocks[(rank - step + 1) % size], communicator, label)
    return torch.stack([blocks[source] for source in range(size)])


def scatter_sum(blocks_PTD: Tensor, communicator: Communicator, label: str) -> Tensor:
    """Sum the blocks for this rank over all ranks: (T, D). Each rank adds its block as the sum passes it."""
    size, rank = communicator.size, communicator.rank
    total = blocks_PTD[(rank - 1) % size].contiguous()
    for step in range(2, size + 1):
        total = shift(total, communicator, label) + blocks_PTD[(rank - step) % size]
    return total
