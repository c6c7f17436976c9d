"""torchtitan's own MoE module, small, on real ranks: with its dispatchers or with ours, in several at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_dispatch import BSHD
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.replay import RoutingTable

RANKS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 256, 32, 8, 2
EXPERT_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
# Of one rank, by name: the output, and every gradient.
Outcome = dict[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One forward and backward of an MoE module.

    Attributes:
        dispatcher: "theirs" for what torchtitan's config builds, or arguments of ``use_moe_dispatch``.
        tokens: of each rank, in one row. None: two rows of six on each rank, in a module that torchtitan parallelises.
        dp, tp, ep: degrees; experts lie over all ranks but ``4 // ep`` copies.
        spmd: torchtitan's ``spmd_backend``.
        dtype: of parameters and tokens.
        replay: whether routers choose what ``given_ids`` says.
    """

    dispatcher: str | Mapping[str, Any]
    tokens: tuple[int, ...] | None = None
    dp: int = RANKS
    tp: int = 1
    ep: int = RANKS
    spmd: str = "partial_dtensor"
    dtype: torch.dtype = field(default=torch.float32)
    replay: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(B, L) of each rank's tokens; under tensor parallelism ranks hold parts of sequences."""
        return [(2, 6 // self.tp)] * RANKS if self.tokens is None else [(1, count) for count in self.tokens]


def moe_config() -> Any:
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

    drawn = partial(nn.init.normal_, std=HIDDEN**-0.5)
    return make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(
            dim=HIDDEN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            gate_param_init={"weight": drawn},
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=INNER,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init=dict.fromkeys(EXPERT_WEIGHTS, drawn),
            comm_backend="standard",
        ),
    )


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The module, with the same parameters whatever dispatches its tokens."""
    torch.manual_seed(0)
    moe = config.build()
    moe.init_states(buffer_device=torch.device("cpu"))
    return moe.to(dtype)


def forward(moe: Any, x_BLD: Tensor) -> Any:
    """In the shape that the installed torchtitan reads: (B, L, D) in release 0.3.0, (T, D) in its main branch."""
    from torchtitan.models.common.moe import RoutedExperts

    if "x_TD" not in inspect.signature(RoutedExperts.forward).parameters:
        return moe(x_BLD)
    y_TD = moe(x_BLD.flatten(0, 1))
    return y_TD if isinstance(y_TD, DTensor) else y_TD.view(x_BLD.shape)


def draw(shape: tuple[int, int], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of a rank, and the gradient of what becomes of them."""
    generator = torch.Generator().manual_seed(rank)
    x_BLD, upstream_BLD = torch.randn(2, *shape, HIDDEN, generator=generator).to(dtype)
    return x_BLD, upstream_BLD


def given_ids(shape: tuple[int, int], rank: int) -> Tensor:
    """(B, L, K) of an earlier pass, for the tokens of a rank."""
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.rand(*shape, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]


def whole(job: Job, rank: int) -> Outcome:
    """What a rank must have: torchtitan's module with all experts on the tokens of all ranks."""
    moe = built(moe_config(), job.dtype)
    if job.replay:
        ids = [given_ids(shape, member).flatten(0, 1) for member, shape in enumerate(job.shapes)]
        moe.router.register_forward_hook(partial(_force, torch.cat(ids).unsqueeze(0)))
    drawn = [draw(shape, member, job.dtype) for member, shape in enumerate(job.shapes)]
    leaves = [x_BLD.requires_grad_() for x_BLD, _ in drawn]
    rows = torch.cat([x_BLD.flatten(0, 1) for x_BLD in leaves]).unsqueeze(0)
    upstream = torch.cat([upstream_BLD.flatten(0, 1) for _, upstream_BLD in drawn]).unsqueeze(0)
    y_BLD = forward(moe, rows)
    y_BLD.backward(upstream)
    counts = [len(x_BLD.flatten(0, 1)) for x_BLD in leaves]
    outcome = {"y": y_BLD.detach()[0].split(counts)[rank].view_as(leaves[rank]), "x": _gradient(leaves[rank])}
    local = slice(rank % job.ep * EXPERTS // job.ep, (rank % job.ep + 1) * EXPERTS // job.ep)
    outcome |= {name: _gradient(parameter)[local] for name, parameter in _experts(moe)}
    return outcome | {"gate": _gradient(moe.router.gate.weight)}


def _force(ids_BLK: Tensor, router: Any, args: Any, routed: tuple[Tensor, Tensor, Tensor]) -> Any:
    ids_BLK = ids_BLK.view(*routed[2].shape[:-1], -1)
    scores_BLK = routed[2].gather(-1, ids_BLK)
    return scores_BLK / scores_BLK.sum(-1, keepdim=True), ids_BLK, routed[2]


def outcomes(rank: int, job: Job) -> tuple[Outcome, Outcome]:
    """What a rank has, and what it must have."""
    return _sharded(job, rank) if job.tokens is None else _ragged(job, rank), whole(job, rank)


def _config(job: Job) -> Any:
    from moe_dispatch.integrations.torchtitan import use_moe_dispatch

    config = moe_config()
    if not isinstance(job.dispatcher, str):
        use_moe_dispatch(config, **job.dispatcher)
    return config


def _sharded(job: Job, rank: int) -> Outcome:
    """Through torchtitan's own ``parallelize``: meshes, DTensors, local_map and sequence parallelism are its."""
    config, dims = _config(job), dims_of(dp=job.dp, tp=job.tp, ep=job.ep, spmd=job.spmd)
    with parallel(config, dims, enable_sp=True):
        moe = built(config, job.dtype)
        moe.parallelize(dims)
        outcome = _run(moe, job, rank)
    for name in EXPERT_WEIGHTS:
        dist.all_reduce(outcome[name], group=dims.get_mesh("efsdp").get_group())
    return outcome


@contextmanager
def parallel(config: Any, dims: Any, *, enable_sp: bool) -> Iterator[None]:
    """What torchtitan's trainer does around a model with this config of an MoE module."""
    import spmd_types as spmd
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=enable_sp, expert_param_layout=layout)
    set_spmd_backend(dims.spmd_backend)
    with get_spmd_context(parallel_dims=dims)():
        yield


def _ragged(job: Job, rank: int) -> Outcome:
    """With experts sharded by hand: DTensors are of one size on every rank."""
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend(job.spmd)
    moe = built(_config(job), job.dtype)
    for name, parameter in _experts(moe):
        shard = nn.Parameter(parameter.detach().chunk(RANKS)[rank].clone())
        setattr(moe.routed_experts.inner_experts, name, shard)
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=_mesh())
    outcome = _run(moe, job, rank)
    dist.all_reduce(outcome["gate"])
    return outcome


def _run(moe: Any, job: Job, rank: int) -> Outcome:
    x_BLD, upstream_BLD = draw(job.shapes[rank], rank, job.dtype)
    with _replaying(moe, job, rank):
        y_BLD = forward(moe, x_BLD.requires_grad_())
        if isinstance(y_BLD, DTensor):
            shaped = upstream_BLD.view(_local(y_BLD).shape)
            upstream_BLD = DTensor.from_local(shaped, y_BLD.device_mesh, y_BLD.placements)
        y_BLD.backward(upstream_BLD)
    outcome = {
        "y": _local(y_BLD).detach().view(x_BLD.shape),
        "x": _gradient(x_BLD),
        "gate": _gradient(moe.router.gate.weight),
    }
    return outcome | {name: _gradient(parameter) for name, parameter in _experts(moe)}


@contextmanager
def _replaying(moe: Any, job: Job, rank: int) -> Iterator[None]:
    if not job.replay:
        yield
        return
    from moe_dispatch.integrations.torchtitan import RoutingReplay

    ids_BLK = given_ids(job.shapes[rank], rank)
    table = RoutingTable(enumerate(ids_BLK.unsqueeze(2)), num_experts=EXPERTS)
    replay = RoutingReplay(moe)
    with pytest.raises(StateError, match=r"forward\(\) was called outside `with replay\.micro_batch"):
        forward(moe, draw(job.shapes[rank], rank, job.dtype)[0])
    lengths, like = [ids_BLK.shape[1]] * len(ids_BLK), (*ids_BLK.shape[:2], HIDDEN)
    partly = RoutingTable({0: torch.tensor([[[3] + [-1] * (ids_BLK.shape[2] - 1)]])}, num_experts=EXPERTS)
    refused = pytest.raises(
        InputError, match=r"an expert in each of \d slots, got \[3, -1.* for sequence 0, position 0"
    )
    with refused, replay.micro_batch(partly.cut(BSHD([1]), [0], like=(1, 1, HIDDEN))):
        pass
    with replay.micro_batch(table.cut(BSHD(lengths), range(len(ids_BLK)), like=like)):
        yield
    table.check_used()
    replay.close()
    (drift,) = moe.routed_experts.token_dispatcher.dispatcher.metrics(gather=True).replay_drift.values()
    assert drift > 0.3


def _experts(moe: Any) -> Sequence[tuple[str, Tensor]]:
    return list(moe.routed_experts.inner_experts.named_parameters())


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "no gradient came back"
    return _local(leaf.grad).clone()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def dims_of(*, dp: int, ep: int, tp: int = 1, replicate: int = 1, spmd: str = "partial_dtensor") -> Any:
    """Made once: each makes process groups."""
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    sizes = {"dp_replicate": replicate, "dp_shard": dp, "cp": 1, "tp": tp, "pp": 1, "ep": ep}
    dims = parallel_dims.ParallelDims(**sizes, world_size=RANKS, spmd_backend=spmd)
    dims.build_mesh()
    return dims


@cache
def _mesh() -> DeviceMesh:
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("ep",))
