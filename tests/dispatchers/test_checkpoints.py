"""The recipe of docs/training.md: saved under one ep_size and backend, loaded under others, on real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from moe_dispatch import DispatcherConfig
from moe_dispatch_testing import run_processes
from tests.pages import run_page

TIMEOUT = timedelta(seconds=60)
RANKS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 16, 8, 8, 2
# Each stage loads what the one before saved.
STAGES = ((4, "alltoall"), (2, "allgather"), (1, "local"), (4, "allgather"))
EMULATED: tuple[Any, ...] = ({"name": "deepep", "emulate": True}, {"name": "hybridep", "emulate": True})


def recipe() -> Any:
    """What the page's code defines."""
    return SimpleNamespace(**run_page("training.md"))


def config(backend: Any, **fields: Any) -> DispatcherConfig:
    return DispatcherConfig(
        **{"backend": backend, "num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, **fields}
    )


def mesh_of(ep_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // ep_size, ep_size), mesh_dim_names=("copies", "ep"))


def trainer(ep_size: int, backend: Any, *, seed: int = 0, **fields: Any) -> tuple[Any, Any, DeviceMesh]:
    """A model and its optimizer; another seed, other weights."""
    torch.manual_seed(seed)
    mesh = mesh_of(ep_size)
    model = recipe().MoE(config(backend, **fields), INNER, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), mesh


def step(model: Any, optimizer: Any, mesh: DeviceMesh, rank: int) -> Tensor:
    """One step on this rank's tokens; the output before it."""
    x = torch.randn(2, 3 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
    y: Tensor = model(x)
    y.square().sum().backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad.to_local(), group=mesh["copies"].get_group())
        else:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def whole(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Every weight and moment, unsharded."""
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in found.items()}


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert list(got) == list(want)
    return {name: (got[name] - tensor).abs().max().item() for name, tensor in want.items()}


def through_all_stages(rank: int, folder: str) -> list[dict[str, dict[str, float]]]:
    """By stage: how far weights and moments are from those saved, and from never having stopped a step later."""
    saved = Path(folder)
    model, optimizer, mesh = trainer(*STAGES[0])
    step(model, optimizer, mesh, rank)
    recipe().save(saved / "0", model, optimizer)
    before = whole(model, optimizer)
    output = step(model, optimizer, mesh, rank)
    after = whole(model, optimizer)
    found = []
    for number, (ep_size, backend) in enumerate(STAGES[1:], start=1):
        model, optimizer, mesh = trainer(ep_size, backend, seed=number)
        recipe().load(saved / f"{number - 1}", model, optimizer)
        loaded = differences(whole(model, optimizer), before)
        recipe().save(saved / f"{number}", model, optimizer)
        loaded["output"] = (step(model, optimizer, mesh, rank) - output).abs().max().item()
        found.append({"loaded": loaded, "continued": differences(whole(model, optimizer), after)})
    return found


def keys_by_backend(rank: int) -> list[list[str]]:
    """Of the model, by backend; the vendors' libraries are emulated."""
    backends = ("alltoall", "allgather", *EMULATED)
    return [list(trainer(4, backend, hidden_size=256)[0].state_dict()) for backend in backends]


def refusals(rank: int, folder: str) -> list[str]:
    """What is said to experts that ep_size does not divide, and to a checkpoint of another number of experts."""
    model, optimizer, _ = trainer(4, "alltoall")
    recipe().save(folder, model, optimizer)
    larger, its_optimizer, _ = trainer(4, "alltoall", num_experts=2 * EXPERTS)
    said = []
    for refused in (
        lambda: trainer(4, "alltoall", num_experts=6),
        lambda: recipe().load(folder, larger, its_optimizer),
    ):
        try:
            refused()
            said.append("nothing")
        except (ValueError, dcp.api.CheckpointException) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def plain_tensors(rank: int, folder: str) -> tuple[float, float]:
    """How far the experts of a rank are from those saved: as they are, and as shards."""
    mesh, shards = mesh_of(4), recipe().as_shards
    mine = torch.full((2, 3), float(rank))
    wraps: dict[str, Callable[[dict[str, Tensor]], Any]] = {"plain": dict, "shards": lambda d: shards(d, ["up"], mesh)}
    losses = []
    for name, wrap in wraps.items():
        dcp.save(wrap({"up": mine.clone()}), checkpoint_id=f"{folder}/{name}")
        found = {"up": torch.zeros(2, 3)}
        dcp.load(wrap(found), checkpoint_id=f"{folder}/{name}")
        losses.append((found["up"] - mine).abs().max().item())
    return losses[0], losses[1]


def all_of_it(rank: int, folder: str) -> dict[str, Any]:
    """Processes start once for all tests."""
    return {
        "stages": through_all_stages(rank, f"{folder}/stages"),
        "keys": keys_by_backend(rank),
        "refusals": refusals(rank, f"{folder}/refusals"),
        "plain": plain_tensors(rank, folder),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(all_of_it, RANKS, str(tmp_path_factory.mktemp("checkpoints")), timeout=TIMEOUT)


@pytest.mark.parametrize(
    "stage", range(1, len(STAGES)), ids=lambda stage: f"ep {STAGES[stage - 1][0]}-{STAGES[stage][0]}"
)
def test_weights_and_moments_come_back_under_another_ep_size_and_backend(
    results: list[dict[str, Any]], stage: int
) -> None:
    for rank, found in enumerate(results):
        loaded, continued = (found["stages"][stage - 1][part] for part in ("loaded", "continued"))
        assert {"up", "down", "router.weight", "up.exp_avg", "down.exp_avg_sq", "up.step"} <= set(loaded)
        output = loaded.pop("output")
        assert set(loaded.values()) == {0.0}, f"rank {rank}: {loaded}"
        assert output <= 1e-5
        assert max(continued.values()) <= 1e-5, f"rank {rank}: {continued}"


def test_no_backend_has_state_dict_keys_of_its_own(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["keys"] == [["up", "down", "router.weight"]] * 4


def test_what_does_not_divide_or_fit_is_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    for found in results:
        undivided, unfit = found["refusals"]
        assert re.search(
            r"ConfigError: num_experts \(6\) must be divisible by ep_size \(4\)\. Use 8 experts", undivided
        )
        assert re.search(r"CheckpointException.*\[8, 16, 8\].*\[16, 16, 8\]", unfit, re.DOTALL)


def test_plain_tensors_are_saved_whole_only_as_shards(results: list[dict[str, Any]]) -> None:
    assert [found["plain"][1] for found in results] == [0.0] * RANKS
    assert any(found["plain"][0] for found in results), "the page warns of what does not happen"
