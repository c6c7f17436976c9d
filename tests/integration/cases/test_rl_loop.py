"""The loop of examples/rl_loop.py on 2 and 4 ranks: its gradients are those of one dense process, however it is cut."""

from __future__ import annotations

import functools
import os
import runpy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from moe_dispatch import BSHD
from moe_dispatch.integrations.transformers import RoutingReplay, dispatchers_of
from moe_dispatch.replay import RoutingTable
from moe_dispatch_testing import run_processes
from tests.pages import relative

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl_loop.py"
BUDGETS = [{"budget": 20}, {"budget": 10**6}, {"budget": 64, "old_budget": 20}]
LAYERS = 2


@functools.cache
def page() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor()
    return found.detach().clone()


def rank_body(rank: int, backend: str) -> dict[str, Any]:
    """One rollout, its gradients with each budget, and then two steps of the whole loop."""
    names = page()
    variables = mock.patch.dict(os.environ, {"MOE_DISPATCH_BACKEND": backend})
    with variables, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, _ = names["build"]()
        rollout = names["sample"](model, names["prompts_of"](rank, 0), seed=rank)
        gains = {name: names["reward"](tokens[rollout.prompts[name] :]) for name, tokens in rollout.tokens.items()}
        layer = next(iter(dispatchers_of(model).values()))
        found, before = [], layer.metrics()
        for budgets in BUDGETS:
            loss = names["train"](model, rollout, gains, **budgets)
            found.append((loss, {name: whole(weight.grad) for name, weight in model.named_parameters()}))
            model.zero_grad()
        metrics = layer.metrics()
        for dispatcher in dispatchers_of(model).values():
            dispatcher.close()
        seen: list[float] = []
        names["loop"](2, seen=lambda model, rollout, advantages, loss: seen.append(loss))
    counted = {label: count - before.collectives.get(label, 0) for label, count in metrics.collectives.items()}
    return {
        "tokens": rollout.tokens,
        "prompts": rollout.prompts,
        "ids": {name: rollout.table.entries(name) for name in rollout.tokens},
        "gains": gains,
        "found": found,
        "dispatches": metrics.dispatches - before.dispatches,
        "counts": counted.get("counts"),
        "drift": metrics.slots_drifted,
        "losses": seen,
        "warned": [str(one.message) for one in warned if "moe_dispatch" in str(one.message)],
    }


CASES = [(2, "alltoall"), (4, "alltoall"), (2, "allgather")]


@functools.cache
def results(size: int, backend: str) -> list[dict[str, Any]]:
    return run_processes(functools.partial(rank_body, backend=backend), size, timeout=timedelta(seconds=300))


def dense(ranks: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process without this library's experts, one sequence after the other."""
    model = page()["dense_model"]()
    model.set_experts_implementation("eager")
    replay, total = RoutingReplay(model), 0.0
    generated = sum(len(ids) - of["prompts"][name] for of in ranks for name, ids in of["tokens"].items())
    for of in ranks:
        for name, tokens in of["tokens"].items():
            ids = of["ids"][name].masked_fill(of["ids"][name] < 0, -1)
            assert (ids[:-1] >= 0).all()
            assert (ids[-1] == -1).all()  # the router chooses for the last token, of which nothing is asked
            cut = RoutingTable({name: ids}, num_experts=page()["EXPERTS"]).cut(BSHD(), [name], like=(1, len(ids), 32))
            with replay.micro_batch(cut):
                logits = model(input_ids=tokens[None]).logits[0]
            prompt = of["prompts"][name]
            new = logits[prompt - 1 : -1].log_softmax(1).gather(1, tokens[prompt:, None])
            # The ratio of a policy to itself is 1, and the gradient of the clipped loss is that of the log-probability.
            (-of["gains"][name] * new.sum() / generated).backward()
            total -= float(of["gains"][name]) * len(new) / generated
    return total, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("size", "backend"), CASES)
def test_gradients_are_those_of_one_dense_process(size: int, backend: str) -> None:
    ranks = results(size, backend)
    assert [len(of["tokens"]) for of in ranks] == [*range(1, size + 1)]  # unequal batches
    assert [of["warned"] for of in ranks] == [[]] * size  # FSDP may manage a stack of the experts of all ranks
    loss, wanted = dense(ranks)
    for number in range(len(BUDGETS)):
        assert sum(of["found"][number][0] for of in ranks) == pytest.approx(loss, abs=1e-6)
        for of in ranks:
            gradients = of["found"][number][1]
            assert gradients.keys() == wanted.keys()
            assert max(relative(gradients[name], wanted[name]) for name in wanted) < 1e-5


@pytest.mark.parametrize(("size", "backend"), CASES)
def test_layers_are_recomputed_on_the_routes_of_their_forwards(size: int, backend: str) -> None:
    """A dispatch of its own would count as one, and exchange counts."""
    ranks = results(size, backend)

    def forwards(budget: int) -> int:
        return max(len(page()["cut"]([*map(len, of["tokens"].values())], budget)) for of in ranks)

    wanted = sum(forwards(of["budget"]) + forwards(of.get("old_budget", of["budget"])) for of in BUDGETS)
    for of in ranks:
        assert of["dispatches"] == LAYERS * wanted
        if backend == "alltoall":
            assert of["counts"] == of["dispatches"]
        assert len(of["losses"]) == 2
        assert sum(of["drift"].values()) == 0  # the trainer's router chooses what the rollout's has chosen


def test_cuts_keep_to_the_budget_and_lose_nothing() -> None:
    lengths = [40, 3, 17, 25, 9, 60, 2, 31]
    for budget in (1, 20, 64, 100, 1000):
        batches = page()["cut"](lengths, budget)
        assert [index for batch in batches for index in batch] == list(range(8))
        assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)
    assert page()["cut"]([], 64) == []
