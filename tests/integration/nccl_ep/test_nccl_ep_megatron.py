"""Megatron's MoE layer with ``backend="nccl_ep"``, converted, beside its own dispatcher, on four ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.integration.jobs import require
from tests.integration.megatron_core.layer import Case
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.test_layers import BFLOAT16, equal
from tests.integration.nccl_ep.double import installed, requires_wheel
from tests.integration.needs import needs

pytestmark = [*needs("megatron"), *requires_wheel]


def equal_on_the_double(rank: int, case: Case, given: dict[str, Any]) -> float:
    with installed():
        return equal(rank, case, {"backend": "nccl_ep"} | given)


def test_a_converted_layer_is_that_of_megatron() -> None:
    cases = {
        "unequal tokens": (Case(seed=31, **BFLOAT16), {}),
        "balanced": (Case(seed=33, **BFLOAT16), {"balance": {"name": "exact", "min_rows": 0}}),
    }
    checks = {name: partial(equal_on_the_double, case=case, given=given) for name, (case, given) in cases.items()}
    for found in run_megatron(checks).values():
        assert max(require(found)) < 1.6e-2
