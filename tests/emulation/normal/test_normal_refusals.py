"""deep_ep.Buffer of v1.2.1: what it refuses, in its words, and what would have ended the process or hung the job."""

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
    return buffer.dispatch(**{name: changed.get(name, value) for name, value in (arguments | changed).items()})


BAD_DISPATCHES: dict[str, tuple[Callable[[Tokens], dict[str, Any]], str]] = {
    "three dimensions": (lambda t: {"x": t.x[None]}, r"deep_ep.cpp:336 'x.dim\(\) == 2 and x.is_contiguous"),
    "strided rows": (lambda t: {"x": t.x.repeat(1, 2)[:, ::2]}, "deep_ep.cpp:336"),
    "row bytes": (lambda t: {"x": t.x[:, :12].contiguous()}, r"cpp:337 '\(x.size\(1\) \* x.element_size\(\)\) % size"),
    "too few flags": (lambda t: {"is_token_in_rank": torch.ones(1, 2, dtype=torch.bool)}, "deep_ep.cpp:339"),
    "flags of uint8": (lambda t: {"is_token_in_rank": torch.ones(len(t.x), 2, dtype=torch.uint8)}, "kBool"),
    "counts of int64": (lambda t: {"num_tokens_per_rank": torch.zeros(2, dtype=torch.int64)}, "deep_ep.cpp:332"),
    "expert counts of int64": (lambda t: {"num_tokens_per_expert": torch.zeros(8)}, "deep_ep.cpp:331"),
    "experts of no rank": (lambda t: {"num_tokens_per_expert": torch.zeros(7, dtype=torch.int32)}, "cpp:347"),
    "2050 experts": (lambda t: {"num_tokens_per_expert": torch.zeros(2050, dtype=torch.int32)}, "LOCAL_EXPERTS"),
    "258 experts": (lambda t: {"num_tokens_per_expert": torch.zeros(258, dtype=torch.int32)}, "intranode.cu:123"),
    "ids without weights": (lambda t: {"topk_weights": None}, "topk_idx.has_value.. == topk_weights.has_value"),
    "weights of bfloat16": (lambda t: {"topk_weights": t.topk_weights.bfloat16()}, "deep_ep.cpp:368"),
    "ids of int32": (lambda t: {"topk_idx": t.topk_idx.int()}, "expected scalar type Long but found Int"),
    "too few ids": (lambda t: {"topk_idx": t.topk_idx[1:], "topk_weights": t.topk_weights[1:]}, "deep_ep.cpp:366"),
    "weights of another top-k": (lambda t: {"topk_weights": t.topk_weights[:, :2].contiguous()}, "deep_ep.cpp:367"),
    "scales of bfloat16 rows": (lambda t: {"x": (t.x, torch.ones(len(t.x), 2))}, "x.element_size.. == 1"),
    "scales of float64": (
        lambda t: {"x": (t.x.to(torch.float8_e4m3fn), torch.ones(len(t.x), 2, dtype=torch.float64))},
        "deep_ep.cpp:378",
    ),
    "scales of other rows": (lambda t: {"x": (t.x.to(torch.float8_e4m3fn), torch.ones(1, 2))}, "deep_ep.cpp:380"),
    "an odd number of SMs": (lambda t: {"config": deep_ep.Config(3)}, "config.num_sms % 2 == 0"),
    "worst tokens without ids": (
        lambda t: {"topk_idx": None, "topk_weights": None, "num_worst_tokens": 99},
        "deep_ep.cpp:446",
    ),
    "long queues": (lambda t: {"config": deep_ep.Config(20, 6, 100000)}, "deep_ep.cpp:496 'num_ranks .* <= num_nvl"),
    "a stream without an event": (lambda t: {"allocate_on_comm_stream": True}, "previous_event.has_value.. and async"),
}


@pytest.mark.parametrize("case", BAD_DISPATCHES)
def test_dispatch_refuses(case: str) -> None:
    change, said = BAD_DISPATCHES[case]
    for end in refuse(lambda buffer, tokens: with_layout(buffer, tokens, **change(tokens))):
        assert re.search("^RuntimeError: .*" + said, end), end


BAD_COMBINES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "float32 rows": (lambda x: {"x": x.float()}, 'launch.cuh:84 \'false and "Unsupported type"'),
    "float16 rows": (lambda x: {"x": x.half()}, "Unsupported type"),
    "a row too few": (lambda x: {"x": x[1:]}, "src_idx.size.0. == num_tokens"),
    "weights of other rows": (lambda x: {"topk_weights": torch.ones(1, 3)}, "deep_ep.cpp:586"),
    "weights of float64": (lambda x: {"topk_weights": torch.ones(len(x), 3).double()}, "deep_ep.cpp:587"),
    "a bias of other rows": (lambda x: {"bias": torch.ones(1, 256).bfloat16()}, "deep_ep.cpp:608"),
    "a bias of float32": (lambda x: {"bias": torch.ones(1, 256)}, "deep_ep.cpp:607"),
    "another number of channels": (lambda x: {"config": deep_ep.Config(10)}, "deep_ep.cpp:562"),
    "long queues": (lambda x: {"config": deep_ep.Config(20, 6, 100000)}, "deep_ep.cpp:614"),
}


@pytest.mark.parametrize("case", BAD_COMBINES)
def test_combine_refuses(case: str) -> None:
    change, said = BAD_COMBINES[case]

    def call(buffer: Any, tokens: Tokens) -> object:
        x, *_, handle, _ = dispatched(buffer, tokens)
        return buffer.combine(**{"x": x, "handle": handle} | change(x))

    for end in refuse(call):
        assert re.search("^RuntimeError: .*" + said, end), end


@pytest.mark.parametrize(("hidden", "end"), [(8176, "returned"), (8192, "EmulatedAbort"), (264, "EmulatedAbort")])
def test_dispatch_takes_rows_of_an_even_number_of_16_bytes_below_8192_wide(hidden: int, end: str) -> None:
    everyone = make_tokens(COUNTS[2], hidden=hidden)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, hidden_bytes=hidden * 2)
        return outcome(lambda: dispatched(buffer, everyone[group.rank()]))

    ends = run_ranks(body, 2)
    assert [each.partition(":")[0] for each in ends] == [end] * 2
    assert end == "returned" or all("intranode.cu:235" in each for each in ends)


def test_combine_of_rows_that_v1_2_1_reduces_by_chance_hangs() -> None:
    everyone = make_tokens(COUNTS[2], hidden=384)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(group, hidden_bytes=384 * 2)
        x, *_, handle, _ = dispatched(buffer, everyone[group.rank()])
        return outcome(lambda: buffer.combine(x, handle))

    assert all(
        "EmulatedHang" in end and "must be a multiple of 256, got hidden 384" in end for end in run_ranks(body, 2)
    )


def test_top_k_of_33_traps() -> None:
    everyone = make_tokens(COUNTS[2], top_k=33, num_experts=64)

    def body(group: dist.ProcessGroup) -> str:
        return outcome(lambda: dispatched(open_buffer(group), everyone[group.rank()]))

    assert all("EmulatedAbort" in end and "num_topk <= 32" in end for end in run_ranks(body, 2))


def test_too_few_worst_tokens_end_the_rank_and_hang_its_peers() -> None:
    everyone = make_tokens((9, 0))

    def body(group: dist.ProcessGroup) -> str:
        return outcome(
            lambda: dispatched(open_buffer(group), everyone[group.rank()], num_worst_tokens=3 + 6 * group.rank())
        )

    ends = run_ranks(body, 2)
    assert ends[0].startswith("EmulatedAbort: Buffer.dispatch: num_worst_tokens (3) must hold every row that rank 0")
    assert ends[1].startswith("EmulatedHang: Buffer.dispatch: num_worst_tokens (3) must hold every row that rank 0")


def test_counts_that_do_not_belong_to_the_flags_end_the_process() -> None:
    counts = torch.tensor([1, 1], dtype=torch.int32)
    ends = refuse(lambda buffer, tokens: with_layout(buffer, tokens, num_tokens_per_rank=counts))
    assert all("EmulatedAbort" in end and "must count is_token_in_rank, got [1, 1]" in end for end in ends)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.ones(7, 512).bfloat16()}, "layout"),
        ({"config": None, "num_tokens_per_expert": torch.zeros(16, dtype=torch.int32)}, "layout"),
    ],
    ids=["hidden", "experts"],
)
def test_a_rank_that_differs_hangs_all(change: dict[str, Any], named: str) -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        return with_layout(buffer, tokens, **(change if buffer.rank == 1 else {}))

    ends = refuse(call)
    assert all(end.startswith(f"EmulatedHang: Buffer.dispatch: every rank must pass the same {named}") for end in ends)


def test_a_rank_that_refuses_keeps_its_error_and_hangs_the_others() -> None:
    ends = refuse(lambda buffer, tokens: with_layout(buffer, tokens, **({"x": tokens.x[0]} if buffer.rank else {})))
    assert "EmulatedHang" in ends[0]
    assert "wait here for rank 1, which raised RuntimeError: Failed: Assertion error" in ends[0]
    assert ends[1].startswith("RuntimeError: Failed: Assertion error csrc/deep_ep.cpp:336")


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

    assert all("EmulatedHang" in end and "same handle" in end for end in refuse(call))


def test_flags_changed_behind_the_handle_hang() -> None:
    """The handle holds the caller's own is_token_in_rank, as the real one does."""

    def call(buffer: Any, tokens: Tokens) -> object:
        handle = dispatched(buffer, tokens)[4]
        handle[4].zero_()
        return buffer.dispatch(tokens.x, handle=handle)

    assert all(
        "EmulatedHang" in end and "handles of all ranks must come from one dispatch" in end for end in refuse(call)
    )


def test_a_buffer_grown_on_one_rank_is_written_past_its_end_by_that_rank() -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> str:
        small = deep_ep.Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(256, 2)
        buffer = deep_ep.Buffer(group, small * (8 if group.rank() == 0 else 1), 0)
        config = deep_ep.Config(20, 6, 2048)
        return outcome(lambda: dispatched(buffer, everyone[group.rank()], config=config))

    ends = run_ranks(body, 2)
    assert ends[0].startswith("EmulatedAbort: Buffer: num_nvl_bytes must be")
    assert "deep_ep.cpp:496" in ends[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_nvl_bytes": 100}, "deep_ep.cpp:27"),
        ({"num_rdma_bytes": 100}, "deep_ep.cpp:28"),
        ({"num_rdma_bytes": 128}, "num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode"),
    ],
)
def test_constructor_refuses_sizes(arguments: dict[str, int], said: str) -> None:
    ends = run_ranks(lambda group: outcome(lambda: deep_ep.Buffer(group, **arguments)), 2)
    assert all(end.startswith("RuntimeError: Failed: Assertion error") and said in end for end in ends)


@pytest.mark.parametrize("size", [1, 3])
def test_kernels_exist_for_2_4_and_8_ranks(size: int) -> None:
    everyone = make_tokens([4] * size, num_experts=12)

    def body(group: dist.ProcessGroup) -> list[str]:
        buffer = deep_ep.Buffer(group, 2**20 * 128, 0, explicitly_destroy=True)
        layout = buffer.get_dispatch_layout(everyone[group.rank()].topk_idx, 12)

        def dispatch(config: Any) -> object:
            counts = {"num_tokens_per_rank": layout[0], "num_tokens_per_expert": layout[2]}
            return buffer.dispatch(everyone[group.rank()].x, is_token_in_rank=layout[3], config=config, **counts)

        return [outcome(lambda: dispatch(None)), outcome(lambda: dispatch(deep_ep.Config())), outcome(buffer.destroy)]

    for unknown, unsupported, not_destroyed in run_ranks(body, size):
        assert unknown == f"AssertionError: Unsupported number of EP ranks: {size}"
        assert 'false and "Unsupported ranks"' in unsupported
        assert 'false and "Unsupported ranks"' in not_destroyed


def test_constructor_wants_a_group() -> None:
    with pytest.raises(ValueError, match="Either 'group' or 'comm' must be provided"):
        deep_ep.Buffer(None)
    with pytest.raises(NotImplementedError, match="a communicator of mpi4py is not emulated"):
        deep_ep.Buffer(None, comm=object())


def test_low_latency_mode_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        buffer = deep_ep.Buffer(group)
        return [
            outcome(lambda: deep_ep.Buffer(group, low_latency_mode=True)),
            outcome(lambda: buffer.low_latency_dispatch(None, None, 8, 8)),
            outcome(lambda: buffer.low_latency_combine(None, None, None, ())),
            outcome(lambda: buffer.clean_low_latency_buffer(8, 256, 8)),
            outcome(lambda: buffer.get_next_low_latency_combine_buffer(())),
            outcome(lambda: deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 256, 2, 8)),
        ]

    said = "NotImplementedError: Buffer: low-latency mode is not emulated. Use dispatch and combine."
    assert run_ranks(body, 2) == [[said] * 6] * 2


def test_what_cpu_ranks_lack_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        buffer = deep_ep.Buffer(group)
        return [outcome(buffer.get_comm_stream), outcome(lambda: buffer.get_local_buffer_tensor(torch.int32))]

    for stream, raw in run_ranks(body, 2):
        assert stream.startswith("NotImplementedError: Buffer.get_comm_stream")
        assert raw.startswith("NotImplementedError: Buffer.get_local_buffer_tensor")


def test_tensors_elsewhere_than_on_the_cpu_are_refused() -> None:
    ends = refuse(lambda buffer, tokens: with_layout(buffer, tokens, x=tokens.x.to("meta")))
    assert all("takes CPU tensors, got one on meta" in end for end in ends)


def test_destroy_is_asked_for_met_by_all_and_final() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        kept, buffer = deep_ep.Buffer(group, 128), open_buffer(group)
        buffer.destroy()
        ids = torch.zeros(1, 1, dtype=torch.int64)
        return [outcome(kept.destroy), outcome(buffer.destroy), outcome(lambda: buffer.get_dispatch_layout(ids, 8))]

    for not_asked, again, used in run_ranks(body, 2):
        assert not_asked == "AssertionError: `explicitly_destroy` flag must be set"
        assert again == "AttributeError: 'NoneType' object has no attribute 'destroy'"
        assert used == "AttributeError: 'NoneType' object has no attribute 'get_dispatch_layout'"


def test_destroy_waits_for_the_other_ranks() -> None:
    everyone = make_tokens(COUNTS[2])

    def call(buffer: Any, tokens: Tokens) -> object:
        return buffer.destroy() if buffer.rank else dispatched(buffer, everyone[0])

    assert all("must be in the same call, got ['Buffer.dispatch', 'Buffer.destroy']" in end for end in refuse(call))


def test_the_number_of_sms_is_even_and_of_the_class() -> None:
    with pytest.raises(AssertionError, match="The SM count must be even"):
        deep_ep.Buffer.set_num_sms(21)
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
