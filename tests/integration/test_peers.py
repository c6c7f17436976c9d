"""The released dispatchers of torchtitan and transformers compute what ours computes, and send more to do it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch_tools.compare.measurement import QUANTITIES, relative_difference
from moe_dispatch_tools.compare.peers import PEERS, missing_packages
from moe_dispatch_tools.compare.workload import Step, Workload, make_material
from tests.cli.test_command import start

pytestmark = pytest.mark.integration

RANKS, TOKENS = 2, 128
CONFIG = DispatcherConfig(num_experts=8, top_k=4, hidden_size=1024)
ROUTING, LEAN = "skewed", "alltoall+deliver=packets"


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """Results of the command, on ranks that are processes, by dtype: an outcome for each contender."""
    sizes = [f"--set={field}={getattr(CONFIG, field)}" for field in ("num_experts", "top_k", "hidden_size")]
    asked = ("--dtype", "float32,bfloat16", "--routing", ROUTING, "--mode", "eager", *sizes)
    shape = ("--ranks", str(RANKS), "--tokens", str(TOKENS), "--steps", "1", "--rounds", "2")
    backends = ("-b", f"alltoall,{LEAN}", "--expert-width", str(CONFIG.hidden_size // 4))
    process = start("compare", "--peers", *backends, *asked, *shape, "--json")
    out, error = process.communicate(timeout=300)
    # A CUDA build of torch says so if it finds a toolkit and no GPU, and its profiler if older memory is freed.
    known = ("No CUDA runtime is found", "was allocated before the profiling started")
    complaints = [line for line in error.splitlines() if not any(text in line for text in known)]
    assert (process.returncode, complaints) == (0, [])
    return {case["dtype"]: {one["backend"]: one for one in case["outcomes"]} for case in json.loads(out)["cases"]}


def step_of(rank: int) -> Step:
    workload = Workload(tokens=TOKENS, dtype="float32", routing=ROUTING, equal=True)
    return make_material(workload, CONFIG, rank=rank, ranks=RANKS).steps[0]


@pytest.mark.parametrize("peer", PEERS)
def test_peer_gives_our_output_and_gradients(peer: str) -> None:
    if missing := missing_packages(peer):
        pytest.skip(f"{peer} needs {', '.join(missing)}: install moe-dispatch[bench]")
    assert len(results()) == 2
    assert all(by_name[peer]["agrees"] for by_name in results().values())


def test_bytes_are_those_of_a_row_per_slot_and_ours_the_fewest() -> None:
    """All collectives of a peer are seen. Ours sends a row once to the other rank, and as little as the floor."""
    local = CONFIG.num_experts // RANKS
    sent = {name: of["bytes_sent"] for name, of in results()["float32"].items()}
    away = [step_of(rank).batch().ids_TK // local != rank for rank in range(RANKS)]
    slots, rows = (sum(int(of_rank.sum()) for of_rank in found) for found in (away, [of.any(1) for of in away]))
    row, counts = 4 * CONFIG.hidden_size, RANKS * 8 * local
    for peer in {"torchtitan", "transformers"} & sent.keys():
        assert sent[peer]["dispatch"] == slots * row + counts
        assert sent[peer]["combine"] > 0
        assert sent[peer]["backward"] > 0
    assert sent["alltoall"] == sent["floor"]
    for phase, ways in {"dispatch": 1, "combine": 1, "backward": 2}.items():
        assert sent["alltoall"][phase] == pytest.approx(rows * row * ways, rel=0.05), phase


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_on_packets_save_the_least(dtype: str) -> None:
    saved = {name: one["saved_bytes"] for name, one in results()[dtype].items()}
    for other in saved.keys() - {LEAN}:
        assert saved[LEAN] <= 0.40 * saved[other], other


def test_one_slot_at_the_wrong_expert_is_a_difference() -> None:
    step = step_of(0)
    batch, right = step.batch(), step.expected()
    ids_TK = batch.ids_TK.clone()
    ids_TK[5, 1] = next(expert for expert in range(CONFIG.num_experts) if expert not in ids_TK[5].tolist())
    wrong = replace(step, batch=lambda: batch.replace(ids_TK=ids_TK)).expected()
    for name in QUANTITIES:
        assert relative_difference(wrong[name], right[name]) > step.scenario.tolerance, name
