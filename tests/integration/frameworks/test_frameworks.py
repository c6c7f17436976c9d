"""Trainers with their real functions: each builds a model for two ranks, and trains it as before."""

from __future__ import annotations

import ast
import functools
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest

from moe_dispatch_testing import run_processes
from tests.integration.frameworks import automodel, training
from tests.integration.frameworks.sources import FOLDER, function_in, needs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core: install moe-dispatch[megatron]"),
]
TIMEOUT = timedelta(seconds=120)


@functools.cache
def built() -> list[dict[str, Any]]:
    present = [package for package in training.CHECKS if (FOLDER / package.partition(",")[0]).is_dir()]
    return run_processes(training.run_checks, training.RANKS, present, timeout=TIMEOUT)


@pytest.mark.parametrize("check", [pytest.param(name, marks=needs(name.partition(",")[0])) for name in training.CHECKS])
def test_a_model_of_the_trainer_trains_as_before(check: str) -> None:
    for found in built():
        assert isinstance(found[check], float), found[check]
        assert found[check] < 1e-5


@needs("nemo_automodel")
def test_experts_of_automodel_train() -> None:
    for found in run_processes(automodel.trained, automodel.RANKS, timeout=TIMEOUT):
        for name, error, padding_is_zero in found.values():
            assert name == "alltoall"
            assert error < 1.6e-2  # rows and experts are bfloat16
            assert padding_is_zero


# Read, as these modules do not import here: the name that is wrapped is the one that is called.
CALLS = {
    ("areal", "areal/engine/megatron_engine.py"): "make_mcore_model",
    ("verl", "verl/workers/engine/megatron/transformer_impl.py"): "make_megatron_module",
    ("slime", "slime/backends/megatron_utils/initialize.py"): "custom_init",
    ("swift", "swift/megatron/model/utils.py"): "_get_megatron_bridge_model",
}


@pytest.mark.parametrize(
    ("path", "name"), [pytest.param(path, name, marks=needs(package)) for (package, path), name in CALLS.items()]
)
def test_the_trainer_calls_the_function_by_its_name(path: str, name: str) -> None:
    tree = ast.parse((FOLDER / path).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert any(isinstance(call.func, ast.Name) and call.func.id == name for call in calls)


@needs("verl")
def test_verl_loads_entry_points_of_its_group() -> None:
    assert '_entry_points(group="verl.plugins")' in (FOLDER / "verl/__init__.py").read_text()


@needs("nemo_automodel")
def test_automodel_has_the_class_that_is_replaced() -> None:
    theirs = function_in("nemo_automodel/components/moe/megatron/token_dispatcher.py", "MoEFlexTokenDispatcher")
    methods = {node.name for node in theirs.body if isinstance(node, ast.FunctionDef)}
    assert {"token_permutation2", "token_unpermutation", "get_pipeline_runtime_initializers"} <= methods
