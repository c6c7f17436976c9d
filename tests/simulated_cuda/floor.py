"""The floor of each verb: the bytes that an ideal implementation must read from device memory and write to it.

A floor has rows and packets only. A packet is a row with what travels beside it. Each row that is sent is read once,
each packet is written once, each packet that arrived is read once, and each row for an expert is written once; the way
back is the same in reverse. This is what a fused implementation does that keeps nothing else in memory: one kernel
reads a row and writes it to all its packets, and another reads a packet that arrived and writes it to all its experts.

- Tables are not in a floor, because a kernel could compute positions in registers. They are small if rows are wide.
- What the links move is not in it either. So collectives, and the transport inside a vendor's library, count nothing.
- The padding of an expert is written: grouped GEMMs read it, so it must be zero. It is never read. The slack behind the
  last expert is in no floor, and neither are the empty places of a send buffer of fixed size.
- A backward of combine reads the gradient of a row once and the output of each expert once. Their dot product is the
  gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

VERBS = ("dispatch", "combine", "combine.backward", "dispatch.backward")
# Bytes of one number, and the columns and bytes of one scale, of rows that travel quantised.
_QUANTISED = {"float8_e4m3fn": (128, 4), "mxfp8": (32, 1)}
_BFLOAT16, _FLOAT32, _ID = 2, 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """Numbers of the rows that one rank handles in one dispatch.

    Attributes:
        own: T, rows of this rank.
        sent: For each leg, the packets that this rank sends.
        received: For each leg, the packets that arrive here.
        everyone: Rows of all ranks together.
        real: Rows for the experts of this rank, without padding.
        padded: The same with padding.
    """

    own: int
    sent: Sequence[int]
    received: Sequence[int]
    everyone: int
    real: int
    padded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Bytes of one row of a bfloat16 model in each of its forms.

    Attributes:
        hidden: D.
        top_k: K.
        wire: ``wire.dtype`` of the config.
        delivers_quantised: Whether experts get rows as they travelled.
        quantised_gradients: Whether the gradient rows of combine travel as ``wire`` too.
    """

    hidden: int
    top_k: int
    wire: str | None = None
    delivers_quantised: bool = False
    quantised_gradients: bool = False

    @property
    def row(self) -> int:
        """A row of the model, and a row on the way back."""
        return self.hidden * _BFLOAT16

    @property
    def travelling(self) -> int:
        """A row in the form in which a dispatch sends it, with its scales."""
        if self.wire is None:
            return self.row
        columns, scale = _QUANTISED[self.wire]
        return self.hidden + self.hidden // columns * scale

    @property
    def packet(self) -> int:
        """A packet of a dispatch: a row, and a float32 weight and an int16 id for each slot."""
        return self.travelling + self.top_k * (_FLOAT32 + _ID)

    @property
    def returning(self) -> int:
        """A packet of the backward of a dispatch: a row, and a float32 gradient for each slot."""
        return self.row + self.top_k * _FLOAT32

    @property
    def gradient(self) -> int:
        """A row of the backward of a combine, which travels bare."""
        return self.travelling if self.quantised_gradients else self.row

    @property
    def expert(self) -> int:
        """A row as an expert gets it."""
        return self.travelling if self.delivers_quantised else self.row


def local(rows: Volume, widths: Widths) -> dict[str, int]:
    """Return the floors of ``local``, where no packet is made."""
    row = widths.row
    return {
        "dispatch": rows.own * row + rows.padded * widths.expert,
        "combine": (rows.real + rows.own) * row,
        "combine.backward": (rows.own + rows.real + rows.padded) * row,
        "dispatch.backward": (rows.real + rows.own) * row,
    }


def alltoall(rows: Volume, widths: Widths) -> dict[str, int]:
    """Return the floors of ``alltoall``: those of ``local``, and each packet of each leg written once and read once.

    With two legs, the ranks in between read the packets of one leg and write those of the other. The gradients of
    combine travel as bare rows.
    """
    packets = sum(rows.sent) + sum(rows.received)
    widths_of = (widths.packet, widths.row, widths.gradient, widths.returning)
    floors = local(rows, widths)
    return {verb: floors[verb] + packets * width for verb, width in zip(VERBS, widths_of, strict=True)}


def allgather(rows: Volume, widths: Widths) -> dict[str, int]:
    """Return the floors of ``allgather``.

    A dispatch writes the packets of this rank, and reads the arrived ones that have an expert here. Gradients of
    combine are gathered from where they are. On the way back the sums of all rows are written in float32 for the
    reduce-scatter, whose result is read once. This rounds once, however many ranks add.
    """
    row, sums, (received,) = widths.row, widths.hidden * _FLOAT32, rows.received
    floors, reduced = local(rows, widths), rows.everyone + rows.own
    return {
        "dispatch": floors["dispatch"] + (rows.own + received) * widths.packet,
        "combine": floors["combine"] + reduced * sums,
        "combine.backward": floors["combine.backward"] + (received - rows.own) * row,
        "dispatch.backward": floors["dispatch.backward"] + reduced * (sums + widths.top_k * _FLOAT32),
    }


def library(rows: Volume, widths: Widths) -> dict[str, int]:
    """Return what the kernels of a vendor's library touch that itself delivers expert-major rows.

    They are taken to be ideal: a call is counted as ``alltoall``'s floor of its direction, without gradients of
    weights. This formula stands for the calls of a verb when the verb is measured, and in its floor.
    """
    floors = alltoall(rows, widths)
    out = floors["dispatch"]
    return {
        "dispatch": out,
        "combine": floors["combine"],
        "combine.backward": out,
        "dispatch.backward": floors["combine"],
    }


def around_library(rows: Volume, widths: Widths) -> dict[str, int]:
    """Return the floors of a backend over such a library, with the weights applied in combine.

    The library adds rows without weights. So combine must read each real row and write its product, and its backward
    must read each gradient and each row, and write the product. The library reads no padding.
    """
    row, calls = widths.row, library(rows, widths)
    calls["combine"] += 2 * rows.real * row
    calls["combine.backward"] += (2 * rows.real + rows.padded) * row
    return calls


def volume(sent: Any, own: int, everyone: int) -> Volume:
    """Count the rows of a dispatch of this package, from the tables of its route. Reads the device.

    Args:
        sent: What ``dispatch`` returned, from a route with a ``SlotIndex``.
        own: Rows of this rank.
        everyone: Rows of all ranks.
    """
    index, legs = sent.state.route.index, _legs_of(sent.state.route)
    needed = int((index.cu_S.diff() > 0).sum())  # rows that arrived and have an expert here
    received = [sum(leg.rows_in) for leg in legs[:-1]] + [needed]
    return Volume(
        own=own,
        sent=[int(leg.cu_T[-1]) for leg in legs],
        received=received,
        everyone=everyone,
        real=int(index.cu_S[-1]),
        padded=_total(sent.tokens_per_expert),
    )


def volume_on_one_rank(sent: Any, own: int) -> Volume:
    """Count the rows of a dispatch that a library made on one rank, where each row travels once. Reads the device."""
    real, padded = _total(sent.real_tokens_per_expert), _total(sent.tokens_per_expert)
    return Volume(own=own, sent=[own], received=[own], everyone=own, real=real, padded=padded)


def _legs_of(route: Any) -> Sequence[Any]:
    """Return the legs of a route: one, two on ``alltoall_by_node``, and none on a backend without packets."""
    return [getattr(route, name) for name in ("leg", "between", "within") if hasattr(route, name)]


def _total(counts: Tensor) -> int:
    return int(counts.sum())
