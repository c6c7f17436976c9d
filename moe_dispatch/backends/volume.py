"""How much of a routing leaves each rank, and what that comes to on a backend's wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Volume:
    """Rows that ranks exchange in one dispatch: float64 (P,), an entry for each rank.

    Whole numbers of a known routing, or expectations of a random one: bytes are linear in all of them.

    Attributes:
        rows: that a rank brings, padded.
        others: ranks that it exchanges rows with.
        pairs_out: pairs of a row of this rank and another rank that owns at least one of its experts.
        pairs_in: pairs of another rank's row and this rank, which owns at least one of its experts.
        slots_out: pairs of a row of this rank and one of its experts, on another rank.
        slots_in: pairs of another rank's row and one of its experts, on this rank.
    """

    rows: Tensor
    others: Tensor
    pairs_out: Tensor
    pairs_in: Tensor
    slots_out: Tensor
    slots_in: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SentBytes:
    """What a backend sends in one dispatch, combine and their backwards.

    Attributes:
        sent: bytes to other ranks, float64 (P,), by collective, as in ``Metrics.bytes_sent``.
        payload_only: only rows are counted; what a library sends beside them is its own affair.
        once_per_node: a row enters another node once and is handed on inside; else once for each rank it goes to.
        row_dtypes: Dtypes of the rows on the wire: the dtype in dispatch first. Empty if the backend does not say.
    """

    sent: dict[str, Tensor]
    payload_only: bool = False
    once_per_node: bool = False
    row_dtypes: tuple[torch.dtype, ...] = ()


def payload(volume: Volume, *, out_bytes: int, back_bytes: int, row_dtypes: tuple[torch.dtype, ...] = ()) -> SentBytes:
    """Count rows that go once to each rank that needs them.

    Args:
        volume: Rows that ranks exchange.
        out_bytes: Bytes of a row in dispatch.
        back_bytes: Bytes of a row in combine and in both backwards.
        row_dtypes: As in ``SentBytes``.
    """
    return SentBytes(
        sent={
            "dispatch": volume.pairs_out * out_bytes,
            "combine": volume.pairs_in * back_bytes,
            "combine.backward": volume.pairs_out * back_bytes,
            "dispatch.backward": volume.pairs_in * back_bytes,
        },
        payload_only=True,
        once_per_node=True,
        row_dtypes=row_dtypes,
    )
