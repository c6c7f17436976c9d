"""deep_ep.Buffer of v1.2.1 on 16 ranks, which are two nodes there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation import normal_case
from tests.emulation.normal_case import deep_ep, open_buffer
from tests.emulation.tokens import (
    HIDDEN,
    TOP_K,
    Tokens,
    expected_rows,
    goes_to,
    make_tokens,
    outcome,
    rows_per_expert,
    run_ranks,
)

RANKS, NUM_EXPERTS = 16, 32
dispatched = functools.partial(normal_case.dispatched, num_experts=NUM_EXPERTS)
COUNTS = [rank % 5 for rank in range(RANKS)]
EVERYONE = make_tokens(COUNTS, num_experts=NUM_EXPERTS)


def test_rows_come_by_source_rank_and_token_and_go_the_same_way_again() -> None:
    others = make_tokens(COUNTS, num_experts=NUM_EXPERTS, seed=1)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens, buffer = EVERYONE[rank], open_buffer(group)
        per_node = buffer.get_dispatch_layout(tokens.topk_idx, NUM_EXPERTS)[1]
        to_first = torch.unique(torch.cat([goes_to(tokens, peer, RANKS, NUM_EXPERTS) for peer in range(8)]))
        assert int(per_node[0]) == len(to_first)
        x, ids, weights, per_expert, handle, _ = dispatched(buffer, tokens, expert_alignment=4)
        expected_x, expected_ids, expected_weights = expected_rows(EVERYONE, rank, NUM_EXPERTS)
        assert torch.equal(x, expected_x)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(weights, expected_weights)
        assert per_expert == [-(-rows // 4) * 4 for rows in rows_per_expert(EVERYONE, rank, NUM_EXPERTS)]
        assert len(handle) == 10
        again, *nothing, _ = buffer.dispatch(others[rank].x, handle=handle)
        sent = [Tokens(other.x, each.topk_idx, each.topk_weights) for other, each in zip(others, EVERYONE, strict=True)]
        assert torch.equal(again, expected_rows(sent, rank, NUM_EXPERTS)[0])
        assert nothing == [None] * 4

    run_ranks(body, RANKS)


def test_combine_rounds_on_each_node_and_at_home() -> None:
    counts = [len(expected_rows(EVERYONE, rank, NUM_EXPERTS)[0]) for rank in range(RANKS)]
    outputs = make_tokens(counts, seed=2)

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        tokens, buffer = EVERYONE[rank], open_buffer(group)
        handle = dispatched(buffer, tokens)[4]
        bias = torch.randn(len(tokens.x), HIDDEN).bfloat16()
        y, weights, _ = buffer.combine(outputs[rank].x, handle, topk_weights=outputs[rank].topk_weights, bias=bias)
        nodes, once = torch.zeros(2, len(tokens.x), HIDDEN), bias.float()
        expected_weights = torch.zeros(len(tokens.x), TOP_K)
        for peer in range(RANKS):
            index = goes_to(tokens, peer, RANKS, NUM_EXPERTS)
            before = sum(len(goes_to(source, peer, RANKS, NUM_EXPERTS)) for source in EVERYONE[:rank])
            rows = slice(before, before + len(index))
            nodes[peer // 8, index] += outputs[peer].x[rows].float()
            once[index] += outputs[peer].x[rows].float()
            expected_weights[index] += outputs[peer].topk_weights[rows]
        expected = (bias.float() + nodes[0].bfloat16().float() + nodes[1].bfloat16().float()).bfloat16()
        assert torch.equal(y, expected)
        torch.testing.assert_close(weights, expected_weights)
        return torch.equal(y, once.bfloat16())

    assert not all(run_ranks(body, RANKS))


REFUSED: dict[str, tuple[Callable[[Any, Tokens], object], str]] = {
    "worst tokens": (lambda b, t: dispatched(b, t, num_worst_tokens=99), "AssertionError: Internode dispatch does"),
    "no counts of nodes": (lambda b, t: dispatched(b, t, num_tokens_per_rdma_rank=None), "AssertionError: "),
    "too many experts": (lambda b, t: dispatched(b, t, num_experts=1040), "RuntimeError: .*at most 64 per rank"),
    "more SMs than queue pairs": (
        lambda b, t: dispatched(b, t, config=deep_ep.Config(26, 6, 16, 2, 4)),
        "EmulatedAbort: .*num_qps_per_rank must be 26 or more between nodes, got 24",
    ),
    "long queues between nodes": (
        lambda b, t: dispatched(b, t, config=deep_ep.Config(20, 36, 288, 20, 10**5)),
        "EmulatedAbort: deep_ep: num_rdma_bytes must be",
    ),
    "a short handle": (lambda b, t: b.dispatch(t.x, handle=dispatched(b, t)[4][:6]), "ValueError: .*expected 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dispatch_refuses(case: str) -> None:
    call, said = REFUSED[case]

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, hidden_bytes=HIDDEN * 64)
        return outcome(lambda: call(buffer, EVERYONE[group.rank()]))

    for end in run_ranks(body, RANKS):
        assert re.search("^" + said, end), end


def test_a_handle_of_another_dispatch_on_one_rank_hangs() -> None:
    other = make_tokens(COUNTS, num_experts=NUM_EXPERTS, seed=5)

    def body(group: dist.ProcessGroup) -> str:
        buffer, rank = open_buffer(group), group.rank()
        handles = [dispatched(buffer, each[rank])[4] for each in (EVERYONE, other)]
        return outcome(lambda: buffer.dispatch(EVERYONE[rank].x, handle=handles[rank == 9]))

    assert all("must come from one dispatch" in end and "EmulatedHang" in end for end in run_ranks(body, RANKS))
