"""Count the rows of dispatches by expert, rank and node, and the bytes that a backend sends for them.

Dimensions: ``C`` dispatches, ``N`` nodes; others as in ``moe_dispatch.types``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.volume import Volume
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


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traffic:
    """The bytes that a backend sends to other ranks in some dispatches, forward and backward.

    Attributes:
        sent_CP: Bytes that each rank sends in each dispatch, float64, by collective.
        between_nodes: Bytes that a rank sends to other nodes in a dispatch, on average.
        payload_only: Whether only rows are counted.
        row_dtypes: Names of the dtypes of the rows on the wire, dispatch first.
    """

    sent_CP: dict[str, Tensor]
    between_nodes: float
    payload_only: bool
    row_dtypes: str


def count_traffic(
    options: BackendOptions, shape: MoEShape, loads: Loads, padded_CP: Tensor, dtypes: Sequence[torch.dtype]
) -> Traffic | None:
    """Count the bytes that a backend sends; None if it cannot say.

    Args:
        options: Options of the backend.
        shape: Sizes of the group.
        loads: Counts of the dispatches.
        padded_CP: Rows that each rank brings, with padding.
        dtypes: Dtype of the rows of each dispatch.
    """
    node_P = torch.arange(shape.ep_size) // (shape.ranks_per_node or shape.ep_size)
    away_PP = node_P.unsqueeze(1) != node_P
    sent_CP, between_nodes = dict[str, Tensor](), 0.0
    row_dtypes: dict[torch.dtype, None] = {}
    payload_only = False
    for number, dtype in enumerate(dtypes):
        volume = _volume(loads, number, padded_CP[number])
        wire = options.wire_bytes(shape, volume, dtype)
        if wire is None:
            return None
        payload_only |= wire.payload_only
        row_dtypes |= dict.fromkeys(wire.row_dtypes)
        for label, nbytes_PP in wire.sent.items():
            sent_CP.setdefault(label, torch.zeros_like(padded_CP, dtype=torch.float64))[number] = nbytes_PP.sum(1)
        across = options.wire_bytes(shape, volume.legs[0], dtype) if wire.once_per_node and volume.legs else None
        crossing = wire.sent if across is None else across.sent
        between_nodes += sum(float((nbytes_PP * away_PP).sum()) for nbytes_PP in crossing.values())
    return Traffic(
        sent_CP=sent_CP,
        between_nodes=between_nodes / padded_CP.numel(),
        payload_only=payload_only,
        row_dtypes=dtype_names(row_dtypes),
    )


def _volume(loads: Loads, number: int, padded_P: Tensor) -> Volume:
    """Count what each rank sends to each other rank in one dispatch. Bytes are linear in it, so they are by pair too.

    With several nodes of several ranks there are two legs: from a rank to its relay on each other node, which has the
    same place on its node, and from relays to the other ranks of their node.
    """
    size, nodes = len(padded_P), loads.nodes_CPN.shape[2]
    rank_P = torch.arange(size)
    node_P, place_P = rank_P // (size // nodes), rank_P % (size // nodes)
    other_PP = rank_P.unsqueeze(1) != rank_P
    same_node_PP, same_place_PP = node_P.unsqueeze(1) == node_P, place_P.unsqueeze(1) == place_P
    pairs_PP, slots_PP, to_nodes_PN = (
        table[number].double() for table in (loads.pairs_CPP, loads.slots_CPP, loads.nodes_CPN)
    )

    def exchanged(
        mask_PP: Tensor, pairs_PP: Tensor, slots_PP: Tensor, legs: tuple[Volume, Volume] | None = None
    ) -> Volume:
        return Volume(
            rows=padded_P.double().unsqueeze(1) * mask_PP,
            others=mask_PP.double(),
            pairs_out=pairs_PP * mask_PP,
            pairs_in=(pairs_PP * mask_PP).t(),
            slots_out=slots_PP * mask_PP,
            slots_in=(slots_PP * mask_PP).t(),
            legs=legs,
        )

    legs = None
    if 1 < nodes < size:
        slots_PN = slots_PP.unflatten(1, (nodes, -1)).sum(2)
        pairs_across = to_nodes_PN.repeat_interleave(size // nodes, 1)
        slots_across = slots_PN.repeat_interleave(size // nodes, 1)
        pairs_within, slots_within = (same_place_PP.double() @ table_PP for table_PP in (pairs_PP, slots_PP))
        legs = (
            exchanged(same_place_PP & ~same_node_PP, pairs_across, slots_across),
            exchanged(same_node_PP & other_PP, pairs_within, slots_within),
        )
    return exchanged(other_PP, pairs_PP, slots_PP, legs)


def padded_rows(rows_CP: Tensor, needs: Constraints, config: DispatcherConfig) -> Tensor:
    """Return the rows that each rank brings to a backend with these needs, including padding, int64 (C, P)."""
    if not needs.equal_rows:
        return rows_CP.clone().apply_(needs.padded)
    most_C = rows_CP.amax(1)
    if (config.graph_safe or config.row_counts == "static") and config.max_tokens_per_rank is not None:
        most_C = torch.full_like(most_C, config.max_tokens_per_rank)
    return most_C.apply_(needs.padded).unsqueeze(1).expand_as(rows_CP)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Format the names of dtypes, without repetitions; "unknown" if there are none."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)) or "unknown"
