"""The code of docs/training.md on four processes: under DDP and FSDP2, and in checkpoints.

Gradients are those of one rank that has all experts and tokens. What was saved under one ep_size and backend is loaded
under others.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch import BSHD, DispatcherConfig, Routing
from moe_dispatch_testing import run_processes
from tests.pages import relative, run_page

RANKS, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 4, 16, 8, 8, 2, 2
MESHES = [(2, 2), (1, 4)]
CONFIG = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)


@functools.cache
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
            x = page().recomputed(block, x, layout) if self.recomputes else block(x, layout)
        y: Tensor = project(norm(x))
        return y


def make_model(
    copies: int, ep_size: int, seed: int = 10, config: DispatcherConfig = CONFIG
) -> tuple[Model, DeviceMesh]:
    """A model with other weights on every rank, and the mesh."""
    mesh = page().make_mesh("cpu", copies, ep_size)
    torch.manual_seed(seed + dist.get_rank())
    blocks = [page().Block(config, mesh["ep"].get_group(), INNER) for _ in range(LAYERS)]
    return Model(*blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)), mesh


def make_blocks(mesh: DeviceMesh) -> nn.Sequential:
    """Blocks with one router and other experts on the ranks of ``mesh["ep"]``."""
    torch.manual_seed(3)
    blocks = nn.Sequential(*(page().Block(CONFIG, mesh["ep"].get_group(), INNER) for _ in range(LAYERS)))
    torch.manual_seed(mesh["ep"].get_local_rank())
    for block in blocks:
        for parameter in block.get_submodule("experts").parameters():
            nn.init.normal_(parameter, std=HIDDEN**-0.5)
    return blocks


def under_ddp(model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    wrapped = page().wrap(model, mesh)
    return wrapped, lambda: page().reduce_expert_gradients(wrapped, mesh)


def under_fsdp(model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    return page().shard(model, mesh), lambda: None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def all_experts(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """(L, ...) of each rank, as (E, ...)."""
    parts = [torch.empty_like(tensor) for _ in range(mesh["ep"].size())]
    dist.all_gather(parts, tensor.contiguous(), group=mesh["ep"].get_group())
    return torch.cat(parts)


def gathered(
    model: nn.Module, mesh: DeviceMesh, pick: Callable[[nn.Parameter], Tensor | None] = lambda p: p
) -> dict[str, Tensor]:
    """Parameters, or what ``pick`` takes of them, of all experts and unsharded."""
    found = {name: tensor for name, p in model.named_parameters() if (tensor := pick(p)) is not None}
    return {
        name: all_experts(tensor.detach(), mesh)
        if "experts" in name.split(".") and not isinstance(tensor, DTensor)
        else whole(tensor)
        for name, tensor in found.items()
    }


def leaves_of(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    return {name: weight.requires_grad_() for name, weight in gathered(model, mesh).items()}


def far(model: nn.Module, mesh: DeviceMesh, want: dict[str, Tensor]) -> dict[str, float]:
    """How far the gradients of the parameters that have one are from those of the dense model."""
    grads = gathered(model, mesh, lambda p: p.grad)
    return {name: relative(grad, want[name].grad) for name, grad in grads.items()}


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


def differences(
    rank: int, copies: int, ep_size: int, under: Callable[..., Any], *, recomputes: bool = False
) -> dict[str, float]:
    """How far every gradient is from that of the dense model on the tokens of all ranks."""
    model, mesh = make_model(copies, ep_size)
    model.recomputes = recomputes
    wrapped, finish = under(model, mesh)
    weights = leaves_of(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(tokens(rank)).square().mean().backward()
    finish()
    sum(dense(tokens(other), weights).square().mean() / RANKS for other in range(RANKS)).backward()  # type: ignore[union-attr]
    return far(model, mesh, weights)


WAYS = {"ddp": under_ddp, "fsdp": under_fsdp}
STEPS = (0, 1, 3, 5)


def unequal_steps(rank: int, copies: int, ep_size: int, under: Callable[..., Any]) -> tuple[dict[str, float], int]:
    """How far gradients are from the dense model's if ranks have other numbers of micro-batches; and the rounds."""
    model, mesh = make_model(copies, ep_size)
    wrapped, finish = under(model, mesh)
    weights, rounds = leaves_of(model, mesh), []

    def step(x: Tensor) -> None:
        rounds.append(len(x))
        wrapped(x).square().sum().backward()

    page().accumulate(map(tokens, range(STEPS[rank])), step, tokens(0)[:0])
    finish()
    total = sum(dense(tokens(number), weights).square().sum() for steps in STEPS for number in range(steps))
    (total / RANKS).backward()  # type: ignore[union-attr]
    return far(model, mesh, weights), len(rounds)


def router_inside(rank: int, under: Callable[..., Any], frozen: bool) -> tuple[dict[str, float], list[str]]:
    """How far gradients of a layer that holds its router are from those of the page's block; and who gets none."""

    class Inside(page().Experts):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)

        def forward(self, x: Tensor, layout: Any = None) -> Tensor:
            weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(TOP_K)
            y: Tensor = x + super().forward(x, Routing(ids, weights), layout)
            return y

    torch.manual_seed(rank)
    mesh = page().make_mesh("cpu", 2, 2)
    block, layer = (make(CONFIG, mesh["ep"].get_group(), INNER) for make in (page().Block, Inside))
    own = {"router.weight": block.router.weight, "up": block.experts.up, "down": block.experts.down}
    layer.load_state_dict(own)
    for experts in (layer, block.experts) if frozen else ():
        experts.up.requires_grad_(False)
    for model in map(nn.Sequential, (block, layer)):
        wrapped, finish = under(model, mesh)
        wrapped(tokens(rank)).square().mean().backward()
        finish()
    got, want = ({name.replace("experts.", ""): p.grad for name, p in of.named_parameters()} for of in (layer, block))
    far = {name: relative(whole(grad), whole(want[name])) for name, grad in got.items() if grad is not None}
    return far, [name for name, grad in got.items() if grad is None]


def with_all_parameters(rank: int) -> tuple[bool, list[str]]:
    """DDP without the page's precautions: whether a rank still holds its own experts, and what is said."""
    model, mesh = make_model(1, RANKS)
    before = all_experts(model.get_parameter("0.experts.up").detach().clone(), mesh)
    wrapped = DistributedDataParallel(model)
    after = whole(model.get_parameter("0.experts.up"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.no_grad():
                wrapped(tokens(rank))
            wrapped(tokens(rank)).sum().backward()
    said = [str(warning.message) for warning in caught if "experts" in str(warning.message)]
    return torch.equal(after, before.chunk(RANKS)[rank]), said


def copies_only(rank: int) -> list[str]:
    """DDP among ranks that hold the same experts is right, and nothing is said."""
    model, mesh = make_model(2, 2)
    wrapped = DistributedDataParallel(model, process_group=mesh["copies"].get_group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(tokens(rank)).sum().backward()
    return [str(warning.message) for warning in caught]


# Checkpoints.

# Each stage loads what the one before saved.
STAGES = ((4, "alltoall"), (2, "allgather"), (1, "local"), (4, "allgather"))


def trainer(ep_size: int, backend: Any, *, seed: int = 10) -> tuple[Any, Any]:
    """A model and its optimizer; another seed, other weights."""
    model, mesh = make_model(RANKS // ep_size, ep_size, seed, CONFIG.replace(backend=backend))
    page().shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> Tensor:
    """One step on this rank's tokens; the output before it."""
    y: Tensor = model(tokens(dist.get_rank()))
    y.square().sum().backward()
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


def resumed(
    folder: str, model: Any, optimizer: Any, go_on: Callable[[], Tensor], saved: tuple[dict[str, Tensor], Tensor, Any]
) -> dict[str, dict[str, float]]:
    """How far a loaded model is from the one that was saved, and from its output and its state a step later."""
    before, output, after = saved
    page().load(folder, model, optimizer)
    loaded = distances(state_of(model, optimizer), before)
    loaded["output"] = (go_on() - output).abs().max().item()
    return {"loaded": loaded, "continued": distances(state_of(model, optimizer), after)}


def through_all_stages(rank: int, folder: str) -> list[dict[str, dict[str, float]]]:
    model, optimizer = trainer(*STAGES[0])
    step(model, optimizer)
    found = []
    page().save(f"{folder}/0", model, optimizer)
    saved = state_of(model, optimizer), step(model, optimizer), state_of(model, optimizer)
    for number, (ep_size, backend) in enumerate(STAGES[1:], start=1):
        model, optimizer = trainer(ep_size, backend, seed=50 * number)
        page().load(f"{folder}/{number - 1}", model, optimizer)
        page().save(f"{folder}/{number}", model, optimizer)
        go_on = functools.partial(step, model, optimizer)
        found.append(resumed(f"{folder}/{number}", model, optimizer, go_on, saved))
    return found


def without_the_rule(rank: int, copies: int, ep_size: int) -> dict[str, float]:
    """How many times too large gradients of experts are if DDP or FSDP2 treats them like those of other parameters."""
    found = {}
    for way in ("right", "ddp", "fsdp"):
        model, mesh = make_model(copies, ep_size)
        wrapped, finish = under_ddp(model, mesh)
        if way == "fsdp":
            model = make_model(copies, ep_size)[0]
            model.load_state_dict(wrapped.get_submodule("module").state_dict())
            for module in model.modules():
                if isinstance(module, page().Dispatcher):
                    fully_shard(module, mesh=mesh["copies"])
            fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
            wrapped = model
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


def sharded(copies: int, ep_size: int, seed: int) -> tuple[Any, Any]:
    model, mesh = make_model(copies, ep_size, seed)
    model.recomputes = True
    page().shard(model, mesh, POLICY)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def with_policy(rank: int) -> dict[str, Any]:
    """Parameters and gradients of the page's FSDP2 recipe in bfloat16."""
    model, mesh = make_model(2, 2)
    model.recomputes = True
    first = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." not in name}
    exact, _ = make_model(2, 2)
    page().shard(exact, mesh, POLICY, router_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    logits: list[torch.dtype] = []
    exact[0].get_submodule("router").register_forward_hook(lambda _, args, found: logits.append(found.dtype))
    exact(padded_batch(rank, 0), BSHD(LENGTHS))
    for tensor in first.values():
        dist.broadcast(tensor, src=0)
    page().shard(model, mesh, POLICY)
    found: dict[str, Any] = {
        "logits": set(logits),
        "differ": [n for n, p in model.named_parameters() if n in first and not whole(p).equal(first[n])],
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
    found["norm"] = relative(page().clip_gradients(model, 0.5), norm)
    clipped = [whole(p.grad).norm() for p in model.parameters() if p.grad is not None]
    found["clipped"] = torch.stack(clipped).norm().item()
    return found


def stopped(rank: int, folder: str) -> list[dict[str, dict[str, float]]]:
    model, optimizer = sharded(2, 2, seed=10)
    trained(model, optimizer)
    page().save(folder, model, optimizer)
    saved = state_of(model, optimizer), trained(model, optimizer), state_of(model, optimizer)
    found = []
    for mesh_sizes in MESHES:
        model, optimizer = sharded(*mesh_sizes, seed=50)
        found.append(resumed(folder, model, optimizer, functools.partial(trained, model, optimizer), saved))
    return found


def on_parts(rank: int, spread: tuple[str, ...] = ("ep",)) -> dict[str, float]:
    """How far gradients of blocks on parts of sequences are from those of the dense blocks on all sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    held = mesh  # whose dimension "ep" is the group of the dispatchers
    if len(spread) == 2:
        held = DeviceMesh.from_group(page().joined_group(mesh), "cpu", mesh_dim_names=("ep",))
    model = make_blocks(held)
    weights = leaves_of(model, held)

    def inputs(data: int) -> tuple[Tensor, BSHD]:
        generator = torch.Generator().manual_seed(data)
        return torch.randn(2, 4 + 2 * data, HIDDEN, generator=generator), BSHD([4, 1 + data])

    x, layout = inputs(mesh["ep"].get_local_rank())
    y = x.requires_grad_()
    for block in model:
        y = page().OnParts(block, mesh["tp"])(y, layout)
    y.square().mean().backward()
    page().average_gradients(model, mesh, spread)
    whole_x = [inputs(data)[0].requires_grad_() for data in range(2)]
    for data, x_ in enumerate(whole_x):
        valid_T = inputs(data)[1].valid_T(x_.shape[0] * x_.shape[1])
        (dense_blocks(x_.flatten(0, 1), weights, valid_T).square().mean() / 2).backward()
    assert x.grad is not None
    return {"x": relative(x.grad / 2, whole_x[mesh["ep"].get_local_rank()].grad), **far(model, held, weights)}


# Pipeline stages: two stages, two expert-parallel ranks each, and a block in each stage.

MICRO_BATCHES, DEPTH, EP_RANKS = 4, 2, 2


def batch(pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a pipeline, (micro-batches times tokens, D); each pipeline has another number of tokens."""
    generator = torch.Generator().manual_seed(pipeline)
    shape = 2, MICRO_BATCHES * (3 + pipeline), HIDDEN
    x, target = torch.randn(shape, generator=generator)
    return x, target


def through_stages(rank: int) -> dict[str, float]:
    """How far the gradients of this rank's stage are from those of the dense model on the tokens of both pipelines."""
    mesh = init_device_mesh("cpu", (DEPTH, EP_RANKS), mesh_dim_names=("pp", "ep"))
    stage, pipeline = mesh["pp"].get_local_rank(), mesh["ep"].get_local_rank()
    blocks = make_blocks(mesh)
    weights = leaves_of(blocks, mesh)
    model = nn.Sequential(blocks[stage])
    run = page().make_pipeline(model, mesh, F.mse_loss, MICRO_BATCHES)
    x, target = batch(pipeline)
    losses: list[Tensor] = []
    last = {"target": target, "losses": losses} if stage == DEPTH - 1 else {}
    run.step(*([x] if stage == 0 else []), **last)
    page().average_gradients(model, mesh)
    wants = [F.mse_loss(dense_blocks(x, weights), target) for x, target in map(batch, range(EP_RANKS))]
    (sum(wants) / EP_RANKS).backward()  # type: ignore[union-attr]
    if losses:
        assert relative(torch.stack(losses).mean(), wants[pipeline]) <= 1e-5
    return far(blocks, mesh, weights)


def what_the_library_does(rank: int, folder: str) -> dict[str, Any]:
    """Processes start once for these."""
    return {
        "ddp": differences(rank, 2, 2, under_ddp),
        "ddp, recomputed": differences(rank, 2, 2, under_ddp, recomputes=True),
        "ddp over experts": with_all_parameters(rank),
        "copies only": copies_only(rank),
        **{f"rounds, {way}": unequal_steps(rank, 2, 2, under) for way, under in WAYS.items()},
        **{
            f"inside, {way}, {'frozen' if frozen else 'trained'}": router_inside(rank, under, frozen)
            for way, under in WAYS.items()
            for frozen in (False, True)
        },
    }


def what_else_the_page_says(rank: int, folder: str) -> dict[str, Any]:
    return {
        **{f"without the rule {mesh}": without_the_rule(rank, *mesh) for mesh in MESHES},
        "pipeline": through_stages(rank),
        "fsdp": differences(rank, 2, 2, under_fsdp),
        **{f"{way} alone": differences(rank, 1, 4, under) for way, under in WAYS.items()},
        "stages": through_all_stages(rank, f"{folder}/stages"),
        "parts": on_parts(rank),
        "parts, experts over both": on_parts(rank, ("ep", "tp")),
        "policy": with_policy(rank),
        "stopped": stopped(rank, f"{folder}/stopped"),
    }


Found = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(tmp_path_factory.mktemp("training"))
    return run_processes(what_the_library_does, RANKS, folder, timeout=timedelta(seconds=60))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(tmp_path_factory.mktemp("training"))
    return run_processes(what_else_the_page_says, RANKS, folder, timeout=timedelta(seconds=120))


def all_close(found: Found, name: str, number: int) -> None:
    for rank, differences in enumerate(found):
        assert len(differences[name]) == number
        assert max(differences[name].values()) <= 1e-5, f"rank {rank}: {differences[name]}"


def test_gradients_are_those_of_one_rank_with_all_experts(results: Found) -> None:
    for name in ("ddp", "ddp, recomputed"):
        all_close(results, name, 3 * LAYERS + 4)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_data_give_the_gradients_of_one_rank_with_all_data(results: Found, way: str) -> None:
    for far, rounds in (found[f"rounds, {way}"] for found in results):
        assert rounds == max(STEPS)
        assert len(far) == 3 * LAYERS + 4
        assert max(far.values()) <= 1e-5, far


@pytest.mark.parametrize("way", WAYS)
def test_router_inside_a_dispatcher_is_no_expert_and_frozen_experts_stay_frozen(results: Found, way: str) -> None:
    for rank, found in enumerate(results):
        for kind, without in (("trained", []), ("frozen", ["up"])):
            far, frozen = found[f"inside, {way}, {kind}"]
            assert frozen == without, f"rank {rank}, {kind}"
            assert len(far) == 3 - len(without)
            assert max(far.values()) <= 1e-5, f"rank {rank}, {kind}: {far}"


@pytest.mark.slow
def test_gradients_under_fsdp_on_parts_of_sequences_and_in_stages(others: Found) -> None:
    for name in ("fsdp", "ddp alone", "fsdp alone"):
        all_close(others, name, 3 * LAYERS + 4)
    all_close(others, "parts", 1 + 3 * LAYERS)
    all_close(others, "parts, experts over both", 1 + 3 * LAYERS)
    all_close(others, "pipeline", 3)


@pytest.mark.slow
def test_a_policy_in_bfloat16_keeps_layouts_router_weights_and_gradients(others: Found) -> None:
    for rank, found in enumerate(other["policy"] for other in others):
        assert not found["differ"], "parameters must begin as those of rank 0"
        assert found["dtypes"] == {(torch.bfloat16, torch.float32)}
        assert found["logits"] == {torch.float32}
        assert max(found["grads"].values()) <= 0.05, f"rank {rank}: {found['grads']}"
        assert found["norm"] <= 1e-5
        assert found["clipped"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.slow
def test_training_under_fsdp_goes_on_from_a_checkpoint(others: Found) -> None:
    for found in others:
        for mesh, stage in zip(MESHES, found["stopped"], strict=True):
            assert stage["loaded"].pop("output") <= 0.05
            assert set(stage["loaded"].values()) == {0.0}, stage
            assert max(stage["continued"].values()) <= (1e-6 if mesh == (2, 2) else 0.05), stage


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_without_the_rule_gradients_of_experts_are_ep_size_times_too_large(
    others: Found, mesh: tuple[int, int]
) -> None:
    for found in others:
        times = found[f"without the rule {mesh}"]
        assert times == pytest.approx({"right": 1, "ddp": mesh[1], "fsdp": mesh[1]}, rel=1e-4)


def test_ddp_over_experts_makes_them_alike_and_is_warned_of_once_a_layer(results: Found) -> None:
    for rank, found in enumerate(results):
        assert found["copies only"] == []
        kept, said = found["ddp over experts"]
        assert kept == (rank == 0)
        assert len(said) == LAYERS
        for layer, text in enumerate(said):
            assert "must leave out the parameters of experts, got 2 that" in text
            assert f"({layer}.experts.up, {layer}.experts.down)" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", range(1, len(STAGES)), ids=lambda stage: f"ep {STAGES[stage - 1][0]}-{STAGES[stage][0]}"
)
def test_weights_and_moments_come_back_under_another_ep_size_and_backend(others: Found, stage: int) -> None:
    for found in others:
        loaded, continued = (found["stages"][stage - 1][part] for part in ("loaded", "continued"))
        assert {f"0.{name}" for name in ("router.weight", "experts.up.exp_avg", "experts.down.exp_avg_sq")} <= set(
            loaded
        )
        assert loaded.pop("output") <= 1e-5
        assert set(loaded.values()) == {0.0}, loaded
        assert max(continued.values()) <= 1e-5, continued
