"""deep_ep.Buffer of v1.2.1 on 16 ranks, which are two nodes there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.normal_case import deep_ep
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
COUNTS = [rank % 5 for rank in range(RANKS)]
EVERYONE = make_tokens(COUNTS, num_experts=NUM_EXPERTS)


def open_buffer(group: dist.ProcessGroup, *, hidden_bytes: int = HIDDEN * 2, **options: Any) -> Any:
    configs = [deep_ep.Buffer.get_dispatch_config(RANKS), deep_ep.Buffer.get_combine_config(RANKS)]
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, RANKS) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, RANKS) for config in configs)
    return deep_ep.Buffer(group, **({"num_nvl_bytes": nvl, "num_rdma_bytes": rdma} | options))


def with_layout(buffer: Any, tokens: Tokens, num_experts: int = NUM_EXPERTS, **changed: Any) -> Any:
    """A fresh dispatch whose arguments are those of the layout but for ``changed``."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens.topk_idx, num_experts)
    arguments = {
        "x": tokens.x,
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
    }
    return buffer.dispatch(**arguments | changed)


def test_rows_come_by_source_rank_and_token_and_go_the_same_way_again() -> None:
    others = make_tokens(COUNTS, num_experts=NUM_EXPERTS, seed=1)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens, buffer = EVERYONE[rank], open_buffer(group)
        per_node = buffer.get_dispatch_layout(tokens.topk_idx, NUM_EXPERTS)[1]
        to_first = torch.unique(torch.cat([goes_to(tokens, peer, RANKS, NUM_EXPERTS) for peer in range(8)]))
        assert int(per_node[0]) == len(to_first)
        x, ids, weights, per_expert, handle, _ = with_layout(buffer, tokens, expert_alignment=4)
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
        handle = with_layout(buffer, tokens)[4]
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


def test_handle_tells_counts_and_leaves_the_rest_unwritten() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        handle = with_layout(open_buffer(group), EVERYONE[rank])[4]
        sent = [len(goes_to(tokens, rank, RANKS, NUM_EXPERTS)) for tokens in EVERYONE]
        assert handle[6].tolist() == torch.tensor(sent).cumsum(0).tolist()
        assert [tuple(tensor.shape) for tensor in handle[1:5]] == [(2, 10), (16, 10), (2, 10), (2,)]
        assert handle[2][:, -1].tolist() == [int(column.sum()) for column in handle[0].T]
        taken_in = int(handle[4][-1])
        assert handle[9].shape == (taken_in, 8)
        assert handle[7].shape == (sum(sent), 8)
        assert (handle[8] == torch.iinfo(torch.int32).min).all()

    run_ranks(body, RANKS)


REFUSED: dict[str, tuple[Callable[[Any, Tokens], object], str]] = {
    "worst tokens": (
        lambda b, t: with_layout(b, t, num_worst_tokens=99),
        "AssertionError: Internode dispatch does not support `num_worst_tokens > 0`",
    ),
    "no counts of nodes": (lambda b, t: with_layout(b, t, num_tokens_per_rdma_rank=None), "RuntimeError: .*cpp:680"),
    "counts of other nodes": (
        lambda b, t: with_layout(b, t, num_tokens_per_rdma_rank=torch.zeros(3, dtype=torch.int32)),
        "RuntimeError: .*cpp:713",
    ),
    "float64 weights": (
        lambda b, t: with_layout(b, t, topk_weights=t.topk_weights.double()),
        "RuntimeError: .*cpp:733",
    ),
    "flags of uint8": (
        lambda b, t: with_layout(b, t, is_token_in_rank=torch.ones(len(t.x), RANKS, dtype=torch.uint8)),
        "EmulatedAbort: .*is_token_in_rank must be bool",
    ),
    "wide rows": (lambda b, t: with_layout(b, t, x=t.x.repeat(1, 32)), "EmulatedAbort: .*internode.cu:453"),
    "too many experts": (
        lambda b, t: with_layout(b, t, num_experts=1040),
        "EmulatedAbort: .*num_rdma_experts <= num_t",
    ),
    "more SMs than queue pairs": (
        lambda b, t: with_layout(b, t, config=deep_ep.Config(26, 6, 16, 2, 4)),
        "EmulatedAbort: .*internode.cu:386.*24 queue pairs for 13 channels",
    ),
    "long queues": (
        lambda b, t: with_layout(b, t, config=deep_ep.Config(20, 36, 10**5, 20, 128)),
        "RuntimeError: .*internode.cu:340 '.nvl_clean_meta",
    ),
    "long queues between nodes": (
        lambda b, t: with_layout(b, t, config=deep_ep.Config(20, 36, 288, 20, 10**5)),
        "EmulatedAbort: Buffer: num_rdma_bytes must be",
    ),
    "a short handle": (lambda b, t: b.dispatch(t.x, handle=with_layout(b, t)[4][:6]), "ValueError: .*expected 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dispatch_refuses(case: str) -> None:
    call, said = REFUSED[case]

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, hidden_bytes=HIDDEN * 64)
        return outcome(lambda: call(buffer, EVERYONE[group.rank()]))

    for end in run_ranks(body, RANKS):
        assert re.search("^" + said, end), end


BAD_COMBINES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "float32 rows": (lambda x: {"x": x.float()}, "RuntimeError: .*internode.cu:1859 'type == CUDA_R_16BF'"),
    "a row too many": (
        lambda x: {"x": torch.cat([x, x[:1], x[:1] + 1, x.new_ones(1, HIDDEN)])},
        "EmulatedAbort: .*x must have \\d+ rows, as dispatch returned, got",
    ),
    "narrow rows": (lambda x: {"x": x[:, :128].contiguous()}, "EmulatedAbort: .*internode.cu:1250.*hidden is 128"),
    "queues that nodes cannot share": (lambda x: {"config": deep_ep.Config(20, 4, 289, 12, 128)}, ".*cpp:997"),
    "queues that do not fit": (lambda x: {"config": deep_ep.Config(20, 150, 288, 12, 128)}, ".*cpp:998"),
    "queues as long as a shipment": (lambda x: {"config": deep_ep.Config(20, 144, 288, 12, 128)}, ".*cu:1856"),
    "no spare queue": (lambda x: {"config": deep_ep.Config(20, 140, 288, 12, 128)}, ".*cu:1857"),
    "small shipments": (lambda x: {"config": deep_ep.Config(20, 4, 288, 8, 128)}, ".*internode.cu:1858"),
    "another number of channels": (lambda x: {"config": deep_ep.Config(10, 4, 288, 12, 128)}, ".*cpp:960"),
}


@pytest.mark.parametrize("case", BAD_COMBINES)
def test_combine_refuses(case: str) -> None:
    change, said = BAD_COMBINES[case]

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group)
        x, *_, handle, _ = with_layout(buffer, EVERYONE[group.rank()])
        return outcome(lambda: buffer.combine(**{"x": x, "handle": handle} | change(x)))

    for end in run_ranks(body, RANKS):
        assert re.search("^" + said, end.removeprefix("RuntimeError: Failed: ")) or re.search("^" + said, end), end


def test_a_buffer_without_rdma_memory_is_written_past_its_end() -> None:
    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, num_rdma_bytes=0)
        return outcome(lambda: with_layout(buffer, EVERYONE[group.rank()]))

    assert all(end.startswith("EmulatedAbort: Buffer: num_rdma_bytes must be") for end in run_ranks(body, RANKS))


def test_a_handle_of_another_dispatch_on_one_rank_hangs() -> None:
    other = make_tokens(COUNTS, num_experts=NUM_EXPERTS, seed=5)

    def body(group: dist.ProcessGroup) -> str:
        buffer, rank = open_buffer(group), group.rank()
        handles = [with_layout(buffer, each[rank])[4] for each in (EVERYONE, other)]
        return outcome(lambda: buffer.dispatch(EVERYONE[rank].x, handle=handles[rank == 9]))

    assert all("must come from one dispatch" in end and "EmulatedHang" in end for end in run_ranks(body, RANKS))


def test_methods_behind_dispatch_and_combine_are_not_to_be_called() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        buffer = open_buffer(group)
        return [outcome(lambda: buffer.internode_dispatch(None)), outcome(lambda: buffer.internode_combine(None, ()))]

    for ends in run_ranks(body, RANKS):
        assert all(end.startswith("NotImplementedError: Buffer: the internode methods") for end in ends)


@pytest.mark.parametrize("size", [12, 24])
def test_nodes_have_8_ranks_and_are_2_4_8_and_so_on(size: int) -> None:
    def body(group: dist.ProcessGroup) -> str:
        tokens = make_tokens([2] * size, num_experts=24)[group.rank()]
        return outcome(lambda: with_layout(deep_ep.Buffer(group, 2**27, 2**27), tokens, num_experts=24))

    said = "num_ranks % NUM_MAX_NVL_PEERS == 0" if size == 12 else "Unsupported RDMA ranks"
    assert all(said in end for end in run_ranks(body, size))
