"""The layout that a call's arguments describe; no part of transformers is needed for it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moe_dispatch.errors import LayoutError
from moe_dispatch.integrations.transformers.forwards import layout_of

IDS = torch.zeros(2, 3, dtype=torch.int64)
EMBEDS = torch.zeros(2, 3, 4)
CACHE = object()


def real(**call: Any) -> list[int] | None:
    valid = layout_of(call).valid_T(6)
    return None if valid is None else valid.int().tolist()


@pytest.mark.parametrize("batch", [{"input_ids": IDS}, {"inputs_embeds": EMBEDS}])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_may_have_padding_anywhere(batch: dict[str, Any], dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    assert real(**batch, attention_mask=mask) == [0, 1, 1, 1, 0, 1]


def test_without_a_mask_every_row_is_real() -> None:
    assert real(input_ids=IDS) is None
    assert real(input_ids=IDS, attention_mask=None, past_key_values=CACHE) is None


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # until transformers 5.23, and from 5.24 on
def test_with_a_cache_the_last_positions_of_the_mask_are_those_of_the_call(name: str) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])
    assert real(input_ids=IDS, attention_mask=mask, **{name: CACHE}) == [1, 1, 1, 1, 0, 1]
    assert real(input_ids=IDS, attention_mask=mask[:, 2:], **{name: CACHE}) == [1, 1, 1, 1, 0, 1]


def test_rows_behind_packed_sequences_are_padding() -> None:
    packed = torch.zeros(1, 6, dtype=torch.int64)
    assert real(input_ids=packed, cu_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32)) == [1, 1, 1, 1, 0, 0]
    assert real(input_ids=packed, cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32)) == [1] * 6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "attention_mask must be [2, 3], got [2, 1, 3, 3]. Pass the"),
        ({"attention_mask": torch.ones(3, 3)}, "attention_mask must be [2, 3], got [3, 3]"),
        ({"attention_mask": torch.ones(2, 2)}, "attention_mask must be [2, 3], got [2, 2]"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask must be [2, 3], got [2, 4]"),
        ({"attention_mask": torch.ones(2, 2), "past_key_values": CACHE}, "attention_mask must be [2, 3 or more], got"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask must be [2, 3], got dict"),
        ({"input_ids": None}, "must be given input_ids [B, S] or inputs_embeds [B, S, D], got None"),
        ({"input_ids": IDS[0]}, "must be given input_ids [B, S] or inputs_embeds [B, S, D], got (3,)"),
        ({"inputs_embeds": EMBEDS[0]}, "must be given input_ids [B, S] or inputs_embeds [B, S, D], got (3, 4)"),
    ],
)
def test_other_masks_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(text)):
        layout_of({"input_ids": IDS, **changes})


def test_no_value_is_read() -> None:
    """On the device without values a read would fail."""

    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="meta")

    assert not layout_of({"input_ids": made(2, 3), "attention_mask": made(2, 3)}).on_host
    assert layout_of({"input_ids": made(1, 6), "cu_seq_lens_q": made(3)})
