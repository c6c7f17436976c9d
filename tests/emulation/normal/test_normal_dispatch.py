"""deep_ep.Buffer of v1.2.1: what dispatch and combine give, against sums over the data of all ranks.

16 ranks are two nodes there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.emulation.normal_case import COUNTS, dispatched, open_buffer
from tests.emulation.tokens import (
    HIDDEN,
    TOP_K,
    Tokens,
    expected_rows,
    goes_to,
    make_tokens,
    rows_per_expert,
    run_ranks,
)

SIZES = pytest.mark.parametrize(("size", "num_experts"), [(2, 8), (4, 8), (16, 32)])


@SIZES
def test_rows_come_by_source_rank_and_token_and_go_the_same_way_again(size: int, num_experts: int) -> None:
    everyone, others = (make_tokens(COUNTS[size], num_experts=num_experts, seed=seed) for seed in (0, 1))
    sent_again = [
        Tokens(other.x, each.topk_idx, each.topk_weights) for other, each in zip(others, everyone, strict=True)
    ]

    def body(group: dist.ProcessGroup) -> None:
        rank, buffer = group.rank(), open_buffer(group)
        if size == 16:
            per_node = buffer.get_dispatch_layout(everyone[rank].topk_idx, num_experts)[1]
            to_first = torch.unique(torch.cat([goes_to(everyone[rank], peer, size, num_experts) for peer in range(8)]))
            assert int(per_node[0]) == len(to_first)
        *received, per_expert, handle, _ = dispatched(
            buffer, everyone[rank], num_experts=num_experts, expert_alignment=4
        )
        for found, expected in zip(received, expected_rows(everyone, rank, num_experts), strict=True):
            assert torch.equal(found, expected)
        assert per_expert == [-(-rows // 4) * 4 for rows in rows_per_expert(everyone, rank, num_experts)]
        assert len(handle) == (10 if size == 16 else 6)
        again, *nothing, _ = buffer.dispatch(others[rank].x, handle=handle)
        assert torch.equal(again, expected_rows(sent_again, rank, num_experts)[0])
        assert nothing == [None] * 4

    run_ranks(body, size)


@SIZES
def test_combine_sums_in_float32_after_the_biases_and_rounds_once_a_node_and_at_home(
    size: int, num_experts: int
) -> None:
    everyone = make_tokens(COUNTS[size], num_experts=num_experts)
    outputs = make_tokens([len(expected_rows(everyone, rank, num_experts)[0]) for rank in range(size)], seed=2)

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        tokens, buffer = everyone[rank], open_buffer(group)
        handle = dispatched(buffer, tokens, num_experts=num_experts)[4]
        bias = torch.randn(2, len(tokens.x), HIDDEN).bfloat16().unbind()
        y, weights, _ = buffer.combine(outputs[rank].x, handle, topk_weights=outputs[rank].topk_weights, bias=bias)
        nodes, once = torch.zeros(2, len(tokens.x), HIDDEN), bias[0].float() + bias[1].float()
        expected, expected_weights = once.clone(), torch.zeros(len(tokens.x), TOP_K)
        for peer in range(size):
            index = goes_to(tokens, peer, size, num_experts)
            before = sum(len(goes_to(source, peer, size, num_experts)) for source in everyone[:rank])
            rows = slice(before, before + len(index))
            nodes[peer // 8, index] += outputs[peer].x[rows].float()
            once[index] += outputs[peer].x[rows].float()
            expected_weights[index] += outputs[peer].topk_weights[rows]
        expected = once if size < 16 else expected + nodes[0].bfloat16().float() + nodes[1].bfloat16().float()
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, expected.bfloat16())
        torch.testing.assert_close(weights, expected_weights)
        return torch.equal(y, once.bfloat16())

    assert all(run_ranks(body, size)) == (size < 16)


def test_num_worst_tokens_leaves_all_but_the_tail_of_the_ids_unwritten() -> None:
    everyone = make_tokens(COUNTS[4])
    worst = 4 * max(COUNTS[4])

    def body(group: dist.ProcessGroup) -> None:
        rank, buffer = group.rank(), open_buffer(group)
        x, ids, weights, per_expert, handle, _ = dispatched(buffer, everyone[rank], num_worst_tokens=worst)
        rows = len(expected_rows(everyone, rank)[0])
        assert per_expert == []
        assert x.shape[0] == ids.shape[0] == weights.shape[0] == worst
        for found, expected in zip((x, ids, weights), expected_rows(everyone, rank), strict=True):
            assert torch.equal(found[:rows], expected)
        assert (ids[rows:] == -1).all()
        assert x[rows:].isnan().all()
        assert weights[rows:].isnan().all()
        # What lies in the tail is not read again.
        assert not buffer.combine(x, handle)[0].isnan().any()
        assert buffer.dispatch(everyone[rank].x, handle=handle)[0].shape[0] == worst

    run_ranks(body, 4)
