"""megatron-core's flex dispatcher, unmodified, on the emulated deep_ep, against the dense layer."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest

from tests.integration.deep_ep_users import megatron_layer
from tests.integration.deep_ep_users.dense import TRAINING, Case
from tests.integration.deep_ep_users.rank import require_dense, run_jobs
from tests.integration.needs import needs

pytestmark = needs("megatron")

NORMAL = "v1.2.1"
EP_SIZES = {NORMAL: 4, "hybridep-94a9f8f": 4, "hybridep-744": 2}
UNEQUAL = (40, 13, 0, 27)


def flex(backend: str, **options: Any) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend, **options}


def deepep_jobs(ep_size: int) -> dict[str, list[Case]]:
    unequal = UNEQUAL[:ep_size]
    case = partial(Case, tokens=unequal, options=flex("deepep"))
    capacity = flex("deepep", moe_expert_capacity_factor=2.0)
    return {
        "unequal": [case()],
        "crowded": [case(routing="crowded", hidden=512, seed=1)],
        "starved": [case(routing="starved", seed=7)],
        "two in flight": [case(tokens=unequal[::-1], seed=seed) for seed in (3, 4)],
        "no slot taken": [case(routing="holes", seed=5, options=capacity)],
        "zero weights": [case(routing="holes", seed=6)],
    }


def hybridep_jobs(ep_size: int) -> dict[str, list[Case]]:
    pads, fuses = {"moe_hybridep_pad_uneven_dispatch_inputs": True}, {"moe_permute_fusion_into_hybridep": True}
    capacity = flex("hybridep", moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    fused = flex("hybridep", **fuses)
    equal = partial(Case, tokens=(64,) * ep_size, options=flex("hybridep"))
    unequal = partial(Case, tokens=UNEQUAL[:ep_size], options=flex("hybridep", **pads))
    return {
        "unequal, fused": [unequal(seed=3, options=flex("hybridep", **pads, **fuses))],
        "crowded": [unequal(routing="crowded", seed=4)],
        "starved": [unequal(routing="starved", seed=10)],
        "holes": [equal(routing="holes", seed=5)],
        "two in flight": [equal(seed=6), equal(seed=7, options=fused)],
        "to capacity": [equal(routing="even", seed=8, options=capacity)],
        "no whole chunks": [equal(tokens=(528,) * ep_size, seed=9)],
    }


def jobs(release: str) -> dict[str, list[Case]]:
    return (deepep_jobs if release == NORMAL else hybridep_jobs)(EP_SIZES[release])


@functools.cache
def results(release: str) -> dict[str, list[Any]]:
    return run_jobs(megatron_layer.forward, release, jobs(release), EP_SIZES[release])


RUN = [(release, name) for release in EP_SIZES for name in jobs(release)]


@pytest.mark.parametrize(("release", "name"), RUN)
def test_the_flex_dispatcher_is_the_dense_layer(release: str, name: str) -> None:
    require_dense(results(release)[name], TRAINING)
