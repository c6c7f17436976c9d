"""deep_ep.Buffer of v1.2.1: rules that a caller must keep, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.normal_case import COUNTS, deep_ep, dispatched, open_buffer
from tests.emulation.tokens import NUM_EXPERTS, Tokens, make_tokens, outcome, run_ranks

Call = Callable[[Any, Tokens], object]


def refuse(call: Call) -> list[str]:
    """The same call on two ranks that hold tokens and an open buffer; how it ended on each."""
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group)
        return outcome(lambda: call(buffer, everyone[group.rank()]))

    return run_ranks(body, 2)


def with_layout(buffer: Any, tokens: Tokens, **changed: Any) -> object:
    """A dispatch whose arguments are the right ones but for ``changed``."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens.topk_idx, NUM_EXPERTS)
    arguments: dict[str, Any] = {
        "x": tokens.x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
    }
    return buffer.dispatch(**arguments | changed)


BAD_DISPATCHES: dict[str, tuple[Callable[[Tokens], dict[str, Any]], str]] = {
    "strided rows": (lambda t: {"x": t.x.repeat(1, 2)[:, ::2]}, "RuntimeError: .*x must be contiguous and 2-D"),
    "odd rows": (lambda t: {"x": t.x[:, :12].contiguous()}, "EmulatedAbort: .*multiple of 32 bytes below 16384"),
    "wide rows": (lambda t: {"x": t.x.repeat(1, 32)}, "EmulatedAbort: .*below 16384, got 8192"),
    "too few flags": (lambda t: {"is_token_in_rank": torch.ones(1, 2, dtype=torch.bool)}, "is_token_in_rank must be"),
    "counts of int64": (lambda t: {"num_tokens_per_rank": torch.zeros(2, dtype=torch.int64)}, "must be int32"),
    "other counts": (
        lambda t: {"num_tokens_per_rank": torch.tensor([1, 1], dtype=torch.int32)},
        "EmulatedAbort: .*must count is_token_in_rank, got .1, 1.",
    ),
    "258 experts": (lambda t: {"num_tokens_per_expert": torch.zeros(258, dtype=torch.int32)}, "at most 128 per rank"),
    "ids without weights": (lambda t: {"topk_weights": None}, "must be given together"),
    "weights of bfloat16": (lambda t: {"topk_weights": t.topk_weights.bfloat16()}, "topk_weights must be float32"),
    "ids of int32": (lambda t: {"topk_idx": t.topk_idx.int()}, "topk_idx must be contiguous int64"),
    "scales of bfloat16 rows": (lambda t: {"x": (t.x, torch.ones(len(t.x), 2))}, "scales must be float32 or int32"),
    "an odd number of SMs": (lambda t: {"config": deep_ep.Config(3)}, "the number of SMs must be even, got 3"),
    "long queues": (lambda t: {"config": deep_ep.Config(20, 6, 100000)}, "EmulatedAbort: .*num_nvl_bytes must be"),
    "a stream without an event": (lambda t: {"allocate_on_comm_stream": True}, "needs previous_event and async"),
    "worst tokens without ids": (
        lambda t: {"topk_idx": None, "topk_weights": None, "num_worst_tokens": 99},
        "num_worst_tokens needs topk_idx",
    ),
    "tensors elsewhere": (lambda t: {"x": t.x.to("meta")}, "RuntimeError: .*takes CPU tensors, got one on meta"),
}


@pytest.mark.parametrize("case", BAD_DISPATCHES)
def test_dispatch_refuses(case: str) -> None:
    change, said = BAD_DISPATCHES[case]
    for end in refuse(lambda buffer, tokens: with_layout(buffer, tokens, **change(tokens))):
        assert re.search(said, end), end


BAD_COMBINES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "float32 rows": (lambda x: {"x": x.float()}, "x must be contiguous bfloat16 rows, got torch.float32"),
    "a row too few": (lambda x: {"x": x[1:]}, "rows that dispatch returned, got"),
    "narrow rows": (lambda x: {"x": x[:, :128].contiguous()}, "EmulatedHang: .*multiple of 256 in combine, got 128"),
    "weights of other rows": (lambda x: {"topk_weights": torch.ones(1, 3)}, "topk_weights must be float32 with"),
    "a bias of float32": (lambda x: {"bias": torch.ones(1, 256)}, "a bias must be bfloat16"),
    "other channels": (lambda x: {"config": deep_ep.Config(10)}, "the config must have the 10 channels"),
}


@pytest.mark.parametrize("case", BAD_COMBINES)
def test_combine_refuses(case: str) -> None:
    change, said = BAD_COMBINES[case]

    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens)
        return buffer.combine(**{"x": x, "handle": handle} | change(x))

    for end in refuse(call):
        assert re.search(said, end), end


def test_top_k_of_33_traps() -> None:
    everyone = make_tokens(COUNTS[2], top_k=33, num_experts=64)

    def body(group: dist.ProcessGroup) -> str:
        return outcome(lambda: dispatched(open_buffer(group), everyone[group.rank()]))

    assert all("EmulatedAbort" in end and "top-k must be at most 32, got 33" in end for end in run_ranks(body, 2))


def test_too_few_worst_tokens_end_the_rank_and_hang_its_peers() -> None:
    everyone = make_tokens((9, 0))

    def body(group: dist.ProcessGroup) -> str:
        return outcome(
            lambda: dispatched(open_buffer(group), everyone[group.rank()], num_worst_tokens=3 + 6 * group.rank())
        )

    ends = run_ranks(body, 2)
    assert ends[0].startswith("EmulatedAbort: deep_ep: num_worst_tokens (3) must hold every row that rank 0")
    assert ends[1].startswith("EmulatedHang: deep_ep: num_worst_tokens (3) must hold every row that rank 0")


@pytest.mark.parametrize(
    "change",
    [{"x": torch.ones(7, 512).bfloat16()}, {"num_tokens_per_expert": torch.zeros(16, dtype=torch.int32)}],
    ids=["hidden", "experts"],
)
def test_a_rank_that_differs_hangs_all(change: dict[str, Any]) -> None:
    ends = refuse(lambda buffer, tokens: with_layout(buffer, tokens, **(change if buffer.rank == 1 else {})))
    assert all(end.startswith("EmulatedHang: Buffer.dispatch: every rank must pass the same layout") for end in ends)


def test_a_rank_that_refuses_keeps_its_error_and_hangs_the_others() -> None:
    ends = refuse(lambda buffer, tokens: with_layout(buffer, tokens, **({"x": tokens.x[0]} if buffer.rank else {})))
    assert "EmulatedHang" in ends[0]
    assert "wait here for rank 1, which raised RuntimeError: deep_ep: x must be" in ends[0]
    assert ends[1].startswith("RuntimeError: deep_ep: x must be contiguous and 2-D")


def test_ranks_in_different_calls_hang() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens)
        return buffer.combine(x, handle) if buffer.rank else buffer.dispatch(tokens.x, handle=handle)

    assert all("must be in the same call" in end and "EmulatedHang" in end for end in refuse(call))


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_handle_of_another_dispatch_on_one_rank_hangs(verb: str) -> None:
    other = make_tokens(COUNTS[2], seed=5)

    def call(buffer: Any, tokens: Tokens) -> object:
        handles = [dispatched(buffer, each)[4] for each in (tokens, other[buffer.rank])]
        handle = handles[buffer.rank]
        if verb == "dispatch":
            return buffer.dispatch(tokens.x, handle=handle)
        return buffer.combine(torch.ones(len(handle[3]), 256).bfloat16(), handle)

    assert all("EmulatedHang" in end and "must come from one dispatch" in end for end in refuse(call))


@pytest.mark.parametrize("size", [1, 3, 12])
def test_groups_have_2_4_or_8_ranks_or_whole_nodes(size: int) -> None:
    for end in run_ranks(lambda group: outcome(lambda: deep_ep.Buffer(group, 128)), size):
        assert f"a group must have 2, 4 or 8 ranks, or 2, 4, 8, 16, 18 or 20 nodes of 8 ranks, got {size}" in end


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


def test_destroy_is_asked_for_met_by_all_and_final() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        kept, buffer = deep_ep.Buffer(group, 128), open_buffer(group)
        buffer.destroy()
        return [outcome(kept.destroy), outcome(buffer.destroy)]

    for not_asked, again in run_ranks(body, 2):
        assert not_asked == "AssertionError: `explicitly_destroy` flag must be set"
        assert again.startswith("AttributeError: 'NoneType' object has no attribute")
    everyone = make_tokens(COUNTS[2])
    ends = refuse(lambda buffer, tokens: buffer.destroy() if buffer.rank else dispatched(buffer, everyone[0]))
    assert all("must be in the same call, got ['Buffer.dispatch', 'Buffer.destroy']" in end for end in ends)


def test_the_number_of_sms_is_even_and_of_the_class() -> None:
    with pytest.raises(AssertionError, match="The SM count must be even"):
        deep_ep.Buffer.set_num_sms(21)
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
