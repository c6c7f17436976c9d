"""deep_ep.Buffer of v1.2.1: what dispatch and combine give, against sums over the data of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import run_processes
from tests.emulation.normal_case import COUNTS, deep_ep, dispatched, open_buffer
from tests.emulation.tokens import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Tokens,
    expected_rows,
    goes_to,
    make_tokens,
    rows_per_expert,
    run_ranks,
)

SIZES = pytest.mark.parametrize("size", [2, 4])


@SIZES
def test_layout_counts_tokens_once_per_rank_and_experts_by_slot(size: int) -> None:
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        per_rank, per_node, per_expert, in_rank, _ = open_buffer(group).get_dispatch_layout(
            tokens.topk_idx, NUM_EXPERTS
        )
        assert per_node is None
        assert per_rank.dtype == per_expert.dtype == torch.int32
        for rank in range(size):
            index = goes_to(tokens, rank, size)
            assert in_rank[:, rank].nonzero().flatten().tolist() == index.tolist()
            assert per_rank[rank] == len(index)
        slots = tokens.topk_idx[tokens.topk_idx >= 0]
        assert per_expert.tolist() == torch.bincount(slots, minlength=NUM_EXPERTS).tolist()

    run_ranks(body, size)


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


def test_weights_that_dispatch_zeroed_add_up_to_those_that_were_sent() -> None:
    """How a backward of dispatch finds the gradient of the weights."""
    everyone = make_tokens(COUNTS[4])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        buffer = open_buffer(group)
        x, _, weights, _, handle, _ = dispatched(buffer, tokens)
        _, summed, _ = buffer.combine(x, handle, topk_weights=weights)
        assert torch.equal(summed, torch.where(tokens.topk_idx >= 0, tokens.topk_weights, 0.0))

    run_ranks(body, 4)


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


def test_float8_rows_travel_with_their_scales() -> None:
    everyone = make_tokens(COUNTS[2])
    scales = [torch.rand(count, HIDDEN // 128) for count in COUNTS[2]]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        x8 = [tokens.x.to(torch.float8_e4m3fn) for tokens in everyone]
        (x, received), *_ = dispatched(open_buffer(group), everyone[rank], x=(x8[rank], scales[rank]))
        index = [goes_to(tokens, rank, 2) for tokens in everyone]
        expected = torch.cat([rows.view(torch.uint8)[index] for rows, index in zip(x8, index, strict=True)])
        assert x.dtype == torch.float8_e4m3fn
        assert torch.equal(x.view(torch.uint8), expected)
        assert torch.equal(received, torch.cat([scale[index] for scale, index in zip(scales, index, strict=True)]))

    run_ranks(body, 2)


def test_handle_holds_what_is_read_and_leaves_the_rest_unwritten() -> None:
    everyone = make_tokens(COUNTS[4])
    sent = torch.tensor([[len(goes_to(tokens, rank, 4)) for rank in range(4)] for tokens in everyone])

    def body(group: dist.ProcessGroup) -> None:
        config = deep_ep.Config(4, 6, 256, 6, 128)  # two channels
        handle = dispatched(open_buffer(group), everyone[group.rank()], config=config)[4]
        assert [tensor.dtype for tensor in handle] == [*[torch.int32] * 4, torch.bool, torch.int32]
        assert handle[0].tolist() == sent.cumsum(0).tolist()
        assert handle[1].shape == (4, 2)
        assert handle[3].shape == (int(sent[:, group.rank()].sum()),)

    run_ranks(body, 4)


def test_results_are_outside_autograd() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        buffer = open_buffer(group)
        wanted = Tokens(tokens.x.requires_grad_(), tokens.topk_idx, tokens.topk_weights.requires_grad_())
        x, _, weights, _, handle, _ = dispatched(buffer, wanted)
        y, summed, _ = buffer.combine(x.requires_grad_(), handle, topk_weights=weights.requires_grad_())
        again = buffer.dispatch(wanted.x, handle=handle)[0]
        assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in (y, summed, again))

    run_ranks(body, 2)


def test_no_topk_is_needed_to_move_rows() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        buffer = open_buffer(group)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(everyone[rank].topk_idx, NUM_EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        x, ids, weights, *_ = buffer.dispatch(everyone[rank].x, **layout)
        assert (ids, weights) == (None, None)
        assert torch.equal(x, expected_rows(everyone, rank)[0])

    run_ranks(body, 2)


def in_a_process(rank: int, everyone: list[tuple[Tensor, Tensor, Tensor]]) -> bool:
    tokens = [Tokens(*each) for each in everyone]
    assert dist.group.WORLD is not None
    buffer = open_buffer(dist.group.WORLD)
    x, *_ = dispatched(buffer, tokens[rank])
    buffer.destroy()
    return torch.equal(x, expected_rows(tokens, rank)[0])


def test_ranks_may_be_processes() -> None:
    everyone = [(tokens.x, tokens.topk_idx, tokens.topk_weights) for tokens in make_tokens(COUNTS[2])]
    assert run_processes(in_a_process, 2, everyone) == [True, True]
