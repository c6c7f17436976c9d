"""HybridEPBuffer: expert rows and the sums that come back, and what would have ended the process or hung the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation import EmulatedAbort
from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from tests.emulation.conftest import Setting
from tests.emulation.hybrid_case import (
    CURRENT,
    HIDDEN,
    JULY,
    LOCAL,
    RAGGED,
    ROWS,
    Source,
    expected_rows,
    expected_sums,
    expert_outputs,
    make_sources,
    open_buffer,
    opened,
    returned,
    sent,
)
from tests.emulation.tokens import outcome, run_ranks

MODES = pytest.mark.parametrize(("release", "fused"), [(JULY, False), (JULY, True), (RAGGED, False), (RAGGED, True)])
# Releases, ranks, ranks of a domain, and whether permutations are fused. A size of 0 is one rank without a group.
PLACES = pytest.mark.parametrize(
    ("release", "size", "domain", "fused"),
    [
        *((release, 2, 2, fused) for release in (JULY, RAGGED) for fused in (False, True)),
        *((release, 0, 1, fused) for release, fused in ((JULY, False), (RAGGED, True))),
        *((JULY, 1, 1, True), (JULY, 4, 4, False), (RAGGED, 4, 4, True)),
        *((JULY, 4, 2, False), (JULY, 4, 1, True), (RAGGED, 4, 2, True), (RAGGED, 4, 1, False)),
    ],
)


@PLACES
def test_rows_and_their_sums(release: str, size: int, domain: int, fused: bool, variables: Setting) -> None:
    """Rows come by expert, then rank, then token, with padding of zeros.

    Combine sums in float32, and rounds per rank, what comes from another node before it travels, and once more.
    """
    ranks = max(size, 1)
    sources = make_sources([ROWS] * ranks)
    outputs = expert_outputs(sources, pad=16)

    def body(group: dist.ProcessGroup | None) -> Any:
        rank = 0 if group is None else group.rank()
        buffer = open_buffer(release, group, **({} if domain == ranks else {"enable_custom_allgather": False}))
        nodes = ranks // domain
        assert (buffer.num_of_nodes, buffer.local_rank, buffer.node_rank) == (nodes, rank % domain, rank // domain)
        received = sent(buffer, sources[rank], pad_multiple=16, fused=fused)
        rows, probs, _, _, handle = received
        assert rows.shape == outputs[rank].shape
        assert handle[0].shape == (nodes * ROWS, domain)
        real = expected_rows(sources, rank, pad=16).real[:, None]
        with_garbage = torch.where(real, outputs[rank], torch.nan)  # padding is never read
        garbage_probs = torch.where(real[:, 0], probs, torch.nan)
        return received, returned(buffer, with_garbage, handle, garbage_probs, fused=fused)

    if domain < ranks:
        variables(NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=str(domain))
    expected_out = expected_sums(sources, outputs, pad=16, domain=domain)
    outs = run_ranks(body, size) if size else [body(None)]
    for rank, ((rows, probs, scales, counts, _), (sums, returned_probs)) in enumerate(outs):
        expected = expected_rows(sources, rank, pad=16)
        assert torch.equal(rows, expected.rows)
        assert torch.equal(probs, expected.probs)
        assert scales is None
        assert (counts.tolist(), counts.dtype) == (expected.counts, torch.int64)
        assert sums.dtype == torch.bfloat16
        assert torch.equal(sums, expected_out[rank])
        assert torch.equal(returned_probs, sources[rank].probs)


@MODES
def test_non_blocking_leaves_nan_after_the_rows_and_the_flag_at_zero(release: str, fused: bool) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        out = sent(
            buffer, sources[group.rank()], pad_multiple=16, num_permuted_tokens=512, non_blocking=True, fused=fused
        )
        return (*out, returned(buffer, out[0], out[4], out[1], fused=fused))

    outs = run_ranks(body, 2)
    expected_out = expected_sums(sources, [out[0] for out in outs], pad=16)
    for rank, (rows, probs, _, counts, handle, (sums, _)) in enumerate(outs):
        expected = expected_rows(sources, rank, pad=16)
        used = len(expected.rows)
        assert rows.shape == (512, HIDDEN)
        assert torch.equal(rows[:used], expected.rows)
        assert rows[used:].isnan().all()
        assert probs[used:].isnan().all()
        assert counts.tolist() == expected.counts
        assert flag_of(release, handle).tolist() == [0]
        assert torch.equal(sums, expected_out[rank])


def flag_of(release: str, handle: Any) -> Any:
    return handle[-2] if release == "hybridep-744" else handle[-1]


@CURRENT
def test_a_rank_may_move_no_probs_in_combine(release: str) -> None:
    """It gets none back; the other reads memory that nobody wrote for rows that lay there."""

    def body(group: dist.ProcessGroup) -> Tensor | None:
        buffer = hybrid_ep_buffer(release)(group, HIDDEN, ROWS, LOCAL)
        source = make_sources([ROWS] * 2)[group.rank()]
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=source.x, routing_map=source.routing, probs=source.probs
        )
        given = probs if group.rank() == 0 else None
        back: Tensor | None = buffer.combine_with_unpermute(hidden=rows, probs=given, handle=handle)[1]
        assert (back is None) == (given is None)
        return back

    first, second = run_ranks(body, 2)
    assert second is None
    (source, _) = make_sources([ROWS] * 2)
    went = source.routing[:, LOCAL:].any(1)
    assert first is not None
    assert bool(first[went].isnan().any())
    torch.testing.assert_close(first[~went], source.probs[~went])


@CURRENT
@pytest.mark.parametrize(
    "sizes", [{"hidden_dim": 40}, {"num_local_experts": 3}, {"hidden_dim": 256, "use_fp8": True}], ids=str
)
def test_impossible_sizes_are_refused(release: str, sizes: dict[str, Any]) -> None:
    assert "The buffer config is not valid" in outcome(lambda: opened(release, **sizes))
    assert "The config is not valid" in outcome(lambda: opened(release).update_template_config(**sizes))


@CURRENT
def test_the_most_rows_across_nodes(release: str, variables: Setting) -> None:
    most = 21824
    assert outcome(lambda: open_buffer(release, None, rows=most + 64)) == "returned"  # no rule inside a node

    def body(group: dist.ProcessGroup) -> list[str]:
        return [outcome(partial(open_buffer, release, group, rows=rows)) for rows in (most, most + 64)]

    variables(NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN="1")
    for fits, refused in run_ranks(body, 2):
        assert fits == "returned"
        assert "3 * max_num_of_tokens_per_rank + 1 must be below 65536 across nodes" in refused


@pytest.mark.parametrize(("size", "rows", "fits"), [(1, 66, False), (2, 65, False), (1, 68, True), (2, 66, True)])
def test_tma_loads_whole_16_bytes(size: int, rows: int, fits: bool) -> None:
    sources = make_sources([rows] * size)
    ends = run_ranks(lambda group: outcome(lambda: sent(open_buffer(JULY, group), sources[group.rank()])), size)
    assert all((end == "returned") if fits else ("TMA 16B alignment error" in end) for end in ends)


BAD_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no row": (JULY, {"hidden": torch.zeros(0, HIDDEN), "routing_map": torch.zeros(0, 4).bool()}, "at least one row"),
    "other rows": (JULY, {"routing_map": torch.zeros(8, LOCAL).bool()}, "should have the same row number"),
    "other experts": (JULY, {"routing_map": torch.zeros(ROWS, 8).bool()}, "EmulatedAbort: .*with 4 columns"),
    "no routing": (JULY, {"routing_map": None}, "a dispatch needs a routing_map, topk_idx or a handle"),
    "three dimensions": (JULY, {"hidden": torch.zeros(ROWS, 1, HIDDEN)}, "hidden must be 2-D"),
    "float32 rows": (JULY, {"hidden": torch.zeros(ROWS, HIDDEN)}, "must have 2 bytes an element .*got torch.float32"),
    "strided rows": (JULY, {"hidden": torch.zeros(HIDDEN, ROWS).bfloat16().T}, "hidden must be contiguous"),
    "probs of float64": (JULY, {"probs": torch.zeros(ROWS, LOCAL).double()}, "probs must be torch.float32"),
    "probs of other experts": (JULY, {"probs": torch.zeros(ROWS, 2)}, r"probs must be contiguous \(64, 4\)"),
    "ids outside the experts": (
        JULY,
        {"routing_map": None, "topk_idx": torch.tensor([[0, -1]] * ROWS), "num_of_experts": LOCAL},
        r"EmulatedAbort: .*topk_idx must be in \[0, 4\)",
    ),
    "ids of unknown experts": (
        RAGGED,
        {"routing_map": None, "topk_idx": torch.zeros(ROWS, 1, dtype=torch.int64)},
        "The number of experts should be provided",
    ),
    "float8 without scales": (
        JULY,
        {"hidden": torch.zeros(ROWS, 512, dtype=torch.uint8), "use_fp8": True},
        "float8 rows need a scaling_factor",
    ),
    "non-blocking without room": (JULY, {"non_blocking": True}, "num_permuted_tokens is required for non-blocking"),
    "room that is not whole padding": (
        JULY,
        {"non_blocking": True, "num_permuted_tokens": 250, "pad_multiple": 16},
        r"num_permuted_tokens \(250\) must be a multiple of pad_multiple \(16\)",
    ),
    "too little room": (JULY, {"num_permuted_tokens": 8}, r"EmulatedAbort: .*permute writes expert row \d+ of 8"),
    "too few slots": (RAGGED, {"num_of_tokens_per_rank": 8}, r"\(8\) must be >= the local token count \(64\)"),
    "rows elsewhere": (JULY, {"hidden": torch.zeros(ROWS, HIDDEN, device="meta")}, "CPU tensors, got one on meta"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_dispatch_refuses(case: str) -> None:
    release, change, said = BAD_CALLS[case]
    (source,) = make_sources([ROWS])
    given = {"hidden": source.x, "routing_map": source.routing} | change
    if case in ("no row", "rows elsewhere"):
        given["hidden"] = given["hidden"].bfloat16()
    end = outcome(lambda: open_buffer(release, None).dispatch_with_permute(**given))
    assert re.search(said, end), end


@pytest.mark.parametrize(("release", "fused"), [(JULY, False), (JULY, True), (RAGGED, True)])
def test_combine_takes_bfloat16_rows_of_its_dispatch(release: str, fused: bool) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    rows, probs, _, _, handle = sent(buffer, source, fused=fused)
    for hidden, given, said in (
        (rows.float(), None, "hidden must be bfloat16, got torch.float32"),
        (rows[:, :16].contiguous(), None, "hidden must be contiguous"),
        (rows[:-1], None, "unpermute reads expert row"),
        (rows, probs.bfloat16(), "probs must be contiguous float32"),
    ):
        with pytest.raises(EmulatedAbort, match=said):
            returned(buffer, hidden, handle, given, fused=fused)
    for call in (buffer.combine, lambda hidden: buffer.combine_with_unpermute(hidden=hidden)):
        with pytest.raises(AssertionError, match="The handle is necessary"):
            call(hidden=rows)


@CURRENT
def test_a_cached_handle_needs_the_number_of_rows(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    rows, _, _, _, handle = sent(buffer, source)
    with pytest.raises(AssertionError, match="num_permuted_tokens takes an int with a handle, got None"):
        buffer.dispatch_with_permute(hidden=source.x, handle=handle)
    with pytest.raises(EmulatedAbort, match="permute writes expert row"):
        buffer.dispatch_with_permute(hidden=source.x, handle=handle, num_permuted_tokens=len(rows) - 1)
    with pytest.raises(EmulatedAbort, match=r"hidden must be contiguous \(64, 32\), got shape \(32, 32\)"):
        buffer.dispatch_with_permute(hidden=source.x[:32], handle=handle, num_permuted_tokens=len(rows))


# Ranks that do not agree: the real ones wait for ever, so every rank must be told.
Disagreement = Callable[[Any, Source, int], object]


def sent_again(buffer: Any, source: Source, rank: int) -> object:
    """A new dispatch on rank 0, one with a handle on rank 1."""
    rows, _, _, _, handle = sent(buffer, source)
    return sent(buffer, source, **({"handle": handle, "num_permuted_tokens": len(rows)} if rank else {}))


DISAGREEMENTS: dict[str, tuple[list[str], tuple[int, int], Disagreement, str]] = {
    "unequal rows": ([JULY], (64, 32), lambda b, s, _: sent(b, s, pad_multiple=1), r"rank, got \[64, 32\] by"),
    "unequal slots": ([RAGGED], (40, 5), lambda b, s, rank: sent(b, s), r"every rank must pass the same"),
    "different calls": (
        [JULY, RAGGED],
        (ROWS, ROWS),
        lambda b, s, rank: b.dispatch(s.x, routing_map=s.routing) if rank else sent(b, s, pad_multiple=1),
        "every rank must be in the same call",
    ),
    "a handle on one rank": ([JULY, RAGGED], (ROWS, ROWS), sent_again, r"every rank must pass the same handle"),
}


@pytest.mark.parametrize(
    ("case", "release"), [(case, release) for case, (releases, *_) in DISAGREEMENTS.items() for release in releases]
)
def test_ranks_that_do_not_agree_are_told(case: str, release: str) -> None:
    _, counts, call, said = DISAGREEMENTS[case]
    sources = make_sources(counts)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(release, group)
        return outcome(lambda: call(buffer, sources[group.rank()], group.rank()))

    for end in run_ranks(body, 2):
        assert re.match(f"EmulatedHang: HybridEPBuffer.*{said}", end), end


@CURRENT
def test_a_rank_that_was_opened_smaller_grows_alone(release: str) -> None:
    sources = make_sources([1024] * 2)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(release, group, rows=1024 if group.rank() else 512)
        return outcome(lambda: sent(buffer, sources[group.rank()]))

    assert all("got growth only on ranks [0] of 2" in said for said in run_ranks(body, 2))


def test_the_handle_of_another_dispatch_gives_other_sums() -> None:
    """A swapped handle is not refused, there as here: the sums must show it."""
    sources, others = make_sources([ROWS] * 2), make_sources([ROWS] * 2, seed=9)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(JULY, group)
        rows, _, _, _, handle = sent(buffer, sources[group.rank()], num_permuted_tokens=512)
        other = sent(buffer, others[group.rank()], num_permuted_tokens=512)[4]
        right, wrong = returned(buffer, rows, handle)[0], returned(buffer, rows, other)[0]
        return (right.isnan().any() or right.shape != wrong.shape), bool((right == wrong).all())

    assert run_ranks(body, 2) == [(False, False)] * 2


def test_a_reallocation_ends_the_handles_of_ragged_releases() -> None:
    (source,), (larger,) = make_sources([ROWS]), make_sources([600])
    buffer, july = open_buffer(RAGGED, None), open_buffer(JULY, None)
    rows, _, _, _, handle = sent(buffer, source)
    sent(buffer, larger)
    with pytest.raises(RuntimeError, match=r"created against buffer generation 0, but the current generation is 1"):
        returned(buffer, rows, handle)
    rows, _, _, _, handle = sent(july, source)
    sent(july, larger)
    assert returned(july, rows, handle)[0].shape == (ROWS, HIDDEN)


def test_a_row_that_lost_all_its_expert_rows_hangs_the_fused_combine() -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(JULY, group)
        source = sources[group.rank()]
        rows, _, _, _, handle = sent(buffer, source, num_permuted_tokens=16, non_blocking=True, fused=True)
        return outcome(lambda: returned(buffer, rows, handle, fused=True)), returned(buffer, rows, handle)[0]

    for source, (said, sums) in zip(sources, run_ranks(body, 2), strict=True):
        assert said.startswith("EmulatedHang: deep_ep: the fused combine waits")
        assert not sums.isnan().any()  # unfused, a dropped row adds nothing
        assert sums.shape == source.x.shape
