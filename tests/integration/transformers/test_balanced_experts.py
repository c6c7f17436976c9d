"""Models of transformers with balanced experts on four gloo ranks, against the model on one rank."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integration.jobs import require, run_checks
from tests.integration.transformers.balancing import accumulated, faulty, resumed, trained
from tests.integration.transformers.ranks import BALANCED, Case, Mesh

RANKS = 4
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "balanced": BALANCED}
STATIC = {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": 64}
HAS_ACCELERATE = find_spec("accelerate") is not None
TOGETHER = functools.partial(accumulated, together=True)


def jobs() -> dict[str, Any]:
    sharded, replicated, whole = Mesh(fsdp=RANKS, ep=2), Mesh(ep=RANKS), Mesh(fsdp=RANKS, ep=RANKS)
    of_kinds = {
        f"{how}, {kind}": (job, Case(mesh=mesh, fields=fields))
        for kind, fields in KINDS.items()
        for how, (job, mesh) in {
            "FSDP2": (accumulated, sharded),
            "FSDP2, one backward": (TOGETHER, sharded),
            "DDP": (accumulated, replicated),
            "DDP, one backward": (TOGETHER, replicated),
            "train": (trained, whole),
        }.items()
    }
    return {
        **of_kinds,
        "FSDP2, graph-safe": (accumulated, Case(mesh=sharded, fields=STATIC)),
        **({"resumed": (resumed, Case(mesh=whole))} if HAS_ACCELERATE else {}),
        "planted, FSDP2": (faulty, Case(mesh=sharded, fields=BALANCED)),
        "planted, DDP": (faulty, Case(mesh=replicated, fields=BALANCED)),
    }


@functools.cache
def all_results() -> dict[str, list[Any]]:
    return run_checks({name: functools.partial(job, case) for name, (job, case) in jobs().items()}, RANKS)


def results(name: str) -> list[Any]:
    return require(all_results()[name])


@pytest.mark.parametrize("kind", ["plain", "balanced", "graph-safe"])
@pytest.mark.parametrize("how", ["FSDP2", "DDP"])
def test_gradients_of_two_micro_batches_are_those_of_one_rank(how: str, kind: str) -> None:
    """Each hook runs once in each backward, and the weights keep their names."""
    names = [name for name in (f"{how}, {kind}", f"{how}, one backward, {kind}") if name in jobs()]
    for name in names:
        for result in results(name):
            assert result["error"] < 1e-4
            assert result["fired"] == {1 if "one backward" in name else 2}
            assert result["hooked"]
            assert result["keys"]
            assert result["idle"]  # experts without rows
            assert bool(result["fetches"]) == (kind != "plain")


def test_the_checks_see_gradients_of_copies_that_are_lost_or_counted_twice() -> None:
    for how in ("FSDP2", "DDP"):
        assert min(map(min, results(f"planted, {how}"))) > 0.1


def test_training_with_a_router_that_favours_few_experts() -> None:
    """The losses stay the same, and the busiest rank computes as many rows as the others."""
    for plain, balanced in zip(results("train, plain"), results("train, balanced"), strict=True):
        assert plain["losses"][-1] < plain["losses"][0] - 0.2
        assert balanced["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert plain["imbalance"] > 0.9 * RANKS
        assert balanced["imbalance"] < 1.05


@pytest.mark.skipif(not HAS_ACCELERATE, reason="from_pretrained needs accelerate to shard")
def test_a_checkpoint_of_an_unbalanced_run_is_loaded() -> None:
    for found in results("resumed"):
        assert found["plain"][0] < found["first"][0] - 0.2
        assert found["balanced"] == pytest.approx(found["plain"], rel=1e-4)
