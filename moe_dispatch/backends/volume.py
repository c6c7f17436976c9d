"""The rows that each rank exchanges with other ranks, and the bytes that a backend sends for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Volume:
    """The rows and slots that ranks exchange in one dispatch. Each attribute is float64 (P,), one entry per rank.

    The entries are whole numbers for a known routing, and expected values for a random routing. Bytes are linear in
    all entries, so expected entries give expected bytes.

    For example, rank 0 owns experts 0 and 1, and rank 1 owns experts 2 and 3. A row of rank 0 that names experts 1, 2
    and 3 adds 1 to ``pairs_out[0]`` and ``pairs_in[1]``, and 2 to ``slots_out[0]`` and ``slots_in[1]``.

    Attributes:
        rows: Number of rows that the rank brings, padding included.
        others: Number of other ranks that the rank exchanges rows with.
        pairs_out: Number of pairs of a row of this rank and another rank that owns at least one expert of the row.
        pairs_in: Number of rows of other ranks with at least one expert on this rank.
        slots_out: Number of slots of this rank's rows whose expert is on another rank.
        slots_in: Number of slots of other ranks' rows whose expert is on this rank.
        legs: The volumes of an exchange in two legs: between nodes, where a row goes to one rank of each other node
            that owns one of its experts; then on the nodes, where that rank sends it to the other ranks that own one.
            None if all ranks are on one node, if each is on a node of its own, or if the nodes are not known.
    """

    rows: Tensor
    others: Tensor
    pairs_out: Tensor
    pairs_in: Tensor
    slots_out: Tensor
    slots_in: Tensor
    legs: tuple[Volume, Volume] | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SentBytes:
    """The bytes that a backend sends in one dispatch, one combine and their backwards.

    Attributes:
        sent: Bytes that each rank sends to other ranks, float64 (P,), by collective, as in ``Metrics.bytes_sent``.
        payload_only: Whether ``sent`` counts rows only. The vendor's library may send other data beside them.
        once_per_node: Whether a row enters another node once and is forwarded inside the node. If not, it enters the
            node once for each rank that it goes to.
        row_dtypes: Dtypes of the rows on the wire: the dtype in dispatch first. Empty if the backend does not say.
    """

    sent: dict[str, Tensor]
    payload_only: bool = False
    once_per_node: bool = False
    row_dtypes: tuple[torch.dtype, ...] = ()
