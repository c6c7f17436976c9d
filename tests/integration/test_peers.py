"""The released dispatchers of torchtitan and transformers compute what ours computes, and send more to do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_testing.ranks import run_processes
from moe_dispatch_testing.scenario import DtypeName
from moe_dispatch_tools.compare.contenders import Contender, Ours, run_layer
from moe_dispatch_tools.compare.measurement import (
    PHASES,
    QUANTITIES,
    Variant,
    _empty,
    hold_against_reference,
    relative_difference,
)
from moe_dispatch_tools.compare.peers import PEERS, missing_packages
from moe_dispatch_tools.compare.workload import Step, Workload, make_material
from moe_dispatch_tools.place import Place
from tests.cli.test_command import start

pytestmark = pytest.mark.integration

RANKS = 2
CONFIG = DispatcherConfig(num_experts=8, top_k=4, hidden_size=1024)
ROUTINGS = ("uniform", "skewed")
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


def on_ranks(body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_processes(body, RANKS, *args, timeout=timedelta(seconds=60))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def step_of(rank: int, dtype: DtypeName, routing: str) -> Step:
    workload = Workload(tokens=128, dtype=dtype, routing=routing, equal=True)
    return make_material(workload, CONFIG, rank=rank, ranks=RANKS).steps[0]


def differences_of_peer(rank: int, peer: str) -> list[dict[str, float]]:
    group, found = world(), []
    for dtype in DTYPES:
        for routing in ROUTINGS:
            step, variant = step_of(rank, dtype, routing), Variant(label=peer, mode="eager")
            outcome, place = _empty(variant), Place(device=torch.device("cpu"), group=group)
            hold_against_reference(step, {0: PEERS[peer](CONFIG, group)}, [outcome], [variant], place)
            found.append({name: value / step.scenario.tolerance for name, value in outcome["from_reference"].items()})
    return found


def bytes_by_phase(contender: Contender, step: Step) -> dict[str, int]:
    call, marks = step.call(torch.device("cpu")), list[int]()
    contender.prepare(call)
    with count_collectives() as collectives:
        run_layer(contender, call, lambda: marks.append(collectives.nbytes))
    return {phase: end - begin for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False)}


def bytes_of_peer(rank: int, peer: str) -> tuple[dict[str, int], int]:
    """What is seen of one layer, and what a dispatcher that sends a row per slot must send in dispatch."""
    step, local = step_of(rank, "float32", "uniform"), CONFIG.num_experts // RANKS
    slots = int((step.batch().ids_TK // local != rank).sum())
    counts = 8 * (CONFIG.num_experts - local)
    contender = PEERS[peer](CONFIG, world())
    sent = bytes_by_phase(contender, step)
    assert bytes_by_phase(contender, step) == sent
    return sent, slots * CONFIG.hidden_size * 4 + counts


def bytes_of_ours(rank: int, dtype: DtypeName) -> tuple[dict[str, int], int, int]:
    """What is seen of one layer, what the dispatcher says it sent, and what must be sent to the other rank."""
    step, ours = step_of(rank, dtype, "skewed"), Ours(build_dispatcher(CONFIG.replace(backend="alltoall"), world()))
    before = sum(ours.dispatcher.metrics().bytes_sent.values())
    sent = bytes_by_phase(ours, step)
    told = sum(ours.dispatcher.metrics().bytes_sent.values()) - before
    rows = int((step.batch().ids_TK // (CONFIG.num_experts // RANKS) != rank).any(1).sum())
    row_bytes = CONFIG.hidden_size * step.scenario.torch_dtype.itemsize + 6 * CONFIG.top_k
    return sent, told, rows * row_bytes


def skip_without(peer: str) -> None:
    if missing := missing_packages(peer):
        pytest.skip(f"{peer} needs {', '.join(missing)}: install moe-dispatch[bench]")


@pytest.mark.parametrize("peer", PEERS)
def test_peer_gives_our_output_and_gradients(peer: str) -> None:
    skip_without(peer)
    for errors in on_ranks(differences_of_peer, peer):
        assert len(errors) == len(DTYPES) * len(ROUTINGS)
        assert all(value <= 1 for by_name in errors for value in by_name.values()), errors


@pytest.mark.parametrize("peer", ["torchtitan", "transformers"])
def test_collectives_of_a_peer_are_all_seen(peer: str) -> None:
    skip_without(peer)
    for sent, one_way in on_ranks(bytes_of_peer, peer):
        assert sent["dispatch"] == one_way
        assert sent["combine"] > 0
        assert sent["backward"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ours_sends_the_fewest_bytes_in_every_phase(dtype: DtypeName) -> None:
    ranks = on_ranks(bytes_of_ours, dtype)
    floor = sum(rank[2] for rank in ranks)
    for phase, ways in {"dispatch": 1, "combine": 1, "backward": 2}.items():
        sent = sum(rank[0][phase] for rank in ranks)
        assert 0.95 * floor * ways <= sent <= 1.05 * floor * ways, phase
    for seen, told, _ in ranks:
        assert sum(seen.values()) == told


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_slot_at_the_wrong_expert_is_a_difference(dtype: DtypeName) -> None:
    step = step_of(0, dtype, "uniform")
    batch, right = step.batch(), step.expected()
    ids_TK = batch.ids_TK.clone()
    ids_TK[5, 1] = next(expert for expert in range(CONFIG.num_experts) if expert not in ids_TK[5].tolist())
    wrong = replace(step, batch=lambda: batch.replace(ids_TK=ids_TK)).expected()
    for name in QUANTITIES:
        assert relative_difference(wrong[name], right[name]) > step.scenario.tolerance, name


@pytest.mark.slow
def test_command_measures_ours_beside_the_peers() -> None:
    """The command itself, on ranks that are processes."""
    asked = ("--tokens", "256", "--steps", "1", "--rounds", "2", "--routing", ",".join(ROUTINGS), "--mode", "eager")
    process = start("compare", "--peers", "--ranks", "2", "--dtype", "float32", *asked, "--json")
    out, error = process.communicate(timeout=300)
    # A CUDA build of torch says so if it finds a toolkit and no GPU, and its profiler if older memory is freed.
    known = ("No CUDA runtime is found", "was allocated before the profiling started")
    complaints = [line for line in error.splitlines() if not any(text in line for text in known)]
    assert (process.returncode, complaints) == (0, [])
    results = json.loads(out)
    here = [name for name in PEERS if not missing_packages(name)]
    assert [case["routing"] for case in results["cases"]] == list(ROUTINGS)
    for case in results["cases"]:
        assert [one["backend"] for one in case["outcomes"]] == ["alltoall", *here]
        ours, floor, *_ = case["outcomes"]
        assert ours["bytes_sent"]["dispatch"] <= 1.05 * floor["bytes_sent"]["dispatch"]
        assert ours["peak_bytes"] >= 256 * 1024 * 4
