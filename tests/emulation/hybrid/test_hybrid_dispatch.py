"""HybridEPBuffer: expert rows, their order and padding, and the sums that come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from tests.emulation.conftest import Setting
from tests.emulation.hybrid_case import (
    APRIL,
    CURRENT,
    FUSED,
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
    returned,
    sent,
)
from tests.emulation.tokens import run_ranks

MODES = pytest.mark.parametrize(("release", "fused"), [(APRIL, False), (JULY, True), (RAGGED, False), (RAGGED, True)])
# Releases, ranks, ranks of a domain, and whether permutations are fused. A size of 0 is one rank without a group.
PLACES = pytest.mark.parametrize(
    ("release", "size", "domain", "fused"),
    [
        *((release, 2, 2, fused) for release in (APRIL, JULY, RAGGED) for fused in (False, True)),
        *((release, 0, 1, fused) for release, fused in ((APRIL, True), (JULY, False), (RAGGED, True))),
        *((JULY, 1, 1, True), (APRIL, 4, 4, False), (RAGGED, 4, 4, True)),
        *((APRIL, 4, 2, False), (JULY, 4, 1, True), (RAGGED, 4, 2, True), (RAGGED, 4, 1, False)),
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
def test_a_cached_handle_sends_other_rows_the_same_way(release: str, fused: bool) -> None:
    sources, others = make_sources([ROWS] * 2), make_sources([ROWS] * 2, seed=7)
    again = [Source(other.x, source.routing, source.probs) for source, other in zip(sources, others, strict=True)]

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        rows, _, _, _, handle = sent(buffer, sources[group.rank()], pad_multiple=16, fused=fused)
        more = {"fuse_permute_dispatch": True} if fused else {}
        return buffer.dispatch_with_permute(
            hidden=again[group.rank()].x, handle=handle, num_permuted_tokens=len(rows), pad_multiple=16, **more
        )

    for rank, (rows, probs, _, counts, _) in enumerate(run_ranks(body, 2)):
        assert torch.equal(rows, expected_rows(again, rank, pad=16).rows)
        assert probs is None
        assert counts is None


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


@FUSED
def test_ragged_ranks_send_what_they_have_and_get_as_many_rows_back(fused: bool) -> None:
    counts = [5, 0, 33, 16]
    sources = make_sources(counts)

    def body(group: dist.ProcessGroup) -> Any:
        buffer, source = open_buffer(RAGGED, group), sources[group.rank()]
        rows, probs, _, _, handle = sent(buffer, source, pad_multiple=4, num_of_tokens_per_rank=33, fused=fused)
        assert handle[8] == 48  # slots
        again = buffer.dispatch_with_permute(
            hidden=source.x, handle=handle, num_permuted_tokens=len(rows), pad_multiple=4, fuse_permute_dispatch=fused
        )[0]
        return rows, again, returned(buffer, rows, handle, probs, fused=fused)

    outs = run_ranks(body, 4)
    expected = expected_sums(sources, [out[0] for out in outs], pad=4)
    for rank, (rows, again, (sums, probs)) in enumerate(outs):
        assert torch.equal(rows, expected_rows(sources, rank, pad=4).rows)
        assert torch.equal(again, rows)
        assert torch.equal(sums, expected[rank])
        assert torch.equal(probs, sources[rank].probs)
