"""deep_ep.ElasticBuffer of v2: rules that a caller must keep, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulation.elastic_case import CAPACITY, COUNTS, deep_ep, dispatched, open_buffer
from tests.emulation.tokens import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Call,
    Tokens,
    call_on_two_ranks,
    make_tokens,
    outcome,
    run_ranks,
)

MIB = 2**20


def again(buffer: Any, tokens: Tokens, **options: Any) -> object:
    """A dispatch with the handle of an earlier one."""
    handle = dispatched(buffer, tokens)[3]
    return buffer.dispatch(**{"x": tokens.x, "handle": handle} | options)


def combined(buffer: Any, tokens: Tokens, *, do_expand: bool = False, **options: Any) -> object:
    """A combine with the rows of its dispatch, but for what ``options`` make of them."""
    x, *_, handle, _ = dispatched(buffer, tokens, do_expand=do_expand)
    return buffer.combine(handle=handle, **{"x": x} | {name: make(x) for name, make in options.items()})


# What both ranks must say.
REFUSED: dict[str, tuple[Call, str]] = {
    "padding of a compact form": (lambda b, t: dispatched(b, t, do_zero_padding=True), "do_zero_padding needs do_exp"),
    "strided rows": (lambda b, t: dispatched(b, t, x=t.x.repeat(1, 2)[:, ::2]), "x must be contiguous and 2-D"),
    "row bytes": (lambda b, t: dispatched(b, t, x=t.x[:, :24].contiguous()), "multiple of 32 bytes, got 24"),
    "too many tokens": (lambda b, t: dispatched(b, t, num_max_tokens_per_rank=4), "at most num_max_tokens_per_rank r"),
    "ids of int32": (lambda b, t: dispatched(b, t, topk_idx=t.topk_idx.int()), "topk_idx must be contiguous int64"),
    "ids of other rows": (lambda b, t: dispatched(b, t, topk_idx=t.topk_idx[1:]), "topk_idx must be contiguous int64"),
    "ids beyond the experts": (
        lambda b, t: dispatched(b, t, topk_idx=t.topk_idx + NUM_EXPERTS),
        r"EmulatedAbort: .*topk_idx must be below num_experts \(8\), got 1",
    ),
    "weights of bfloat16": (
        lambda b, t: dispatched(b, t, topk_weights=t.topk_weights.bfloat16()),
        "must be contiguous",
    ),
    "514 experts": (lambda b, t: dispatched(b, t, num_experts=514), "with at most 256 experts per rank, got 514"),
    "rows larger than the buffer": (lambda b, t: dispatched(b, t, x=t.x.float().repeat(1, 256)), "num_bytes must be"),
    "tensors elsewhere": (lambda b, t: dispatched(b, t, x=t.x.to("meta")), "takes CPU tensors, got one on meta"),
    "a handle but no SMs": (again, "^TypeError: unsupported operand type"),
    "a handle and ids": (lambda b, t: again(b, t, topk_idx=t.topk_idx, num_sms=4, num_experts=8), "^AssertionError: "),
    "a handle and a CPU sync": (lambda b, t: again(b, t, do_cpu_sync=True, num_sms=4), "Cannot do CPU sync with cach"),
    "a handle of another alignment": (lambda b, t: again(b, t, expert_alignment=8, num_sms=4), "^AssertionError: "),
    "a handle of other rows": (lambda b, t: again(b, t, x=t.x[:1], num_sms=4), "RuntimeError: .*topk_idx must be"),
    "a compact handle expanded": (
        lambda b, t: again(b, t, do_expand=True, num_sms=4),
        "EmulatedAbort: .*with do_expand, a handle must come from an expanded dispatch",
    ),
    "a handle on one rank": (
        lambda b, t: again(b, t, num_sms=10) if b.rank_idx else [dispatched(b, t), dispatched(b, t)],
        "every rank must pass the same use of a handle",
    ),
    "float32 sums": (lambda b, t: combined(b, t, x=torch.Tensor.float), "contiguous bfloat16 rows, got torch.float32"),
    "a row too few": (lambda b, t: combined(b, t, x=lambda x: x[1:]), "RuntimeError: .*rows of its dispatch, got"),
    "narrow sums": (lambda b, t: combined(b, t, x=lambda x: x[:, :128].contiguous()), "256 in combine, got 128"),
    "weights of float64": (
        lambda b, t: combined(b, t, topk_weights=lambda x: torch.ones(len(x), TOP_K).double()),
        "topk_weights must be",
    ),
    "missing expanded rows": (
        lambda b, t: combined(b, t, do_expand=True, x=lambda x: x[:1]),
        "EmulatedAbort: .*rows or more, got 1",
    ),
    "another maximum on a rank": (
        lambda b, t: dispatched(b, t, num_max_tokens_per_rank=CAPACITY - b.rank_idx),
        "EmulatedHang: ElasticBuffer.dispatch: every rank must pass the same row sizes",
    ),
    "another width on a rank": (
        lambda b, t: dispatched(b, t, x=t.x[:, : HIDDEN // (1 + b.rank_idx)].contiguous()),
        "EmulatedHang: ElasticBuffer.dispatch: every rank must pass the same row sizes",
    ),
    "other experts on a rank": (
        lambda b, t: dispatched(b, t, num_experts=NUM_EXPERTS * (1 + b.rank_idx)),
        "EmulatedHang: ElasticBuffer.dispatch: every rank must pass the same num_experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_are_refused_on_both_ranks(case: str) -> None:
    call, said = REFUSED[case]
    for end in call_on_two_ranks(open_buffer, call):
        assert re.search(said, end), end


@pytest.mark.parametrize(
    ("call", "refused_on", "error", "said"),
    [
        # In v1 such a token is fine, and its row counts twice.
        (
            lambda b, t: dispatched(b, t, topk_idx=torch.full_like(t.topk_idx, 5)),
            1,
            "EmulatedAbort: deep_ep: a token must not name an expert twice",
            "EmulatedHang: deep_ep: a token must not name an expert twice",
        ),
        (
            lambda b, t: dispatched(b, t, x=t.x[0] if b.rank_idx else t.x),
            1,
            "RuntimeError: deep_ep: x must be contiguous and 2-D",
            "EmulatedHang: .*wait here for rank 1, which raised RuntimeError: deep_ep: x must be",
        ),
    ],
    ids=["an expert named twice", "x of one dimension"],
)
def test_a_rank_that_refuses_keeps_its_error_and_hangs_the_others(
    call: Call, refused_on: int, error: str, said: str
) -> None:
    for rank, end in enumerate(call_on_two_ranks(open_buffer, call)):
        assert re.match(error if rank == refused_on else said, end), end


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


def test_memory_that_torch_fills_is_refused(filled_memory: None) -> None:
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
    with pytest.raises(NotImplementedError, match="memory on the host is not emulated"):
        open_buffer(None, num_cpu_bytes=2 * MIB)
