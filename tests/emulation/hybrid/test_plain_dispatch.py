"""HybridEPBuffer without permute, with ids, with fp8, and with a different number of rows on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid_rows import indices_to_map
from tests.emulation.hybrid_case import (
    APRIL,
    CURRENT,
    EVERY,
    FUSED,
    HIDDEN,
    JULY,
    LOCAL,
    RAGGED,
    ROWS,
    TOP_K,
    Source,
    expected_rows,
    expected_sums,
    make_sources,
    open_buffer,
    returned,
    run_ranks,
    sent,
)


def received(sources: list[Source], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a rank by (source rank, token), their probabilities and their experts here."""
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    needed = [source.routing[:, own].any(1) for source in sources]
    rows = torch.cat([source.x[flags] for source, flags in zip(sources, needed, strict=True)])
    probs = torch.cat([source.probs[flags] for source, flags in zip(sources, needed, strict=True)])
    return rows, probs, torch.cat([s.routing[flags][:, own] for s, flags in zip(sources, needed, strict=True)])


@EVERY
def test_dispatch_without_permute_gives_each_row_once_by_rank_and_token(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        source = sources[group.rank()]
        return open_buffer(release, group).dispatch(source.x, routing_map=source.routing, probs=source.probs)

    for rank, (rows, probs, scales, handle) in enumerate(run_ranks(body, 2)):
        expected, expected_probs, experts = received(sources, rank)
        assert torch.equal(rows, expected)
        assert torch.equal(probs, expected_probs)  # all experts of the node, not only those here
        assert scales is None
        assert handle[3].tolist() == [len(expected)]
        assert torch.equal(handle[4][: len(expected)], experts)


@EVERY
def test_combine_without_permute_sums_over_ranks(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer, source = open_buffer(release, group), sources[group.rank()]
        rows, probs, _, handle = buffer.dispatch(source.x, routing_map=source.routing, probs=source.probs)
        own = slice(group.rank() * LOCAL, (group.rank() + 1) * LOCAL)
        masked = torch.zeros_like(probs)
        masked[:, own] = probs[:, own]
        return buffer.combine(rows, masked, handle)

    for source, (sums, probs) in zip(sources, run_ranks(body, 2), strict=True):
        ranks = source.routing.view(ROWS, 2, LOCAL).any(2).sum(1, keepdim=True)
        assert torch.equal(sums, (source.x.float() * ranks).bfloat16())
        assert torch.equal(probs, source.probs)


def test_combine_adds_probabilities_of_other_ranks_too_until_only_the_own_slice_is_taken() -> None:
    """Between 94a9f8f and 744 the combine kernel came to load a rank's own experts only."""
    (source,) = make_sources([ROWS])
    sources = make_sources([ROWS] * 2)

    def body_of(release: str) -> Any:
        def body(group: dist.ProcessGroup) -> Any:
            buffer, source = open_buffer(release, group), sources[group.rank()]
            rows, probs, _, handle = buffer.dispatch(source.x, routing_map=source.routing, probs=source.probs)
            return buffer.combine(rows, probs, handle)[1]

        return body

    for source, july, ragged in zip(sources, run_ranks(body_of(JULY), 2), run_ranks(body_of(RAGGED), 2), strict=True):
        ranks = source.routing.view(ROWS, 2, LOCAL).any(2).sum(1, keepdim=True)
        assert torch.equal(july, source.probs * ranks)
        assert torch.equal(ragged, source.probs)


def ids_of(source: Source) -> tuple[Tensor, Tensor]:
    """Ids (T, K) of rows that all have K experts, and their weights."""
    ids = source.routing.nonzero()[:, 1].view(-1, TOP_K)
    return ids, source.probs.gather(1, ids)


def with_ids(count: int, size: int) -> list[Source]:
    """Sources of which every row has K experts."""
    kept = [torch.arange(count + 1) != 1] * size
    return [
        Source(source.x[rows], source.routing[rows], source.probs[rows])
        for source, rows in zip(make_sources([count + 1] * size), kept, strict=True)
    ]


@EVERY
def test_ids_and_weights_give_what_the_map_and_the_probabilities_give(release: str) -> None:
    sources = with_ids(ROWS, 2)

    def body(group: dist.ProcessGroup) -> Any:
        source = sources[group.rank()]
        ids, weights = ids_of(source)
        return open_buffer(release, group).dispatch_with_permute(
            hidden=source.x, topk_idx=ids, topk_weights=weights, pad_multiple=8, num_of_experts=2 * LOCAL
        )

    for rank, (rows, probs, *_) in enumerate(run_ranks(body, 2)):
        expected = expected_rows(sources, rank, pad=8)
        assert torch.equal(rows, expected.rows)
        assert torch.equal(probs, expected.probs)


def test_indices_to_map_is_their_function() -> None:
    (source,) = with_ids(ROWS, 1)
    routing, probs = indices_to_map(*ids_of(source), ROWS, LOCAL)
    assert torch.equal(routing, source.routing)
    assert probs is not None
    assert torch.equal(probs, source.probs)
    assert indices_to_map(ids_of(source)[0], None, ROWS, LOCAL)[1] is None


def test_ragged_releases_take_minus_one_and_add_the_weights_of_a_repeated_expert() -> None:
    ids = torch.tensor([[0, -1], [2, 2], [-1, -1], [1, 9]])
    weights = torch.tensor([[0.5, 7.0], [0.25, 0.5], [7.0, 7.0], [1.0, 7.0]])
    x = torch.randn(4, HIDDEN).bfloat16()
    rows, probs, _, counts, handle = open_buffer(RAGGED, None).dispatch_with_permute(
        hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=LOCAL
    )
    assert torch.equal(rows, x[[0, 3, 1]])
    assert probs.tolist() == [0.5, 1.0, 0.75]
    assert counts.tolist() == [1, 1, 1, 0]
    assert handle[-2] == 4
    assert handle[-1].tolist() == [0]  # the overflow flag stays last


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
        plain, _, _, plain_handle = buffer.dispatch(source.x, routing_map=source.routing, num_of_tokens_per_rank=33)
        return (
            rows,
            again,
            returned(buffer, rows, handle, probs, fused=fused),
            buffer.combine(plain, None, plain_handle),
        )

    outs = run_ranks(body, 4)
    expected = expected_sums(sources, [out[0] for out in outs], pad=4)
    for rank, (rows, again, (sums, probs), (plain, _)) in enumerate(outs):
        assert torch.equal(rows, expected_rows(sources, rank, pad=4).rows)
        assert torch.equal(again, rows)
        assert torch.equal(sums, expected[rank])
        assert torch.equal(probs, sources[rank].probs)
        assert plain.shape == (counts[rank], HIDDEN)


def test_a_group_without_any_row_still_dispatches_ragged() -> None:
    rows, _, _, counts, handle = open_buffer(RAGGED, None).dispatch_with_permute(
        hidden=torch.empty(0, HIDDEN, dtype=torch.bfloat16), routing_map=torch.empty(0, LOCAL, dtype=torch.bool)
    )
    assert rows.shape == (0, HIDDEN)
    assert counts.tolist() == [0] * LOCAL
    assert handle[8] == 16


@FUSED
@CURRENT
def test_fp8_rows_travel_as_bytes_beside_their_scales(release: str, fused: bool) -> None:
    hidden = 512
    generator = torch.Generator().manual_seed(0)
    sources = make_sources([ROWS] * 2)
    x = [torch.randint(0, 256, (ROWS, hidden), generator=generator, dtype=torch.uint8) for _ in sources]
    scales = [torch.rand(ROWS, hidden // 128, generator=generator) for _ in sources]

    def body(group: dist.ProcessGroup) -> Any:
        rank = group.rank()
        buffer = type(open_buffer(release, group))(group, hidden, ROWS, LOCAL)
        return buffer.dispatch_with_permute(
            hidden=x[rank],
            routing_map=sources[rank].routing,
            scaling_factor=scales[rank],
            use_fp8=True,
            pad_multiple=16,
            fuse_permute_dispatch=fused,
        )

    of_bytes = [Source(values, source.routing, source.probs) for values, source in zip(x, sources, strict=True)]
    of_scales = [Source(values, source.routing, source.probs) for values, source in zip(scales, sources, strict=True)]
    for rank, (rows, _, sf, _, _) in enumerate(run_ranks(body, 2)):
        assert rows.dtype == torch.uint8
        assert torch.equal(rows, expected_rows(of_bytes, rank, pad=16).rows)
        assert torch.equal(sf, expected_rows(of_scales, rank, pad=16).rows)


def test_float8_rows_keep_their_dtype() -> None:
    (source,) = make_sources([ROWS])
    x = torch.randn(ROWS, 512).to(torch.float8_e4m3fn)
    buffer = type(open_buffer(JULY, None))(None, 512, ROWS, LOCAL, use_fp8=True)
    rows, _, _, _, _ = buffer.dispatch_with_permute(
        hidden=x, routing_map=source.routing, scaling_factor=torch.ones(ROWS, 4), num_permuted_tokens=256
    )
    used = int(source.routing.sum())
    assert rows.dtype == torch.float8_e4m3fn
    expected = expected_rows([Source(x.view(torch.uint8), source.routing, source.probs)], 0, pad=1).rows
    assert torch.equal(rows.view(torch.uint8)[:used], expected)
    assert rows[used:].float().isnan().all()


def test_unwritten_maps_are_poison() -> None:
    """The scan that finds expert rows does not write the map of experts; nobody may read it."""
    (source,) = make_sources([ROWS])
    handle = sent(open_buffer(JULY, None), source)[4]
    assert handle[4].all()
    april = sent(open_buffer(APRIL, None), source)[4]
    number = int(april[3])
    assert torch.equal(april[4][:number], source.routing[source.routing.any(1)])
