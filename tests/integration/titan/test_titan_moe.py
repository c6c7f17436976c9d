"""torchtitan's MoE with our dispatcher: what it computes with its own, and what it computes unsharded."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.integration.deep_ep_users.dense import TOLERANCE
from tests.integration.jobs import require, run_checks
from tests.integration.needs import needs
from tests.integration.steps import difference
from tests.integration.titan import moe
from tests.integration.titan.moe import EXPERT_WEIGHTS, RANKS, Job, Outcome

pytestmark = [
    *needs("torchtitan"),
    # What torch's compiler imports uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

UNEQUAL = (5, 0, 33, 12)
SHARDED: dict[str, dict[str, Any]] = {
    "ep 4": {"dp": 4, "ep": 4},
    "ep 2 x efsdp 2": {"dp": 4, "ep": 2},
    "ep 4 over dp 2 x tp 2": {"dp": 2, "tp": 2, "ep": 4},
}
SPMD = ("partial_dtensor", "spmd_types")
THEIRS = "theirs"
RAGGED: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "alltoall, padded": {"backend": "alltoall", "pad_multiple": 16},
    "alltoall, graph-safe": {"backend": "alltoall", "graph_safe": True, "max_tokens_per_rank": 40, "pad_multiple": 8},
    "allgather": {"backend": "allgather"},
    "in chunks": {"backend": "alltoall", "chunks": 8},
    "chunks recomputed": {"backend": "allgather", "chunks": {"tokens": 8, "recompute": True}},
    "auto": {},
}
BFLOAT16: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "allgather": {"backend": "allgather"},
    "deepep": {"backend": {"name": "deepep", "emulate": True}},
    "hybridep": {"backend": {"name": "hybridep", "emulate": True}},
}


def jobs() -> dict[str, Job]:
    sharded: dict[str, Job] = {}
    for name, degrees in SHARDED.items():
        sharded[f"{THEIRS}, {name}"] = Job(dispatcher=THEIRS, **degrees)
        sharded |= {f"{spmd}, {name}": Job(dispatcher={"backend": "alltoall"}, spmd=spmd, **degrees) for spmd in SPMD}
    ragged = {f"{THEIRS}, ragged": Job(dispatcher=THEIRS, tokens=UNEQUAL)}
    ragged |= {f"{name}, ragged": Job(dispatcher=fields, tokens=UNEQUAL) for name, fields in RAGGED.items()}
    low = {
        f"{name}, bfloat16": Job(dispatcher=fields, tokens=UNEQUAL, dtype=torch.bfloat16)
        for name, fields in BFLOAT16.items()
    }
    replayed = {
        "replayed, ragged": Job(dispatcher={"backend": "alltoall"}, tokens=UNEQUAL, replay=True),
        "replayed, in chunks": Job(dispatcher=RAGGED["in chunks"], tokens=UNEQUAL, replay=True),
        **{
            f"replayed, {name}": Job(dispatcher={"backend": "alltoall"}, replay=True, **SHARDED[name])
            for name in SHARDED
        },
    }
    return sharded | ragged | low | replayed


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_checks({name: functools.partial(moe.outcomes, job=job) for name, job in jobs().items()}, RANKS)


def outcomes(name: str, rank: int) -> tuple[Outcome, Outcome]:
    """What a rank has, and what it must have."""
    found: tuple[Outcome, Outcome] = require(results()[name])[rank]
    return found


def require_close(got: Outcome, want: Outcome, tolerances: dict[str, float], rank: int) -> None:
    """Within a part of the largest number of each tensor; of a rank without tokens only shapes can differ."""
    for name, tolerance in tolerances.items():
        assert want[name].any() or not want[name].numel(), f"{name} on rank {rank} has nothing to compare"
        assert difference({name: got[name]}, {name: want[name]}) <= tolerance, f"{name} on rank {rank}"


# float32 but for what is inside the experts, which torchtitan computes in bfloat16, the same way for every dispatcher.
EXACT = dict.fromkeys(("y", "x", "gate"), 1e-5)
# Expert gradients are sums in bfloat16, of other parts where other ranks hold the expert.
SUMMED = dict.fromkeys(EXPERT_WEIGHTS, TOLERANCE)


@pytest.mark.parametrize("spmd", SPMD)
@pytest.mark.parametrize("degrees", SHARDED)
def test_parallelised_module_is_that_of_their_dispatcher_and_the_whole_one(degrees: str, spmd: str) -> None:
    same = dict.fromkeys((*EXACT, *EXPERT_WEIGHTS), 1e-5)
    for rank in range(RANKS):
        got, whole = outcomes(f"{spmd}, {degrees}", rank)
        require_close(got, outcomes(f"{THEIRS}, {degrees}", rank)[0], same, rank)
        require_close(got, whole, {"y": 1e-5, "x": 1e-5} | SUMMED, rank)


@pytest.mark.parametrize("name", [THEIRS, *RAGGED])
def test_unequal_and_no_tokens_give_the_whole_module(name: str) -> None:
    for rank in range(RANKS):
        require_close(*outcomes(f"{name}, ragged", rank), EXACT | SUMMED, rank)


@pytest.mark.parametrize("name", ["ragged", "in chunks", *SHARDED])
def test_a_replayed_routing_gives_the_whole_module_whose_router_is_forced(name: str) -> None:
    # The experts' gradients of rows are bfloat16, and one of them is rounded to its neighbour under tensor parallelism.
    exact = EXACT if name not in SHARDED else {"y": 1e-5, "x": TOLERANCE}
    for rank in range(RANKS):
        require_close(*outcomes(f"replayed, {name}", rank), exact | SUMMED, rank)


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_gives_the_whole_module(name: str) -> None:
    for rank in range(RANKS):
        require_close(*outcomes(f"{name}, bfloat16", rank), dict.fromkeys((*EXACT, *SUMMED), TOLERANCE), rank)
