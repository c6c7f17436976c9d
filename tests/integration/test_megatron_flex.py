"""megatron-core's flex dispatcher, unmodified, on the emulated deep_ep: the dense layer, and the reported failure."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.integration.deep_ep_users.dense import TRAINING, Case
from tests.integration.deep_ep_users.megatron_layer import MegatronRunning
from tests.integration.deep_ep_users.rank import Job, Results, require_dense, run_jobs
from tests.integration.needs import needs

pytestmark = needs("megatron")

NORMAL, UNPADDED = "v1.2.1", "hybridep-34152ae"
EP_SIZES = {NORMAL: 4, UNPADDED: 2, "hybridep-94a9f8f": 4, "hybridep-744": 2}
UNEQUAL = (40, 13, 0, 27)
EQUAL = (64,) * 4
WHOLE_CHUNKS_ONLY = "528 rows"


def deepep(case: Case, **options: Any) -> Job:
    return Job(case=case, options={"moe_flex_dispatcher_backend": "deepep"} | options)


def hybridep(case: Case, **options: Any) -> Job:
    return Job(case=case, options={"moe_flex_dispatcher_backend": "hybridep"} | options)


def deepep_jobs(ep_size: int) -> dict[str, list[Job]]:
    unequal = UNEQUAL[:ep_size]
    return {
        "unequal": [deepep(Case(tokens=unequal))],
        "crowded": [deepep(Case(tokens=unequal, routing="crowded", hidden=512, seed=1))],
        "starved": [deepep(Case(tokens=unequal, routing="starved", seed=7))],
        "two in flight": [deepep(Case(tokens=unequal[::-1], seed=seed)) for seed in (3, 4)],
        "no slot taken": [deepep(Case(tokens=unequal, routing="holes", seed=5), moe_expert_capacity_factor=2.0)],
        "zero weights": [deepep(Case(tokens=unequal, routing="holes", seed=6))],
    }


def hybridep_jobs(ep_size: int) -> dict[str, list[Job]]:
    equal, unequal = EQUAL[:ep_size], UNEQUAL[:ep_size]
    pads = {"moe_hybridep_pad_uneven_dispatch_inputs": True}
    fused = {"moe_permute_fusion_into_hybridep": True}
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    return {
        "unequal, fused": [hybridep(Case(tokens=unequal, seed=3), **pads, **fused)],
        "crowded": [hybridep(Case(tokens=unequal, routing="crowded", seed=4), **pads)],
        "starved": [hybridep(Case(tokens=unequal, routing="starved", seed=10), **pads)],
        "holes": [hybridep(Case(tokens=equal, routing="holes", seed=5))],
        "two in flight": [hybridep(Case(tokens=equal, seed=6)), hybridep(Case(tokens=equal, seed=7), **fused)],
        "to capacity": [hybridep(Case(tokens=equal, routing="even", seed=8), **capacity)],
        WHOLE_CHUNKS_ONLY: [hybridep(Case(tokens=(528,) * ep_size, seed=9))],
        "padded to chunks": [hybridep(Case(tokens=(528,) * ep_size, seed=9), **pads)],
    }


def jobs(release: str) -> dict[str, list[Job]]:
    return (deepep_jobs if release == NORMAL else hybridep_jobs)(EP_SIZES[release])


@functools.cache
def results(release: str) -> list[Results]:
    return run_jobs(MegatronRunning, release, jobs(release), EP_SIZES[release])


@pytest.mark.parametrize(
    ("release", "name"),
    [
        (release, name)
        for release in EP_SIZES
        for name in jobs(release)
        if (release, name) != (UNPADDED, WHOLE_CHUNKS_ONLY)
    ],
)
def test_the_flex_dispatcher_is_the_dense_layer(release: str, name: str) -> None:
    require_dense(results(release), name, *[TRAINING] * len(jobs(release)[name]))


def test_rows_in_no_whole_chunks_fail_to_compile_as_was_reported() -> None:
    """Megatron-Bridge #3294, through the code that met it, on a release that does not round its capacity up."""
    for by_name in results(UNPADDED):
        found = by_name[WHOLE_CHUNKS_ONLY]
        assert isinstance(found, str)
        assert "hybrid_ep_combine" in found
        assert "MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK" in found
        assert "RuntimeError: Failed to compile the code" in found
