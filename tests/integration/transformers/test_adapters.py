"""Adapters of PEFT on models whose experts run through us: they train, and are saved, as without expert parallelism."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

from tests.integration.jobs import require, run_checks
from tests.integration.transformers.adapting import Adapted, balanced, refused, saved, set_up, trained

RANKS = 4
ON_ATTENTION = Adapted(parameters=())
ON_EXPERTS = Adapted(modules=())
TRAINED = {
    "attention": ON_ATTENTION,
    "attention, balanced": balanced(ON_ATTENTION),
    "attention, experts sharded by transformers": Adapted(parameters=(), sharded=True),
    "attention, sharded, balanced": balanced(Adapted(parameters=(), sharded=True)),
    "attention, DoRA": Adapted(parameters=(), options={"use_dora": True}),
    "experts": ON_EXPERTS,
    "experts, balanced": balanced(ON_EXPERTS),
    "both, rsLoRA": Adapted(options={"use_rslora": True}),
    "both, rsLoRA, balanced": balanced(Adapted(options={"use_rslora": True})),
    "both, mixtral": Adapted(family="mixtral"),
    "both, deepseek_v3": Adapted(family="deepseek_v3", modules=("q_a_proj", "kv_b_proj")),
}
REFUSED = {
    "DoRA on experts": Adapted(options={"use_dora": True}),
    "experts that transformers shards": Adapted(sharded=True),
}


@functools.cache
def all_results() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        checks: dict[str, Any] = {name: functools.partial(trained, case) for name, case in TRAINED.items()}
        checks |= {name: functools.partial(refused, case) for name, case in REFUSED.items()}
        checks |= {
            "set up": functools.partial(set_up, TRAINED["attention, experts sharded by transformers"]),
            "saved": functools.partial(saved, Adapted(), f"{folder}/plain"),
            "saved, balanced": functools.partial(saved, balanced(Adapted()), f"{folder}/balanced"),
        }
        return run_checks(checks, RANKS)


@pytest.mark.parametrize("name", TRAINED)
def test_adapters_train_as_without_expert_parallelism(name: str) -> None:
    case = TRAINED[name]
    for result in require(all_results()[name]):
        assert result["loss"] < 1e-5
        assert result["gradients"] < 1e-4
        assert all(".lora_" in trained for trained in result["names"])
        assert any(".experts." in trained for trained in result["names"]) == bool(case.parameters)


@pytest.mark.parametrize("name", [name for name in TRAINED if "balanced" in name])
def test_frozen_experts_send_no_gradients_of_their_copies(name: str) -> None:
    for result in require(all_results()[name]):
        assert result["collectives"].get("weights", 0) > 0, "there must be copies"
        assert bool(result["collectives"].get("weights.backward", 0)) == bool(TRAINED[name].parameters)


@pytest.mark.parametrize("name", ["saved", "saved, balanced"])
def test_saved_adapters_load_on_another_number_of_ranks(name: str) -> None:
    results = require(all_results()[name])
    assert max(max(apart["pairs"], apart["one process"]) for apart in results) < 1e-5
    assert max(apart["untrained"] for apart in results) > 1e-2


def test_adapters_beside_sharded_experts_start_alike_and_are_averaged() -> None:
    assert max(require(all_results()["set up"])) < 1e-4


def test_what_cannot_work_is_refused() -> None:
    for text in require(all_results()["DoRA on experts"]):
        assert "ParamWrapper does not work with use_dora=True" in text  # by PEFT
    for text in require(all_results()["experts that transformers shards"]):
        assert "ConfigError" in text
