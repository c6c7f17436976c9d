"""Ranks of HybridEP that do not agree: the real ones wait for ever, so every rank must be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.emulation.hybrid_case import (
    APRIL,
    CURRENT,
    EVERY,
    HIDDEN,
    JULY,
    RAGGED,
    ROWS,
    make_sources,
    open_buffer,
    outcome,
    returned,
    run_ranks,
    sent,
)


@pytest.mark.parametrize("release", [APRIL, JULY])
def test_unequal_rows_hang(release: str) -> None:
    sources = make_sources([64, 32])

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(release, group)
        return outcome(lambda: sent(buffer, sources[group.rank()], pad_multiple=1))

    for said in run_ranks(body, 2):
        assert said.startswith("EmulatedHang: HybridEPBuffer")
        assert "every rank must pass the same num_of_tokens_per_rank, got [64, 32] by rank" in said


def test_unequal_slots_hang_ragged_ranks_too() -> None:
    sources = make_sources([40, 5])

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(RAGGED, group)
        return outcome(lambda: sent(buffer, sources[group.rank()]))

    assert all("the same num_of_tokens_per_rank, got [48, 16] by rank" in said for said in run_ranks(body, 2))


@CURRENT
def test_a_rank_that_was_opened_smaller_grows_alone(release: str) -> None:
    sources = make_sources([1024] * 2)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(release, group, rows=1024 if group.rank() else 512)
        return outcome(lambda: sent(buffer, sources[group.rank()]))

    assert all("got growth only on ranks [0] of 2" in said for said in run_ranks(body, 2))


@CURRENT
def test_ranks_that_grow_together_go_on(release: str) -> None:
    sources = make_sources([640] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group)
        rows, _, _, _, handle = sent(buffer, sources[group.rank()])
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 640
        return returned(buffer, rows, handle)[0].shape

    assert run_ranks(body, 2) == [(640, HIDDEN)] * 2


@EVERY
def test_ranks_in_different_calls_hang(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> str:
        buffer, source = open_buffer(release, group), sources[group.rank()]
        if group.rank():
            return outcome(lambda: buffer.dispatch(source.x, routing_map=source.routing))
        return outcome(lambda: sent(buffer, source, pad_multiple=1))

    assert all("every rank must be in the same call" in said for said in run_ranks(body, 2))


@EVERY
def test_the_peers_of_a_rank_that_refuses_hear_of_it(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> str:
        buffer, source = open_buffer(release, group), sources[group.rank()]
        rows = source.x[:32] if group.rank() else source.x
        return outcome(lambda: buffer.dispatch_with_permute(hidden=rows, routing_map=source.routing, pad_multiple=1))

    waiting, refusing = run_ranks(body, 2)
    assert refusing.startswith("AssertionError: The hidden and the routing")
    assert waiting.startswith("EmulatedHang: ")
    assert "rank 1, which raised AssertionError: The hidden and the routing" in waiting


@CURRENT
def test_a_cached_and_a_new_dispatch_hang(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> str:
        buffer, source = open_buffer(release, group), sources[group.rank()]
        rows, _, _, _, handle = sent(buffer, source)
        more = {"handle": handle, "num_permuted_tokens": len(rows)} if group.rank() else {}
        return outcome(lambda: sent(buffer, source, **more))

    assert all("every rank must pass the same handle, got ['none', 'cached'] by rank" in s for s in run_ranks(body, 2))


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
