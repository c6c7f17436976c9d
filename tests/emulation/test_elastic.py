"""deep_ep.ElasticBuffer of v2 against the data of all ranks, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
    local,
    make_tokens,
    outcome,
    rows_per_expert,
    run_ranks,
)

deep_ep: Any = emulated_deep_ep("v2-2.1.0")
CAPACITY = 8
COUNTS = {1: (5,), 2: (5, 7), 4: (5, 0, 7, 3)}


def open_buffer(group: dist.ProcessGroup | None, release: str = "v2-2.1.0", **options: Any) -> Any:
    module: Any = emulated_deep_ep(release)
    cls = module.EPBuffer if hasattr(module, "EPBuffer") else module.ElasticBuffer
    return cls(group, **({"num_max_tokens_per_rank": CAPACITY, "hidden": HIDDEN, "num_topk": TOP_K} | options))


def dispatched(buffer: Any, tokens: Tokens, **options: Any) -> Any:
    arguments = {"topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights, "num_experts": NUM_EXPERTS}
    return buffer.dispatch(options.pop("x", tokens.x), **(arguments | options))


def sources(everyone: list[Tokens], rank: int) -> list[tuple[int, int]]:
    """(source rank, token) of each row that a rank receives, sorted."""
    size = len(everyone)
    return [(peer, int(token)) for peer, tokens in enumerate(everyone) for token in goes_to(tokens, rank, size)]


def found_sources(handle: Any, rows: int) -> list[tuple[int, int]]:
    """(source rank, token) of each row in the order it lies, as the handle tells."""
    return [divmod(int(index), handle.num_max_tokens_per_rank) for index in handle.recv_src_metadata[:rows, 0]]


def expert_rows(everyone: list[Tokens], rank: int) -> list[list[tuple[int, int, int]]]:
    """For each expert of a rank the (source rank, token, choice) that lead to it, sorted."""
    size = len(everyone)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_EXPERTS // size)]
    for peer, tokens in enumerate(everyone):
        for token, choices in enumerate(local(tokens.topk_idx, rank, size).tolist()):
            for choice, expert in enumerate(choices):
                if expert >= 0:
                    rows[expert].append((peer, token, choice))
    return rows


def ranks_of(tokens: Tokens, token: int, size: int) -> list[int]:
    """The ranks that a token goes to, in the order in which its sum is made: by the last choice that leads there."""
    owners = [int(expert) // (NUM_EXPERTS // size) if expert >= 0 else -1 for expert in tokens.topk_idx[token]]
    return [rank for choice, rank in enumerate(owners) if rank >= 0 and rank not in owners[choice + 1 :]]


def added(rows: list[Tensor]) -> Tensor:
    """The release's sum: two rows in bfloat16, more in float32 and rounded once."""
    if len(rows) <= 2:
        return sum(rows, torch.zeros(HIDDEN, dtype=torch.bfloat16))
    return torch.stack([row.float() for row in rows]).sum(0).bfloat16()


SIZES = pytest.mark.parametrize("size", [1, 4])
ALIGNMENT = 4


@pytest.mark.parametrize(
    ("size", "do_cpu_sync", "deterministic"),
    [(1, True, False), (4, True, False), (1, False, True), (4, True, True), (4, False, True)],
)
def test_rows_come_by_source_rank_and_by_chance_within_it_unless_sorted(
    size: int, do_cpu_sync: bool, deterministic: bool
) -> None:
    """Without a CPU sync, nobody writes the tail, not even its ids as v1 does. A running total tells the rows.

    With a handle, other rows come in the same order.
    """
    everyone, others = make_tokens(COUNTS[size]), make_tokens(COUNTS[size], seed=1)

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=deterministic)
        options = {"do_cpu_sync": do_cpu_sync, "expert_alignment": ALIGNMENT}
        x, ids, weights, handle, _ = dispatched(buffer, everyone[rank], **options)
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        again = buffer.dispatch(others[rank].x, handle=handle, num_sms=handle.num_sms)[0]
        found = found_sources(handle, rows)
        assert sorted(found) == sources(everyone, rank)
        assert [peer for peer, _ in found] == sorted(peer for peer, _ in found)
        for row, (peer, token) in enumerate(found):
            sent = everyone[peer]
            assert torch.equal(x[row], sent.x[token])
            assert torch.equal(ids[row], local(sent.topk_idx, rank, size)[token])
            # Also the weights of choices that lead to other ranks.
            assert torch.equal(weights[row], sent.topk_weights[token])
            assert torch.equal(again[row], others[peer].x[token])
        length = rows if do_cpu_sync else CAPACITY * size
        assert len(x) == len(ids) == len(weights) == handle.num_recv_tokens == length
        assert x[rows:].isnan().all()
        assert weights[rows:].isnan().all()
        assert (ids[rows:] == torch.iinfo(torch.int64).min).all()
        assert not buffer.combine(x, handle)[0].isnan().any()
        aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in rows_per_expert(everyone, rank)]
        assert handle.num_recv_tokens_per_expert_list == (aligned if do_cpu_sync else [])
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == rows_per_expert(everyone, rank)
        return found == sources(everyone, rank)

    assert all(run_ranks(body, size)) == deterministic


def test_deterministic_and_asynchronous_rows_are_sorted_by_the_wait() -> None:
    everyone = make_tokens(COUNTS[4])

    def body(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        buffer = open_buffer(group, deterministic=True)
        x, *_, event = dispatched(buffer, everyone[rank], async_with_compute_stream=True)
        expected = expected_rows(everyone, rank)[0]
        was_sorted = torch.equal(x, expected)
        event.current_stream_wait()
        assert torch.equal(x, expected)
        return was_sorted

    assert not all(run_ranks(body, 4))


def places_of(rows: list[list[tuple[int, int, int]]]) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Where each expert's rows start when they are rounded up to the alignment, and what they are."""
    starts, start = [], 0
    for mine in rows:
        starts.append((start, mine))
        start += -(-len(mine) // ALIGNMENT) * ALIGNMENT
    return starts


def arrived_at(handle: Any) -> dict[int, tuple[int, int, int]]:
    """Row -> (source rank, token, choice), as the handle tells."""
    num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    told = {}
    for index, _, *places in handle.recv_src_metadata[:num_rows].tolist():
        for choice, place in enumerate(places):
            if place >= 0:
                told[place] = (*divmod(index, handle.num_max_tokens_per_rank), choice)
    return told


@pytest.mark.parametrize(
    ("size", "do_cpu_sync", "deterministic", "zeros"),
    [(1, True, False, False), (2, False, True, True), (4, True, True, False), (4, False, False, True)],
)
def test_rows_lie_by_expert_and_by_chance_within_it_unless_sorted(
    size: int, do_cpu_sync: bool, deterministic: bool, zeros: bool
) -> None:
    """Nobody writes what lies between experts, unless it is filled with zeros, nor the tail."""
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup) -> tuple[bool, bool]:
        rank = group.rank()
        options = {"do_expand": True, "expert_alignment": ALIGNMENT, "do_cpu_sync": do_cpu_sync}
        options["do_zero_padding"] = zeros
        x, ids, weights, handle, _ = dispatched(
            open_buffer(group, deterministic=deterministic), everyone[rank], **options
        )
        rows = expert_rows(everyone, rank)
        assert ids is None
        aligned = [-(-len(mine) // ALIGNMENT) * ALIGNMENT for mine in rows]
        assert handle.num_recv_tokens_per_expert_list == (aligned if do_cpu_sync else [])
        worst = size * CAPACITY * min(TOP_K, len(rows)) + (ALIGNMENT - 1) * len(rows)
        assert len(x) == len(weights) == (sum(aligned) if do_cpu_sync else -(-worst // ALIGNMENT) * ALIGNMENT)
        ends = [start + len(mine) for start, mine in places_of(rows)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [len(mine) for mine in rows]

        told = arrived_at(handle)
        in_order, by_source = True, True
        for start, mine in places_of(rows):
            found = [told.pop(start + row) for row in range(len(mine))]
            assert sorted(found) == mine
            in_order = in_order and found == mine
            by_source = by_source and [peer for peer, *_ in found] == sorted(peer for peer, *_ in found)
            for row, (peer, token, choice) in enumerate(found, start):
                assert torch.equal(x[row], everyone[peer].x[token])
                assert weights[row] == everyone[peer].topk_weights[token, choice]
        assert told == {}
        for start, mine in places_of(rows):
            for gap in (
                part[start + len(mine) : start + -(-len(mine) // ALIGNMENT) * ALIGNMENT] for part in (x, weights)
            ):
                assert (gap == 0).all() if zeros else gap.isnan().all()
        assert x[sum(aligned) :].isnan().all()
        assert weights[sum(aligned) :].isnan().all()
        return in_order, by_source

    in_order, by_source = zip(*run_ranks(body, size), strict=True)
    assert all(in_order) == deterministic
    assert all(by_source) == (deterministic or size == 1)


@pytest.mark.parametrize("allow_multiple_reduction", [True, False])
@SIZES
def test_combine_sums_by_rank_and_then_at_home_or_only_at_home(size: int, allow_multiple_reduction: bool) -> None:
    everyone = make_tokens(COUNTS[size])
    torch.manual_seed(0)
    output = {
        (rank, source): torch.randn(HIDDEN).bfloat16()
        for rank in range(size)
        for mine in expert_rows(everyone, rank)
        for source in mine
    }

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tokens = everyone[rank]
        buffer = open_buffer(group, allow_multiple_reduction=allow_multiple_reduction)
        x, *_, handle, _ = dispatched(buffer, tokens, do_expand=True, do_cpu_sync=False)
        rows = torch.full_like(x, torch.nan)
        for row, source in arrived_at(handle).items():
            rows[row] = output[rank, source]
        y, weights, _ = buffer.combine(rows, handle)
        assert weights is None
        for token in range(len(tokens.x)):
            choices = {choice: int(expert) for choice, expert in enumerate(tokens.topk_idx[token]) if expert >= 0}
            owner = {choice: expert // (NUM_EXPERTS // size) for choice, expert in choices.items()}
            arrived = {choice: output[owner[choice], (rank, token, choice)] for choice in choices}
            if allow_multiple_reduction:
                sums = [
                    added([arrived[choice] for choice in choices if owner[choice] == peer])
                    for peer in ranks_of(tokens, token, size)
                ]
                assert torch.equal(y[token], added(sums))
            else:
                assert torch.equal(y[token], added(list(arrived.values())))

    run_ranks(body, size)


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
    "other experts": (lambda b, t: dispatched(b, t, topk_idx=t.topk_idx + 8), r"Abort: .*num_experts \(8\), got 1"),
    "bfloat16 weights": (lambda b, t: dispatched(b, t, topk_weights=t.topk_weights.bfloat16()), "must be contiguous"),
    "514 experts": (lambda b, t: dispatched(b, t, num_experts=514), "with at most 256 experts per rank, got 514"),
    "rows larger than the buffer": (lambda b, t: dispatched(b, t, x=t.x.float().repeat(1, 256)), "num_bytes must be"),
    "tensors elsewhere": (lambda b, t: dispatched(b, t, x=t.x.to("meta")), "takes CPU tensors, got one on meta"),
    "a handle but no SMs": (again, "^TypeError: unsupported operand type"),
    "a handle and ids": (lambda b, t: again(b, t, topk_idx=t.topk_idx, num_sms=4, num_experts=8), "^AssertionError: "),
    "a handle and a CPU sync": (lambda b, t: again(b, t, do_cpu_sync=True, num_sms=4), "Cannot do CPU sync with cach"),
    "a handle of another alignment": (lambda b, t: again(b, t, expert_alignment=8, num_sms=4), "^AssertionError: "),
    "a handle of other rows": (lambda b, t: again(b, t, x=t.x[:1], num_sms=4), "RuntimeError: .*topk_idx must be"),
    "a compact handle": (lambda b, t: again(b, t, do_expand=True, num_sms=4), "EmulatedAbort: .*an expanded dispatch"),
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
    "missing rows": (lambda b, t: combined(b, t, do_expand=True, x=lambda x: x[:1]), "EmulatedAbort: .*or more, got 1"),
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
