"""Count the rows of dispatches by expert, rank and node, from the expert ids of all ranks.

Dimensions: ``C`` dispatches, ``N`` nodes; others as in ``moe_dispatch.types``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.config import DispatcherConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loads:
    """Counts of several dispatches, int64.

    Attributes:
        rows_CP: Rows that each rank brings, before padding.
        experts_CPE: Rows of each rank that go to each expert.
        slots_CPP: For each sender and receiver: pairs of a row and one of its experts on the receiver.
        pairs_CPP: For each sender and receiver: rows with at least one expert on the receiver.
        nodes_CPN: For each sender and node: rows with at least one expert on the node.
    """

    rows_CP: Tensor
    experts_CPE: Tensor
    slots_CPP: Tensor
    pairs_CPP: Tensor
    nodes_CPN: Tensor

    @property
    def tokens_CE(self) -> Tensor:
        """Rows that go to each expert."""
        return self.experts_CPE.sum(1)

    @property
    def received_CP(self) -> Tensor:
        """Rows that the experts of each rank get, without padding."""
        return self.slots_CPP.sum(1)

    def expert_padding_CP(self, pad_multiple: int) -> Tensor:
        """Count the padding that rounds the rows of each expert up to ``pad_multiple``, by rank of the expert."""
        size = self.rows_CP.shape[1]
        padding_CP: Tensor = (-self.tokens_CE % pad_multiple).unflatten(1, (size, -1)).sum(2)
        return padding_CP


def count_loads(dispatches: Iterable[Sequence[Tensor]], shape: MoEShape) -> Loads:
    """Count the rows of every dispatch.

    Args:
        dispatches: Expert ids of each rank in each dispatch, int64 (T, K). The id is -1 if a slot goes nowhere. An
            expert that a row names twice counts once.
        shape: Sizes. Without ``ranks_per_node``, all ranks are on one node.
    """
    local, nodes = shape.num_local_experts, shape.ep_size // (shape.ranks_per_node or shape.ep_size)
    blocks = (shape.num_experts, shape.ep_size, nodes)
    rows, counts = [], [[torch.zeros(0, shape.ep_size, number, dtype=torch.int64)] for number in blocks]
    for ids in dispatches:
        rows.append([len(ids_TK) for ids_TK in ids])
        sender_T = torch.arange(len(ids)).repeat_interleave(torch.tensor(rows[-1])).unsqueeze(1)
        sorted_TK = torch.cat(list(ids)).sort(1).values
        for number, found in zip(blocks, counts, strict=True):
            found.append(_count_blocks(sorted_TK, sender_T, shape, number).unsqueeze(0))
    experts_CPE, pairs_CPP, nodes_CPN = (torch.cat(found) for found in counts)
    return Loads(
        rows_CP=torch.tensor(rows, dtype=torch.int64).view(-1, shape.ep_size),
        experts_CPE=experts_CPE,
        slots_CPP=experts_CPE.unflatten(2, (shape.ep_size, local)).sum(3),
        pairs_CPP=pairs_CPP,
        nodes_CPN=nodes_CPN,
    )


def _count_blocks(sorted_TK: Tensor, sender_T1: Tensor, shape: MoEShape, num_blocks: int) -> Tensor:
    """Count the rows of each sender with an expert in each of ``num_blocks`` blocks of experts, int64 (P, B).

    Example with 4 experts per block: a row with the sorted ids -1, 1, 3, 6 has the blocks -1, 0, 0, 1. It counts once
    in block 0 and once in block 1.
    """
    block_TK = sorted_TK.div(shape.num_experts // num_blocks, rounding_mode="floor")
    counts_TK = block_TK >= 0
    counts_TK[:, 1:] &= block_TK[:, 1:] != block_TK[:, :-1]
    cells = shape.ep_size * num_blocks
    cell_TK = torch.where(counts_TK, sender_T1 * num_blocks + block_TK, cells)  # the last cell is discarded
    return torch.bincount(cell_TK.flatten(), minlength=cells + 1)[:cells].view(shape.ep_size, num_blocks)


def rows_between_nodes(table_CPN: Tensor) -> Tensor:
    """Return the rows, or slots, that senders send to relays on other nodes, by sender and relay, (C, P, P).

    The relay of a node has the same place on its node as the sender has on its own.

    Args:
        table_CPN: Rows, or slots, of each sender for each node.
    """
    nodes = table_CPN.shape[2]
    table = table_CPN.unflatten(1, (nodes, -1)) * ~torch.eye(nodes, dtype=torch.bool).unsqueeze(1)
    same_GG = torch.eye(table.shape[2], dtype=torch.bool)
    sent: Tensor = table.unsqueeze(4) * same_GG.unsqueeze(1)
    return sent.flatten(3).flatten(1, 2)


def rows_within_nodes(table_CPP: Tensor, num_nodes: int) -> Tensor:
    """Return the rows, or slots, that relays send on to other ranks of their node, by relay and receiver, (C, P, P).

    Args:
        table_CPP: Rows, or slots, of each sender for each receiver.
        num_nodes: Number of nodes.
    """
    same_NN = torch.eye(num_nodes, dtype=torch.bool)
    # The dimensions are C, the place of the relay, the node, and the place of the receiver.
    table = table_CPP.unflatten(1, (num_nodes, -1)).sum(1).unflatten(2, (num_nodes, -1))
    table = table * ~torch.eye(table.shape[1], dtype=torch.bool).unsqueeze(1)
    sent: Tensor = table.transpose(1, 2).unsqueeze(3) * same_NN[:, None, :, None]
    return sent.flatten(3).flatten(1, 2)


def padded_rows(rows_CP: Tensor, needs: Constraints, config: DispatcherConfig) -> Tensor:
    """Return the rows that each rank brings to a backend with these needs, including padding, int64 (C, P)."""
    if not needs.equal_rows:
        return rows_CP.clone().apply_(needs.padded)
    most_C = rows_CP.amax(1)
    if (config.graph_safe or config.row_counts == "static") and config.max_tokens_per_rank is not None:
        most_C = torch.full_like(most_C, config.max_tokens_per_rank)
    return most_C.apply_(needs.padded).unsqueeze(1).expand_as(rows_CP)


def overflow_bounds(rows_CPP: Tensor, limit: int, *, summed: bool) -> tuple[float, float]:
    """Return two bounds of the chance that some receiver gets more than ``limit`` rows.

    The numbers are assumed to be normal, with the mean and the variance of the simulated rows. For the bounds, the mean
    is two standard errors lower and two standard errors higher.

    Args:
        rows_CPP: Rows of each sender and receiver in simulated dispatches. All senders have the same distribution.
        limit: Largest number of rows of a receiver.
        summed: Whether the limit applies to the rows of all senders together; otherwise to the rows of each sender.
    """
    rows_CPP, (dispatches, size, _) = rows_CPP.double(), rows_CPP.shape
    terms = size if summed else 1  # means and variances of independent terms add up
    mean_P, variance_P = terms * rows_CPP.mean((0, 1)), terms * rows_CPP.var((0, 1))
    room_P = (limit + 0.5 - mean_P) / variance_P.sqrt()
    doubt = 2 * math.sqrt(terms / (dispatches * size))
    low, high = (
        float(torch.expm1(torch.special.log_ndtr(room_P + side * doubt).sum() * size / terms).abs()) for side in (1, -1)
    )
    return low, high


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Format the names of dtypes, without repetitions; "unknown" if there are none."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)) or "unknown"
