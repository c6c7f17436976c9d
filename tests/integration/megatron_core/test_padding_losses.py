"""Losses and counts of Megatron's routers leave gaps out, as Megatron has them on the real rows without a mask."""

from __future__ import annotations

import functools
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integration.frameworks.sources import needs as needs_source
from tests.integration.jobs import require
from tests.integration.megatron_core import padding_losses
from tests.integration.megatron_core.layer import TOP_K, Parallel
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.needs import needs

pytestmark = needs("megatron")

HAS_QUANTILES = find_spec("megatron") is not None and version("megatron-core") >= "0.19"
PARALLEL = {"cp": Parallel(ep=1, cp=2), "tp": Parallel(ep=2, tp=2), "dp": Parallel(ep=2)}
CASES = {
    f"{loss}, {where}{', per token' * per_token}": (parallel, loss, per_token)
    for loss in padding_losses.LOSSES
    for where, parallel in PARALLEL.items()
    for per_token in (False, True)
}


@functools.cache
def results() -> dict[str, list[Any]]:
    checks: dict[str, Any] = {
        name: functools.partial(_compared, parallel, loss, per_token)
        for name, (parallel, loss, per_token) in CASES.items()
    }
    return run_megatron(checks | ({"quantile": padding_losses.quantile} if HAS_QUANTILES else {}), 2)


def _compared(parallel: Parallel, loss: str, per_token: bool, rank: int) -> float:
    return padding_losses.compared(rank, parallel, loss, per_token)


@pytest.mark.parametrize("name", CASES)
def test_losses_of_a_router_are_those_of_the_real_rows(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


@pytest.mark.skipif(not HAS_QUANTILES, reason="needs a megatron-core with quantile balancing")
def test_quantile_balancing_trains_with_gaps_that_are_not_sent() -> None:
    for found in require(results()["quantile"]):
        assert found["outcome"] < 1e-5
        assert found["bias"] == 0
        assert found["sent"] == found["wanted"]


@needs_source("verl")
def test_the_routing_of_verls_replay_counts_real_rows() -> None:
    (found, _) = require(run_megatron({"verl": padding_losses.with_routing_of_verl}, 2)["verl"])
    assert found["gradient"] < 1e-5
    assert found["counts"] == found["wanted"] == sum(padding_losses.GAPS) * TOP_K
