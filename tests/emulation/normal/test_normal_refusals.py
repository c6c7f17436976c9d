"""deep_ep.Buffer of v1.2.1: rules that a caller must keep, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.normal_case import COUNTS, deep_ep, dispatched, open_buffer
from tests.emulation.tokens import HIDDEN, Call, Tokens, call_on_two_ranks, make_tokens, outcome, run_ranks


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


def test_a_rank_that_refuses_keeps_its_error_and_hangs_the_others() -> None:
    ends = call_on_two_ranks(open_buffer, lambda b, t: dispatched(b, t, x=t.x[0] if b.rank else t.x))
    assert re.search("EmulatedHang.*wait here for rank 1, which raised RuntimeError: deep_ep: x must be", ends[0])
    assert ends[1].startswith("RuntimeError: deep_ep: x must be contiguous and 2-D")


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
