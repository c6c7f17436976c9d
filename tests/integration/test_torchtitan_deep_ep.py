"""torchtitan's DeepEP and HybridEP dispatchers, unmodified, on the emulated deep_ep: what a dense layer computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.integration.deep_ep_users.dense import TRAINING, Case
from tests.integration.deep_ep_users.rank import Job, Results, require_dense, run_jobs
from tests.integration.deep_ep_users.titan_layer import TitanRunning
from tests.integration.needs import needs

pytestmark = needs("torchtitan")

EP_SIZES = (2, 4)
ELASTIC = "v2-2.1.0"
HYBRID = [("hybridep-34152ae", 4), ("hybridep-94a9f8f", 2), ("hybridep-744", 4)]  # releases, each with a size
EQUAL, UNEQUAL = (64,) * 4, (40, 13, 0, 27)
FORWARD = ("y_TD",)
STARVED = "starved"


def deepep(case: Case, **options: Any) -> Job:
    return Job(case=case, options={"dispatcher": "DeepEPTokenDispatcher"} | options)


def hybridep(case: Case, **options: Any) -> Job:
    return Job(case=case, options={"dispatcher": "HybridEPTokenDispatcher"} | options)


def deepep_jobs(ep_size: int) -> dict[str, list[Job]]:
    equal, unequal = (48,) * ep_size, UNEQUAL[:ep_size]
    expand = {"cudagraphable": True, "training": False}
    return {
        "compact": [deepep(Case(tokens=equal))],
        "uneven": [deepep(Case(tokens=unequal, seed=1), uneven=True)],
        "crowded": [deepep(Case(tokens=equal, routing="crowded", seed=2))],
        "starved": [deepep(Case(tokens=equal, routing="starved", seed=12))],
        "holes": [deepep(Case(tokens=equal, routing="holes", seed=3))],
        "room to spare": [deepep(Case(tokens=equal, seed=4), num_max_tokens_per_rank=100)],
        "larger": [deepep(Case(tokens=equal, hidden=512, seed=5))],
        "two in flight": [deepep(Case(tokens=equal, seed=seed)) for seed in (6, 7)],
        "deterministic": [deepep(Case(tokens=equal, seed=8), deterministic=True)],
        "compact inference": [deepep(Case(tokens=equal, seed=9), training=False)],
        "expand": [deepep(Case(tokens=equal, seed=10), **expand)],
        "expand, holes": [deepep(Case(tokens=equal, routing="holes", seed=11), **expand)],
    }


def hybridep_jobs(ep_size: int) -> dict[str, list[Job]]:
    equal = EQUAL[:ep_size]
    static = {"non_blocking_capacity_factor": 1.0}
    return {
        "blocking": [hybridep(Case(tokens=equal))],
        "padded": [hybridep(Case(tokens=equal, seed=1), pad_multiple=16)],
        "static": [hybridep(Case(tokens=equal, seed=2), **static)],
        "static, padded": [hybridep(Case(tokens=equal, seed=3), pad_multiple=32, **static)],
        "crowded": [hybridep(Case(tokens=equal, routing="crowded", seed=4), pad_multiple=16)],
        "two in flight": [hybridep(Case(tokens=equal, seed=5)), hybridep(Case(tokens=equal, seed=6), pad_multiple=8)],
        "larger": [hybridep(Case(tokens=(640,) * ep_size, seed=7))],
        "inference": [hybridep(Case(tokens=equal, seed=8), training=False)],
        STARVED: [hybridep(Case(tokens=equal, routing="starved", seed=9))],
    }


def jobs_of(release: str, ep_size: int) -> dict[str, list[Job]]:
    return deepep_jobs(ep_size) if release == ELASTIC else hybridep_jobs(ep_size)


@functools.cache
def results(release: str, ep_size: int) -> list[Results]:
    return run_jobs(TitanRunning, release, jobs_of(release, ep_size), ep_size)


def require(release: str, ep_size: int, name: str) -> None:
    jobs = jobs_of(release, ep_size)[name]
    names = [TRAINING if job.options.get("training", True) else FORWARD for job in jobs]
    require_dense(results(release, ep_size), name, *names)


@pytest.mark.parametrize("name", deepep_jobs(2))
@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_deepep_is_the_dense_layer(ep_size: int, name: str) -> None:
    require(ELASTIC, ep_size, name)


@pytest.mark.parametrize("name", [name for name in hybridep_jobs(2) if name != STARVED])
@pytest.mark.parametrize(("release", "ep_size"), HYBRID)
def test_hybridep_is_the_dense_layer(release: str, ep_size: int, name: str) -> None:
    require(release, ep_size, name)


@pytest.mark.parametrize(("release", "ep_size"), HYBRID)
def test_a_rank_that_receives_nothing_gets_no_gradient_of_its_scores(release: str, ep_size: int) -> None:
    """A fault of torchtitan 0.3.0: on an empty rank it calls the combine of the backward without probabilities."""
    of_ranks = results(release, ep_size)
    require_dense(of_ranks[:-1], STARVED, TRAINING)
    require_dense(of_ranks[-1:], STARVED, tuple(name for name in TRAINING if name != "grad_weights_TK"))
