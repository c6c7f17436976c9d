"""The variables MOE_DISPATCH_*: one rule in the constructor, in load and in the command, and no silent ones."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.config import _tell_unused
from moe_dispatch.errors import ConfigError

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64}
EXACT = {"name": "alltoall", "reduction": "exact"}
Caught = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def _told_again() -> None:
    _tell_unused.cache_clear()


def variables(monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    for name, text in texts.items():
        monkeypatch.setenv(f"MOE_DISPATCH_{name}", text)


@pytest.mark.parametrize("make", [DispatcherConfig, DispatcherConfig.load, DispatcherConfig.model_validate])
def test_a_variable_sets_what_the_program_leaves_out(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: Caught
) -> None:
    variables(monkeypatch, BACKEND="allgather", BALANCE="exact", BALANCE__BOUND="1.05", WATCHDOG="60", DEBUG="")
    config = make(SIZES) if make == DispatcherConfig.model_validate else make(**SIZES)
    assert config == DispatcherConfig.load(
        environment={}, backend="allgather", balance={"name": "exact", "bound": 1.05}, watchdog=60, **SIZES
    )
    assert not caplog.messages
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config


def test_auto_leaves_the_choice_to_the_variable(monkeypatch: pytest.MonkeyPatch, caplog: Caught) -> None:
    variables(monkeypatch, BACKEND="allgather")
    assert DispatcherConfig(backend="auto", **SIZES).backend == "allgather"
    assert DispatcherConfig(**SIZES).replace(backend="auto").backend == "auto"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("texts", "fields"),
    [
        ({"BACKEND": "alltoall"}, {"backend": EXACT}),
        ({"BACKEND": json.dumps(EXACT)}, {"backend": EXACT}),
        ({"BACKEND__REDUCTION": "exact"}, {"backend": EXACT}),
        ({"GRAPH_SAFE": "true", "MAX_TOKENS_PER_RANK": "4"}, {"graph_safe": {}, "max_tokens_per_rank": 4}),
        ({"CHUNKS": "4"}, {"chunks": {"tokens": 4, "recompute": True}}),
        ({"NUM_EXPERTS": "8"}, {}),
    ],
)
def test_a_variable_that_agrees_is_not_told(
    texts: dict[str, str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: Caught
) -> None:
    variables(monkeypatch, **texts)
    assert DispatcherConfig(**SIZES, **fields) == DispatcherConfig.load(environment={}, **SIZES, **fields)
    assert not caplog.messages


@pytest.mark.parametrize("make", [DispatcherConfig, DispatcherConfig.load])
@pytest.mark.parametrize(
    ("texts", "fields", "told"),
    [
        (
            {"BACKEND": "allgather"},
            {"backend": "local"},
            "BACKEND='allgather' is not used: the program sets backend to",
        ),
        ({"BACKEND__REDUCTION": "exact"}, {"backend": "alltoall"}, "BACKEND__REDUCTION='exact' is not used"),
        ({"BALANCE": "exact"}, {"balance": None}, "BALANCE='exact' is not used: the program sets balance to None"),
        ({"GRAPH_SAFE": "true"}, {"graph_safe": False}, "GRAPH_SAFE='true' is not used"),
        ({"TOP_K__X": "1"}, {}, "TOP_K__X='1' is not used"),
        ({"ALGORITHM": "ring"}, {}, "ALGORITHM is not used: 'algorithm' is no field of DispatcherConfig"),
        ({"DISPATCHER": "ring"}, {}, "DISPATCHER is not used"),
    ],
)
def test_a_variable_that_is_not_used_is_told_once(
    make: Any,
    texts: dict[str, str],
    fields: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Caught,
) -> None:
    variables(monkeypatch, **texts)
    for _ in range(2):
        assert make(**SIZES, **fields) == DispatcherConfig.load(environment={}, **SIZES, **fields)
    assert len(caplog.messages) == 1
    assert told in caplog.messages[0]


def test_a_misspelled_variable_and_a_wrong_value_raise_in_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    variables(monkeypatch, DEBUG="perhaps")
    with pytest.raises(ConfigError, match=r"DispatcherConfig: keywords and MOE_DISPATCH_DEBUG: .*debug: .*boolean"):
        DispatcherConfig(**SIZES)
    variables(monkeypatch, BACKEN="local")
    with pytest.raises(
        ConfigError, match=r"DispatcherConfig: MOE_DISPATCH_BACKEN: no such field\. Did you mean .*ND\?"
    ):
        DispatcherConfig(**SIZES)


def test_a_file_stands_below_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Caught) -> None:
    file = tmp_path / "moe.json"
    file.write_text(json.dumps({**SIZES, "backend": "local", "debug": True}))
    variables(monkeypatch, BACKEND="allgather")
    config = DispatcherConfig.load(file)
    assert (config.backend, config.debug) == ("allgather", True)
    assert config.replace(backend="alltoall").backend == "alltoall"
    assert not caplog.messages
