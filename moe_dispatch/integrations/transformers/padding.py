"""The layout of one call of a model: which of its positions hold tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import Layout, Masked, Rows


def positions_of(call: Mapping[str, Any]) -> Tensor:
    """What holds the positions of a call, [B, S] or [B, S, D]: ``inputs_embeds`` or ``input_ids``.

    Raises:
        LayoutError: it has neither, or not of these dimensions.
    """
    embeds, ids = call.get("inputs_embeds"), call.get("input_ids")
    held = ids if embeds is None else embeds
    if not isinstance(held, Tensor) or held.dim() != (2 if embeds is None else 3):
        got = tuple(held.shape) if isinstance(held, Tensor) else held
        raise LayoutError(
            f"attach: a forward must be given input_ids [B, S] or inputs_embeds [B, S, D], got {got}. Pass one."
        )
    return held


def layout_of(call: Mapping[str, Any]) -> Layout:
    """Which rows of ``[B * S, D]`` are real, from the arguments of a forward, by name.

    ``attention_mask`` [B, M], 0 on padding, with or without holes; with a cache M counts earlier positions too, and the
    last S are taken. Without one ``cu_seq_lens_q`` (n+1,) of packed sequences: rows behind its end are padding. Without
    either every row is real.

    Raises:
        LayoutError: a mask of another form.

    Cost: no host sync.
    """
    batch, length = positions_of(call).shape[:2]
    mask, ends = call.get("attention_mask"), call.get("cu_seq_lens_q")
    if mask is None:
        return Rows() if ends is None else Rows(num_real=ends[-1:])
    _check_mask(mask, batch, length, cached=call.get("past_key_values") is not None)
    return Masked((mask[:, mask.shape[1] - length :] != 0).flatten())


def _check_mask(mask: Any, batch: int, length: int, *, cached: bool) -> None:
    wanted = f"[{batch}, {length}]" if not cached else f"[{batch}, {length} or more]"
    if not isinstance(mask, Tensor):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {type(mask).__name__}. Pass the tokenizer's 2-D mask."
        )
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if not fits or mask.shape[1] < length or (mask.shape[1] > length and not cached):
        raise LayoutError(
            f"attach: attention_mask must be {wanted}, got {list(mask.shape)}. Pass the tokenizer's 2-D mask of this "
            "batch; transformers makes the one for attention of it."
        )
