"""The loop of examples/rl_loop.py on 4 ranks: its gradients do not depend on cuts, padding, ranks, backend."""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing import run_processes
from tests.pages import flat, relative

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl_loop.py"
RANKS = 4
Dealt = tuple[tuple[int, ...], ...]
UNEVENLY: Dealt = ((0, 1), (2,), (), (3, 4, 5, 6, 7))  # one rank has nothing at all
IN_PAIRS: Dealt = ((7, 0), (6, 1), (5, 2), (4, 3))
CUTS: list[tuple[Dealt, dict[str, int]]] = [
    (UNEVENLY, {"budget": 20}),
    (UNEVENLY, {"budget": 10**6}),
    (IN_PAIRS, {"budget": 64}),
    (IN_PAIRS, {"budget": 64, "logprob_budget": 20}),
]
BACKENDS = {
    "alltoall": {"MOE_DISPATCH_BACKEND": "alltoall"},
    "allgather": {"MOE_DISPATCH_BACKEND": "allgather"},
    "hybridep": {
        "MOE_DISPATCH_BACKEND": '{"name": "hybridep", "emulate": true}',
        "MOE_DISPATCH_WIRE": "bfloat16",
    },
}
Outcome = tuple[dict[str, Tensor], float, dict[str, Any]]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return names()


def names() -> dict[str, Any]:
    """The names of the example, and its rollouts."""
    found = runpy.run_path(str(EXAMPLE))
    return {**found, **dict(zip(("rollouts", "advantages"), found["draw"](), strict=True))}


def one_step(page: dict[str, Any], group: dist.ProcessGroup | None, mine: Sequence[int], **budgets: int) -> Outcome:
    """Gradients of one step on some of the rollouts, the loss and the report."""
    policy = page["Policy"](page["load_config"](), group)
    rollouts, gains = [page["rollouts"][index] for index in mine], page["advantages"][list(mine)]
    loss = page["step"](policy, rollouts, gains, group=group, **budgets)
    report = page["report"](policy)
    for moe in policy.moes:
        moe.close()
    return {name: weight.grad for name, weight in policy.named_parameters()}, loss, report


def rank_body(rank: int) -> list[Outcome]:
    """All cuts, and one of them on each backend, in one start of the processes."""
    page, found = names(), []
    for dealt, budgets in CUTS:
        found.append(one_step(page, dist.group.WORLD, dealt[rank], **budgets))
    for variables in BACKENDS.values():
        with mock.patch.dict(os.environ, variables):
            found.append(one_step(page, dist.group.WORLD, UNEVENLY[rank], budget=64))
    return found


@functools.cache
def results() -> list[list[Outcome]]:
    return run_processes(rank_body, RANKS, timeout=timedelta(seconds=180))


@functools.cache
def of_all() -> Outcome:
    """Of one rank that has all rollouts in one micro-batch."""
    return one_step(names(), None, range(8), budget=10**6)


def put_together(found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Experts of all ranks; the other weights, which every rank has alike."""
    for other in found[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in found[0].items() if not is_expert(name))
    return {
        name: torch.cat([one[name] for one in found]) if is_expert(name) else grad for name, grad in found[0].items()
    }


def is_expert(name: str) -> bool:
    return name.endswith("weight_EDD")


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(relative(got[name], want[name]) for name in want)


@pytest.mark.parametrize("cut", range(len(CUTS)), ids=lambda cut: str(CUTS[cut]))
def test_gradients_do_not_depend_on_how_micro_batches_are_cut(cut: int) -> None:
    found = [of_rank[cut] for of_rank in results()]
    want, loss, _ = of_all()
    assert worst(put_together([grads for grads, _, _ in found]), want) < 1e-12
    assert sum(part for _, part, _ in found) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(("backend", "tolerance"), [("alltoall", 1e-12), ("allgather", 1e-12), ("hybridep", 3e-2)])
def test_the_backend_is_switched_by_the_environment(page: dict[str, Any], backend: str, tolerance: float) -> None:
    found = [of_rank[len(CUTS) + list(BACKENDS).index(backend)] for of_rank in results()]
    # Through bfloat16 a token whose best experts are close may go to another: seen in one router's gradient alone.
    assert relative(flat(put_together([grads for grads, _, _ in found])), flat(of_all()[0])) < tolerance
    for _, _, report in found:
        assert report["backend"] == backend
    # One layer's channel is that of both: two layers, two passes, two experts a token. Padded ends went nowhere.
    rows = sum(map(len, page["rollouts"]))
    assert sum(report["tokens"] for _, _, report in found) == rows * 2 * 2 * 2
    assert sum(report["padding not sent"] for _, _, report in found) > 0


def test_old_and_new_policy_agree_before_the_first_update(page: dict[str, Any]) -> None:
    policy = page["Policy"](page["load_config"]())
    together = page["logprobs"](policy, page["rollouts"])
    apart = torch.cat([page["logprobs"](policy, [sequence]) for sequence in page["rollouts"]])
    assert (together - apart).abs().max() < 1e-12


def test_cuts_keep_to_the_budget_and_lose_nothing(page: dict[str, Any]) -> None:
    lengths = [40, 3, 17, 25, 9, 60, 2, 31]
    for budget in (1, 20, 64, 100, 1000):
        batches = page["cut"](lengths, budget)
        assert [index for batch in batches for index in batch] == list(range(8))
        assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)
    assert page["cut"]([], 64) == []
