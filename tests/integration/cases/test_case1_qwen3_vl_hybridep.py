"""Case 1: Qwen3-VL on HybridEP, whose rules of rows reached the training step. NVIDIA-NeMo/Megatron-Bridge#3294.

Reported: tp 1, ep 8, pp 1, micro-batch 4, flex dispatcher on hybridep. The step pads sequences to 16, so rows came in
multiples of 64, and the chunks of 128 of that time did not divide them. Releases of today need no whole chunks.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import BSHD, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import padded_length, sequence_multiple
from moe_dispatch_testing import Ranks

pytestmark = pytest.mark.integration

EP_SIZE, MICRO_BATCH, CHUNK, FP8_ROWS = 8, 4, 128, 16
LENGTHS = (135, 87, 121, 43)
EQUAL_ROWS, ANY_ROWS = "hybridep-94a9f8f", "hybridep-744"

on_ranks = partial(Ranks(timedelta(seconds=60)).run, size=EP_SIZE)


def test_a_forced_length_does_not_bypass_the_rule() -> None:
    """Review of #3294: round the pipeline's seq_length up, or refuse it with both numbers."""
    multiple = sequence_multiple(batch_size=MICRO_BATCH, row_multiple=CHUNK)
    for seq_length in range(max(LENGTHS), 300):
        assert MICRO_BATCH * padded_length(max(LENGTHS), multiple, seq_length) % CHUNK == 0
    with pytest.raises(LayoutError, match=r"seq_length \(128\) must be at least the length \(135\)"):
        padded_length(max(LENGTHS), multiple, seq_length=128)


@pytest.mark.parametrize(
    ("release", "lengths", "rows"),
    [(EQUAL_ROWS, LENGTHS, 386), (EQUAL_ROWS, None, 576), (ANY_ROWS, LENGTHS, None)],
)
def test_the_rule_belongs_to_the_installed_version(
    release: str, lengths: tuple[int, ...] | None, rows: int | None
) -> None:
    """The model's code stays the same. The lengths are odd, and other ones on each rank.

    A release that needs equal rows gets the largest number of the group from every rank, a ragged one what there is.
    """
    backend = {"name": "hybridep", "emulate": release}
    config = DispatcherConfig(backend=backend, num_experts=16, top_k=4, hidden_size=512, wire="bfloat16")

    def body(group: dist.ProcessGroup) -> int | None:
        dispatcher = build_dispatcher(config, group)
        layout = BSHD([length - 2 * group.rank() for length in lengths] if lengths else None)
        shape = MICRO_BATCH, padded_length(max(LENGTHS), FP8_ROWS)
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randint(-8, 8, (*shape, 512), generator=generator).float()
        plan = dispatcher.plan(layout, like=x)
        ids = torch.rand(shape[0] * shape[1], 16, generator=generator).topk(4).indices
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(ids.shape)), plan)
        y = dispatcher.combine(sent.rows, sent)
        real = layout.valid_T(len(ids))
        assert torch.equal(y, 4 * x * (1 if real is None else real.view(*shape, 1)))
        dispatcher.close()
        return plan.sizes.padded_rows

    assert on_ranks(body) == [rows] * EP_SIZE
