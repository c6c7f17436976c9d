"""HybridEPBuffer with permute: expert rows, their order and padding, and the sums that come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import run_processes
from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from tests.emulation.hybrid_case import (
    APRIL,
    CURRENT,
    EVERY,
    FUSED,
    HIDDEN,
    JULY,
    LOCAL,
    RAGGED,
    ROWS,
    SIZES,
    Source,
    environment,
    expected_rows,
    expected_sums,
    expert_outputs,
    make_sources,
    open_buffer,
    returned,
    run_ranks,
    sent,
)

DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
POISON = torch.iinfo(torch.int32).min


@SIZES
@EVERY
def test_expert_rows_are_by_expert_then_rank_then_token_with_zero_padding(release: str, size: int) -> None:
    sources = make_sources([ROWS] * size)

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(release, group), sources[group.rank()], pad_multiple=16)

    for rank, (rows, probs, scales, counts, _) in enumerate(run_ranks(body, size)):
        expected = expected_rows(sources, rank, pad=16)
        assert torch.equal(rows, expected.rows)
        assert torch.equal(probs, expected.probs)
        assert scales is None
        assert counts.tolist() == expected.counts
        assert counts.dtype == torch.int64


@FUSED
@CURRENT
def test_a_group_of_one_rank_works_with_and_without_a_process_group(release: str, fused: bool) -> None:
    (source,) = sources = make_sources([ROWS])

    def body(group: dist.ProcessGroup | None) -> Any:
        rows, _, _, counts, handle = sent(open_buffer(release, group), source, fused=fused)
        return rows, counts, returned(open_buffer(release, group), rows, handle, fused=fused)[0]

    expected = expected_rows(sources, 0, pad=1)
    for rows, counts, sums in [body(None), *run_ranks(body, 1)]:
        assert torch.equal(rows, expected.rows)
        assert counts.tolist() == expected.counts
        assert torch.equal(sums, expected_sums(sources, [rows], pad=1)[0])


@FUSED
@SIZES
@CURRENT
def test_combine_sums_in_float32_and_rounds_per_rank_and_once_more(release: str, size: int, fused: bool) -> None:
    sources = make_sources([ROWS] * size)
    outputs = expert_outputs(sources, pad=16)

    def body(group: dist.ProcessGroup) -> Any:
        rank, buffer = group.rank(), open_buffer(release, group)
        rows, probs, _, _, handle = sent(buffer, sources[rank], pad_multiple=16, fused=fused)
        assert rows.shape == outputs[rank].shape
        real = expected_rows(sources, rank, pad=16).real[:, None]
        with_garbage = torch.where(real, outputs[rank], torch.nan)  # padding is never read
        garbage_probs = torch.where(real[:, 0], probs, torch.nan)
        return returned(buffer, with_garbage, handle, garbage_probs, fused=fused)

    expected = expected_sums(sources, outputs, pad=16)
    for rank, (sums, probs) in enumerate(run_ranks(body, size)):
        assert sums.dtype == torch.bfloat16
        assert torch.equal(sums, expected[rank])
        assert torch.equal(probs, sources[rank].probs)


@pytest.mark.parametrize("domain", [1, 2])
@FUSED
@CURRENT
def test_across_nodes_another_nodes_sum_is_rounded_before_it_travels(
    release: str, fused: bool, domain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = make_sources([ROWS] * 4)
    outputs = expert_outputs(sources, pad=8)

    def body(group: dist.ProcessGroup) -> Any:
        rank, buffer = group.rank(), open_buffer(release, group, enable_custom_allgather=False)
        nodes = 4 // domain
        assert (buffer.num_of_nodes, buffer.local_rank, buffer.node_rank) == (nodes, rank % domain, rank // domain)
        rows, probs, _, _, handle = sent(buffer, sources[rank], pad_multiple=8, fused=fused)
        assert handle[0].shape == (nodes * ROWS, domain)
        assert handle[2].shape == (ROWS, nodes - 1)
        return rows, returned(buffer, outputs[rank], handle, probs, fused=fused)

    with environment(monkeypatch, **{DOMAIN: domain}):
        outs = run_ranks(body, 4)
    expected = expected_sums(sources, outputs, pad=8, domain=domain)
    for rank, (rows, (sums, probs)) in enumerate(outs):
        assert torch.equal(rows, expected_rows(sources, rank, pad=8).rows)
        assert torch.equal(sums, expected[rank])
        assert torch.equal(probs, sources[rank].probs)


@pytest.mark.parametrize(
    ("release", "fused"),
    [(release, fused) for release in (APRIL, JULY, RAGGED) for fused in (False, True)],
)
def test_a_cached_handle_sends_other_rows_the_same_way(release: str, fused: bool) -> None:
    sources, others = make_sources([ROWS] * 2), make_sources([ROWS] * 2, seed=7)
    again = [Source(other.x, source.routing, source.probs) for source, other in zip(sources, others, strict=True)]

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        rows, _, _, _, handle = sent(buffer, sources[group.rank()], pad_multiple=16, fused=fused)
        more = {"fuse_permute_dispatch": True} if fused else {}
        return buffer.dispatch_with_permute(
            hidden=again[group.rank()].x, handle=handle, num_permuted_tokens=len(rows), pad_multiple=16, **more
        )

    for rank, (rows, probs, _, counts, _) in enumerate(run_ranks(body, 2)):
        assert torch.equal(rows, expected_rows(again, rank, pad=16).rows)
        assert probs is None
        assert counts is None


@CURRENT
def test_a_cached_unfused_dispatch_without_pad_multiple_leaves_padding_unwritten(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        source = sources[group.rank()]
        rows, _, _, _, handle = sent(buffer, source, pad_multiple=16)
        return buffer.dispatch_with_permute(hidden=source.x, handle=handle, num_permuted_tokens=len(rows))[0]

    for rank, rows in enumerate(run_ranks(body, 2)):
        expected = expected_rows(sources, rank, pad=16)
        assert torch.equal(rows[expected.real], expected.rows[expected.real])
        assert rows[~expected.real].isnan().all()
        assert (~expected.real).any()


@FUSED
@CURRENT
def test_non_blocking_leaves_nan_after_the_rows_and_the_flag_at_zero(release: str, fused: bool) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        out = sent(
            buffer, sources[group.rank()], pad_multiple=16, num_permuted_tokens=512, non_blocking=True, fused=fused
        )
        return (*out, returned(buffer, out[0], out[4], out[1], fused=fused))

    outs = run_ranks(body, 2)
    expected_out = expected_sums(sources, [out[0] for out in outs], pad=16)
    for rank, (rows, probs, _, counts, handle, (sums, _)) in enumerate(outs):
        expected = expected_rows(sources, rank, pad=16)
        used = len(expected.rows)
        assert rows.shape == (512, HIDDEN)
        assert torch.equal(rows[:used], expected.rows)
        assert rows[used:].isnan().all()
        assert probs[used:].isnan().all()
        assert counts.tolist() == expected.counts
        assert flag_of(release, handle).tolist() == [0]
        assert torch.equal(sums, expected_out[rank])


def flag_of(release: str, handle: Any) -> Any:
    return handle[-2] if release == "hybridep-744" else handle[-1]


@FUSED
@pytest.mark.parametrize("release", [APRIL, JULY, "hybridep-744", "hybridep-746"])
def test_overflow_drops_the_last_expert_rows_and_raises_the_flag(release: str, fused: bool) -> None:
    sources = make_sources([ROWS] * 2)
    full = [expected_rows(sources, rank, pad=16) for rank in range(2)]
    # Inside the last expert of the fuller rank, so that no received row loses all its expert rows.
    limit = max(sum(expected.counts) for expected in full) - 16

    def body(group: dist.ProcessGroup) -> Any:
        return sent(
            open_buffer(release, group),
            sources[group.rank()],
            pad_multiple=16,
            num_permuted_tokens=limit,
            non_blocking=True,
            fused=fused,
        )

    flags = []
    for rank, (rows, _, _, counts, handle) in enumerate(run_ranks(body, 2)):
        kept = min(limit, len(full[rank].rows))
        assert rows.shape[0] == limit
        assert torch.equal(rows[:kept], full[rank].rows[:kept])
        assert int(counts.sum()) == kept
        flags.append(int(flag_of(release, handle)))
    assert flags == [int(sum(expected.counts) > limit) for expected in full]
    assert 1 in flags


@pytest.mark.parametrize(
    ("release", "fused", "flag"),
    [(APRIL, False, 0), (APRIL, True, POISON), (JULY, False, POISON), (JULY, True, POISON), (RAGGED, False, 0)],
)
def test_in_blocking_mode_only_some_releases_write_the_overflow_flag(release: str, fused: bool, flag: int) -> None:
    sources = make_sources([ROWS])
    handle = sent(open_buffer(release, None), sources[0], fused=fused)[4]
    assert flag_of(release, handle).tolist() == [flag]


@pytest.mark.parametrize(
    ("release", "unfused", "fused", "plain"), [(APRIL, 9, 11, 7), (JULY, 11, 11, 7), (RAGGED, 12, 12, 8)]
)
def test_handle_lengths(release: str, unfused: int, fused: int, plain: int) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    assert len(sent(buffer, source)[4]) == unfused
    assert len(sent(buffer, source, fused=True)[4]) == fused
    assert len(buffer.dispatch(source.x, routing_map=source.routing)[3]) == plain


@CURRENT
def test_a_rank_without_rows_takes_part(release: str) -> None:
    sources = make_sources([ROWS] * 2, away_from=1)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        rows, probs, _, counts, handle = sent(buffer, sources[group.rank()], pad_multiple=16)
        return rows, counts, returned(buffer, rows, handle, probs)

    outs = run_ranks(body, 2)
    assert outs[1][0].shape == (0, HIDDEN)
    assert outs[1][1].tolist() == [0] * LOCAL
    for source, (_, _, (sums, probs)) in zip(sources, outs, strict=True):
        times = source.routing.sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), source.x.float() * times, rtol=1e-2, atol=1e-5)
        assert torch.equal(probs, source.probs)


def test_works_between_real_processes() -> None:
    for rank, (rows, sums) in enumerate(run_processes(in_a_process, 2)):
        sources = make_sources([ROWS] * 2)
        assert torch.equal(rows, expected_rows(sources, rank, pad=16).rows)
        assert sums.shape == (ROWS, HIDDEN)


def in_a_process(rank: int) -> Any:
    sources = make_sources([ROWS] * 2)
    assert dist.group.WORLD is not None
    buffer = open_buffer(JULY, dist.group.WORLD)
    rows, _, _, _, handle = sent(buffer, sources[rank], pad_multiple=16)
    return rows, returned(buffer, rows, handle)[0]


def test_inputs_that_require_grad_give_outputs_outside_autograd() -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(JULY, None)
    given = Source(source.x.clone().requires_grad_(), source.routing, source.probs.clone().requires_grad_())
    rows, probs, _, _, handle = sent(buffer, given)
    sums, back = returned(buffer, rows.requires_grad_(), handle, probs)
    assert [out.requires_grad for out in (probs, sums, back)] == [False] * 3


@CURRENT
def test_a_count_may_be_an_integer_tensor(release: str) -> None:
    """As megatron-core passes it; pybind takes whatever has ``__index__``."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        buffer = hybrid_ep_buffer(release)(group, HIDDEN, ROWS, LOCAL)
        (source, *_) = make_sources([ROWS] * 2)
        rows, _, _, counts, handle = buffer.dispatch_with_permute(hidden=source.x, routing_map=source.routing)
        again = buffer.dispatch_with_permute(hidden=source.x, handle=handle, num_permuted_tokens=counts.sum())
        return rows, again[0]

    for rows, again in run_ranks(body, 2):
        assert torch.equal(rows, again)


@CURRENT
def test_a_rank_may_move_no_probs_in_combine(release: str) -> None:
    """It gets none back; the other reads memory that nobody wrote for rows that lay there."""

    def body(group: dist.ProcessGroup) -> Tensor | None:
        buffer = hybrid_ep_buffer(release)(group, HIDDEN, ROWS, LOCAL)
        source = make_sources([ROWS] * 2)[group.rank()]
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=source.x, routing_map=source.routing, probs=source.probs
        )
        given = probs if group.rank() == 0 else None
        back: Tensor | None = buffer.combine_with_unpermute(hidden=rows, probs=given, handle=handle)[1]
        assert (back is None) == (given is None)
        return back

    first, second = run_ranks(body, 2)
    assert second is None
    (source, _) = make_sources([ROWS] * 2)
    went = source.routing[:, LOCAL:].any(1)
    assert first is not None
    assert bool(first[went].isnan().any())
    torch.testing.assert_close(first[~went], source.probs[~went])
