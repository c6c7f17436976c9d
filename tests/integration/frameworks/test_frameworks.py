"""Trainers with their real functions: each builds a model for two ranks, and trains it as before."""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dispatch_testing import run_processes
from tests.integration.frameworks import automodel, training
from tests.integration.frameworks.sources import FOLDER, function_in, needs
from tests.integration.jobs import TIMEOUT, require, run_checks
from tests.integration.megatron_core.layer import BALANCED
from tests.integration.transformers.models import LAYERS
from tests.replay.samples import SAMPLES_OF_VERL

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core: install moe-dispatch[megatron]"),
]


@functools.cache
def built() -> dict[str, list[Any]]:
    present = {name: check for name, check in training.CHECKS.items() if (FOLDER / name.partition(",")[0]).is_dir()}
    return run_checks(present, training.RANKS, training.in_megatron)


@pytest.mark.parametrize("check", [pytest.param(name, marks=needs(name.partition(",")[0])) for name in training.CHECKS])
def test_a_model_of_the_trainer_trains_as_before(check: str) -> None:
    assert max(require(built()[check])) < 1e-5


@needs("nemo_automodel")
def test_what_automodel_cannot_have_is_refused() -> None:
    run_processes(automodel.refused, 2, timeout=TIMEOUT)


@needs("nemo_automodel")
def test_automodel_recomputes_on_kept_routes() -> None:
    """Its full checkpoints. On ``alltoall`` the policies of its others decide, and they save no dispatch."""
    ways = {"none": None, "full": {"ignore_router": False}, "router saved": {}, "selective": {"selective": True}}
    for found in run_processes(automodel.checkpointed, 2, ways, timeout=TIMEOUT):
        for name, result in found.items():
            assert result["error"] < 1e-5
            assert result["keys"]
            assert result["dispatches"] == 2 * LAYERS * (1 if name.startswith(("none", "full")) else 2)


@needs("nemo_automodel")
@pytest.mark.parametrize("ranks", [2, 4])
def test_balanced_experts_of_automodel_train_as_on_one_rank(ranks: int) -> None:
    """Also with two micro-batches, a rank without tokens, experts without rows, and FSDP2 around the experts."""
    in_chunks = {"chunks": {"tokens": 4, "recompute": True}}
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "balanced": BALANCED, "in chunks": in_chunks}
    if ranks == automodel.EP:
        static = {"balance": "exact", "graph_safe": True, "max_tokens_per_rank": 20}
        kinds |= {"graph-safe": static, "balanced, in chunks": in_chunks | BALANCED}
    for found in run_processes(automodel.compared, ranks, kinds, timeout=TIMEOUT):
        for kind in kinds:
            for together in (False, True):
                result = found[f"{kind}, {together}"]
                # In chunks a GEMM has other sizes, so it rounds otherwise. This shows in small gradients of attention.
                assert result["error"] < (1e-5 if kind in ("plain", "balanced") else 3e-4)
                assert result["fired"] == {1 if together else 2}
                assert result["hooked"]
                assert result["keys"]
                assert bool(result["fetches"]) == ("balance" in kinds[kind])
        if ranks == automodel.EP:
            continue
        plain, balanced = found["plain, train"], found["balanced, train"]
        assert balanced["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert plain["losses"][-1] < 0.9 * plain["losses"][0]
        assert plain["imbalance"] > 1.9
        assert balanced["imbalance"] < 1.05
        assert found["offloaded"] < 1e-5
        assert min(found["lost"], found["twice"]) > 0.1  # gradients of copies that are lost or counted twice are seen


@needs("nemo_automodel")
def test_experts_of_automodel_read_no_masked_row_and_no_garbage() -> None:
    in_chunks = {"chunks": {"tokens": 2, "recompute": True}}
    kinds = {"plain": {}, "chunks": {"chunks": 2}, "recomputed": in_chunks, "balanced": BALANCED}
    for found in run_processes(automodel.of_experts, 2, kinds, timeout=TIMEOUT):
        assert max(found.values()) < 1e-6, found


# Read, as these modules do not import here: the name that is wrapped is the one that is called.
CALLS = {
    ("areal", "areal/engine/megatron_engine.py"): "make_mcore_model",
    ("areal", "areal/infra/rpc/guard/app.py"): "run_with_streaming_logs",
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


@needs("verl")
def test_verl_fills_missing_routes_with_zeros() -> None:
    """The samples of tests/replay hold the routes that verl writes, and none where verl replays none."""
    write = real_function("verl/experimental/agent_loop/agent_loop.py", "as_dict")
    replay_mask = real_function("verl/utils/megatron/router_replay_utils.py", "build_r3_replay_mask")
    for sample in SAMPLES_OF_VERL.values():
        fields = {
            "prompt_ids": [0] * sample.prompt,
            "response_ids": [0] * len(sample.generated),
            "response_mask": sample.generated.tolist(),
            "routed_experts": sample.ids.numpy(),
        }
        output = SimpleNamespace(model_dump=lambda *, fields=fields, **_: dict(fields), extra_fields={})
        ids, mask, _ = sample.padded(4, 5)
        assert torch.equal(write(output)["routed_experts"], ids[mask != 0])
        nested = torch.nested.as_nested_tensor([torch.zeros(int(mask.sum()))], layout=torch.jagged)
        replayed = replay_mask(nested, sample.generated.unsqueeze(0)).values()
        assert not (torch.arange(len(replayed)) < sample.routes)[~replayed].any()


def real_function(path: str, name: str) -> Any:
    """A function of a module that does not import here, run alone."""
    names: dict[str, Any] = {"torch": torch, "Any": Any}
    exec(compile(ast.Module([function_in(path, name)], type_ignores=[]), path, "exec"), names)
    return names[name]


@needs("nemo_automodel")
def test_automodel_has_the_class_that_is_replaced() -> None:
    theirs = function_in("nemo_automodel/components/moe/megatron/token_dispatcher.py", "MoEFlexTokenDispatcher")
    methods = {node.name for node in theirs.body if isinstance(node, ast.FunctionDef)}
    assert {"token_permutation2", "token_unpermutation", "get_pipeline_runtime_initializers"} <= methods
