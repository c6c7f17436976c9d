"""deep_ep.Buffer of v1.2.1: what dispatch and combine give, against sums over the data of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.emulation.normal_case import COUNTS, dispatched, open_buffer
from tests.emulation.tokens import TOP_K, Tokens, expected_rows, goes_to, make_tokens, rows_per_expert, run_ranks

SIZES = pytest.mark.parametrize("size", [2, 4])


@SIZES
def test_dispatch_sends_each_token_once_to_each_rank_of_its_experts(size: int) -> None:
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        x, ids, weights, per_expert, handle, _ = dispatched(open_buffer(group), everyone[rank], expert_alignment=4)
        expected_x, expected_ids, expected_weights = expected_rows(everyone, rank)
        assert torch.equal(x, expected_x)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(weights, expected_weights)
        assert per_expert == [-(-rows // 4) * 4 for rows in rows_per_expert(everyone, rank)]
        assert len(handle) == 6

    run_ranks(body, size)


@SIZES
def test_cached_dispatch_sends_other_rows_the_same_way(size: int) -> None:
    everyone, others = make_tokens(COUNTS[size]), make_tokens(COUNTS[size], seed=1)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group)
        handle = dispatched(buffer, everyone[rank])[4]
        x, *nothing, _ = buffer.dispatch(others[rank].x, handle=handle)
        assert nothing == [None] * 4
        sent = [
            Tokens(other.x, tokens.topk_idx, tokens.topk_weights)
            for other, tokens in zip(others, everyone, strict=True)
        ]
        assert torch.equal(x, expected_rows(sent, rank)[0])

    run_ranks(body, size)


@SIZES
def test_combine_sums_in_float32_by_rank_after_the_biases_and_rounds_once(size: int) -> None:
    everyone = make_tokens(COUNTS[size])
    outputs = [make_tokens([len(expected_rows(everyone, rank)[0])], seed=2 + rank)[0] for rank in range(size)]
    biases = [make_tokens([count, count], seed=9) for count in COUNTS[size]]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens, output = everyone[rank], outputs[rank]
        buffer = open_buffer(group)
        handle = dispatched(buffer, tokens)[4]
        bias = (biases[rank][0].x, biases[rank][1].x)
        y, weights, _ = buffer.combine(output.x, handle, topk_weights=output.topk_weights, bias=bias)

        total = bias[0].float() + bias[1].float()
        expected_weights = torch.zeros(len(tokens.x), TOP_K)
        for peer in range(size):
            index = goes_to(tokens, peer, size)
            before = sum(len(goes_to(source, peer, size)) for source in everyone[:rank])
            rows = slice(before, before + len(index))
            total[index] += outputs[peer].x[rows].float()
            expected_weights[index] += outputs[peer].topk_weights[rows]
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, total.bfloat16())
        assert torch.equal(weights, expected_weights)

    run_ranks(body, size)


def test_num_worst_tokens_leaves_all_but_the_tail_of_the_ids_unwritten() -> None:
    everyone = make_tokens(COUNTS[4])
    worst = 4 * max(COUNTS[4])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group)
        x, ids, weights, per_expert, handle, _ = dispatched(buffer, everyone[rank], num_worst_tokens=worst)
        expected_x, expected_ids, expected_weights = expected_rows(everyone, rank)
        rows = len(expected_x)
        assert per_expert == []
        assert x.shape[0] == ids.shape[0] == weights.shape[0] == worst
        assert torch.equal(x[:rows], expected_x)
        assert torch.equal(weights[:rows], expected_weights)
        assert torch.equal(ids[:rows], expected_ids)
        assert (ids[rows:] == -1).all()
        assert x[rows:].isnan().all()
        assert weights[rows:].isnan().all()
        # What lies in the tail is not read again.
        y, _, _ = buffer.combine(x, handle)
        assert not y.isnan().any()
        assert buffer.dispatch(everyone[rank].x, handle=handle)[0].shape[0] == worst

    run_ranks(body, 4)
