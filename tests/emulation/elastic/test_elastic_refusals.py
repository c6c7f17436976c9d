"""deep_ep.ElasticBuffer of v2: what it refuses, in its words, and what would have ended the process or hung the job."""

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
    "padding of a compact form": (lambda t: {"do_zero_padding": True}, "731.: not do_zero_padding or do_expand"),
    "three dimensions": (lambda t: {"x": t.x[None]}, "utils.hpp:17.: t.dim.. == kNumDims"),
    "strided rows": (lambda t: {"x": t.x.repeat(1, 2)[:, ::2]}, "buffer.hpp:754"),
    "row bytes": (lambda t: {"x": t.x[:, :12].contiguous()}, r"755.: \(x.size\(1\) \* x.element_size\(\)\) % sizeof"),
    "row bytes of TMA": (lambda t: {"x": t.x[:, :24].contiguous()}, "layout.cuh:198.: num_hidden_bytes % ptx::kNumTMA"),
    "more tokens than the maximum": (lambda t: {"num_max_tokens_per_rank": 4}, "756.: num_tokens <= num_max_tokens"),
    "scale packs of other rows": (lambda t: {"x": (t.x, torch.ones(1, 2))}, "buffer.hpp:765"),
    "scale packs of 8 bytes": (lambda t: {"x": (t.x, torch.ones(len(t.x), 2).double())}, "buffer.hpp:767"),
    "ids of other rows": (lambda t: {"topk_idx": t.topk_idx[1:]}, "buffer.hpp:776"),
    "ids of int32": (lambda t: {"topk_idx": t.topk_idx.int()}, "777.: topk_idx.scalar_type.. == c10::CppType"),
    "strided ids": (lambda t: {"topk_idx": t.topk_idx.repeat(1, 2)[:, ::2]}, "buffer.hpp:778"),
    "weights of other rows": (lambda t: {"topk_weights": t.topk_weights[1:]}, "buffer.hpp:784"),
    "strided weights": (lambda t: {"topk_weights": t.topk_weights.repeat(1, 2)[:, ::2]}, "buffer.hpp:785"),
    "weights of bfloat16": (lambda t: {"topk_weights": t.topk_weights.bfloat16()}, "type Float but found BFloat16"),
    "counters of other experts": (
        lambda t: {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)},
        "buffer.hpp:795",
    ),
    "counters of int64": (
        lambda t: {"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int64)},
        "type Int but found Long",
    ),
    "experts of no rank": (lambda t: {"num_experts": 7, "num_sms": 4}, "805.: num_experts % nccl_context->num_ranks"),
    "2050 experts": (lambda t: {"num_experts": 2050}, "layout.cuh:39.: num_experts <= kNumMaxExperts"),
    "514 experts": (lambda t: {"num_experts": 514}, "layout.cuh:40.: num_experts_per_rank <= kNumMaxExpertsPerRank"),
    "SMs that the GPU lacks": (lambda t: {"num_sms": 134}, "979.: num_sms <= jit::device_runtime->get_num_sms"),
    "no SMs": (lambda t: {"num_sms": -1}, "728.: num_sms > 0"),
    "rows larger than the buffer was made for": (lambda t: {"x": t.x.float().repeat(1, 256)}, "buffer.hpp:963"),
    "an event but memory of the compute stream": (
        lambda t: {"previous_event": deep_ep.ElasticBuffer.capture()},
        "540.: allocate_on_comm_stream",
    ),
}


@pytest.mark.parametrize("case", BAD_DISPATCHES)
def test_dispatch_refuses(case: str) -> None:
    change, said = BAD_DISPATCHES[case]
    for end in refuse(lambda buffer, tokens: dispatched(buffer, tokens, **change(tokens))):
        assert re.search("^RuntimeError: .*" + said, end), end


BAD_COMBINES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "float32 rows": (lambda x: {"x": x.float()}, "1203.: x.scalar_type.. == torch::kBFloat16"),
    "strided rows": (lambda x: {"x": x.repeat(1, 2)[:, ::2]}, "buffer.hpp:1202"),
    "a row too few": (lambda x: {"x": x[1:]}, "buffer.hpp:1219"),
    "row bytes": (lambda x: {"x": x[:, :12].contiguous()}, "buffer.hpp:1204"),
    "weights of other rows": (lambda x: {"topk_weights": torch.ones(1, TOP_K)}, "buffer.hpp:1231"),
    "weights of one dimension": (lambda x: {"topk_weights": torch.ones(len(x))}, "utils.hpp:17"),
    "weights of float64": (lambda x: {"topk_weights": torch.ones(len(x), TOP_K).double()}, "buffer.hpp:1234"),
    "a bias of other rows": (lambda x: {"bias": torch.ones(1, HIDDEN).bfloat16()}, "buffer.hpp:1244"),
    "a bias of float32": (lambda x: {"bias": torch.ones(1, HIDDEN)}, "buffer.hpp:1243"),
    "a hidden size that does not compile": (
        lambda x: {"x": x[:, :128].contiguous()},
        'NVCC compilation failed.*static assertion failed with "Invalid hidden" .*combine.cuh:109',
    ),
    "no SMs": (lambda x: {"num_sms": -1}, "1198.: num_sms > 0"),
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

    assert all(
        '"Insufficient lanes" (deep_ep/include/deep_ep/impls/dispatch.cuh:93)' in end for end in run_ranks(body, 2)
    )


def test_an_expert_named_twice_traps_its_rank_and_hangs_the_others() -> None:
    """In v1 such a token is fine, and its row counts twice."""
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, topk_idx=torch.full_like(tokens.topk_idx, 5)))
    assert ends[0].startswith("EmulatedHang: Assertion failed: deep_ep/include/deep_ep/impls/dispatch_copy_epilogue")
    assert ends[1].startswith("EmulatedAbort: Assertion failed: deep_ep/include/deep_ep/impls/dispatch_copy_epilogue")
    assert "a token names an expert of rank 1 twice" in ends[0]


def test_ids_beyond_the_experts_write_outside_shared_memory() -> None:
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, topk_idx=tokens.topk_idx + NUM_EXPERTS))
    assert all("EmulatedAbort" in end and "topk_idx must be below num_experts (8), got 1" in end for end in ends)


def test_weights_of_another_top_k_are_read_past_their_end() -> None:
    ends = refuse(lambda buffer, tokens: dispatched(buffer, tokens, topk_weights=torch.ones(len(tokens.x), 2)))
    assert all("EmulatedAbort" in end and "the 3 columns of topk_idx, got 2" in end for end in ends)


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
    assert "wait here for rank 1, which raised RuntimeError: Assertion exception" in ends[0]
    assert ends[1].startswith("RuntimeError: Assertion exception (csrc/elastic/utils.hpp:17)")


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
    "counters": (
        {"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int32), "num_sms": 4},
        "RuntimeError: .*csrc/kernels/elastic/dispatch.hpp:168.: cumulative_local_expert_recv_stats == nullptr",
    ),
    "other rows": ({"x": torch.ones(1, HIDDEN).bfloat16(), "num_sms": 4}, "RuntimeError: .*buffer.hpp:776"),
    "a compact handle expanded": (
        {"do_expand": True, "num_sms": 4},
        "EmulatedAbort: ElasticBuffer.dispatch: with do_expand, a handle must come from an expanded dispatch",
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


def test_expanded_sends_of_every_row_have_no_backward() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        x, _, weights, handle, _ = dispatched(buffer, tokens, do_expand=True)
        return buffer.combine(x, handle, weights)

    ends = refuse(call, allow_multiple_reduction=False)
    assert all("EmulatedAbort" in end and "combine.cuh:69, condition: topk_weights == nullptr" in end for end in ends)


def test_expanded_rows_that_are_missing_are_read_past_the_end() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens, do_expand=True)
        return buffer.combine(x[:1], handle)

    assert all("EmulatedAbort" in end and "x must have every row" in end for end in refuse(call))


def test_memory_that_torch_fills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    (tokens,) = make_tokens(COUNTS[1])
    with pytest.raises(AssertionError):
        dispatched(open_buffer(None), tokens)
    torch.use_deterministic_algorithms(False)
    _, _, _, handle, _ = dispatched(open_buffer(None), tokens)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(AssertionError):
        open_buffer(None).combine(tokens.x, handle)


@pytest.mark.parametrize("num_bytes", [-2 * MIB, MIB])
def test_buffers_come_in_steps_of_2_mib(num_bytes: int) -> None:
    with pytest.raises(RuntimeError, match=r"buffer.hpp:98.: num_buffer_bytes > 0 and num_buffer_bytes % symmetric"):
        open_buffer(None, num_bytes=num_bytes)


def test_a_buffer_of_another_size_on_one_rank_hangs_all() -> None:
    ends = run_ranks(lambda group: outcome(lambda: open_buffer(group, num_bytes=(2 + 2 * group.rank()) * MIB)), 2)
    assert all("ElasticBuffer: every rank must pass the same num_bytes" in end for end in ends)


def test_buffer_size_hint_worked_out_by_hand() -> None:
    """Bytes of a row: hidden, and in steps of 32 the scale packs, and ids, weights, source and links of each choice."""
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    row = 14336 + (8 * 8 + 9 * 4 + 28)  # 100 bytes of metadata are 128
    assert hint(None, 65536, 7168, num_topk=8) == -(-65536 * row // (2 * MIB)) * 2 * MIB
    row8 = 7168 + 224 * 4 + 128
    combined = 65536 * (14336 + 64)  # one rank of one choice each
    assert hint(None, 65536, 7168, 8, use_fp8_dispatch=True) == -(-max(65536 * row8, combined) // (2 * MIB)) * 2 * MIB
    everything = hint(None, 65536, 7168, 8, allow_multiple_reduction=False)
    assert everything == -(-8 * combined // (2 * MIB)) * 2 * MIB
    two = run_ranks(lambda group: hint(group, 65536, 7168, 8), 2)
    assert two == [-(-2 * 65536 * row // (2 * MIB)) * 2 * MIB] * 2


def test_buffer_size_hint_refuses_nothing_to_hold() -> None:
    with pytest.raises(RuntimeError, match=r"buffer.hpp:657.: num_max_tokens_per_rank > 0 and hidden > 0"):
        deep_ep.ElasticBuffer.get_buffer_size_hint(None, 0, 7168)
    with pytest.raises(RuntimeError, match=r"buffer\.hpp:660"):
        deep_ep.ElasticBuffer.get_buffer_size_hint(None, 8, 3)


def test_combine_needs_a_buffer_for_its_rows() -> None:
    everyone = make_tokens(COUNTS[1])
    buffer = open_buffer(None, num_bytes=2 * MIB)
    handle = dispatched(buffer, everyone[0])[3]
    handle.num_max_tokens_per_rank = 2**14
    with pytest.raises(RuntimeError, match=r"buffer.hpp:1254.: get_combine_buffer_size"):
        buffer.combine(everyone[0].x[: handle.num_recv_tokens], handle)


def test_more_queue_pairs_than_allocated_are_refused() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    buffer = open_buffer(None, num_allocated_qps=8)
    with pytest.raises(AssertionError, match="Allocated QPs are not enough"):
        dispatched(buffer, tokens, num_qps=9)


def test_an_overlap_is_no_event() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    event = deep_ep.EventOverlap(deep_ep.ElasticBuffer.capture())
    with pytest.raises(TypeError, match="an event must be an EventHandle"):
        dispatched(open_buffer(None), tokens, previous_event=event, allocate_on_comm_stream=True)


def test_the_number_of_experts_is_needed_without_a_handle() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    with pytest.raises(TypeError, match="num_experts must be an int, got None"):
        dispatched(open_buffer(None), tokens, num_experts=None, num_sms=4)


def test_tensors_elsewhere_than_on_the_cpu_are_refused() -> None:
    (tokens,) = make_tokens(COUNTS[1])
    with pytest.raises(RuntimeError, match="takes CPU tensors, got one on meta"):
        dispatched(open_buffer(None), tokens, x=tokens.x.to("meta"))


def test_destroy_is_asked_for_met_by_all_and_final() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        kept, buffer = open_buffer(group), open_buffer(group, explicitly_destroy=True)
        tokens = make_tokens(COUNTS[2])[group.rank()]
        buffer.destroy()
        buffer.destroy()  # nothing happens
        return [outcome(kept.destroy), outcome(lambda: dispatched(buffer, tokens)), outcome(buffer.barrier)]

    for not_asked, used, met in run_ranks(body, 2):
        assert not_asked == "AssertionError: "
        assert used == "AttributeError: 'NoneType' object has no attribute 'dispatch'"
        assert met == "AttributeError: 'NoneType' object has no attribute 'barrier'"


def test_parts_beside_expert_parallelism_are_refused() -> None:
    buffer = open_buffer(None)
    calls: list[Callable[[], object]] = [
        buffer.get_comm_stream,
        lambda: buffer.get_engram_storage_size_hint(1, 256, 1),
        lambda: buffer.engram_write(torch.ones(1)),
        lambda: buffer.engram_fetch(torch.ones(1)),
        lambda: buffer.get_pp_buffer_size_hint(1, 1),
        lambda: buffer.pp_set_config(1, 1),
        lambda: buffer.pp_send(torch.ones(1), 0),
        lambda: buffer.pp_recv(torch.ones(1), 0),
        lambda: buffer.get_agrs_num_max_session_bytes(None, (1,), torch.int32),
        lambda: buffer.get_agrs_buffer_size_hint(None, 1),
        buffer.create_agrs_session,
        buffer.destroy_agrs_session,
        buffer.agrs_new_session,
        lambda: buffer.agrs_set_config(1, 1),
        lambda: buffer.agrs_get_inplace_tensor((1,), torch.int32),
        lambda: buffer.all_gather(torch.ones(1)),
    ]
    assert all(outcome(call).startswith("NotImplementedError: ElasticBuffer.") for call in calls)
    with pytest.raises(NotImplementedError, match="host memory is not emulated"):
        open_buffer(None, num_cpu_bytes=2 * MIB)
