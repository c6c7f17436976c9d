"""The rules that only the first emulated release of HybridEP has: 0ed15b5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import EmulatedAbort
from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from tests.emulation.hybrid_case import (
    FIRST,
    HIDDEN,
    LOCAL,
    ROWS,
    environment,
    make_sources,
    open_buffer,
    outcome,
    returned,
    run_ranks,
    sent,
)


def test_the_first_release_refuses_more_rows_than_its_capacity() -> None:
    sources = make_sources([ROWS] * 2)
    with pytest.raises(AssertionError, match="The number of tokens should be less than or equal to the max number"):
        run_ranks(lambda group: sent(open_buffer(FIRST, group, rows=32), sources[group.rank()]), 2)


def test_the_first_release_has_rules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = make_sources([ROWS])
    with pytest.raises(AssertionError, match="should be used with at least 2 ranks, but got 1"):
        open_buffer(FIRST, None)

    def zero_padding(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(FIRST, group), make_sources([ROWS] * 2)[group.rank()])

    with pytest.raises(EmulatedAbort, match="pad_multiple must be at least 1, since the kernel divides by it, got 0"):
        run_ranks(zero_padding, 2)
    with (
        environment(monkeypatch, NVLINK_DOMAIN_SIZE=1),
        pytest.raises(EmulatedAbort, match="inter-node communication is not supported, got 2 ranks and 1 a node"),
    ):
        run_ranks(lambda group: open_buffer(FIRST, group), 2)
    assert source.x.shape[0] == ROWS


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ({"hidden": 640}, RuntimeError, "scaling factor per token must be multiple of 16B"),
        ({"hidden": 36}, EmulatedAbort, "hidden_size % 8 == 0"),
        ({"hidden": 64}, None, ""),  # their integer division gives 0 groups of 128, which passes
        ({"local": 3}, RuntimeError, "expert per node must be multiple of 4"),
        ({"rows": 513}, EmulatedAbort, r"max_num_of_tokens_for_experts \(1026\) % 4 == 0"),
        ({"num_sms_dispatch_api": 133}, AssertionError, "check the sms occupancy setting"),
        ({"nvlink_domain_size": 0}, AssertionError, "The rank stride should be less than or equal to"),
    ],
    ids=str,
)
def test_sizes_of_the_first_release(sizes: dict[str, int], error: type[Exception] | None, said: str) -> None:
    given = {"hidden": HIDDEN, "local": LOCAL, "rows": 512} | sizes
    hidden, local, rows = given.pop("hidden"), given.pop("local"), given.pop("rows")

    def body(group: dist.ProcessGroup) -> Any:
        buffer = hybrid_ep_buffer(FIRST)(group, hidden, rows, local, 2 * local, **given)
        x, routing = torch.zeros(ROWS, hidden).bfloat16(), torch.ones(ROWS, 2 * local, dtype=torch.bool)
        return buffer.dispatch_with_permute(hidden=x, routing_map=routing, pad_multiple=1)[0].shape

    if error is None:
        assert run_ranks(body, 2) == [(2 * ROWS * local, hidden)] * 2
        return
    with pytest.raises(error, match=said):
        run_ranks(body, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_dispatched_tokens": 5}, r"num_dispatched_tokens must be at least \d+, got 5"),
        ({"num_permuted_tokens": 5}, r"permute_kernel writes expert row \d+ of 5"),
    ],
)
def test_sizes_that_the_caller_of_the_first_release_gives(options: dict[str, Any], said: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(FIRST, group), sources[group.rank()], pad_multiple=1, **options)

    with pytest.raises(EmulatedAbort, match=said):
        run_ranks(body, 2)

    def generous(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(FIRST, group)
        more: dict[str, Any] = {"num_dispatched_tokens": 256, "num_permuted_tokens": 512}
        rows, _, _, counts, handle = sent(buffer, sources[group.rank()], pad_multiple=1, **more)
        cached = {"hidden": rows[:ROWS], "handle": handle}
        return rows[int(counts.sum()) :].isnan().all(), outcome(lambda: buffer.dispatch_with_permute(**cached))

    for unwritten, said_later in run_ranks(generous, 2):
        assert unwritten
        assert "Assertion `args.num_permuted_tokens >= 0' failed" in said_later


def test_a_map_of_other_experts_does_not_gather_in_the_first_release() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        x = torch.zeros(4, HIDDEN).bfloat16()
        return open_buffer(FIRST, group).dispatch(x, routing_map=torch.zeros(4, 4, dtype=torch.bool))

    with pytest.raises(ValueError, match=r"output tensor size must be equal to .* must be \(4, 8\), got \(4, 4\)"):
        run_ranks(body, 2)


def test_the_first_release_returns_nothing_to_a_rank_without_rows_which_then_cannot_combine() -> None:
    sources = make_sources([ROWS] * 2, away_from=1)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(FIRST, group)
        out = sent(buffer, sources[group.rank()], pad_multiple=16)
        rows = torch.empty(0, HIDDEN, dtype=torch.bfloat16) if out[0] is None else out[0]
        with pytest.raises(RuntimeError) as raised:
            returned(buffer, rows, out[4])
        return out, f"{type(raised.value).__name__}: {raised.value}"

    (full, waiting), (empty, aborted) = run_ranks(body, 2)
    assert full[0].shape[0] > 0
    assert empty[:4] == (None, None, None, None)
    assert empty[4][5] is None
    assert aborted.startswith("EmulatedAbort: executor.cu:216: Assertion `args.row_id_map.has_value()' failed.")
    assert waiting.startswith("EmulatedHang: HybridEpBuffer.combine_with_unpermute: ")
    assert "rank 1" in waiting
