"""torchtitan's DeepEP and HybridEP dispatchers, unmodified, on the emulated deep_ep: what a dense layer computes."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest

from tests.integration.deep_ep_users import titan_layer
from tests.integration.deep_ep_users.dense import INFERENCE, TRAINING, Case
from tests.integration.deep_ep_users.rank import require_dense, run_jobs
from tests.integration.needs import needs

pytestmark = needs("torchtitan")

ELASTIC = "v2-2.1.0"
# Releases and numbers of ranks.
DEEPEP = [(ELASTIC, 2), (ELASTIC, 4)]
HYBRIDEP = [("hybridep-94a9f8f", 2), ("hybridep-94a9f8f", 4), ("hybridep-744", 4)]


def deepep_jobs(ep_size: int) -> dict[str, list[Case]]:
    case = partial(Case, tokens=(48,) * ep_size)
    deepep = {"dispatcher": "DeepEPTokenDispatcher"}
    expand = deepep | {"cudagraphable": True, "training": False}
    return {
        "compact": [case(options=deepep)],
        "crowded": [case(routing="crowded", seed=2, options=deepep)],
        "starved": [case(routing="starved", seed=12, options=deepep)],
        "holes": [case(routing="holes", seed=3, options=deepep)],
        "room to spare": [case(seed=4, options=deepep | {"num_max_tokens_per_rank": 100})],
        "larger": [case(hidden=512, seed=5, options=deepep)],
        "two in flight": [case(seed=seed, options=deepep) for seed in (6, 7)],
        "compact inference": [case(seed=9, options=deepep | {"training": False})],
        "expand inference": [case(seed=10, options=expand)],
        "expand inference, holes": [case(routing="holes", seed=11, options=expand)],
    }


def hybridep_jobs(ep_size: int) -> dict[str, list[Case]]:
    case = partial(Case, tokens=(64,) * ep_size)
    hybridep = {"dispatcher": "HybridEPTokenDispatcher"}
    padded, static = hybridep | {"pad_multiple": 16}, hybridep | {"non_blocking_capacity_factor": 1.0}
    return {
        "blocking": [case(options=hybridep)],
        "padded": [case(seed=1, options=padded)],
        "static": [case(seed=2, options=static)],
        "static, padded": [case(seed=3, options=static | {"pad_multiple": 32})],
        "crowded": [case(routing="crowded", seed=4, options=padded)],
        "two in flight": [case(seed=5, options=hybridep), case(seed=6, options=padded)],
        "larger": [Case(tokens=(640,) * ep_size, seed=7, options=hybridep)],
        "inference": [case(seed=8, options=hybridep | {"training": False})],
        "starved": [case(routing="starved", seed=9, options=hybridep)],
    }


@functools.cache
def results(release: str, ep_size: int) -> dict[str, list[Any]]:
    jobs = deepep_jobs(ep_size) if release == ELASTIC else hybridep_jobs(ep_size)
    return run_jobs(titan_layer.forward, release, jobs, ep_size)


@pytest.mark.parametrize(
    ("release", "ep_size", "name"),
    [(*found, name) for found in DEEPEP for name in deepep_jobs(2)]
    + [(*found, name) for found in HYBRIDEP for name in hybridep_jobs(2) if name != "starved"],
)
def test_a_dispatcher_is_the_dense_layer(release: str, ep_size: int, name: str) -> None:
    require_dense(results(release, ep_size)[name], INFERENCE if "inference" in name else TRAINING)


@pytest.mark.parametrize(("release", "ep_size"), HYBRIDEP)
def test_a_rank_that_receives_nothing_gets_no_gradient_of_its_scores(release: str, ep_size: int) -> None:
    """A fault of torchtitan 0.3.0: on an empty rank it calls the combine of the backward without probabilities."""
    of_ranks = results(release, ep_size)["starved"]
    require_dense(of_ranks[:-1], TRAINING)
    require_dense(of_ranks[-1:], tuple(name for name in TRAINING if name != "weights"))
