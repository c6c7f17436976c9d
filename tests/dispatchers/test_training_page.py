"""The code of docs/training.md on four processes: under DDP and FSDP2, and in checkpoints.

Gradients are those of one rank that has all experts and tokens. What was saved under one ep_size and backend is loaded
under others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_dispatch import BSHD, DispatcherConfig
from moe_dispatch_testing import run_processes
from tests.pages import relative, run_page

RANKS, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 4, 16, 8, 8, 2, 2
MESHES = [(2, 2), (1, 4)]
CONFIG = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)


def page() -> Any:
    """What the page's code defines."""
    return SimpleNamespace(**run_page("training.md"))


def tokens(rank: int) -> Tensor:
    return torch.randn(3 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))


class Model(nn.Sequential):
    """Blocks of the page, a norm and a projection: parameters of equal and of other sizes."""

    recomputes = False

    def forward(self, x: Tensor, layout: Any = None) -> Tensor:
        *blocks, norm, project = self
        for block in blocks:
            x = checkpoint(block, x, layout, use_reentrant=False) if self.recomputes else block(x, layout)
        y: Tensor = project(norm(x))
        return y


def make_model(copies: int, ep_size: int, seed: int = 10) -> tuple[Any, Model, DeviceMesh]:
    """The page, a model with other weights on every rank, and the mesh."""
    code = page()
    mesh = code.make_mesh("cpu", copies, ep_size)
    torch.manual_seed(seed + dist.get_rank())
    blocks = [code.Block(CONFIG, mesh["ep"].get_group(), INNER) for _ in range(LAYERS)]
    return code, Model(*blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)), mesh


def under_ddp(code: Any, model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    wrapped = code.wrap(model, mesh)
    return wrapped, lambda: code.reduce_expert_gradients(wrapped.module, mesh)


def under_fsdp(code: Any, model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    return code.shard(model, mesh), lambda: None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def all_experts(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """(L, ...) of each rank, as (E, ...)."""
    parts = [torch.empty_like(tensor) for _ in range(mesh["ep"].size())]
    dist.all_gather(parts, tensor.contiguous(), group=mesh["ep"].get_group())
    return torch.cat(parts)


def dense_blocks(x: Tensor, weights: dict[str, Tensor], valid_T: Tensor | None = None) -> Tensor:
    """The blocks on one rank, every expert on every row that is a token."""
    for layer in range(LAYERS):
        router, up, down = (weights[f"{layer}.{name}"] for name in ("router.weight", "experts.up", "experts.down"))
        weights_TK, ids_TK = (x @ router.T).softmax(-1, dtype=torch.float32).topk(TOP_K)
        weights_TE = torch.zeros(len(x), EXPERTS).scatter(1, ids_TK, weights_TK)
        weights_TE = weights_TE if valid_T is None else torch.where(valid_T[:, None], weights_TE, 0)
        outputs_TED = torch.einsum("tei,eid->ted", F.silu(torch.einsum("td,edi->tei", x, up)), down)
        x = x + torch.einsum("te,ted->td", weights_TE, outputs_TED.float()).to(x.dtype)
    return x


def dense(x: Tensor, weights: dict[str, Tensor], valid_T: Tensor | None = None) -> Tensor:
    scale, shift, matrix, bias = (
        weights[name] for name in (f"{LAYERS}.weight", f"{LAYERS}.bias", f"{LAYERS + 1}.weight", f"{LAYERS + 1}.bias")
    )
    return F.linear(F.layer_norm(dense_blocks(x, weights, valid_T), (HIDDEN,), scale, shift), matrix, bias)


def differences(rank: int, copies: int, ep_size: int, under: Callable[..., Any]) -> dict[str, float]:
    """How far every gradient is from that of the dense model on the tokens of all ranks."""
    code, model, mesh = make_model(copies, ep_size)
    wrapped, finish = under(code, model, mesh)

    def gathered(pick: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        found = {name: pick(parameter) for name, parameter in model.named_parameters()}
        plain = {name for name, found in found.items() if ".experts." in name and not isinstance(found, DTensor)}
        return {
            name: all_experts(found.detach(), mesh) if name in plain else whole(found) for name, found in found.items()
        }

    weights = {name: weight.requires_grad_() for name, weight in gathered(lambda p: p).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(tokens(rank)).square().mean().backward()
    finish()
    sum(dense(tokens(other), weights).square().mean() / RANKS for other in range(RANKS)).backward()  # type: ignore[union-attr]
    grads = gathered(lambda p: p.grad if p.grad is not None else torch.full_like(p, torch.nan))
    return {name: relative(grad, weights[name].grad) for name, grad in grads.items()}


def with_all_parameters(rank: int, ep_size: int) -> dict[str, Any]:
    """DDP and FSDP2 without the page's precautions: what is said, and whether ranks still hold their own experts."""
    found: dict[str, Any] = {}
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp": shard_all}
    for name, wrap in wraps.items():
        _, model, mesh = make_model(RANKS // ep_size, ep_size)
        before = all_experts(model.get_parameter("0.experts.up").detach().clone(), mesh)
        wrapped = wrap(model)
        after = whole(model.get_parameter("0.experts.up"))
        found[f"{name} kept"] = bool(torch.equal(after, before.chunk(ep_size)[mesh["ep"].get_local_rank()]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with torch.no_grad():
                    wrapped(tokens(rank))
                wrapped(tokens(rank)).sum().backward()
        found[name] = [str(warning.message) for warning in caught if "experts" in str(warning.message)]
    return found


def shard_all(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def copies_only(rank: int) -> list[str]:
    """DDP among ranks that hold the same experts is right, and nothing is said."""
    _, model, mesh = make_model(2, 2)
    wrapped = DistributedDataParallel(model, process_group=mesh["copies"].get_group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(tokens(rank)).sum().backward()
    return [str(warning.message) for warning in caught]


# Checkpoints.

# Each stage loads what the one before saved.
STAGES = ((4, "alltoall"), (2, "allgather"), (1, "local"), (4, "allgather"))
EMULATED: tuple[Any, ...] = ({"name": "deepep", "emulate": True}, {"name": "hybridep", "emulate": True})


def mesh_of(ep_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // ep_size, ep_size), mesh_dim_names=("copies", "ep"))


def trainer(ep_size: int, backend: Any, *, seed: int = 0, **fields: Any) -> tuple[Any, Any, DeviceMesh]:
    """A model and its optimizer; another seed, other weights."""
    torch.manual_seed(seed)
    mesh = mesh_of(ep_size)
    model = page().MoE(CONFIG.replace(backend=backend, **fields), INNER, mesh)
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


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Every weight and moment, unsharded."""
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: whole(tensor) for name, tensor in found.items()}


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert list(got) == list(want)
    return {name: (got[name] - tensor).abs().max().item() for name, tensor in want.items()}


def through_all_stages(rank: int, folder: str) -> list[dict[str, dict[str, float]]]:
    """By stage: how far weights and moments are from those saved, and from never having stopped a step later."""
    saved = Path(folder)
    model, optimizer, mesh = trainer(*STAGES[0])
    step(model, optimizer, mesh, rank)
    page().save(saved / "0", model, optimizer)
    before = state_of(model, optimizer)
    output = step(model, optimizer, mesh, rank)
    after = state_of(model, optimizer)
    found = []
    for number, (ep_size, backend) in enumerate(STAGES[1:], start=1):
        model, optimizer, mesh = trainer(ep_size, backend, seed=number)
        page().load(saved / f"{number - 1}", model, optimizer)
        loaded = distances(state_of(model, optimizer), before)
        page().save(saved / f"{number}", model, optimizer)
        loaded["output"] = (step(model, optimizer, mesh, rank) - output).abs().max().item()
        found.append({"loaded": loaded, "continued": distances(state_of(model, optimizer), after)})
    return found


def keys_by_backend(rank: int) -> list[list[str]]:
    """Of the model, by backend; the vendors' libraries are emulated."""
    backends = ("alltoall", "allgather", *EMULATED)
    return [list(trainer(4, backend, hidden_size=256)[0].state_dict()) for backend in backends]


def refusals(rank: int, folder: str) -> list[str]:
    """What is said to experts that ep_size does not divide, and to a checkpoint of another number of experts."""
    model, optimizer, _ = trainer(4, "alltoall")
    page().save(folder, model, optimizer)
    larger, its_optimizer, _ = trainer(4, "alltoall", num_experts=2 * EXPERTS)
    said = []
    for refused in (lambda: trainer(4, "alltoall", num_experts=6), lambda: page().load(folder, larger, its_optimizer)):
        try:
            refused()
            said.append("nothing")
        except (ValueError, dcp.api.CheckpointException) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def plain_tensors(rank: int, folder: str) -> tuple[float, float]:
    """How far the experts of a rank are from those saved: as they are, and as shards."""
    mesh, shards = mesh_of(4), page().as_shards
    mine = torch.full((2, 3), float(rank))
    wraps: dict[str, Callable[[dict[str, Tensor]], Any]] = {"plain": dict, "shards": lambda d: shards(d, ["up"], mesh)}
    losses = []
    for name, wrap in wraps.items():
        dcp.save(wrap({"up": mine.clone()}), checkpoint_id=f"{folder}/{name}")
        found = {"up": torch.zeros(2, 3)}
        dcp.load(wrap(found), checkpoint_id=f"{folder}/{name}")
        losses.append((found["up"] - mine).abs().max().item())
    return losses[0], losses[1]


def without_the_rule(rank: int, copies: int, ep_size: int) -> dict[str, float]:
    """How many times too large gradients of experts are if DDP or FSDP2 treats them like those of other parameters."""
    found = {}
    for way in ("right", "ddp", "fsdp"):
        code, model, mesh = make_model(copies, ep_size)
        wrapped, finish = under_ddp(code, model, mesh)
        if way == "fsdp":
            model = make_model(copies, ep_size)[1]
            model.load_state_dict(wrapped.get_submodule("module").state_dict())
            for module in model.modules():
                if isinstance(module, code.Dispatcher):
                    fully_shard(module, mesh=mesh["copies"])
            wrapped = shard_all(model)
        wrapped(tokens(rank)).square().mean().backward()
        if way == "right":
            finish()
        grad = model.get_parameter("0.experts.up").grad
        assert grad is not None
        if way == "ddp":  # DDP would average over the ranks that hold the same experts
            dist.all_reduce(grad, group=mesh["copies"].get_group())
            grad /= copies
        found[way] = whole(grad).norm().item()
    return {way: norm / found["right"] for way, norm in found.items()}


# FSDP2 in bfloat16.

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LENGTHS = [3, 1]


def padded_batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(len(LENGTHS), 3 + rank, HIDDEN, generator=generator)


def trained(model: Any, optimizer: Any = None) -> Tensor:
    """Accumulate gradients over two micro-batches, one with a layout and one with a plan, and step; the last output."""
    rank = dist.get_rank()
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        x, layout = padded_batch(rank, number), BSHD(LENGTHS)
        y: Tensor = model(x, layout if number else model[0].experts.plan(layout, like=x))
        y.float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def sharded(copies: int, ep_size: int, seed: int) -> tuple[Any, Any, Any]:
    code, model, mesh = make_model(copies, ep_size, seed)
    model.recomputes = True
    code.shard(model, mesh, POLICY)
    return code, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def with_policy(rank: int) -> dict[str, Any]:
    """Parameters and gradients of the page's FSDP2 recipe in bfloat16."""
    code, model, mesh = make_model(2, 2)
    model.recomputes = True
    first = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." not in name}
    for tensor in first.values():
        dist.broadcast(tensor, src=0)
    code.shard(model, mesh, POLICY)
    found: dict[str, Any] = {
        "differ": [n for n, p in model.named_parameters() if n in first and not whole(p).equal(first[n])]
    }
    dtypes: list[tuple[torch.dtype, torch.dtype]] = []
    hook = (
        model[0]
        .get_submodule("experts")
        .register_forward_pre_hook(lambda _, args: dtypes.append((args[0].dtype, args[1].topk_weights.dtype)))
    )
    with warnings.catch_warnings():
        # Torch warns of an output that is a view, because a change in place would lose its hooks.
        warnings.filterwarnings("error", message=".*FSDPExperts.* returned a view")
        trained(model)
    hook.remove()
    found["dtypes"] = set(dtypes)
    weights = {name: whole(p).bfloat16().requires_grad_() for name, p in model.named_parameters()}
    for other in range(RANKS):
        for number in range(2):
            x = padded_batch(other, number)
            valid_T = BSHD(LENGTHS).valid_T(x.shape[0] * x.shape[1])
            (dense(x.bfloat16().flatten(0, 1), weights, valid_T).float().square().mean() / RANKS).backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found["grads"] = {name: relative(grads[name], weights[name].grad) for name in weights}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    found["norm"] = relative(code.clip_gradients(model, 0.5), norm)
    clipped = [whole(p.grad).norm() for p in model.parameters() if p.grad is not None]
    found["clipped"] = torch.stack(clipped).norm().item()
    return found


def stopped(rank: int, folder: str) -> dict[str, Any]:
    """By mesh: how far weights and moments are from those saved, and from never having stopped a step later."""
    code, model, optimizer = sharded(2, 2, seed=10)
    trained(model, optimizer)
    code.save(f"{folder}/policy", model, optimizer)
    before = state_of(model, optimizer)
    output = trained(model, optimizer)
    after = state_of(model, optimizer)
    found = {}
    for mesh_sizes in MESHES:
        _, model, optimizer = sharded(*mesh_sizes, seed=50)
        code.load(f"{folder}/policy", model, optimizer)
        loaded = distances(state_of(model, optimizer), before)
        loaded["output"] = (trained(model, optimizer) - output).abs().max().item()
        found[f"{mesh_sizes}"] = {"loaded": loaded, "continued": distances(state_of(model, optimizer), after)}
    return found


def on_parts(rank: int) -> dict[str, float]:
    """How far gradients of a block on parts of sequences are from those of the dense block on all sequences."""
    code = page()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    data = mesh["ep"].get_local_rank()
    torch.manual_seed(3)
    blocks = [code.Block(CONFIG, mesh["ep"].get_group(), INNER) for _ in range(LAYERS)]
    torch.manual_seed(data)
    for block in blocks:
        for parameter in block.experts.parameters():
            nn.init.normal_(parameter, std=HIDDEN**-0.5)
    model = nn.Sequential(*blocks)
    weights = {
        name: (all_experts(p.detach(), mesh) if ".experts." in name else p.detach().clone()).requires_grad_()
        for name, p in model.named_parameters()
    }

    def inputs(data: int) -> tuple[Tensor, BSHD]:
        generator = torch.Generator().manual_seed(data)
        return torch.randn(2, 4 + 2 * data, HIDDEN, generator=generator), BSHD([4, 1 + data])

    x, layout = inputs(data)
    y = x.requires_grad_()
    for block in blocks:
        y = code.OnParts(block, mesh["tp"])(y, layout)
    y.square().mean().backward()
    code.average_gradients_of_parts(model, mesh)
    whole_x = list[Tensor]()
    for other in range(2):
        x_, layout_ = inputs(other)
        whole_x.append(x_.requires_grad_())
        valid_T = layout_.valid_T(x_.shape[0] * x_.shape[1])
        (dense_blocks(x_.flatten(0, 1), weights, valid_T).square().mean() / 2).backward()
    assert x.grad is not None
    found = {"x": relative(x.grad / 2, whole_x[data].grad)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = all_experts(parameter.grad, mesh) if ".experts." in name else parameter.grad
        found[name] = relative(grad, weights[name].grad)
    return found


# Pipeline stages: two stages, two expert-parallel ranks each, and a block in each stage.

MICRO_BATCHES, DEPTH, EP_RANKS = 4, 2, 2
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def batch(pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a pipeline, (micro-batches times tokens, D); each pipeline has another number of tokens."""
    generator = torch.Generator().manual_seed(pipeline)
    shape = 2, MICRO_BATCHES * (3 + pipeline), HIDDEN
    x, target = torch.randn(shape, generator=generator)
    return x, target


def through_stages(rank: int, schedule: Any) -> dict[str, float]:
    """How far the gradients of this rank's stage are from those of the dense model on the tokens of both pipelines."""
    code = page()
    code.make_pipeline.__globals__["Schedule1F1B"] = schedule
    mesh = init_device_mesh("cpu", (DEPTH, EP_RANKS), mesh_dim_names=("pp", "ep"))
    stage, pipeline = mesh["pp"].get_local_rank(), mesh["ep"].get_local_rank()
    blocks = []
    for number in range(DEPTH):
        torch.manual_seed(number)  # routers are alike on all ranks
        block = code.Block(CONFIG, mesh["ep"].get_group(), INNER)
        torch.manual_seed(100 * number + pipeline)
        for parameter in block.experts.parameters():
            torch.nn.init.normal_(parameter, std=HIDDEN**-0.5)
        blocks.append(block)
    weights = {
        f"{number}.{name}": all_experts(p.detach(), mesh) if name.startswith("experts.") else p.detach().clone()
        for number, block in enumerate(blocks)
        for name, p in block.named_parameters()
    }
    model = nn.Sequential(blocks[stage])
    run = code.make_pipeline(model, mesh, F.mse_loss, MICRO_BATCHES)
    x, target = batch(pipeline)
    losses: list[Tensor] = []
    last = {"target": target, "losses": losses} if stage == DEPTH - 1 else {}
    run.step(*([x] if stage == 0 else []), **last)
    code.average_gradients(model, mesh)

    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    wants = [F.mse_loss(dense_blocks(x, leaves), target) for x, target in map(batch, range(EP_RANKS))]
    (sum(wants) / EP_RANKS).backward()  # type: ignore[union-attr]
    if losses:
        assert relative(torch.stack(losses).mean(), wants[pipeline]) <= 1e-5
    grads = {
        f"{stage}.{name}": all_experts(grad, mesh) if name.startswith("experts.") else grad
        for name, p in blocks[stage].named_parameters()
        if (grad := p.grad) is not None
    }
    return {name: relative(grad, leaves[name].grad) for name, grad in grads.items()}


def all_of_it(rank: int, folder: str) -> dict[str, Any]:
    """Processes start once for all tests."""
    ways = {"ddp": under_ddp, "fsdp": under_fsdp}
    return {
        **{f"{way} {mesh}": differences(rank, *mesh, under) for way, under in ways.items() for mesh in MESHES},
        **{f"pipeline {name}": through_stages(rank, schedule) for name, schedule in SCHEDULES.items()},
        **{f"without the rule {mesh}": without_the_rule(rank, *mesh) for mesh in MESHES},
        "all parameters": with_all_parameters(rank, RANKS),
        "copies only": copies_only(rank),
        "stages": through_all_stages(rank, f"{folder}/stages"),
        "keys": keys_by_backend(rank),
        "refusals": refusals(rank, f"{folder}/refusals"),
        "plain": plain_tensors(rank, folder),
        "policy": with_policy(rank),
        "parts": on_parts(rank),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(all_of_it, RANKS, str(tmp_path_factory.mktemp("training")), timeout=timedelta(seconds=60))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_rank_with_all_experts(
    results: list[dict[str, Any]], way: str, mesh: tuple[int, int]
) -> None:
    for rank, found in enumerate(results):
        assert len(found[f"{way} {mesh}"]) == 3 * LAYERS + 4
        for name, difference in found[f"{way} {mesh}"].items():
            assert difference <= 1e-5, f"rank {rank}: {name}"


def test_parameters_begin_as_those_of_rank_0_under_fsdp(results: list[dict[str, Any]]) -> None:
    assert [found["policy"]["differ"] for found in results] == [[]] * RANKS


def test_a_policy_in_bfloat16_keeps_layouts_router_weights_and_gradients(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(result["policy"] for result in results):
        assert found["dtypes"] == {(torch.bfloat16, torch.float32)}
        for name, difference in found["grads"].items():
            assert difference <= 0.05, f"rank {rank}: {name}"
        assert found["norm"] <= 1e-5
        assert found["clipped"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.slow
def test_training_under_fsdp_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for rank, by_mesh in enumerate(run_processes(stopped, RANKS, str(tmp_path), timeout=timedelta(seconds=60))):
        for mesh in MESHES:
            loaded, continued = (by_mesh[f"{mesh}"][part] for part in ("loaded", "continued"))
            assert loaded.pop("output") <= 0.05
            assert set(loaded.values()) == {0.0}, f"rank {rank}: {loaded}"
            assert max(continued.values()) <= (1e-6 if mesh == (2, 2) else 0.05), f"rank {rank}: {continued}"


def test_gradients_of_parts_are_those_of_one_rank_with_whole_sequences(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(result["parts"] for result in results):
        assert len(found) == 1 + 3 * LAYERS
        for name, difference in found.items():
            assert difference <= 1e-5, f"rank {rank}: {name}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_without_the_rule_gradients_of_experts_are_ep_size_times_too_large(
    results: list[dict[str, Any]], mesh: tuple[int, int]
) -> None:
    for found in results:
        times = found[f"without the rule {mesh}"]
        assert times == pytest.approx({"right": 1, "ddp": mesh[1], "fsdp": mesh[1]}, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_stages_are_those_of_one_rank_with_all_experts(
    results: list[dict[str, Any]], schedule: str
) -> None:
    for rank, found in enumerate(results):
        assert len(found[f"pipeline {schedule}"]) == 3
        for name, difference in found[f"pipeline {schedule}"].items():
            assert difference <= 1e-5, f"rank {rank}: {name}"


def test_ddp_over_experts_makes_them_alike_and_is_warned_of_once_a_layer(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        assert found["all parameters"]["ddp kept"] == (rank == 0)
        said = found["all parameters"]["ddp"]
        assert len(said) == LAYERS
        for layer, text in enumerate(said):
            assert re.search(
                r"Dispatcher\.combine: DistributedDataParallel must leave out the parameters of experts, got 2 that "
                rf"it manages \({layer}\.experts\.up, {layer}\.experts\.down\)\..*docs/training\.md",
                text,
            )


def test_fsdp_over_experts_mixes_them_as_the_page_says(results: list[dict[str, Any]]) -> None:
    assert not all(found["all parameters"]["fsdp kept"] for found in results)
    assert [found["all parameters"]["fsdp"] for found in results] == [[]] * RANKS


def test_ddp_over_copies_only_is_not_warned_of(results: list[dict[str, Any]]) -> None:
    assert [found["copies only"] for found in results] == [[]] * RANKS


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
