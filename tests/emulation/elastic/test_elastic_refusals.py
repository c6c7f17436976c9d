"""deep_ep.ElasticBuffer of v2: rules that a caller must keep, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.elastic_case import CAPACITY, COUNTS, deep_ep, dispatched, open_buffer
from tests.emulation.tokens import HIDDEN, NUM_EXPERTS, TOP_K, Tokens, make_tokens, outcome, run_ranks

Call = Callable[[Any, Tokens], object]
MIB = 2**20


@pytest.fixture(autouse=True)
def unfilled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release refuses to run while torch fills fresh memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def refuse(call: Call, **options: Any) -> list[str]:
    """The same call on two ranks that hold tokens and an open buffer; how it ended on each."""
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, **options)
        return outcome(lambda: call(buffer, everyone[group.rank()]))

    return run_ranks(body, 2)


BAD_DISPATCHES: dict[str, tuple[Callable[[Tokens], dict[str, Any]], str]] = {
    "padding of a compact form": (lambda t: {"do_zero_padding": True}, "do_zero_padding needs do_expand"),
    "strided rows": (lambda t: {"x": t.x.repeat(1, 2)[:, ::2]}, "x must be contiguous and 2-D"),
    "row bytes": (lambda t: {"x": t.x[:, :24].contiguous()}, "multiple of 32 bytes, got 24"),
    "more tokens than the maximum": (lambda t: {"num_max_tokens_per_rank": 4}, "at most num_max_tokens_per_rank rows"),
    "scale packs of 8 bytes": (lambda t: {"x": (t.x, torch.ones(len(t.x), 2).double())}, "scales must have 4 bytes"),
    "ids of int32": (lambda t: {"topk_idx": t.topk_idx.int()}, "topk_idx must be contiguous int64"),
    "ids of other rows": (lambda t: {"topk_idx": t.topk_idx[1:]}, "topk_idx must be contiguous int64"),
    "ids beyond the experts": (
        lambda t: {"topk_idx": t.topk_idx + NUM_EXPERTS},
        r"EmulatedAbort: .*topk_idx must be below num_experts \(8\), got 1",
    ),
    "weights of bfloat16": (lambda t: {"topk_weights": t.topk_weights.bfloat16()}, "topk_weights must be contiguous"),
    "counters of int64": (
        lambda t: {"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int64)},
        "cumulative_local_expert_recv_stats must be int32",
    ),
    "514 experts": (lambda t: {"num_experts": 514}, "with at most 256 experts per rank, got 514"),
    "rows larger than the buffer": (lambda t: {"x": t.x.float().repeat(1, 256)}, "num_bytes must be .* or more"),
    "an event but memory of the compute stream": (
        lambda t: {"previous_event": deep_ep.ElasticBuffer.capture()},
        "previous_event needs allocate_on_comm_stream",
    ),
    "an overlap for an event": (
        lambda t: {"previous_event": deep_ep.EventOverlap(), "allocate_on_comm_stream": True},
        "TypeError: .*an event must be an EventHandle",
    ),
    "no number of experts": (lambda t: {"num_experts": None, "num_sms": 4}, "TypeError: .*num_experts must be an int"),
    "tensors elsewhere": (lambda t: {"x": t.x.to("meta")}, "takes CPU tensors, got one on meta"),
}


@pytest.mark.parametrize("case", BAD_DISPATCHES)
def test_dispatch_refuses(case: str) -> None:
    change, said = BAD_DISPATCHES[case]
    for end in refuse(lambda buffer, tokens: dispatched(buffer, tokens, **change(tokens))):
        assert re.search(said, end), end


BAD_COMBINES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "float32 rows": (lambda x: {"x": x.float()}, "x must be contiguous bfloat16 rows, got torch.float32"),
    "a row too few": (lambda x: {"x": x[1:]}, "rows of its dispatch, got"),
    "narrow rows": (lambda x: {"x": x[:, :128].contiguous()}, "multiple of 256 in combine, got 128"),
    "weights of float64": (lambda x: {"topk_weights": torch.ones(len(x), TOP_K).double()}, "topk_weights must be"),
    "a bias of other rows": (lambda x: {"bias": torch.ones(1, HIDDEN).bfloat16()}, "a bias must be contiguous"),
}


@pytest.mark.parametrize("case", BAD_COMBINES)
def test_combine_refuses(case: str) -> None:
    change, said = BAD_COMBINES[case]

    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens)
        return buffer.combine(**{"x": x, "handle": handle} | change(x))

    for end in refuse(call):
        assert re.search("^RuntimeError: .*" + said, end), end


def test_a_top_k_of_33_does_not_compile() -> None:
    everyone = make_tokens(COUNTS[2], top_k=33, num_experts=64)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, num_topk=33)
        return outcome(lambda: dispatched(buffer, everyone[group.rank()], num_experts=64))

    assert all("top-k must be at most 32, got 33" in end for end in run_ranks(body, 2))


def test_an_expert_named_twice_traps_its_rank_and_hangs_the_others() -> None:
    """In v1 such a token is fine, and its row counts twice."""
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, topk_idx=torch.full_like(tokens.topk_idx, 5)))
    assert ends[0].startswith("EmulatedHang: deep_ep: a token must not name an expert twice")
    assert ends[1].startswith("EmulatedAbort: deep_ep: a token must not name an expert twice")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_max_tokens_per_rank": CAPACITY - 1}, "row sizes"),
        ({"x": torch.ones(7, HIDDEN // 2).bfloat16()}, "row sizes"),
        ({"num_experts": 2 * NUM_EXPERTS}, "num_experts"),
    ],
    ids=["maximum", "hidden", "experts"],
)
def test_a_rank_that_differs_hangs_all(change: dict[str, Any], named: str) -> None:
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, **(change if buffer.rank_idx else {})))
    assert all(f"EmulatedHang: ElasticBuffer.dispatch: every rank must pass the same {named}" in end for end in ends)


def test_one_rank_with_a_handle_hangs_all() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        handle = dispatched(buffer, tokens)[3]
        if buffer.rank_idx:
            return buffer.dispatch(tokens.x, handle=handle, num_sms=handle.num_sms)
        return dispatched(buffer, tokens)

    assert all("every rank must pass the same use of a handle" in end for end in refuse(call))


def test_a_rank_that_refuses_keeps_its_error_and_hangs_the_others() -> None:
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, **({"x": tokens.x[0]} if buffer.rank_idx else {})))
    assert "EmulatedHang" in ends[0]
    assert "wait here for rank 1, which raised RuntimeError: deep_ep: x must be" in ends[0]
    assert ends[1].startswith("RuntimeError: deep_ep: x must be contiguous and 2-D")


def test_a_handle_of_another_dispatch_is_believed_and_gives_memory_that_nobody_wrote() -> None:
    """Nothing there compares handles: only barriers meet. NaN stands for what lay in the buffer."""
    everyone, other = make_tokens(COUNTS[2]), make_tokens(COUNTS[2], seed=5)

    def body(group: dist.ProcessGroup) -> bool:
        buffer = open_buffer(group)
        handles = [dispatched(buffer, each[group.rank()])[3] for each in (everyone, other)]
        handle = handles[group.rank()]
        rows = torch.ones(handle.num_recv_tokens, HIDDEN).bfloat16()
        return bool(buffer.combine(rows, handle)[0].isnan().any())

    assert any(run_ranks(body, 2))


CACHED: dict[str, tuple[dict[str, Any], str]] = {
    "no SMs are named": ({}, "TypeError: unsupported operand type"),
    "ids": ({"topk_idx": torch.zeros(5, TOP_K, dtype=torch.int64), "num_sms": 4, "num_experts": 8}, "AssertionError: "),
    "a CPU sync": ({"do_cpu_sync": True, "num_sms": 4}, "AssertionError: Cannot do CPU sync with cached handle"),
    "another alignment": ({"expert_alignment": 8, "num_sms": 4}, "AssertionError: "),
    "other rows": ({"x": torch.ones(1, HIDDEN).bfloat16(), "num_sms": 4}, "RuntimeError: .*topk_idx must be"),
    "a compact handle expanded": (
        {"do_expand": True, "num_sms": 4},
        "EmulatedAbort: .*with do_expand, a handle must come from an expanded dispatch",
    ),
}


@pytest.mark.parametrize("case", CACHED)
def test_cached_dispatch_refuses(case: str) -> None:
    options, said = CACHED[case]

    def call(buffer: Any, tokens: Tokens) -> object:
        handle = dispatched(buffer, tokens)[3]
        return buffer.dispatch(**{"x": tokens.x, "handle": handle} | options)

    for end in refuse(call):
        assert re.search("^" + said, end), end


def test_expanded_rows_that_are_missing_are_read_past_the_end() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens, do_expand=True)
        return buffer.combine(x[:1], handle)

    assert all("EmulatedAbort" in end and "rows or more, got 1" in end for end in refuse(call))


def test_memory_that_torch_fills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    (tokens,) = make_tokens(COUNTS[1])
    with pytest.raises(AssertionError):
        dispatched(open_buffer(None), tokens)


def test_a_buffer_has_whole_blocks_and_the_same_bytes_on_every_rank() -> None:
    with pytest.raises(RuntimeError, match="num_bytes must be a multiple of 2097152, got 1048576"):
        open_buffer(None, num_bytes=MIB)
    with pytest.raises(RuntimeError, match="must be positive"):
        deep_ep.ElasticBuffer.get_buffer_size_hint(None, 0, 7168)
    ends = run_ranks(lambda group: outcome(lambda: open_buffer(group, num_bytes=(2 + 2 * group.rank()) * MIB)), 2)
    assert all("ElasticBuffer: every rank must pass the same num_bytes" in end for end in ends)


def test_destroy_is_asked_for_met_by_all_and_final() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        kept, buffer = open_buffer(group), open_buffer(group, explicitly_destroy=True)
        buffer.destroy()
        buffer.destroy()  # nothing happens
        return [outcome(kept.destroy), outcome(buffer.barrier)]

    for not_asked, met in run_ranks(body, 2):
        assert not_asked == "AssertionError: "
        assert met.startswith("AttributeError: 'NoneType' object has no attribute")


def test_parts_beside_expert_parallelism_are_refused() -> None:
    buffer = open_buffer(None)
    for call in (buffer.get_comm_stream, buffer.create_agrs_session, lambda: buffer.engram_write(torch.ones(1))):
        with pytest.raises(NotImplementedError, match=r"ElasticBuffer\..* is not emulated"):
            call()
    with pytest.raises(NotImplementedError, match="memory on the host and for redundant experts is not emulated"):
        open_buffer(None, num_cpu_bytes=2 * MIB)
