"""deep_ep.Buffer of v1.2.1 against the data of all ranks, and what would have ended the process or hung the job.

16 ranks are two nodes there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.emulation.tokens import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Call,
    Tokens,
    call_on_two_ranks,
    expected_rows,
    goes_to,
    make_tokens,
    outcome,
    rows_per_expert,
    run_ranks,
)

deep_ep: Any = emulated_deep_ep("v1.2.1")
COUNTS = {2: (5, 7), 4: (5, 0, 7, 3), 16: tuple(rank % 5 for rank in range(16))}


def open_buffer(group: dist.ProcessGroup, *, hidden_bytes: int = HIDDEN * 2, **options: Any) -> Any:
    """With room for the queues; between nodes also for those of RDMA."""
    size = group.size()
    configs = [deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size)]
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs) if size > 8 else 0
    return deep_ep.Buffer(group, nvl, rdma, explicitly_destroy=True, **options)


def dispatched(buffer: Any, tokens: Tokens, *, num_experts: int = NUM_EXPERTS, **changed: Any) -> Any:
    """A fresh dispatch whose arguments are those of the layout of the tokens' ids, but for ``changed``."""
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


def combined(buffer: Any, tokens: Tokens, **options: Any) -> object:
    """A combine with the rows of its dispatch, but for what ``options`` make of them."""
    x, *_, handle, _ = dispatched(buffer, tokens)
    return buffer.combine(handle=handle, **{"x": x} | {name: make(x) for name, make in options.items()})


def with_handle(buffer: Any, tokens: Tokens, verb: str) -> object:
    """A call with a handle, which on rank 1 is that of another dispatch."""
    other = make_tokens(COUNTS[2], seed=5)
    handle = [dispatched(buffer, each)[4] for each in (tokens, other[buffer.rank])][buffer.rank]
    if verb == "dispatch":
        return buffer.dispatch(tokens.x, handle=handle)
    return buffer.combine(torch.ones(len(handle[3]), 256).bfloat16(), handle)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What both ranks must say.
REFUSED: dict[str, tuple[Call, str]] = {
    "strided rows": (lambda b, t: dispatched(b, t, x=t.x.repeat(1, 2)[:, ::2]), "x must be contiguous and 2-D"),
    "odd rows": (lambda b, t: dispatched(b, t, x=t.x[:, :12].contiguous()), "multiple of 32 bytes below 16384"),
    "wide rows": (lambda b, t: dispatched(b, t, x=t.x.repeat(1, 32)), "EmulatedAbort: .*below 16384, got 8192"),
    "too few flags": (lambda b, t: dispatched(b, t, is_token_in_rank=torch.ones(1, 2) > 0), "is_token_in_rank must"),
    "counts of int64": (lambda b, t: dispatched(b, t, num_tokens_per_rank=int32(1, 1).long()), "must be int32"),
    "other counts": (lambda b, t: dispatched(b, t, num_tokens_per_rank=int32(1, 1)), "EmulatedAbort: .*must count"),
    "258 experts": (lambda b, t: dispatched(b, t, num_tokens_per_expert=int32(*[0] * 258)), "at most 128 per rank"),
    "ids without weights": (lambda b, t: dispatched(b, t, topk_weights=None), "must be given together"),
    "weights of bfloat16": (lambda b, t: dispatched(b, t, topk_weights=t.topk_weights.bfloat16()), "be float32"),
    "ids of int32": (lambda b, t: dispatched(b, t, topk_idx=t.topk_idx.int()), "topk_idx must be contiguous int64"),
    "scales of bfloat16 rows": (lambda b, t: dispatched(b, t, x=(t.x, torch.ones(len(t.x), 2))), "scales must be"),
    "an odd number of SMs": (lambda b, t: dispatched(b, t, config=deep_ep.Config(3)), "SMs must be even, got 3"),
    "long queues": (lambda b, t: dispatched(b, t, config=deep_ep.Config(20, 6, 100000)), "num_nvl_bytes must be"),
    "a stream without an event": (lambda b, t: dispatched(b, t, allocate_on_comm_stream=True), "previous_event and"),
    "worst tokens without ids": (
        lambda b, t: dispatched(b, t, topk_idx=None, topk_weights=None, num_worst_tokens=99),
        "num_worst_tokens needs topk_idx",
    ),
    "tensors elsewhere": (lambda b, t: dispatched(b, t, x=t.x.to("meta")), "takes CPU tensors, got one on meta"),
    "float32 sums": (lambda b, t: combined(b, t, x=torch.Tensor.float), "contiguous bfloat16 rows, got torch.float32"),
    "a row too few": (lambda b, t: combined(b, t, x=lambda x: x[1:]), "rows that dispatch returned, got"),
    "narrow sums": (lambda b, t: combined(b, t, x=lambda x: x[:, :128].contiguous()), "256 in combine, got 128"),
    "weights of other rows": (lambda b, t: combined(b, t, topk_weights=lambda x: torch.ones(1, 3)), "must be float32"),
    "other channels": (lambda b, t: combined(b, t, config=lambda x: deep_ep.Config(10)), "must have the 10 channels"),
    "another width on a rank": (
        lambda b, t: dispatched(b, t, x=t.x[:, : 256 // (1 + b.rank)].contiguous()),
        "EmulatedHang: Buffer.dispatch: every rank must pass the same layout",
    ),
    "other experts on a rank": (
        lambda b, t: dispatched(b, t, **(dict[str, Any](num_tokens_per_expert=int32(*[0] * 16)) if b.rank else {})),
        "EmulatedHang: Buffer.dispatch: every rank must pass the same layout",
    ),
    "different calls": (
        lambda b, t: combined(b, t) if b.rank else [dispatched(b, t), dispatched(b, t)],
        "EmulatedHang: .*must be in the same call",
    ),
    "destroy on a rank": (lambda b, t: b.destroy() if b.rank else dispatched(b, t), r"must be in the same call, got"),
    "a handle of another dispatch": (lambda b, t: with_handle(b, t, "dispatch"), "EmulatedHang: .*must come from one"),
    "a combine with a handle of another dispatch": (
        lambda b, t: with_handle(b, t, "combine"),
        "EmulatedHang: .*must come from one dispatch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_are_refused_on_both_ranks(case: str) -> None:
    call, said = REFUSED[case]
    for end in call_on_two_ranks(open_buffer, call):
        assert re.search(said, end), end


# What all of 16 ranks, two nodes, must say. Each has tokens of 32 experts.
BETWEEN_NODES: dict[str, tuple[Call, str]] = {
    "worst tokens": (lambda b, t: across(b, t, num_worst_tokens=99), "AssertionError: Internode dispatch does"),
    "no counts of nodes": (lambda b, t: across(b, t, num_tokens_per_rdma_rank=None), "AssertionError: "),
    "too many experts": (lambda b, t: across(b, t, num_experts=1040), "RuntimeError: .*at most 64 per rank"),
    "more SMs than queue pairs": (
        lambda b, t: across(b, t, config=deep_ep.Config(26, 6, 16, 2, 4)),
        "EmulatedAbort: .*num_qps_per_rank must be 26 or more between nodes, got 24",
    ),
    "long queues between nodes": (
        lambda b, t: across(b, t, config=deep_ep.Config(20, 36, 288, 20, 10**5)),
        "EmulatedAbort: deep_ep: num_rdma_bytes must be",
    ),
    "a short handle": (lambda b, t: b.dispatch(t.x, handle=across(b, t)[4][:6]), "ValueError: .*expected 10"),
    "a handle of another dispatch on one rank": (
        lambda b, t: b.dispatch(t.x, handle=[across(b, each)[4] for each in (t, elsewhere(t))][b.rank == 9]),
        "EmulatedHang: .*must come from one dispatch",
    ),
}


def elsewhere(tokens: Tokens) -> Tokens:
    """As many tokens, that go to other experts."""
    return Tokens(tokens.x, torch.where(tokens.topk_idx >= 0, tokens.topk_idx.add(5) % 32, -1), tokens.topk_weights)


def across(buffer: Any, tokens: Tokens, **changed: Any) -> Any:
    return dispatched(buffer, tokens, **{"num_experts": 32, **changed})


def test_calls_between_nodes_are_refused_on_all_ranks() -> None:
    everyone = make_tokens(COUNTS[16], num_experts=32)

    def body(group: dist.ProcessGroup) -> list[str]:
        tokens, ends = everyone[group.rank()], []
        for call, _ in BETWEEN_NODES.values():
            buffer = open_buffer(group, hidden_bytes=HIDDEN * 64)
            ends.append(outcome(partial(call, buffer, tokens)))
        return ends

    for ends in run_ranks(body, 16):
        for end, (_, said) in zip(ends, BETWEEN_NODES.values(), strict=True):
            assert re.search("^" + said, end), end


def test_too_few_worst_tokens_end_the_rank_and_hang_its_peers() -> None:
    everyone = make_tokens((9, 0))

    def body(group: dist.ProcessGroup) -> str:
        return outcome(
            lambda: dispatched(open_buffer(group), everyone[group.rank()], num_worst_tokens=3 + 6 * group.rank())
        )

    for end, kind in zip(run_ranks(body, 2), ("EmulatedAbort", "EmulatedHang"), strict=True):
        assert end.startswith(f"{kind}: deep_ep: num_worst_tokens (3) must hold every row that rank 0")


@pytest.mark.parametrize("size", [1, 3, 12])
def test_groups_have_2_4_or_8_ranks_or_whole_nodes(size: int) -> None:
    for end in run_ranks(lambda group: outcome(lambda: deep_ep.Buffer(group, 128)), size):
        assert f"a group must have 2, 4 or 8 ranks, or 2, 4, 8, 16, 18 or 20 nodes of 8 ranks, got {size}" in end


def test_destroy_is_asked_for_met_by_all_and_final() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        kept, buffer = deep_ep.Buffer(group, 128), open_buffer(group)
        buffer.destroy()
        return [outcome(kept.destroy), outcome(buffer.destroy)]

    for not_asked, again in run_ranks(body, 2):
        assert not_asked == "AssertionError: `explicitly_destroy` flag must be set"
        assert again.startswith("AttributeError: 'NoneType' object has no attribute")


def test_constructor_refuses_what_is_not_emulated() -> None:
    with pytest.raises(ValueError, match="needs a ProcessGroup, got None"):
        deep_ep.Buffer(None)

    def body(group: dist.ProcessGroup) -> list[str]:
        buffer = deep_ep.Buffer(group)
        calls: list[Callable[[], object]] = [
            lambda: deep_ep.Buffer(group, low_latency_mode=True),
            lambda: buffer.internode_combine(None, ()),
            lambda: buffer.clean_low_latency_buffer(8, 256, 8),
            buffer.get_comm_stream,
        ]
        return [outcome(call) for call in calls] + [outcome(lambda: deep_ep.Buffer(group, num_rdma_bytes=128))]

    for *unemulated, sizes in run_ranks(body, 2):
        assert all(end.startswith("NotImplementedError: Buffer") and "not emulated" in end for end in unemulated)
        assert "num_rdma_bytes must be 0 within a node, got 128" in sizes


def test_the_number_of_sms_is_even_and_of_the_class() -> None:
    with pytest.raises(AssertionError, match="The SM count must be even"):
        deep_ep.Buffer.set_num_sms(21)
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
