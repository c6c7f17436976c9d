"""Real models over four gloo processes: loss, gradients and tokens are those of the model unsharded.

All jobs run in one set of processes, because starting four with torch and transformers takes longer than most of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integration.jobs import require, run_checks
from tests.integration.transformers.models import BATCHES, FAMILIES, LAYERS, TOP_K
from tests.integration.transformers.ranks import (
    BALANCED,
    THEIRS,
    Case,
    Mesh,
    by_function,
    generate,
    generate_in_rounds,
    indivisible,
    resume,
    round_trip,
    train,
)

RANKS = 4
MESHES = {
    "fsdp 4, ep 4": Mesh(fsdp=4, ep=4),
    "fsdp 4, ep 2": Mesh(fsdp=4, ep=2),
    "fsdp 2 x tp 2, ep 4": Mesh(fsdp=2, tp=2, ep=4),
    "fsdp 2 x tp 2, ep 2": Mesh(fsdp=2, tp=2, ep=2),
    "tp 4, ep 4": Mesh(tp=4, ep=4),
}
PLAIN, BOTH = MESHES["fsdp 4, ep 4"], MESHES["fsdp 2 x tp 2, ep 4"]

TRAIN = {
    **{family: Case(family=family, mesh=PLAIN) for family in FAMILIES},
    "deepseek_v3, tp 2": Case(family="deepseek_v3", mesh=BOTH),
    **{name: Case(mesh=mesh) for name, mesh in MESHES.items() if mesh is not PLAIN},
    "allgather": Case(mesh=PLAIN, backend="allgather"),
    "hybridep": Case(mesh=PLAIN, backend={"name": "hybridep", "emulate": True}, dtype=torch.bfloat16),
    "checkpoint, ep 2": Case(mesh=MESHES["fsdp 4, ep 2"], checkpoint=True),
}
# "fsdp 4, ep 2" shards the weights of the experts, and so does the third mesh, whose ranks also share a batch.
DRIVEN = {name: MESHES[name] for name in ("fsdp 4, ep 4", "fsdp 4, ep 2", "fsdp 2 x tp 2, ep 2")}
CHUNKS: dict[str, Case] = {
    **{f"in chunks, {name}": Case(mesh=mesh, fields={"chunks": 4}) for name, mesh in DRIVEN.items()},
    "in chunks, allgather": Case(mesh=PLAIN, backend="allgather", fields={"chunks": 4}),
    "in chunks, graph-safe": Case(mesh=PLAIN, fields={"chunks": 4, "graph_safe": True, "max_tokens_per_rank": 32}),
    "in chunks, checkpoint": Case(mesh=BOTH, fields={"chunks": 4}, checkpoint=True),
    "in chunks, balanced": Case(mesh=PLAIN, fields={"chunks": 4, **BALANCED}),
    # FSDP gathers the weights of the experts again in the backward.
    "chunks recomputed": Case(mesh=MESHES["fsdp 4, ep 2"], fields={"chunks": {"tokens": 4, "recompute": True}}),
}
BALANCE = {
    **{f"balanced, {name}": Case(mesh=mesh, fields=BALANCED) for name, mesh in DRIVEN.items()},
    "balanced, gpt_oss": Case(family="gpt_oss", mesh=PLAIN, fields=BALANCED),  # with a bias for each expert
    "balanced, checkpoint": Case(mesh=MESHES["fsdp 4, ep 2"], fields=BALANCED, checkpoint=True),
    "balanced, graph-safe": Case(
        mesh=PLAIN, fields={"balance": "exact", "graph_safe": True, "max_tokens_per_rank": 32}
    ),
    "spare slots": Case(mesh=PLAIN, fields={"balance": {"name": "least_loaded", "spare_experts_per_rank": 1}}),
}
TRAIN |= BALANCE | CHUNKS
THEIR_TRAIN = {
    f"theirs, {family}": Case(family=family, mesh=PLAIN, implementation=THEIRS) for family in ("qwen3_moe", "mixtral")
}
GENERATE = {
    "generate": Case(mesh=PLAIN),
    "generate, allgather, tp 2": Case(mesh=BOTH, backend="allgather"),
    "generate, qwen3_5": Case(family="qwen3_5_moe_text", mesh=PLAIN),
}
ADAPTED = functools.partial(by_function, adapted=True)
OTHER: dict[str, tuple[Callable[[Case, int], Any], Case]] = {
    "function": (by_function, Case(mesh=PLAIN)),
    "lora": (ADAPTED, Case(family="gpt_oss", mesh=PLAIN)),
    "lora, balanced": (ADAPTED, Case(mesh=PLAIN, fields=BALANCED)),
    "lora, recomputed": (ADAPTED, Case(mesh=PLAIN, fields={"chunks": {"tokens": 4, "recompute": True}})),
    "round trip": (round_trip, Case(mesh=PLAIN)),
    "resume": (resume, Case(mesh=PLAIN)),
    "resume, ep 2": (resume, Case(mesh=MESHES["fsdp 4, ep 2"])),
    "indivisible": (indivisible, Case(mesh=PLAIN, changes={"num_experts": 6})),
}


@functools.cache
def all_results() -> dict[str, list[Any]]:
    jobs = {
        **{name: (train, case) for name, case in {**TRAIN, **THEIR_TRAIN}.items()},
        **{name: (generate, case) for name, case in GENERATE.items()},
        "generate in rounds": (generate_in_rounds, Case(mesh=PLAIN)),
        **OTHER,
    }
    return run_checks({name: functools.partial(job, case) for name, (job, case) in jobs.items()}, RANKS)


def results(name: str) -> list[Any]:
    return require(all_results()[name])


def real_and_padding(mesh: Mesh) -> tuple[int, int]:
    """Rows of the batches in use, over all layers: tokens, and what is none."""
    batches = BATCHES[: mesh.fsdp]
    real = sum(batch.num_real for batch in batches)
    return LAYERS * real, LAYERS * (sum(batch.attention_mask.numel() for batch in batches) - real)


@pytest.mark.parametrize("name", TRAIN)
def test_loss_and_gradients_are_those_of_the_unsharded_model(name: str) -> None:
    case = TRAIN[name]
    real, padding = real_and_padding(case.mesh)
    # Ranks of one expert-parallel group sum what they saw; with several groups each sees its part.
    groups = RANKS // case.mesh.ep
    seen = results(name)
    for result in seen:
        assert result["loss"] < (1e-5 if case.dtype == torch.float32 else 1e-3)
        assert result["gradients"] < (1e-4 if case.dtype == torch.float32 else 0.05)
    firsts = [seen[group * case.mesh.ep] for group in range(groups)]
    assert sum(result["skipped"] for result in firsts) == padding, "a recomputation counts nothing"
    assert sum(result["slots"] for result in firsts) == real * TOP_K
    assert all(bool(result["fetches"]) == ("balance" in case.fields) for result in seen)


@pytest.mark.parametrize("name", THEIR_TRAIN)
def test_their_all_to_all_gives_the_same(name: str) -> None:
    """So it is the model's mathematics that is compared with above, and not a difference of ours from theirs."""
    for result in results(name):
        assert result["loss"] < 1e-5
        assert result["gradients"] < 1e-4


def test_sizes_are_agreed_on_once_per_forward() -> None:
    for name in ("allgather", "in chunks, fsdp 4, ep 4", "in chunks, allgather"):
        assert [result["agreements"] for result in results(name)] == [RANKS] * RANKS
    assert [result["agreements"] for result in results("qwen3_moe")] == [0] * RANKS


@pytest.mark.parametrize("name", [*GENERATE, "generate in rounds"])
def test_tokens_are_those_of_the_unsharded_model(name: str) -> None:
    for got, wanted in results(name):
        assert got == wanted


def test_experts_function_on_ranks_that_hold_all_experts() -> None:
    real, padding = real_and_padding(PLAIN)
    for result in results("function"):
        assert result["gradients"] < 1e-4
        assert result["skipped"] == padding
        assert result["slots"] == real * TOP_K


@pytest.mark.parametrize("name", [name for name in OTHER if name.startswith("lora")])
def test_adapters_on_stacked_experts_train_as_without_expert_parallelism(name: str) -> None:
    for result in results(name):
        assert result["gradients"] < 1e-4
        assert bool(result["fetches"]) == (name == "lora, balanced")


def test_weights_and_their_names_stay_as_they_are() -> None:
    assert results("round trip") == [{"keys": True, "difference": 0.0}] * RANKS


def test_experts_that_do_not_divide_are_refused() -> None:
    for text in results("indivisible"):
        assert text.startswith("Cannot evenly shard 6 experts across 4 expert-parallel ranks")  # by transformers
        assert "num_experts (6) must be divisible by ep_size (4)" in text


@pytest.mark.parametrize("name", ["resume", "resume, ep 2"])
def test_a_run_resumes_from_a_checkpoint_of_torch_although_trainer_refuses_to(name: str) -> None:
    for found in results(name):
        assert found["resumed"] == found["unbroken"]
        assert "Resuming is not supported for models sharded at load time" in found["refused"]
