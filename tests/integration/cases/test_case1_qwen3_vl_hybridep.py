"""Case 1: Qwen3-VL on HybridEP whose rules want whole chunks of rows. NVIDIA-NeMo/Megatron-Bridge#3294.

Reported: tp 1, ep 8, pp 1, micro-batch 4, flex dispatcher on hybridep. The step pads sequences to 16, so rows come in
multiples of 64, and chunks of 128 do not divide them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import BSHD, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import padded_length, sequence_multiple
from moe_dispatch_testing import Ranks
from tests.emulation.hybrid_case import make_sources, open_buffer, returned, sent
from tests.emulation.tokens import outcome

pytestmark = pytest.mark.integration

EP_SIZE, MICRO_BATCH, CHUNK, FP8_ROWS = 8, 4, 128, 16
LENGTHS = (135, 87, 121, 43)
REPORTED = "MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK"
# Megatron-Bridge's recipes asked for chunks of 128 (#3135) when the default had become 64.
APRIL, JULY = "hybridep-34152ae", "hybridep-94a9f8f"
ASKED = {"NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "128"}
ASKED_FOR = pytest.mark.parametrize("variables", [ASKED], indirect=True, ids=["asked for"])

on_ranks = partial(Ranks(timedelta(seconds=60)).run, size=EP_SIZE)


@pytest.fixture(autouse=True)
def variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a test's parameter says in the environment of its ranks, which are threads of this process."""
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)


# By hand: the calls that Megatron's flex dispatcher makes, with the rows that the step gives it


def by_hand(rows: int) -> Callable[[dist.ProcessGroup], str]:
    sources = make_sources([rows] * EP_SIZE)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(APRIL, group, rows=rows)

        def round_trip() -> None:
            expert_rows, probs, _, _, handle = sent(buffer, sources[group.rank()], pad_multiple=1)
            returned(buffer, expert_rows, handle, probs)

        return outcome(round_trip)

    return body


@ASKED_FOR
def test_by_hand_it_fails_as_reported() -> None:
    rows = MICRO_BATCH * padded_length(max(LENGTHS), FP8_ROWS)
    assert rows % 64 == 0
    for told in on_ranks(by_hand(rows)):
        assert told.startswith("RuntimeError: Failed to compile the code"), told
        assert REPORTED in told


@ASKED_FOR
def test_by_hand_it_works_on_sequences_padded_to_their_multiple() -> None:
    multiple = sequence_multiple(batch_size=MICRO_BATCH, fp8=True, row_multiple=CHUNK)
    rows = MICRO_BATCH * padded_length(max(LENGTHS), multiple)
    assert rows == MICRO_BATCH * padded_length(max(LENGTHS), multiple, 150) == 640
    assert on_ranks(by_hand(rows)) == ["returned"] * EP_SIZE


def test_a_forced_length_does_not_bypass_the_rule() -> None:
    """Review of #3294: round the pipeline's seq_length up, or refuse it with both numbers."""
    multiple = sequence_multiple(batch_size=MICRO_BATCH, row_multiple=CHUNK)
    for seq_length in range(max(LENGTHS), 300):
        assert MICRO_BATCH * padded_length(max(LENGTHS), multiple, seq_length) % CHUNK == 0
    with pytest.raises(LayoutError, match=r"seq_length \(128\) must be at least the length \(135\)"):
        padded_length(max(LENGTHS), multiple, seq_length=128)


# Through the dispatcher


@pytest.mark.parametrize(
    ("release", "variables", "lengths", "rows"),
    [
        (APRIL, ASKED, LENGTHS, 512),
        (APRIL, ASKED, None, 640),  # 4 * 144 rows that are all tokens
        (APRIL, {}, LENGTHS, 448),
        (JULY, {}, LENGTHS, 386),
        (JULY, ASKED, LENGTHS, 386),
    ],
    indirect=["variables"],
)
def test_the_rule_belongs_to_the_installed_version(release: str, lengths: Any, rows: int) -> None:
    """Later in #3294: an updated HybridEP no longer needs it. The model's code stays the same.

    The lengths are odd, and other ones on each rank. Still every rank sends the same whole chunks.
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
