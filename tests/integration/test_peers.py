"""The released dispatchers of torchtitan and transformers compute what ours computes, and send more to do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.ranks import run_processes, run_ranks
from moe_dispatch_tools.bench.agreement import (
    TOLERANCES,
    DisagreementError,
    check_agreement,
    dense_outcome,
    draw_scales,
    magnitudes,
    require_agreement,
)
from moe_dispatch_tools.bench.contenders import Ours
from moe_dispatch_tools.bench.costs import floor_bytes, sent_by_phase
from moe_dispatch_tools.bench.overhead import Recorder
from moe_dispatch_tools.bench.peers import PEERS, missing_packages
from moe_dispatch_tools.bench.results import load_results
from moe_dispatch_tools.bench.workload import Shape, Skew, draw_tokens
from tests.cli.test_command import start

pytestmark = pytest.mark.integration

RANKS = 2
SMALL = Shape(tokens=64, hidden=64, experts=8, top_k=2)
WIDE = Shape(tokens=128, hidden=1024, experts=8, top_k=4)
SKEWS: tuple[Skew, ...] = ("balanced", "skewed")
DTYPES = (torch.float32, torch.bfloat16)


def on_ranks(body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_processes(body, RANKS, *args, timeout=timedelta(seconds=60))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def agreement_with_peer(rank: int, peer: str) -> list[dict[str, float]]:
    group = world()
    contenders = {"alltoall": Ours(SMALL, group), peer: PEERS[peer](SMALL, group)}
    batches = [draw_tokens(SMALL, skew, dtype, rank) for dtype in DTYPES for skew in SKEWS]
    return [check_agreement(contenders, tokens, group) for tokens in batches]


def bytes_of_peer(rank: int, peer: str) -> tuple[dict[str, int], int]:
    """What is seen of one layer, and what a dispatcher that sends a row per slot must send in dispatch."""
    tokens = draw_tokens(WIDE, "balanced", torch.float32, rank)
    local = WIDE.experts // RANKS
    slots = int((tokens.ids_TK // local != rank).sum())
    counts = 8 * (WIDE.experts - local)
    contender = PEERS[peer](WIDE, world())
    sent = sent_by_phase(contender, tokens)
    assert sent_by_phase(contender, tokens) == sent
    return sent, slots * WIDE.hidden * 4 + counts


def bytes_of_ours(rank: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """What is seen of one layer, what the dispatcher says it sent, and the floor."""
    tokens = draw_tokens(WIDE, "skewed", dtype, rank)
    ours = Ours(WIDE, world())
    before = sum(ours.dispatcher.metrics().bytes_sent.values())
    sent = sent_by_phase(ours, tokens)
    return sent, sum(ours.dispatcher.metrics().bytes_sent.values()) - before, floor_bytes(tokens, world())


def skip_without(peer: str) -> None:
    if missing := missing_packages(peer):
        pytest.skip(f"{peer} needs {', '.join(missing)}: install moe-dispatch[bench]")


@pytest.mark.parametrize("peer", ["torchtitan", "transformers"])
def test_peer_gives_our_output_and_gradients(peer: str) -> None:
    skip_without(peer)
    for errors in on_ranks(agreement_with_peer, peer):
        assert len(errors) == len(DTYPES) * len(SKEWS)
        assert all(set(by_name) == {"alltoall", peer} for by_name in errors)


@pytest.mark.parametrize("peer", ["torchtitan", "transformers"])
def test_collectives_of_a_peer_are_all_seen(peer: str) -> None:
    skip_without(peer)
    for sent, one_way in on_ranks(bytes_of_peer, peer):
        assert sent["dispatch"] == one_way
        assert sent["combine"] > 0
        assert sent["backward"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ours_sends_the_fewest_bytes_in_every_phase(dtype: torch.dtype) -> None:
    ranks = on_ranks(bytes_of_ours, dtype)
    floor = sum(rank[2] for rank in ranks)
    for phase, ways in {"dispatch": 1, "combine": 1, "backward": 2}.items():
        sent = sum(rank[0][phase] for rank in ranks)
        assert 0.95 * floor * ways <= sent <= 1.05 * floor * ways, phase
    for seen, told, _ in ranks:
        assert sum(seen.values()) == told


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_slot_at_the_wrong_expert_is_a_disagreement(dtype: torch.dtype) -> None:
    tokens, scales_E = draw_tokens(SMALL, "balanced", dtype, 0), draw_scales(SMALL.experts)
    ids_TK = tokens.ids_TK.clone()
    ids_TK[5, 1] = (ids_TK[5, 1] + 1) % SMALL.experts
    wrong, right = dense_outcome(replace(tokens, ids_TK=ids_TK), scales_E), dense_outcome(tokens, scales_E)
    scale = magnitudes(tokens, scales_E)
    with pytest.raises(DisagreementError, match=r"some peer: y_TD must agree within .* got [0-9.]+\. Do not trust"):
        require_agreement("some peer", wrong, right, scale, TOLERANCES[dtype])


def test_a_result_that_is_not_finite_is_a_disagreement() -> None:
    tokens, scales_E = draw_tokens(SMALL, "balanced", torch.float32, 0), draw_scales(SMALL.experts)
    right = dense_outcome(tokens, scales_E)
    grad_x_TD = right.grad_x_TD.clone()
    grad_x_TD[3, 7] = torch.nan
    wrong = replace(right, grad_x_TD=grad_x_TD)
    with pytest.raises(DisagreementError, match=r"grad_x_TD must agree .* got nan"):
        require_agreement("some peer", wrong, right, magnitudes(tokens, scales_E), 1e-5)


def test_a_collective_that_cannot_be_counted_is_refused() -> None:
    def reduce(group: dist.ProcessGroup) -> None:
        with Recorder():
            group.allreduce([torch.ones(1)]).wait()

    with pytest.raises(NotImplementedError, match="collectives must be all-to-alls, got allreduce_"):
        run_ranks(reduce, 1)


@pytest.mark.slow
def test_benchmark_measures_ours_beside_the_peers(tmp_path: Path) -> None:
    """The command itself, by default, on ranks that are processes."""
    file = tmp_path / "results.json"
    process = start("bench", "--quick", "--ranks", "2", "--dtype", "float32", "--save", str(file))
    out, error = process.communicate(timeout=300)
    # A CUDA build of torch says so if it finds a toolkit and no GPU.
    complaints = [line for line in error.splitlines() if "No CUDA runtime is found" not in line]
    assert (process.returncode, complaints) == (0, [])
    results = load_results(file).joined
    here = [name for name in PEERS if not missing_packages(name)]
    assert [result.case.routing for result in results.cases] == list(SKEWS)
    for result in results.cases:
        assert list(result.contenders) == ["alltoall", "by-hand", "floor", *here]
        ours = result.contenders["alltoall"]
        assert len(ours.timing.runs) == 2
        assert ours.bytes_sent is not None
        assert result.floor_bytes is not None
        assert ours.bytes_sent["dispatch"] <= 1.05 * result.floor_bytes
        assert ours.peak_bytes is not None
        assert ours.peak_bytes >= 256 * 1024 * 4
        assert all(f" {name} " in out for name in here)
