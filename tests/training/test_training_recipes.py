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
from torch import Tensor, nn

from moe_dispatch import DispatcherConfig
from moe_dispatch.training import PerExpert
from moe_dispatch_testing import run_processes
from tests.pages import relative
from tests.training.recipes import (
    HIDDEN,
    RECIPES,
    TOP_K,
    TWO_RANKS,
    UNUSED,
    AuxiliaryModel,
    Make,
    Model,
    Run,
    dense_step,
    of_all_stages,
    with_adapters,
    with_lists,
    world,
)

EXPERTS = 8
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
CELLS = ("start", "gradients", "norm", "infinite norm", "step", "checkpoint")


def config_for(experts: int) -> DispatcherConfig:
    return DispatcherConfig(backend="alltoall", num_experts=experts, top_k=TOP_K, hidden_size=HIDDEN)


def moments_of(run: Run, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every weight and moment, gathered."""
    found = of_all_stages(run.whole())
    for key in MOMENTS:
        of_key = of_all_stages(run.whole(functools.partial(moment, optimizers, key)))
        found |= {f"{name}.{key}": tensor for name, tensor in of_key.items()}
    return found


def moment(optimizers: list[torch.optim.Optimizer], key: str, parameter: Tensor) -> Tensor | None:
    states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
    return next((state[key] for state in states if key in state), None)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices and for each expert of a stack, AdamW for the rest."""
    everything = [*model.parameters()]
    stacks = PerExpert([p for p in everything if p.dim() == 3], torch.optim.Muon, lr=0.01)
    matrices = torch.optim.Muon([p for p in everything if p.dim() == 2], lr=0.01)
    return [stacks, matrices, torch.optim.AdamW([p for p in everything if p.dim() == 1], lr=0.01)]


def dense_muon_step(model: nn.Module) -> dict[str, Tensor]:
    """The same with torch's classes alone: each expert is a parameter of its own. Returns every moment."""
    named = dict(model.named_parameters())
    stacks = {name: parameter for name, parameter in named.items() if parameter.dim() == 3}
    each = {name: [nn.Parameter(expert) for expert in stack.data] for name, stack in stacks.items()}
    for name, experts in each.items():
        for expert, gradient in zip(experts, torch.as_tensor(named[name].grad), strict=True):
            expert.grad = gradient
    of_stacks = [expert for experts in each.values() for expert in experts]
    muon = torch.optim.Muon([*of_stacks, *(p for p in named.values() if p.dim() == 2)], lr=0.01)
    adam = torch.optim.AdamW([p for p in named.values() if p.dim() == 1], lr=0.01)
    muon.step()
    adam.step()
    of_each = {
        f"{name}.momentum_buffer": torch.stack([muon.state[expert]["momentum_buffer"] for expert in experts])
        for name, experts in each.items()
    }
    return of_each | dense_moments(model, muon, adam)


def dense_adamw_step(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    return dense_moments(model, optimizer)


def dense_moments(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": found
        for name, parameter in model.named_parameters()
        for key in MOMENTS
        if (found := moment([*optimizers], key, parameter)) is not None
    }


OPTIMIZERS: dict[Any, tuple[Any, Any]] = {"AdamW": (adamw, dense_adamw_step), "Muon": (muon, dense_muon_step)}


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


def cells(name: str, experts: int, folder: str, make: Make, kind: str) -> dict[str, Any]:
    """How far the recipe is from one process, by cell."""
    torch.manual_seed(10 + dist.get_rank())
    config = config_for(experts)
    run = (RECIPES | UNUSED | TWO_RANKS)[name](config, make=make)
    optimizers = OPTIMIZERS[kind][0](run.model)
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
    moments = OPTIMIZERS[kind][1](dense)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    after = of_all_stages(run.whole())
    wants = {name: p.detach() for name, p in dense.named_parameters() if name in after}
    if kind == "Muon":  # torch's steps a sharded matrix with products in bfloat16, which round otherwise
        matrices = {name for name in wants if wants[name].dim() == 2}
        assert far({name: after[name] for name in matrices}, {name: wants.pop(name) for name in matrices}) < 2e-3
    saved = moments_of(run, optimizers)
    moments = {name: tensor for name, tensor in moments.items() if name.rpartition(".")[0] in after}
    found["step"] = far({name: after[name] for name in wants}, wants) + far(
        {name: saved[name] for name in moments}, moments
    )
    dcp.save({"training": run.setup.state(run.wrapped, optimizers)}, checkpoint_id=folder)
    return found | {"saved": saved}


def loaded(name: str, experts: int, folder: str, saved: dict[str, Tensor], make: Make, kind: str) -> float:
    """How far another recipe, with new weights, is from what it loads."""
    torch.manual_seed(50 + dist.get_rank())
    run = (RECIPES | UNUSED | TWO_RANKS)[name](config_for(experts), make=make)
    optimizers = OPTIMIZERS[kind][0](run.model)
    dcp.load({"training": run.setup.state(run.wrapped, optimizers)}, checkpoint_id=folder)
    found = moments_of(run, optimizers)
    assert found.keys() >= saved.keys()
    never = torch.zeros(())  # the moments of a parameter that has had no gradient
    return max((found[name] - saved.get(name, never)).abs().max().item() for name in found)


def table(rank: int, names: list[str], experts: int, folder: str, make: Make, kind: str) -> dict[str, dict[str, Any]]:
    found = {name: cells(name, experts, f"{folder}/{number}", make, kind) for number, name in enumerate(names)}
    for number, name in enumerate(names):
        other = names[number - 1]
        saved = found[other]["saved"]
        found[name]["checkpoint"] = loaded(name, experts, f"{folder}/{(number - 1) % len(names)}", saved, make, kind)
    for of_name in found.values():
        del of_name["saved"]
    return found


Found = list[dict[str, dict[str, Any]]]  # by rank
QUICK = ["ddp, 2 x 2", "fsdp, 2 x 2", "tp, spread", "pp x ep"]
SLOW = [name for name in RECIPES if name not in QUICK]
UNEVEN = ["fsdp, 4 x 1", "fsdp, 2 x 2", "ddp, 2 x 2", "ddp, 4 x 1", "hsdp, 2 x 2", "one fully_shard, 2 x 2"]
OTHERS: dict[str, tuple[Make, str, list[str]]] = {  # models and optimizers, and the recipes that they take
    "Muon": (Model, "Muon", ["ddp, 2 x 2", "fsdp, 2 x 2", "fsdp, 4 x 1", "pp x ep x fsdp"]),
    "experts in a list": (with_lists, "AdamW", ["by hand, 2 x 2", "fsdp, 4 x 1", "ddp, 1 x 4", "tp, spread"]),
    "auxiliary loss": (AuxiliaryModel, "AdamW", ["ddp, 2 x 2", *(name for name in RECIPES if name.startswith("pp"))]),
    "adapters": (with_adapters, "AdamW", [name for name in RECIPES if name != "one fully_shard, 2 x 2"]),
}


def on_ranks(
    names: list[str], experts: int, folder: Path, make: Make = Model, kind: str = "AdamW", ranks: int = 4
) -> Found:
    return run_processes(table, ranks, names, experts, str(folder), make, kind, timeout=timedelta(seconds=240))


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


@pytest.fixture(scope="module", params=(2, 6, 10), ids=lambda experts: f"{experts} experts")
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_ranks(UNEVEN, request.param, tmp_path_factory.mktemp("uneven"))


@pytest.fixture(scope="module", params=(2, 6, 10), ids=lambda experts: f"{experts} experts")
def one_copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """On two ranks, which must divide the number of experts."""
    return on_ranks(["ddp, 1 x 2", "fsdp, 1 x 2"], request.param, tmp_path_factory.mktemp("one"), ranks=2)


@pytest.fixture(scope="module", params=OTHERS)
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    make, kind, names = OTHERS[request.param]
    if make is with_adapters:
        pytest.importorskip("peft", reason="needs peft")
    return on_ranks(names, EXPERTS, tmp_path_factory.mktemp("others"), make, kind)


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


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_so_does_one_copy_of_any_number_of_experts(one_copy: Found, cell: str) -> None:
    for name in one_copy[0]:
        hold(one_copy, name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_so_do_other_models_and_optimizers(others: Found, cell: str) -> None:
    for name in others[0]:
        hold(others, name, cell)


def test_adapters_of_parts_and_of_all_experts_load_each_other(tmp_path: Path) -> None:
    """PEFT's factor B has the experts last, so a part of a checkpoint is no slice of it."""
    pytest.importorskip("peft", reason="needs peft")
    found = on_ranks(["ddp, 1 x 2", "ddp, 2 x 2"], EXPERTS, tmp_path, with_adapters, ranks=2)
    for name in found[0]:
        hold(found, name, "checkpoint")
