"""Axolotl with our plug-in, which it finds by its entry point, trains as with its own dispatch."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.axolotl.runs import (
    LORA,
    ON_EXPERTS,
    PACKED,
    STEPS,
    Case,
    by_trl,
    compared,
    on_cpu,
    on_four_bits,
    refused,
    save_model,
    saved,
)
from tests.integration.jobs import require, run_checks
from tests.integration.transformers.adapting import Adapted, balanced

BALANCED: dict[str, Any] = {"backend": "alltoall", "balance": {"name": "exact", "min_rows": 0}}
PLAIN: dict[str, Any] = {"backend": "alltoall"}
CHECKPOINTED: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
TRAINED = {
    "alltoall": Case(fields=PLAIN),
    "allgather": Case(fields={"backend": "allgather"}),
    "balanced": Case(fields=BALANCED),
    "in chunks": Case(fields={**PLAIN, "chunks": 8}),
    "accumulation": Case(fields=BALANCED, keys={"gradient_accumulation_steps": 2}),
    "checkpointing": Case(fields=PLAIN, keys=CHECKPOINTED),
    "LoRA": Case(fields=PLAIN, keys=LORA),
    "LoRA, balanced": Case(fields=BALANCED, keys=LORA),
    "LoRA on experts": Case(fields=PLAIN, keys=ON_EXPERTS),
    "LoRA on experts, balanced": Case(fields=BALANCED, keys=ON_EXPERTS),
}
# With an expert group that is smaller than the world. Accelerate then wraps FSDP2, also on a CPU.
WITH_FSDP2: dict[str, Any] = {"expert_parallel_size": 2, "dp_shard_size": 2}
ON_FOUR = {
    "balanced": TRAINED["balanced"],
    "dp_shard": Case(fields=PLAIN, keys=WITH_FSDP2),
    "dp_shard, balanced": Case(fields=BALANCED, keys=WITH_FSDP2),
}
REFUSED = {
    "backend": (Case(fields={"backend": "altoall"}), "Unknown backend 'altoall'"),
    "field": (Case(fields={**PLAIN, "balnce": "exact"}), "balnce"),
    "quantised": (
        Case(fields={**PLAIN, "wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}),
        "read no quantised rows",
    ),
    "graph-safe": (
        Case(fields={**PLAIN, "graph_safe": True, "max_tokens_per_rank": 64}),
        "moe_dispatch: graph_safe must be False",
    ),
    "one rank": (Case(fields=PLAIN, keys={"expert_parallel_size": 1}), "must be at least 2, .*, got 1"),
    "dropped tokens": (
        Case(fields=PLAIN, keys={"expert_parallel_token_capacity": 64}),
        "expert_parallel_token_capacity belongs to Axolotl's own dispatch and kernels, .* got 64",
    ),
    "DeepEP": (Case(fields=PLAIN, keys={"expert_parallel_backend": "deep_ep"}), "got 'deep_ep'"),
    "kernels": (Case(fields=PLAIN, keys={"experts_implementation": "batched_mm"}), "got 'batched_mm'"),
}

FOUR_BITS = {
    "attention": Adapted(parameters=()),
    "attention, balanced": balanced(Adapted(parameters=())),
    "experts": Adapted(modules=()),
}


@functools.cache
def results(ranks: int) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        save_model(Path(folder, "model"))
        trained = TRAINED if ranks == 2 else ON_FOUR
        checks: dict[str, Any] = {name: functools.partial(compared, folder, case) for name, case in trained.items()}
        cases = {name: case for name, (case, _) in REFUSED.items()}
        first: dict[str, Any] = {
            "refused": functools.partial(refused, folder, cases),
            "TRL": functools.partial(by_trl, folder),
        }
        first |= {f"4 bits, {name}": functools.partial(on_four_bits, case) for name, case in FOUR_BITS.items()}
        return run_checks(first | checks, ranks, on_cpu)


@functools.cache
def results_of_packing() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        save_model(Path(folder, "model"))
        checks = {
            "packed": functools.partial(compared, folder, Case(fields=BALANCED, keys=PACKED)),
            "saved": functools.partial(saved, folder, Case(fields=PLAIN, keys=LORA)),
        }
        return run_checks(checks, 2, on_cpu)


def test_packed_sequences_train_as_with_axolotls_own_dispatch() -> None:
    for result in require(results_of_packing()["packed"]):
        assert result["steps"] == STEPS
        assert result["moved"] > 1e-3
        assert result["losses"] < 1e-5
        assert result["weights"] < 1e-4
        assert result["fetches"]


def test_axolotl_saves_the_adapters_of_a_run_through_us() -> None:
    for result in require(results_of_packing()["saved"]):
        assert result["weights"] == 0
        assert result["largest"] > 1e-3


def check(name: str, case: Case, found: list[Any]) -> None:
    for result in require(found):
        assert result["steps"] == STEPS
        assert result["moved"] > 1e-3
        assert result["losses"] < 1e-5
        assert result["weights"] < 1e-4
        assert result["skipped"], "padding must not be sent"
        assert bool(result["fetches"]) == ("balance" in case.fields)
        adapted = "adapter" in case.keys
        assert all((".lora_" in trained) == adapted for trained in result["names"])
        assert any(".experts." in trained for trained in result["names"]) == (not adapted or "experts" in name)


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_with_axolotls_own_dispatch(name: str) -> None:
    check(name, TRAINED[name], results(2)[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_with_axolotls_own_dispatch(name: str) -> None:
    check(name, ON_FOUR[name], results(4)[name])


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_when_the_config_is_loaded(name: str) -> None:
    for texts in require(results(2)["refused"]):
        with pytest.raises(AssertionError, match=REFUSED[name][1]):
            raise AssertionError(texts[name])


def test_trl_trains_a_model_of_transformers_as_without_us() -> None:
    for result in require(results(2)["TRL"]):
        assert result["weights"] < 1e-4
        assert result["rows"] > 0


@pytest.mark.parametrize("name", ["attention", "attention, balanced"])
def test_adapters_on_experts_frozen_in_4_bits_train_as_in_one_process(name: str) -> None:
    for result in require(results(2)[f"4 bits, {name}"]):
        assert result["loss"] < 1e-5
        assert result["gradients"] < 1e-4
        assert bool(result["collectives"].get("weights")) == ("balanced" in name)
        assert not result["collectives"].get("weights.backward")


def test_peft_refuses_adapters_on_weights_in_4_bits() -> None:
    for result in require(results(2)["4 bits, experts"]):
        assert "no `target_parameters` found" in result["error"]
