"""Who holds what: the table of a model under each set-up on four processes, and what it refuses to guess."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch import Dispatcher, DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.training import Setup, Table
from moe_dispatch_testing import run_processes

RANKS, HIDDEN, INNER, EXPERTS = 4, 6, 3, 8
CONFIG = DispatcherConfig(num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN)


class Experts(Dispatcher):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(CONFIG, group)
        self.up = nn.Parameter(torch.zeros(EXPERTS // (group.size() if group else 1), HIDDEN, INNER))


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(group)


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def summary(table: Table) -> dict[str, str]:
    """Kind, a letter for each dimension, the dimensions to sum over, and the factor, of each parameter."""
    return {
        name: f"{held.kind} {''.join(held.word(dim)[0] for dim in table.axes.dims)} "
        f"{'+'.join(held.summed_over) or '-'} {held.scale:g}"
        for name, held in table.items()
    }


def refusal(setup: Setup, model: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        setup.table(model)
    return str(caught.value)


def recipes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = mesh_of(copies=2, ep=2)
    model = Layer(mesh["ep"].get_group())
    found["plain"] = summary(Setup(mesh).table(model))
    found["numbers"] = Setup(mesh).table(model)["experts.up"].experts
    for number in range(4):
        model.experts.up.data[number] = 4 * (rank % 2) + number
    found["whole"] = Setup(mesh).table(model).whole("experts.up")[:, 0, 0].tolist()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["experts.up"])
    found["ddp"] = summary(Setup(mesh).table(DistributedDataParallel(model)))
    turned = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("copies", "ep"))  # whose groups sort their ranks
    found["order"] = refusal(Setup(turned), Layer(turned["ep"].get_group()))

    def sharded(**options: Any) -> Layer:
        model = Layer(mesh["ep"].get_group())
        for part in (model.experts, model):
            fully_shard(part, mesh=mesh["copies"] if part is model.experts else mesh_of(world=4), **options)
        return model

    found["fsdp"] = summary(Setup(mesh).table(sharded()))
    tensor_parallel = mesh_of(ep=2, tp=2)
    setup = Setup(tensor_parallel, on_parts=["*"])
    model = Layer(tensor_parallel["ep"].get_group())
    found["tp"] = summary(setup.table(model))
    found["tp, router sees everything"] = summary(Setup(tensor_parallel, on_parts=["experts.*"]).table(model))
    found["tp, told nothing"] = refusal(Setup(tensor_parallel), model)
    found["tp, spread"] = summary(setup.table(Layer(dist.group.WORLD)))
    model.experts.up = cut(model.experts.up, tensor_parallel["tp"], 2)
    found["tp, parts of experts"] = summary(setup.table(model))
    stages = mesh_of(pp=2, ep=2)
    found["pp"] = summary(Setup(stages).table(Layer(stages["ep"].get_group())))
    world = Layer(dist.group.WORLD)
    found["one group"] = summary(Setup().table(world))
    found["no mesh"] = refusal(Setup(), Layer(mesh["ep"].get_group()))
    found["not of the mesh"] = refusal(Setup(mesh_of(ep=4)), Layer(mesh["copies"].get_group()))
    found["ddp over experts"] = refusal(Setup(mesh), DistributedDataParallel(Layer(mesh["ep"].get_group())))
    fully_shard(world, mesh=mesh_of(world=4))
    found["fsdp over experts"] = refusal(Setup(mesh_of(ep=4)), world)
    alone = mesh_of(copies=1, ep=4)
    half = Layer(alone["ep"].get_group())
    fully_shard(half.experts, mesh=alone["copies"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    half.experts.set_gradient_divide_factor(4)  # type: ignore[operator]
    found["divided twice"] = refusal(Setup(alone), half)
    return found


def cut(weight: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(dim)]))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(recipes, RANKS, timeout=timedelta(seconds=60))


ROUTER, UP = "router.weight", "experts.up"
SUMMARIES = {
    "plain": {ROUTER: "dense ss copies+ep 0.25", UP: "expert sp copies 0.25"},
    "ddp": {ROUTER: "dense ss - 1", UP: "expert sp copies 0.25"},
    "fsdp": {ROUTER: "dense pp - 1", UP: "expert pp - 0.5"},  # an average over two copies, of sums over two ranks
    "tp": {ROUTER: "dense ss ep+tp 0.5", UP: "expert ps tp 0.5"},
    "tp, router sees everything": {ROUTER: "dense ss ep+tp 0.25", UP: "expert ps tp 0.5"},
    "tp, spread": {ROUTER: "dense ss ep+tp 0.5", UP: "expert pp - 0.5"},
    "tp, parts of experts": {ROUTER: "dense ss ep+tp 0.5", UP: "expert pp - 0.5"},
    "pp": {ROUTER: "dense os ep 0.5", UP: "expert op - 0.5"},
    "one group": {ROUTER: "dense s ep 0.25", UP: "expert p - 0.25"},
}


@pytest.mark.parametrize("recipe", SUMMARIES)
def test_each_recipe_has_its_table(found: list[dict[str, Any]], recipe: str) -> None:
    for of_rank in found:
        assert of_rank[recipe] == SUMMARIES[recipe]


def test_a_stack_knows_its_experts_and_is_gathered_in_their_order(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["numbers"] == range(4 * (rank % 2), 4 * (rank % 2) + 4)
        assert of_rank["whole"] == list(range(EXPERTS))


REFUSALS = {
    "tp, told nothing": "Setup: ranks along ('tp',) compute one loss, and it cannot be told whether each of them sees "
    "a part of what router.weight computes",
    "order": "the group of the dispatcher of experts.up",
    "not of the mesh": "experts.up must be all ranks along some dimensions of the mesh, got ranks [",
    "no mesh": "Setup: pass the mesh of all 4 ranks. The group of a dispatcher has fewer",
    "ddp over experts": "Setup: DistributedDataParallel must not reduce experts.up over ranks that hold different "
    "experts, got the dimensions ['ep']",
    "fsdp over experts": "Setup: fully_shard must not reduce experts.up over ranks that hold different experts",
    "divided twice": "Setup: torch divides the gradient of experts.up twice",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_right_is_refused_on_all_ranks(found: list[dict[str, Any]], case: str) -> None:
    for of_rank in found:
        assert REFUSALS[case] in of_rank[case]


def test_one_process_holds_everything_and_the_table_prints() -> None:
    table = Setup().table(Layer(None))
    assert summary(table) == {ROUTER: "dense  - 1", UP: "expert  - 1"}
    assert str(table).splitlines() == [
        "parameter      kind    gradient",
        "router.weight  dense   as it is",
        "experts.up     expert  as it is",
    ]


class Unclear(Experts):
    """Experts beside other parameters below a dispatcher, and one more layer that is no expert."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.shared = nn.Linear(HIDDEN, INNER, bias=False)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.each = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(4))


def unclear(rank: int) -> dict[str, Any]:
    mesh = mesh_of(ep=2)
    group = mesh["ep"].get_group()
    model = nn.Sequential(Unclear(group))
    found: dict[str, Any] = {"shared": refusal(Setup(mesh), model)}
    table = Setup(mesh, kinds={"*.shared.*": "dense"}).table(model)
    found["told"] = summary(table)
    found["numbers"] = [held.experts for name, held in table.items() if ".each." in name]
    verbs = nn.ModuleDict({"dispatcher": Dispatcher(CONFIG, group), "experts": nn.ParameterList([torch.zeros(4, 2)])})
    found["beside"] = refusal(Setup(mesh), verbs)
    found["beside, told"] = summary(Setup(mesh, kinds={"experts.*": "expert"}).table(verbs))
    found["no dispatcher"] = refusal(Setup(mesh, kinds={"*": "expert"}), nn.Linear(2, 2))
    return found


def test_what_is_below_a_dispatcher_or_beside_it_must_be_told_unless_its_shape_tells() -> None:
    for rank, found in enumerate(run_processes(unclear, 2, timeout=timedelta(seconds=60))):
        assert "cannot be told whether 0.shared.weight belongs to the experts of the dispatcher '0'" in found["shared"]
        assert "this rank holds 4 of 8 experts" in found["shared"]
        assert found["told"] == {
            "0.up": "expert p - 0.5",
            "0.shared.weight": "dense s ep 0.5",
            "0.gate.weight": "dense s ep 0.5",
            **{f"0.each.{number}.weight": "expert o - 0.5" for number in range(4)},
        }
        assert found["numbers"] == [range(4 * rank + number, 4 * rank + number + 1) for number in range(4)]
        assert "no parameter is below the dispatcher 'dispatcher'" in found["beside"]
        assert found["beside, told"] == {"experts.0": "expert p - 0.5"}
        assert "kinds call weight an expert, but the model has no dispatcher" in found["no dispatcher"]
