"""AutoEP of the real DeepSpeed on gloo processes: through our dispatchers it trains as by itself and as one process.

All runs of a number of ranks share one set of processes, because starting them takes longer than most of the runs.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from typing import Any

import pytest
import torch

from tests.integration.deepspeed.engines import (
    BALANCED,
    FEW,
    LENGTHS,
    Case,
    compared,
    evaluated,
    exchanged,
    on_cpu,
    page,
    with_fault,
)
from tests.integration.deepspeed.refusals import refused, refused_by_deepspeed
from tests.integration.jobs import require, run_checks
from tests.integration.transformers.models import LAYERS, TOP_K

CHUNKED: dict[str, Any] = {"chunks": 4}
RECOMPUTED: dict[str, Any] = {"chunks": {"tokens": 4, "recompute": True}}
STATIC: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 32}
# Training in 20 steps, and then in 5 steps whatever can be combined with it.
ON_TWO = {
    "qwen3_moe, ZeRO 0": Case(stage=0),
    "qwen3_moe, ZeRO 1": Case(stage=1),
    "qwen3_moe, ZeRO 2": Case(stage=2),
    "qwen3_moe, ZeRO 3": Case(stage=3),
    "mixtral, ZeRO 2": Case(family="mixtral", stage=2),
    "deepseek_v3, ZeRO 1": Case(family="deepseek_v3", stage=1),
    "balanced, ZeRO 0": Case(stage=0, fields=BALANCED),
    "balanced, ZeRO 1": Case(stage=1, fields=BALANCED),
    "balanced, ZeRO 2": Case(stage=2, fields=BALANCED),
}
ON_TWO |= {
    name: dataclasses.replace(case, steps=FEW)
    for name, case in {
        "allgather": Case(backend="allgather"),
        "balanced, deepseek_v3": Case(family="deepseek_v3", fields=BALANCED),
        "in chunks": Case(fields=CHUNKED),
        "chunks recomputed": Case(fields=RECOMPUTED),
        "chunks recomputed, balanced": Case(fields={**RECOMPUTED, **BALANCED}),
        "graph-safe": Case(fields=STATIC),
        "accumulation, ZeRO 1": Case(stage=1, micro_batches=2),
        "accumulation, ZeRO 2": Case(stage=2, micro_batches=2),
        "accumulation, balanced": Case(micro_batches=2, fields=BALANCED),
        "checkpointing": Case(checkpoint=True),
        "checkpointing, reentrant": Case(checkpoint=True, reentrant=True),
        "checkpointing, ZeRO 3": Case(checkpoint=True, stage=3),
        "checkpointing, balanced": Case(checkpoint=True, fields=BALANCED),
        "two forwards alive": Case(checkpoint=True, micro_batches=2, together=True),
        "two forwards alive, balanced": Case(checkpoint=True, micro_batches=2, together=True, fields=BALANCED),
        "no tokens": Case(empty=True),
        "no tokens, balanced": Case(empty=True, fields=BALANCED),
        "adapters, ZeRO 0": Case(stage=0, adapters=True),
        "adapters, ZeRO 0, balanced": Case(stage=0, adapters=True, fields=BALANCED),
        "adapters, ZeRO 3": Case(stage=3, adapters=True),
        **{
            f"idle experts, ZeRO {stage}": Case(stage=stage, garbage=True, changes=(("num_experts", 32),))
            for stage in (0, 2, 3)
        },
        "idle experts, balanced": Case(garbage=True, changes=(("num_experts", 32),), fields=BALANCED),
        "bfloat16": Case(dtype=torch.bfloat16),
        "deepep": Case(
            backend={"name": "deepep", "emulate": True}, dtype=torch.bfloat16, changes=(("hidden_size", 256),)
        ),
        "hybridep": Case(backend={"name": "hybridep", "emulate": True}, dtype=torch.bfloat16),
    }.items()
}
ON_FOUR = {
    "qwen3_moe, ep 4": Case(ep=4),
    "qwen3_moe, ep 2": Case(ep=2, stage=2),
    "balanced, ep 4": Case(ep=4, fields=BALANCED),
}
ON_FOUR |= {
    name: dataclasses.replace(case, steps=FEW)
    for name, case in {
        "qwen3_moe, ep 2, ZeRO 3": Case(ep=2, stage=3),
        "mixtral, ep 4": Case(family="mixtral", ep=4, stage=0),
        "deepseek_v3, ep 4": Case(family="deepseek_v3", ep=4),
        # ZeRO 2 reduces what is ready first, and must find the same order on ranks with and without copies.
        "balanced, ep 2, ZeRO 2": Case(ep=2, stage=2, fields=BALANCED),
        "balanced, ep 2, ZeRO 2, small buckets": Case(ep=2, stage=2, fields=BALANCED, bucket=4000),
        "chunks recomputed, ep 2, ZeRO 2": Case(ep=2, stage=2, fields=RECOMPUTED),
        "chunks recomputed, balanced, ep 2, ZeRO 2": Case(ep=2, stage=2, fields={**RECOMPUTED, **BALANCED}),
        "no tokens, ep 4": Case(ep=4, empty=True),
    }.items()
}
FAULTS = ("lost", "twice")
EVALUATED = {
    f"{mode.__name__}, ZeRO {stage}, {backend}": functools.partial(evaluated, Case(stage=stage, backend=backend), mode)
    for mode in (torch.no_grad, torch.inference_mode)
    for stage in (2, 3)
    for backend in (None, "alltoall")
}


@functools.cache
def on_two() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        checks: dict[str, Any] = {name: functools.partial(compared, case) for name, case in ON_TWO.items()}
        checks |= {
            f"checkpoint, ZeRO {stage}": functools.partial(exchanged, Case(stage=stage), folder)
            for stage in (0, 1, 2, 3)
        }
        checks |= {fault: functools.partial(with_fault, ON_TWO["balanced, deepseek_v3"], fault) for fault in FAULTS}
        checks |= EVALUATED
        return run_checks(
            checks | {"page": page, "refused by DeepSpeed": refused_by_deepspeed, "refused": refused}, 2, on_cpu
        )


@functools.cache
def on_four() -> dict[str, list[Any]]:
    return run_checks({name: functools.partial(compared, case) for name, case in ON_FOUR.items()}, 4, on_cpu)


def check(results: list[Any], case: Case) -> None:
    rounded = case.dtype == torch.bfloat16
    for result in require(results):
        assert result["losses"] < (1e-2 if rounded else 1e-5)
        # Where weights are rounded to bfloat16, single ones may differ by as much as they have changed.
        assert result["updates_in_norm" if rounded else "updates"] < (0.3 if rounded else 1e-3)
        assert result["same_parameters"]
        assert result["slots"], "every row must have gone through a dispatcher, once"
        assert bool(result["fetches"]) == ("balance" in case.fields)
        if not rounded:
            assert result["losses_of_one"] < 1e-5
            assert result["updates_of_one"] < 1e-3


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_train_as_autoep_does_and_as_one_process(name: str) -> None:
    check(on_two()[name], ON_TWO[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_autoep_does_and_as_one_process(name: str) -> None:
    check(on_four()[name], ON_FOUR[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_of_copies_is_seen(fault: str) -> None:
    assert min(require(on_two()[fault])) > 0.1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoints_of_autoep_are_ours_and_ours_are_its(stage: int) -> None:
    for apart in require(on_two()[f"checkpoint, ZeRO {stage}"]):
        assert len(apart) == 4
        assert max(apart.values()) < 1e-5


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_between_steps_fails_only_where_zero_3_keeps_what_it_has_gathered(name: str) -> None:
    fails = name.startswith("inference_mode, ZeRO 3")  # also with AutoEP alone
    for said in require(on_two()[name]):
        assert said == ("Inference tensors cannot be saved for backward" if fails else "")


def test_a_changed_private_name_of_deepspeed_is_refused_by_name() -> None:
    for texts in require(on_two()["refused"]):
        named = {name.removeprefix("name "): text for name, text in texts.items() if name.startswith("name ")}
        assert len(named) == 13
        for name, text in named.items():
            assert text.startswith("IntegrationError: use_moe_dispatch: deepspeed 0.19.8 has changed private names")
            assert name in text
        assert "deepspeed 0.19.8 has changed a private name" in texts["import"]
        assert "DEEPEP_BACKEND" in texts["import"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no layers", "Linear has no MoE layers of AutoEP"),
        ("options", "options must not set hidden_size, num_experts, top_k, weights, .* got top_k, weights"),
        ("unknown", "balnce"),
        ("quantised", 'got wire.deliver="quantised"'),
        ("tensor parallel", "got autotp_size=2. Set autotp_size to 1"),
        ("no group", "Call use_moe_dispatch after deepspeed.initialize"),
        ("one rank", "with autoep_size=1 each rank holds all experts"),
        ("ZeRO 3, balance", "got balance or chunks with ZeRO stage 3. Use stage 2"),
        ("ZeRO 3, chunks", "got balance or chunks with ZeRO stage 3. Use stage 2"),
    ],
)
def test_what_cannot_work_is_refused(name: str, said: str) -> None:
    for texts in require(on_two()["refused"]):
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(texts[name])


def test_a_second_call_that_fails_leaves_the_layers_of_the_first() -> None:
    for texts in require(on_two()["refused"]):
        assert texts["a second call"] == "planted"
        assert texts["kept"] == f"True {[True] * (LAYERS - 1)}"  # in use, and what the second call has built is closed


def test_adapters_on_experts_are_refused_by_deepspeed_and_so_are_zero_1_and_2_without_trained_experts() -> None:
    for texts in require(on_two()["refused by DeepSpeed"]):
        assert texts["experts"].startswith("AutoEP: no MoE layers detected")
        assert "None of the param groups are marked as MoE" in texts["ZeRO 1"]


def test_the_recipe_of_the_page_runs() -> None:
    counts = require(on_two()["page"])
    assert [sum(layer) for layer in zip(*counts, strict=True)] == [sum(LENGTHS[:2]) * TOP_K] * LAYERS
