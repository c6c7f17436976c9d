"""deep_ep.ElasticBuffer of v2: what dispatch and combine give, compact and expanded, against the data of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.elastic_case import (
    CAPACITY,
    COUNTS,
    added,
    dispatched,
    expert_rows,
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

SIZES = pytest.mark.parametrize("size", [1, 4])
ALIGNMENT = 4


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
def test_deterministic_rows_come_by_source_rank_and_token_and_so_do_others_with_a_handle(size: int) -> None:
    """Without a CPU sync, nobody writes the tail, not even its ids as v1 does. A running total tells the rows."""
    everyone, others = make_tokens(COUNTS[size]), make_tokens(COUNTS[size], seed=1)
    sent_again = [
        Tokens(other.x, each.topk_idx, each.topk_weights) for other, each in zip(others, everyone, strict=True)
    ]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        for do_cpu_sync in (True, False):
            *received, handle, _ = dispatched(buffer, everyone[rank], do_cpu_sync=do_cpu_sync)
            x, ids, weights = received
            rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            for found, expected in zip((x, ids), expected_rows(everyone, rank), strict=False):
                assert torch.equal(found[:rows], expected)
            assert found_sources(handle, rows) == sources(everyone, rank)
            length = rows if do_cpu_sync else CAPACITY * size
            assert len(x) == len(ids) == len(weights) == handle.num_recv_tokens == length
            assert x[rows:].isnan().all()
            assert weights[rows:].isnan().all()
            assert (ids[rows:] == torch.iinfo(torch.int64).min).all()
            assert not buffer.combine(x, handle)[0].isnan().any()
            again, same_ids, none, same, _ = buffer.dispatch(others[rank].x, handle=handle, num_sms=handle.num_sms)
            assert same is handle
            assert none is None
            assert torch.equal(same_ids[:rows], ids[:rows])
            assert torch.equal(again[:rows], expected_rows(sent_again, rank)[0])

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
def test_combine_sums_two_rows_in_bfloat16_and_more_in_float32(size: int) -> None:
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
        y, weights, _ = buffer.combine(output, handle, sent_weights)
        assert y.dtype == torch.bfloat16
        for token in range(len(tokens.x)):
            rows = [outputs[peer][places[peer][rank, token]] for peer in ranks_of(tokens, token, size)]
            assert torch.equal(y[token], added(rows))
            for choice, expert in enumerate(tokens.topk_idx[token].tolist()):
                peer = expert // (NUM_EXPERTS // size)
                given = 1000.0 * peer + places[peer][rank, token] * TOP_K + choice if expert >= 0 else 0.0
                assert weights[token, choice] == given

    run_ranks(body, size)


def places_of(rows: list[list[tuple[int, int, int]]]) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Where each expert's rows start when they are rounded up to the alignment, and what they are."""
    starts, start = [], 0
    for mine in rows:
        starts.append((start, mine))
        start += -(-len(mine) // ALIGNMENT) * ALIGNMENT
    return starts


def arrived_at(handle: Any) -> dict[int, tuple[int, int, int]]:
    """Row -> (source rank, token, choice), as the handle tells."""
    num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    told = {}
    for index, _, *places in handle.recv_src_metadata[:num_rows].tolist():
        for choice, place in enumerate(places):
            if place >= 0:
                told[place] = (*divmod(index, handle.num_max_tokens_per_rank), choice)
    return told


@pytest.mark.parametrize(
    ("size", "do_cpu_sync", "deterministic", "zeros"),
    [(1, True, False, False), (2, False, True, True), (4, True, True, False), (4, False, False, True)],
)
def test_rows_lie_by_expert_and_by_chance_within_it_unless_sorted(
    size: int, do_cpu_sync: bool, deterministic: bool, zeros: bool
) -> None:
    """Nobody writes what lies between experts, unless it is filled with zeros, nor the tail."""
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> tuple[bool, bool]:
        rank = group.rank()
        options = {"do_expand": True, "expert_alignment": ALIGNMENT, "do_cpu_sync": do_cpu_sync}
        options["do_zero_padding"] = zeros
        x, ids, weights, handle, _ = dispatched(
            open_buffer(group, deterministic=deterministic), everyone[rank], **options
        )
        rows = expert_rows(everyone, rank)
        assert ids is None
        aligned = [-(-len(mine) // ALIGNMENT) * ALIGNMENT for mine in rows]
        assert handle.num_recv_tokens_per_expert_list == (aligned if do_cpu_sync else [])
        worst = size * CAPACITY * min(TOP_K, len(rows)) + (ALIGNMENT - 1) * len(rows)
        assert len(x) == len(weights) == (sum(aligned) if do_cpu_sync else -(-worst // ALIGNMENT) * ALIGNMENT)
        ends = [start + len(mine) for start, mine in places_of(rows)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [len(mine) for mine in rows]

        told = arrived_at(handle)
        in_order, by_source = True, True
        for start, mine in places_of(rows):
            found = [told.pop(start + row) for row in range(len(mine))]
            assert sorted(found) == mine
            in_order = in_order and found == mine
            by_source = by_source and [peer for peer, *_ in found] == sorted(peer for peer, *_ in found)
            for row, (peer, token, choice) in enumerate(found, start):
                assert torch.equal(x[row], everyone[peer].x[token])
                assert weights[row] == everyone[peer].topk_weights[token, choice]
        assert told == {}
        for start, mine in places_of(rows):
            for gap in (
                part[start + len(mine) : start + -(-len(mine) // ALIGNMENT) * ALIGNMENT] for part in (x, weights)
            ):
                assert (gap == 0).all() if zeros else gap.isnan().all()
        assert x[sum(aligned) :].isnan().all()
        assert weights[sum(aligned) :].isnan().all()
        return in_order, by_source

    in_order, by_source = zip(*run_ranks(body, size), strict=True)
    assert all(in_order) == deterministic
    assert all(by_source) == (deterministic or size == 1)


@SIZES
def test_cached_dispatch_repeats_the_places_and_combine_brings_weights_back(size: int) -> None:
    everyone, others = make_tokens(COUNTS[size]), make_tokens(COUNTS[size], seed=1)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        tokens, other = everyone[rank], others[rank]
        rows, _, given, handle, _ = dispatched(buffer, tokens, do_expand=True, expert_alignment=ALIGNMENT)
        _, back, _ = buffer.combine(rows, handle, given)
        assert torch.equal(back, torch.where(tokens.topk_idx >= 0, tokens.topk_weights, 0.0))
        x, ids, weights, _, _ = buffer.dispatch(
            other.x, topk_weights=other.topk_weights, handle=handle, num_sms=handle.num_sms, do_expand=True
        )
        assert ids is None
        for row, (peer, token, choice) in arrived_at(handle).items():
            assert torch.equal(x[row], others[peer].x[token])
            assert weights[row] == others[peer].topk_weights[token, choice]

    run_ranks(body, size)


@pytest.mark.parametrize("allow_multiple_reduction", [True, False])
@SIZES
def test_combine_sums_by_rank_and_then_at_home_or_only_at_home(size: int, allow_multiple_reduction: bool) -> None:
    everyone = make_tokens(COUNTS[size])
    torch.manual_seed(0)
    output = {
        (rank, source): torch.randn(HIDDEN).bfloat16()
        for rank in range(size)
        for mine in expert_rows(everyone, rank)
        for source in mine
    }

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens = everyone[rank]
        buffer = open_buffer(group, allow_multiple_reduction=allow_multiple_reduction)
        x, *_, handle, _ = dispatched(buffer, tokens, do_expand=True, do_cpu_sync=False)
        rows = torch.full_like(x, torch.nan)
        for row, source in arrived_at(handle).items():
            rows[row] = output[rank, source]
        y, weights, _ = buffer.combine(rows, handle)
        assert weights is None
        for token in range(len(tokens.x)):
            choices = {choice: int(expert) for choice, expert in enumerate(tokens.topk_idx[token]) if expert >= 0}
            owner = {choice: expert // (NUM_EXPERTS // size) for choice, expert in choices.items()}
            arrived = {choice: output[owner[choice], (rank, token, choice)] for choice in choices}
            if allow_multiple_reduction:
                sums = [
                    added([arrived[choice] for choice in choices if owner[choice] == peer])
                    for peer in ranks_of(tokens, token, size)
                ]
                assert torch.equal(y[token], added(sums))
            else:
                assert torch.equal(y[token], added(list(arrived.values())))

    run_ranks(body, size)
