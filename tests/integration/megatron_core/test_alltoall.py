"""An MoELayer with its router and SequentialMLP computes through us what it computes through Megatron's alltoall."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.integration.megatron_core.jobs import require, run_checks
from tests.integration.megatron_core.layer import (
    BALANCED,
    Case,
    Parallel,
    build,
    difference,
    has_copied_experts,
    outcome,
    own_spec,
)
from tests.integration.needs import needs

pytestmark = needs("megatron")

TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
SHARED = {"moe_shared_expert_intermediate_size": 16}
OVERLAP = SHARED | {"moe_shared_expert_overlap": True}
TP, ETP = Parallel(ep=2, tp=2), Parallel(ep=2, etp=2, tp=2)
UNEQUAL = (6, 3, 9, 5)
# What the vendors' libraries carry.
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, "config": {"hidden_size": 256}, "tokens": (32, 32, 9, 9)}
HYBRIDEP = {"name": "hybridep", "emulate": True}
DEEPEP = {"name": "deepep", "emulate": True}

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "ep 4": (Case(), {}),
    "ep 4, allgather": (Case(seed=1), {"backend": "allgather"}),
    "ep 4, exact reduction": (Case(seed=2), {"backend": {"name": "alltoall", "reduction": "exact"}}),
    "ep 4, debug": (Case(seed=3), {"debug": True}),
    "unequal tokens": (Case(tokens=UNEQUAL, seed=4), {}),
    "unequal tokens, allgather": (Case(tokens=UNEQUAL, seed=5), {"backend": "allgather"}),
    "ep 2 of 4": (Case(parallel=Parallel(ep=2), seed=6), {}),
    "ep 1": (Case(parallel=Parallel(ep=1), seed=7), {"backend": "local"}),
    "ep 2, tp 2": (Case(parallel=TP, seed=8), {}),
    "ep 2, etp 2": (Case(parallel=ETP, seed=9), {}),
    "ep 2, etp 2, allgather": (Case(parallel=ETP, seed=10), {"backend": "allgather"}),
    "ep 1, etp 4": (Case(parallel=Parallel(ep=1, etp=4), seed=11), {}),
    "shared experts": (Case(config=SHARED, seed=12), {}),
    "shared experts, overlap": (Case(config=OVERLAP, seed=13), {}),
    "shared experts, overlap, gate": (Case(config=OVERLAP | {"moe_shared_expert_gate": True}, seed=14), {}),
    "shared experts, overlap, tp 2": (Case(parallel=TP, config=OVERLAP, seed=15), {}),
    "weights on the input": (Case(config=TOP_1, seed=16), {}),
    "etp 2, weights on the input": (Case(parallel=ETP, config=TOP_1, seed=17), {}),
    "dropped by the router": (Case(config={"moe_expert_capacity_factor": 0.5}, seed=18), {}),
    "balanced": (Case(tokens=UNEQUAL, config=OVERLAP, seed=24), BALANCED),
    "balanced, ep 2, etp 2": (Case(parallel=ETP, seed=25), BALANCED),
    "balanced, weights on the input": (Case(config=TOP_1, seed=27), BALANCED),
    "balanced, dropped by the router": (Case(config={"moe_expert_capacity_factor": 0.5}, seed=28), BALANCED),
    "a type that is not alltoall": (Case(config={"moe_token_dispatcher_type": "allgather"}, seed=19), {}),
}
BFLOAT16_CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "hybridep": (Case(seed=20, **BFLOAT16), {"backend": HYBRIDEP}),
    "hybridep, etp 2": (Case(parallel=ETP, seed=21, **BFLOAT16), {"backend": HYBRIDEP}),
    "deepep": (Case(seed=22, **BFLOAT16), {"backend": DEEPEP}),
    "hybridep, balanced": (Case(seed=29, **BFLOAT16), {"backend": HYBRIDEP} | BALANCED),
    "deepep, etp 2": (Case(parallel=ETP, seed=23, **BFLOAT16), {"backend": DEEPEP}),
}


def equal(rank: int, case: Case, given: dict[str, Any]) -> float:
    """How far our layer is from Megatron's; it must be ours, and its parameters where they were."""
    from moe_dispatch.integrations.megatron import MegatronDispatcher, convert

    layer = build(own_spec(), case)
    hidden, keys = case.hidden(rank), list(layer.state_dict())
    want = outcome(layer, hidden)
    convert(layer, **given)
    assert isinstance(layer.token_dispatcher, MegatronDispatcher)
    assert list(layer.state_dict()) == keys
    got = outcome(layer, hidden)
    assert has_copied_experts(layer) == ("balance" in given)
    layer.token_dispatcher.close()
    return difference(got, want)


@functools.cache
def results() -> dict[str, list[Any]]:
    cases = CASES | BFLOAT16_CASES
    return run_checks({name: functools.partial(equal, case=case, given=given) for name, (case, given) in cases.items()})


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


@pytest.mark.parametrize("name", BFLOAT16_CASES)
def test_bfloat16_through_emulated_libraries(name: str) -> None:
    assert max(require(results()[name])) < 1.6e-2
