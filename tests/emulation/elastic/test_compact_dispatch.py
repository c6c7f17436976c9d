"""deep_ep.ElasticBuffer of v2, compact: what dispatch and combine give, against the data of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import run_processes
from tests.emulation.elastic_case import (
    CAPACITY,
    COUNTS,
    added,
    deep_ep,
    dispatched,
    found_sources,
    open_buffer,
    ranks_of,
    sources,
)
from tests.emulation.tokens import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Tokens,
    expected_rows,
    local,
    make_tokens,
    rows_per_expert,
    run_ranks,
)

SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@pytest.fixture(autouse=True)
def unfilled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release refuses to run while torch fills fresh memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@SIZES
def test_rows_come_by_source_rank_and_by_chance_within_it(size: int) -> None:
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        x, ids, weights, handle, _ = dispatched(open_buffer(group), everyone[rank], expert_alignment=4)
        found = found_sources(handle, len(x))
        assert sorted(found) == sources(everyone, rank)
        assert [peer for peer, _ in found] == sorted(peer for peer, _ in found)
        for row, (peer, token) in enumerate(found):
            sent = everyone[peer]
            assert torch.equal(x[row], sent.x[token])
            assert torch.equal(ids[row], local(sent.topk_idx, rank, size)[token])
            # Also the weights of choices that lead to other ranks.
            assert torch.equal(weights[row], sent.topk_weights[token])
        aligned = [-(-rows // 4) * 4 for rows in rows_per_expert(everyone, rank)]
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == rows_per_expert(everyone, rank)
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [
            sum(peer <= last for peer, _ in found) for last in range(size)
        ]
        assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (len(x), sum(aligned))
        return found != sources(everyone, rank)

    assert any(run_ranks(body, size))


@SIZES
def test_deterministic_rows_come_by_source_rank_and_token(size: int) -> None:
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        for options in ({}, {"do_cpu_sync": False}):
            x, ids, _, handle, _ = dispatched(buffer, everyone[rank], **options)
            expected_x, expected_ids, _ = expected_rows(everyone, rank)
            rows = len(expected_x)
            assert torch.equal(x[:rows], expected_x)
            assert torch.equal(ids[:rows], expected_ids)
            assert found_sources(handle, rows) == sources(everyone, rank)
            again, *_ = buffer.dispatch(everyone[rank].x, handle=handle, num_sms=handle.num_sms)
            assert torch.equal(again[:rows], expected_x)
            assert found_sources(handle, rows) == sources(everyone, rank)

    run_ranks(body, size)


def test_deterministic_and_asynchronous_rows_are_sorted_by_the_wait() -> None:
    everyone = make_tokens(COUNTS[4])

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        x, *_, event = dispatched(buffer, everyone[rank], async_with_compute_stream=True)
        expected = expected_rows(everyone, rank)[0]
        was_sorted = torch.equal(x, expected)
        event.current_stream_wait()
        assert torch.equal(x, expected)
        return was_sorted

    assert not all(run_ranks(body, 4))


@SIZES
def test_cached_dispatch_sends_other_rows_to_the_same_places(size: int) -> None:
    everyone, others = make_tokens(COUNTS[size]), make_tokens(COUNTS[size], seed=1)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group)
        _, ids, _, handle, _ = dispatched(buffer, everyone[rank])
        x, again, weights, same, _ = buffer.dispatch(others[rank].x, handle=handle, num_sms=handle.num_sms)
        assert same is handle
        assert weights is None
        assert torch.equal(again, ids)
        for row, (peer, token) in enumerate(found_sources(handle, len(x))):
            assert torch.equal(x[row], others[peer].x[token])

    run_ranks(body, size)


@pytest.mark.parametrize("has_bias", [False, True])
@SIZES
def test_combine_sums_two_rows_in_bfloat16_and_more_or_biases_in_float32(size: int, has_bias: bool) -> None:
    """Of choices that lead to the same rank, the weight of each comes back as that rank gave it, not summed."""
    everyone = make_tokens(COUNTS[size])
    outputs = [[torch.randn(HIDDEN).bfloat16() for _ in sources(everyone, rank)] for rank in range(size)]
    places = [{source: row for row, source in enumerate(sources(everyone, rank))} for rank in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens = everyone[rank]
        buffer = open_buffer(group, deterministic=True)
        x, _, _, handle, _ = dispatched(buffer, tokens)
        output = torch.stack(outputs[rank]) if outputs[rank] else x
        sent_weights = torch.arange(len(x) * TOP_K).view(-1, TOP_K) + 1000.0 * rank
        bias = [torch.randn(len(tokens.x), HIDDEN).bfloat16() for _ in range(2)] if has_bias else []
        y, weights, _ = buffer.combine(output, handle, sent_weights, bias=tuple(bias) if has_bias else None)
        assert y.dtype == torch.bfloat16
        for token in range(len(tokens.x)):
            rows = [outputs[peer][places[peer][rank, token]] for peer in ranks_of(tokens, token, size)]
            assert torch.equal(y[token], added(rows, [each[token] for each in bias]))
            for choice, expert in enumerate(tokens.topk_idx[token].tolist()):
                peer = expert // (NUM_EXPERTS // size)
                given = 1000.0 * peer + places[peer][rank, token] * TOP_K + choice if expert >= 0 else 0.0
                assert weights[token, choice] == given

    run_ranks(body, size)


@SIZES
def test_without_a_cpu_sync_the_tail_is_not_written(size: int) -> None:
    """Not even the ids, unlike in v1: only ``psum_num_recv_tokens_per_scaleup_rank`` tells the rows."""
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        x, ids, weights, handle, _ = dispatched(buffer, everyone[rank], do_cpu_sync=False)
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert torch.equal(x[:rows], expected_rows(everyone, rank)[0])
        assert x.shape[0] == ids.shape[0] == weights.shape[0] == handle.num_recv_tokens == CAPACITY * size
        assert x[rows:].isnan().all()
        assert weights[rows:].isnan().all()
        assert (ids[rows:] == torch.iinfo(torch.int64).min).all()
        assert handle.num_recv_tokens_per_expert_list == []
        y, _, _ = buffer.combine(x, handle)
        assert not y.isnan().any()

    run_ranks(body, size)


def test_handle_holds_where_rows_came_from_and_where_they_went() -> None:
    everyone = make_tokens(COUNTS[4])

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        rank = group.rank()
        tokens = everyone[rank]
        handle = dispatched(open_buffer(group), tokens, num_max_tokens_per_rank=7)[3]
        assert torch.equal(handle.topk_idx, tokens.topk_idx)
        assert handle.topk_idx is not tokens.topk_idx
        assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (False, NUM_EXPERTS, 1)
        assert handle.num_max_tokens_per_rank == 7
        assert handle.token_metadata_at_forward is handle.channel_linked_list is None
        places = handle.recv_src_metadata
        assert places.dtype == handle.dst_buffer_slot_idx.dtype == torch.int32
        for row, (peer, token) in enumerate(found_sources(handle, len(places))):
            here = local(everyone[peer].topk_idx, rank, 4)[token]
            assert int(places[row, 1]) == peer * TOP_K + int((here >= 0).nonzero().max())
        assert (places[:, 2:] == torch.iinfo(torch.int32).min).all()  # not written
        return handle.dst_buffer_slot_idx, handle.psum_num_recv_tokens_per_scaleup_rank

    slots, _ = zip(*run_ranks(body, 4), strict=True)
    for rank, tokens in enumerate(everyone):
        for token in range(len(tokens.x)):
            masters = [int(choice) for choice in (slots[rank][token] >= 0).nonzero().flatten()]
            assert [int(tokens.topk_idx[token, choice]) // 2 for choice in masters] == ranks_of(tokens, token, 4)
            assert all(rank * 7 <= int(slots[rank][token, choice]) < (rank + 1) * 7 for choice in masters)


def test_float8_rows_travel_with_their_scale_packs_in_the_layout_asked_for() -> None:
    everyone = make_tokens(COUNTS[2])
    packs = [torch.arange(count * 2, dtype=torch.float32).view(count, 2) + 100 * count for count in COUNTS[2]]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group, use_fp8_dispatch=True, deterministic=True)
        x8 = everyone[rank].x.to(torch.float8_e4m3fn)
        (x, sf), *_ = dispatched(buffer, everyone[rank], x=(x8, packs[rank]))
        expected = expected_rows(everyone, rank)[0].to(torch.float8_e4m3fn)
        assert torch.equal(x.view(torch.uint8), expected.view(torch.uint8))
        assert sf.tolist() == [packs[peer][token].tolist() for peer, token in sources(everyone, rank)]
        (_, columns), *_ = dispatched(buffer, everyone[rank], x=(x8, packs[rank]), use_tma_aligned_col_major_sf=True)
        assert torch.equal(columns, sf)
        assert columns.stride() == (1, -(-len(sf) // 4) * 4)

    run_ranks(body, 2)


def test_statistics_count_rows_per_expert_before_alignment() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        stats = torch.full((NUM_EXPERTS // 2,), 10, dtype=torch.int32)
        dispatched(open_buffer(group), everyone[rank], expert_alignment=8, cumulative_local_expert_recv_stats=stats)
        assert stats.tolist() == [10 + rows for rows in rows_per_expert(everyone, rank)]

    run_ranks(body, 2)


def test_weights_are_optional_and_the_handle_may_share_the_ids() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        buffer = open_buffer(group)
        _, _, weights, handle, _ = dispatched(buffer, tokens, topk_weights=None, do_handle_copy=False)
        assert weights is None
        assert handle.topk_idx is tokens.topk_idx

    run_ranks(body, 2)


def test_results_are_outside_autograd() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        buffer = open_buffer(group, deterministic=True)
        wanted = {"x": tokens.x.requires_grad_(), "topk_weights": tokens.topk_weights.requires_grad_()}
        x, _, weights, handle, _ = dispatched(buffer, tokens, **wanted)
        y, returned, _ = buffer.combine(x.requires_grad_(), handle, weights.requires_grad_())
        again = buffer.dispatch(tokens.x, handle=handle, num_sms=handle.num_sms)[0]
        assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in (y, returned, again))

    run_ranks(body, 2)


def test_one_rank_needs_no_group_here() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    buffer = open_buffer(None, deterministic=True)
    x, _, _, handle, _ = dispatched(buffer, tokens)
    y, _, _ = buffer.combine(x, handle)
    assert torch.equal(y[:-1], tokens.x[:-1])
    assert (y[-1] == 0).all()  # this token has no expert
    buffer.barrier()


def test_orders_by_chance_repeat_in_another_buffer() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    runs = [[dispatched(buffer, tokens)[0] for _ in range(4)] for buffer in (open_buffer(None), open_buffer(None))]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    assert not all(torch.equal(each, runs[0][0]) for each in runs[0])


def in_a_process(rank: int, everyone: list[tuple[Tensor, Tensor, Tensor]]) -> bool:
    tokens = [Tokens(*each) for each in everyone]
    buffer = open_buffer(dist.group.WORLD, deterministic=True, explicitly_destroy=True)
    x, *_ = dispatched(buffer, tokens[rank])
    buffer.destroy()
    return torch.equal(x, expected_rows(tokens, rank)[0])


def test_ranks_may_be_processes() -> None:
    everyone = [(tokens.x, tokens.topk_idx, tokens.topk_weights) for tokens in make_tokens(COUNTS[2])]
    assert run_processes(in_a_process, 2, everyone) == [True, True]


def test_an_event_is_a_handle_here_and_not_an_overlap_as_in_v1() -> None:
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
    (tokens,) = make_tokens(COUNTS[1])
    event = dispatched(open_buffer(None), tokens, async_with_compute_stream=True)[-1]
    with event(release_handle=True) as entered:
        assert entered is event
    assert event.event is None
