"""Each recipe on four processes against one process in float64: start, gradients, norm, a step, and a checkpoint."""

from __future__ import annotations

import functools
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moe_dispatch import DispatcherConfig
from moe_dispatch_testing import run_processes
from tests.pages import relative
from tests.training.recipes import HIDDEN, RECIPES, TOP_K, UNUSED, Run, dense_step, of_all_stages, world

EXPERTS = 8
CELLS = ("start", "gradients", "norm", "infinite norm", "step", "checkpoint")


def config_for(experts: int) -> DispatcherConfig:
    return DispatcherConfig(backend="alltoall", num_experts=experts, top_k=TOP_K, hidden_size=HIDDEN)


def moments_of(run: Run, optimizer: Any) -> dict[str, Tensor]:
    """Every weight and moment, gathered."""
    found = of_all_stages(run.whole())
    for key in ("exp_avg", "exp_avg_sq"):
        of_key = of_all_stages(run.whole(functools.partial(moment, optimizer, key)))
        found |= {f"{name}.{key}": tensor for name, tensor in of_key.items()}
    return found


def moment(optimizer: torch.optim.Optimizer, key: str, parameter: Tensor) -> Tensor | None:
    found: Tensor | None = optimizer.state[parameter].get(key)
    return found


def equal_everywhere(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> float:
    """The largest difference between the ranks of a group."""
    largest = 0.0
    for tensor in tensors.values():
        first = tensor.clone()
        dist.broadcast(first, group_src=0, group=group)
        largest = max(largest, (first - tensor).abs().max().item())
    return largest


def far(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(relative(got[name], want[name]) for name in got)


def cells(name: str, experts: int, folder: str) -> dict[str, Any]:
    """How far the recipe is from one process, by cell."""
    torch.manual_seed(10 + dist.get_rank())
    config = config_for(experts)
    run = (RECIPES | UNUSED)[name](config)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    found: dict[str, Any] = {"start": equal_everywhere(run.whole(), run.alike)}
    dense = dense_step(run, config, of_all_stages(run.whole()))
    wants = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    run.backward()
    run.setup.reduce(run.wrapped)
    found["gradients"] = far(of_all_stages(run.whole(lambda p: p.grad)), wants)
    whole = torch.stack([grad.norm() for grad in wants.values()]).norm()
    largest = max(grad.abs().max().item() for grad in wants.values())
    norms = [run.setup.clip(run.wrapped, 1e9, kind, foreach=how) for kind in (2, math.inf) for how in (False, None)]
    assert norms[0].allclose(norms[1], rtol=1e-12)
    found["infinite norm"] = abs(norms[2].item() / largest - 1) + abs(norms[3].item() / largest - 1)
    norm = run.setup.clip(run.wrapped, whole.item() / 4)
    found["norm"] = relative(norm, whole) + equal_everywhere({"": norm}, world())
    torch.nn.utils.clip_grad_norm_(dense.parameters(), whole.item() / 4)
    torch.optim.AdamW(dense.parameters(), lr=0.01).step()
    optimizer.step()
    optimizer.zero_grad()
    after = of_all_stages(run.whole())
    found["step"] = far(after, {name: p.detach() for name, p in dense.named_parameters() if name in after})
    dcp.save({"training": run.setup.state(run.wrapped, optimizer)}, checkpoint_id=folder)
    return found | {"saved": moments_of(run, optimizer)}


def loaded(name: str, experts: int, folder: str, saved: dict[str, Tensor]) -> float:
    """How far another recipe, with new weights, is from what it loads."""
    torch.manual_seed(50 + dist.get_rank())
    run = (RECIPES | UNUSED)[name](config_for(experts))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    dcp.load({"training": run.setup.state(run.wrapped, optimizer)}, checkpoint_id=folder)
    found = moments_of(run, optimizer)
    assert found.keys() >= saved.keys()
    never = torch.zeros(())  # the moments of a parameter that has had no gradient
    return max((found[name] - saved.get(name, never)).abs().max().item() for name in found)


def table(rank: int, names: list[str], experts: int, folder: str) -> dict[str, dict[str, Any]]:
    found = {name: cells(name, experts, f"{folder}/{number}") for number, name in enumerate(names)}
    for number, name in enumerate(names):
        other = names[number - 1]
        saved = found[other]["saved"]
        found[name]["checkpoint"] = loaded(name, experts, f"{folder}/{(number - 1) % len(names)}", saved)
    for of_name in found.values():
        del of_name["saved"]
    return found


Found = list[dict[str, dict[str, Any]]]  # by rank
QUICK = ["ddp, 2 x 2", "fsdp, 2 x 2", "tp, spread", "pp x ep"]
SLOW = [name for name in RECIPES if name not in QUICK]
UNEVEN = {2: ["fsdp, 4 x 1", "fsdp, 2 x 2", "ddp, 2 x 2"], 6: ["fsdp, 4 x 1", "fsdp, 2 x 2"]}
UNEVEN[10] = [*UNEVEN[2], "one fully_shard, 2 x 2"]


def on_ranks(names: list[str], experts: int, folder: Path) -> Found:
    return run_processes(table, 4, names, experts, str(folder), timeout=timedelta(seconds=120))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_ranks(QUICK, EXPERTS, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("slow")
    return [
        first | second
        for first, second in zip(
            *(on_ranks(names, EXPERTS, folder / names[0]) for names in (SLOW, [*UNUSED])), strict=True
        )
    ]


@pytest.fixture(scope="module", params=UNEVEN, ids=lambda experts: f"{experts} experts")
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_ranks(UNEVEN[request.param], request.param, tmp_path_factory.mktemp("uneven"))


def hold(found: Found, name: str, cell: str) -> None:
    for rank, of_rank in enumerate(found):
        bound = 0.0 if cell in ("start", "checkpoint") else 1e-12
        assert of_rank[name][cell] <= bound, f"rank {rank}"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_has_the_numbers_of_one_process(quick: Found, name: str, cell: str) -> None:
    hold(quick, name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", [*SLOW, *UNUSED])
def test_other_recipes_have_the_numbers_of_one_process(slow: Found, name: str, cell: str) -> None:
    hold(slow, name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_so_do_uneven_and_empty_parts(uneven: Found, cell: str) -> None:
    for name in uneven[0]:
        hold(uneven, name, cell)
