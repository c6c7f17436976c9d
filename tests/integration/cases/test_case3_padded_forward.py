"""Case 3: layers that refuse packed input, in a model whose data stays packed. areal-project/AReaL#1384."""

from __future__ import annotations

import functools
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.integrations.packing import packing_for
from moe_dispatch_testing import run_processes
from tests.integration.cases.padded_forward import CUTS, JOBS, LAYERS, LENGTHS, REPLAYED, TOP_K, UNTOUCHED, rank_body
from tests.integration.needs import needs
from tests.pages import flat, relative, run_page

pytestmark = [
    *needs("transformers"),
    pytest.mark.skipif(find_spec("fla") is not None, reason="with flash-linear-attention nothing is refused"),
]

RANKS = 4
FIRST, MEAN = "a micro-batch for each rank", "a mean for each micro-batch"
# Of the length of all gradients together. In float32 sums of other lengths round differently.
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-13}


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_processes(rank_body, RANKS, timeout=timedelta(seconds=300))


def untouched_gradients(dtype: torch.dtype, *, forced: bool = False) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = results()[UNTOUCHED.index((dtype, forced))]["untouched"]
    return gradients


def test_by_hand_packed_rows_are_refused_or_mixed() -> None:
    refusals = results()[len(UNTOUCHED)]["refusals"]
    assert "ValueError: `chunk_gated_delta_rule` can't keep packed sequences apart" in refusals["told"]
    assert float(refusals["not told"]) > 0.1, "the second sequence should have seen the first"


@pytest.mark.parametrize(("dtype", "name"), [(dtype, name) for dtype in JOBS for name in JOBS[dtype] if name != MEAN])
def test_gradients_do_not_depend_on_how_micro_batches_are_cut(dtype: torch.dtype, name: str) -> None:
    steps, untouched = results()[0][str(dtype)], untouched_gradients(dtype)
    gradients, seen = steps[name]
    assert gradients.keys() == untouched.keys()
    for gradient in gradients.values():
        assert gradient.dtype == dtype
    assert relative(flat(gradients), flat(untouched)) < TOLERANCES[dtype]
    assert relative(flat(gradients), flat(steps[FIRST][0])) < TOLERANCES[dtype]
    # Padding is no token: neither what attention is padded to nor gaps reach a router's statistics.
    assert sum(seen) == sum(LENGTHS) * TOP_K * len(LAYERS)
    assert seen == steps[FIRST][1]


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_experts_have_the_gradients_of_a_model_whose_router_is_forced(name: str) -> None:
    """The routing of an engine, which the router would not choose, is replayed in every cut of the micro-batches."""
    steps, forced = results()[0]["replayed"], untouched_gradients(torch.float64, forced=True)
    assert relative(flat(steps[name][0]), flat(forced)) < TOLERANCES[torch.float64]
    assert relative(flat(forced), flat(untouched_gradients(torch.float64))) > 0.1, (
        "the routing of the engine should have changed the gradients"
    )
    assert sum(steps[name][1]) == sum(LENGTHS) * TOP_K * len(LAYERS)


def test_a_mean_for_each_micro_batch_does_depend_on_it() -> None:
    """What the loop has to do itself; and the comparison above would see it."""
    mean, _ = results()[0][str(torch.float64)][MEAN]
    assert relative(flat(mean), flat(untouched_gradients(torch.float64))) > 0.1


def test_the_fallback_is_announced_once_on_each_rank() -> None:
    reason = packing_for("qwen3_5_moe_text", framework="transformers").reason
    assert "packed input needs the kernels of fla" in reason
    assert [found["announced"] for found in results()] == [[reason]] * RANKS
    assert len(CUTS) > 1, "models were made more than once"


def test_the_code_of_the_page_runs() -> None:
    namespace = run_page("cases/3-padded-forward.md")
    assert namespace["y"].shape == namespace["x"].shape
    assert relative(namespace["y"], namespace["alone"]) < 1e-5
