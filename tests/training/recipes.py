"""A small model under each recipe on four processes, and what one process with all experts and tokens makes of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Shard

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.training import OnParts, Setup, joined_group

HIDDEN, INNER, TOP_K, LAYERS, MICRO_BATCHES = 6, 4, 2, 2, 2
DTYPE = torch.float64


class Experts(Dispatcher):
    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config, group)
        held = config.num_experts // group.size()
        self.up = nn.Parameter(torch.randn(held, HIDDEN, INNER, dtype=DTYPE) / 2)
        self.down = nn.Parameter(torch.randn(held, INNER, HIDDEN, dtype=DTYPE) / 2)

    def run_experts(self, sent: Dispatched) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = sent.rows.split(sent.tokens_per_expert.tolist())
        return torch.cat([torch.tanh(rows @ a) @ b for rows, a, b in zip(parts, up, down, strict=True)])


class DenseExperts(nn.Module):
    """All experts, each on all rows: plain torch, without the library."""

    def __init__(self, config: DispatcherConfig, _group: None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(config.num_experts, HIDDEN, INNER, dtype=DTYPE))
        self.down = nn.Parameter(torch.zeros(config.num_experts, INNER, HIDDEN, dtype=DTYPE))

    def forward(self, x: Tensor, routing: Routing, layout: Any = None) -> Tensor:
        rows, y = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (routing.topk_weights * (routing.topk_ids == number)).sum(1, keepdim=True)
            y = y + share * (torch.tanh(rows @ up) @ down)
        return y.view_as(x)


class Layer(nn.Module):
    """Experts behind a projection, which stands for attention.

    With ``unused`` it has a parameter that some ranks do not use, and one that no rank uses.
    """

    def __init__(self, config: DispatcherConfig, group: Any, unused: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE)
        self.router = nn.Linear(HIDDEN, config.num_experts, bias=False, dtype=DTYPE)
        self.experts = (DenseExperts if group is None else Experts)(config, group)
        self.unused = nn.ParameterList(torch.randn(HIDDEN, dtype=DTYPE) for _ in range(2 * unused))

    def forward(self, x: Tensor, layout: Any = None) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        if self.unused and x.shape[1] > 6:
            x = x + self.unused[0]
        weights, ids = self.router(x.flatten(0, -2)).softmax(-1).topk(TOP_K)
        y: Tensor = x + self.experts(x, Routing(ids, weights), layout)
        return y


class Model(nn.Module):
    """Some layers by their number in the whole model. The last stage has a projection, too."""

    def __init__(
        self, config: DispatcherConfig, group: Any, numbers: Sequence[int] = range(LAYERS), unused: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(config, group, unused) for number in numbers})
        self.head = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE) if LAYERS - 1 in numbers else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        y: Tensor = self.head(x)
        return y


Make = Callable[..., Any]  # what makes the model, with the arguments of Model


class OneExpert(nn.Module):
    """An expert that is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, INNER, dtype=DTYPE) / 2)
        self.down = nn.Parameter(torch.randn(INNER, HIDDEN, dtype=DTYPE) / 2)

    def forward(self, rows: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.tanh(rows @ up) @ down


class ListedExperts(Dispatcher):
    """Experts in a list of modules, which counts from 0 on each rank."""

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config, group)
        self.each = nn.ModuleList(OneExpert() for _ in range(config.num_experts // group.size()))

    def run_experts(self, sent: Dispatched) -> Tensor:
        parts = sent.rows.split(sent.tokens_per_expert.tolist())
        return torch.cat([expert(rows) for expert, rows in zip(self.each, parts, strict=True)])


class DenseListedExperts(nn.Module):
    """All experts, each on all rows."""

    def __init__(self, config: DispatcherConfig, _group: None) -> None:
        super().__init__()
        self.each = nn.ModuleList(OneExpert() for _ in range(config.num_experts))

    def forward(self, x: Tensor, routing: Routing, layout: Any = None) -> Tensor:
        rows, y = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
        for number, expert in enumerate(self.each):
            y = y + (routing.topk_weights * (routing.topk_ids == number)).sum(1, keepdim=True) * expert(rows)
        return y.view_as(x)


def with_lists(config: DispatcherConfig, group: Any, *arguments: Any, **keywords: Any) -> Model:
    model = Model(config, group, *arguments, **keywords)
    for layer in model.layers.values():
        layer.experts = (DenseListedExperts if group is None else ListedExperts)(config, group)
    return model


def with_adapters(config: DispatcherConfig, group: Any, *arguments: Any, **keywords: Any) -> Any:
    """A model that PEFT adapts: the projection of each layer, and both stacks of its experts."""
    from peft import LoraConfig, get_peft_model

    model: nn.Module = Model(config, group, *arguments, **keywords)
    factors = LoraConfig(r=2, lora_alpha=3, target_modules=["mix"], target_parameters=["experts.up", "experts.down"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, factors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # which PEFT starts at 0
                parameter.normal_(0, 0.2)
    return model


class AuxiliaryModel(Model):
    """Layers with an auxiliary loss, which travels from stage to stage in the shape (1,)."""

    def forward(self, x: Tensor, auxiliary: Any = 0.0) -> Any:
        layers: Any = self.layers
        for layer in layers.values():
            shares = layer.router(x + torch.tanh(layer.mix(x))).softmax(-1).flatten(0, -2).mean(0)
            auxiliary = auxiliary + shares.square().sum().view(1)
            x = layer(x)
        return self.head(x), auxiliary


def batch(data: int) -> Tensor:
    """Micro-batches of tokens, (micro-batches, S, D); each loss has another number of tokens."""
    generator = torch.Generator().manual_seed(data)
    return torch.randn(MICRO_BATCHES, 4 + 2 * data, HIDDEN, dtype=DTYPE, generator=generator)


def loss_of(y: Any, _target: Any = None) -> Tensor:
    y, auxiliary = y if isinstance(y, tuple) else (y, torch.zeros(1, dtype=DTYPE))
    loss: Tensor = (y - 1).square().mean() + 0.1 * auxiliary.sum()
    return loss


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recipe on one rank.

    Attributes:
        model: The module inside of all wrappers, whose parameters have the names of the whole model.
        wrapped: What the methods of the set-up get.
        experts: Group over which plain stacks of experts lie.
        alike: Ranks that hold the same layers.
        data: Number of the loss of this rank, of ``losses``.
        prefix: What the recipe adds to the names of parameters.
    """

    setup: Setup
    model: nn.Module
    wrapped: nn.Module
    experts: dist.ProcessGroup
    alike: dist.ProcessGroup
    data: int
    losses: int
    accumulate: Callable[[bool], Any] = lambda _last: nullcontext()
    schedule: Any = None
    stage: Any = None
    prefix: str = ""
    make: Make = Model

    def backward(self) -> None:
        """Run the forwards and backwards of a step."""
        x = batch(self.data)
        if self.schedule is not None:
            first, last = self.stage.is_first, self.stage.is_last
            self.schedule.step(*([x] if first else []), **({"target": x, "losses": []} if last else {}))
            return
        for number, micro_batch in enumerate(x):
            with self.accumulate(number == MICRO_BATCHES - 1):
                (loss_of(self.wrapped(micro_batch[None])) / MICRO_BATCHES).backward()

    def whole(self, pick: Callable[[Tensor], Tensor | None] = lambda tensor: tensor) -> dict[str, Tensor]:
        """Gather what ``pick`` takes of each parameter from all ranks with parts, by its name in the whole model."""
        found = {}
        for name, parameter in self.model.named_parameters():
            tensor = pick(parameter)
            if tensor is None:
                continue
            tensor = tensor.detach()
            experts = ".experts." in name
            covered = False
            if isinstance(tensor, DTensor):
                covered = tensor.shape[0] == self.num_experts
                tensor = tensor.full_tensor()
            if experts and not covered and self.experts.size() > 1:
                size = self.experts.size()
                parts = [torch.empty_like(tensor) for _ in range(size)]
                dist.all_gather(parts, tensor.contiguous(), group=self.experts)
                if ".each." in name:
                    head, _, rest = name.partition(".each.")
                    number, _, last = rest.partition(".")
                    held = self.num_experts // size
                    for rank, part in enumerate(parts):
                        of = f"{head}.each.{rank * held + int(number)}.{last}".replace(self.prefix, "")
                        found[of] = part.clone()
                    continue
                if ".lora_B." in name:  # (out, r x experts)
                    held = self.num_experts // size
                    tensor = torch.cat([part.view(len(part), -1, held) for part in parts], 2).flatten(1)
                else:
                    tensor = torch.cat(parts)
            found[name.replace(self.prefix, "")] = tensor.clone()
        return found

    @property
    def num_experts(self) -> int:
        return next(m.config.num_experts for m in self.model.modules() if isinstance(m, Dispatcher))


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def syncs(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    return nullcontext()


def by_hand(config: DispatcherConfig, copies: int, unused: bool = False, make: Make = Model) -> Run:
    """Nothing wraps the model."""
    mesh = mesh_of(copies=copies, ep=dist.get_world_size() // copies)
    model = make(config, mesh["ep"].get_group(), unused=unused)
    setup = Setup(mesh)
    setup.start(model)
    group = mesh["ep"].get_group()
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=model,
        experts=group,
        alike=world(),
        data=dist.get_rank(),
        losses=dist.get_world_size(),
    )


def ddp(config: DispatcherConfig, copies: int, unused: bool = False, make: Make = Model) -> Run:
    mesh = mesh_of(copies=copies, ep=dist.get_world_size() // copies)
    model = make(config, mesh["ep"].get_group(), unused=unused)
    setup = Setup(mesh)
    wrapped = setup.ddp(model, find_unused_parameters=unused)
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=wrapped,
        experts=mesh["ep"].get_group(),
        alike=world(),
        data=dist.get_rank(),
        losses=dist.get_world_size(),
        accumulate=lambda last: nullcontext() if last else wrapped.no_sync(),
    )


def fsdp(
    config: DispatcherConfig, copies: int, *, replicate: Sequence[str] = (), layers: bool = False, make: Make = Model
) -> Run:
    mesh = mesh_of(copies=copies, ep=dist.get_world_size() // copies)
    model = make(config, mesh["ep"].get_group())
    setup = Setup(mesh)
    sharded = setup.shard(model, replicate=replicate, blocks=[*model.layers.values()] if layers else ())
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=model,
        experts=mesh["ep"].get_group(),
        alike=world(),
        data=dist.get_rank(),
        losses=dist.get_world_size(),
        accumulate=functools.partial(syncs, sharded),
    )


def one_fully_shard(config: DispatcherConfig, copies: int, make: Make = Model) -> Run:
    """Experts on a mesh of their own inside one call of fully_shard."""
    mesh = mesh_of(copies=copies, ep=dist.get_world_size() // copies)
    model = make(config, mesh["ep"].get_group())
    setup = Setup(mesh)
    setup.start(model)
    of_copies = FSDPMeshInfo(mesh=mesh["copies"], shard_mesh_dim=0)
    experts = {p for name, p in model.named_parameters() if ".experts." in name}

    def placement(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), of_copies) if parameter in experts else None

    sharded = fully_shard(model, mesh=mesh_of(world=4), shard_placement_fn=placement)
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=model,
        experts=mesh["ep"].get_group(),
        alike=world(),
        data=dist.get_rank(),
        losses=dist.get_world_size(),
        accumulate=functools.partial(syncs, sharded),
    )


def tensor_parallel(config: DispatcherConfig, spread: bool, *, sharded: bool = False, make: Make = Model) -> Run:
    """Layers on parts of sequences; the projection sees everything on each rank."""
    mesh = mesh_of(copies=1, ep=2, tp=2) if sharded else mesh_of(ep=2, tp=2)
    group = joined_group(mesh) if spread else mesh["ep"].get_group()
    model = make(config, group)
    for number, layer in model.layers.items():
        model.layers[number] = OnParts(layer, mesh["tp"])
    setup = Setup(mesh)
    accumulate: Callable[[bool], Any] = lambda _last: nullcontext()  # noqa: E731
    if sharded:
        accumulate = functools.partial(syncs, setup.shard(model))
    else:
        setup.start(model)
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=model,
        experts=group,
        alike=world(),
        data=mesh["ep"].get_local_rank(),
        losses=2,
        accumulate=accumulate,
        prefix="block.",
    )


def context_parallel(config: DispatcherConfig, make: Make = Model) -> Run:
    """Each rank has tokens and a loss of its own, as under data parallelism."""
    mesh = mesh_of(dp=2, cp=2)
    model = make(config, mesh["cp"].get_group())
    setup = Setup(mesh)
    wrapped = setup.ddp(model)
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=wrapped,
        experts=mesh["cp"].get_group(),
        alike=world(),
        data=dist.get_rank(),
        losses=dist.get_world_size(),
        accumulate=lambda last: nullcontext() if last else wrapped.no_sync(),
    )


def pipeline(
    config: DispatcherConfig,
    *,
    copies: int = 1,
    sharded: bool = False,
    split: bool = False,
    make: Make = Model,
) -> Run:
    """Two stages. With ``split`` the gradients of inputs come first, and those of weights later."""
    mesh = mesh_of(pp=2, copies=copies, ep=2 // copies)
    stage = mesh["pp"].get_local_rank()
    model = make(config, mesh["ep"].get_group(), [stage])
    setup = Setup(mesh)
    if sharded:
        setup.shard(model)
    else:
        setup.start(model)
    of = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule: Any = Schedule1F1B(of, MICRO_BATCHES, loss_fn=loss_of)
    if split:
        schedule = ScheduleInterleavedZeroBubble([of], MICRO_BATCHES, loss_fn=loss_of)
    return Run(
        setup=setup,
        make=make,
        model=model,
        wrapped=model,
        experts=mesh["ep"].get_group(),
        alike=flat(mesh["copies", "ep"]),
        data=mesh["copies"].get_local_rank() + mesh["ep"].get_local_rank(),
        losses=2,
        schedule=schedule,
        stage=of,
    )


def flat(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh._flatten().get_group()


TWO_RANKS: dict[str, Callable[..., Run]] = {
    "ddp, 1 x 2": functools.partial(ddp, copies=1),
    "fsdp, 1 x 2": functools.partial(fsdp, copies=1),
}
UNUSED: dict[str, Callable[..., Run]] = {
    "by hand, unused parameters": functools.partial(by_hand, copies=2, unused=True),
    "ddp, unused parameters": functools.partial(ddp, copies=2, unused=True),
}
RECIPES: dict[str, Callable[..., Run]] = {
    "by hand, 2 x 2": functools.partial(by_hand, copies=2),
    "ddp, 1 x 4": functools.partial(ddp, copies=1),
    "ddp, 2 x 2": functools.partial(ddp, copies=2),
    "ddp, 4 x 1": functools.partial(ddp, copies=4),
    "fsdp, 1 x 4": functools.partial(fsdp, copies=1),
    "fsdp, 2 x 2": functools.partial(fsdp, copies=2, layers=True),
    "fsdp, 4 x 1": functools.partial(fsdp, copies=4),
    "hsdp, 2 x 2": functools.partial(fsdp, copies=2, replicate=["copies"]),
    "one fully_shard, 2 x 2": functools.partial(one_fully_shard, copies=2),
    "tp": functools.partial(tensor_parallel, spread=False),
    "tp, spread": functools.partial(tensor_parallel, spread=True),
    "tp x fsdp": functools.partial(tensor_parallel, spread=False, sharded=True),
    "tp x fsdp, spread": functools.partial(tensor_parallel, spread=True, sharded=True),
    "cp": context_parallel,
    "pp x ep": pipeline,
    "pp x ep x fsdp": functools.partial(pipeline, sharded=True),
    "pp x ep, split backward": functools.partial(pipeline, split=True),
    "pp x dp, split backward": functools.partial(pipeline, copies=2, split=True),
    "pp x ep x fsdp, split backward": functools.partial(pipeline, sharded=True, split=True),
    "pp x dp x fsdp, split backward": functools.partial(pipeline, copies=2, sharded=True, split=True),
}


def dense_step(run: Run, config: DispatcherConfig, weights: dict[str, Tensor]) -> Model:
    """Return the dense model with the gradients of a step on all tokens. ``weights`` are those of all stages."""
    model: Model = run.make(config, None, unused=any(".unused." in name for name in weights))
    model.load_state_dict(weights)
    for data in range(run.losses):
        for micro_batch in batch(data):
            (loss_of(model(micro_batch[None])) / (MICRO_BATCHES * run.losses)).backward()
    return model


def of_all_stages(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put together what the stages have."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return {name: tensor for of_rank in everybody for name, tensor in of_rank.items()}
