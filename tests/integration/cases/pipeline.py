"""A packed model over 4 pipeline stages of 2 tensor-parallel ranks with sequence parallelism, and unsharded.

Each stage mixes tokens along their sequence, for which it must know the layout and ``max_seqlen``, and has an MoE
layer whose experts its two ranks share. Suffixes as in ``moe_dispatch.types``; F is an expert's inner width.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.layouts import Layout, broadcast_layout, bshd_to_thd, thd_to_bshd
from tests.integration.deep_ep_users.dense import gradient
from tests.pages import relative

STAGES, TP = 4, 2
HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 4, 2
CONFIG = DispatcherConfig(backend="alltoall", num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, infer_layout=False)
# Of each micro-batch: the sequences' lengths and the rows they own. What a rank holds may cut a sequence.
MICRO_BATCHES = (((5, 3, 9), (6, 4, 10)), ((1, 12), (2, 12)), ((7,), (8,)))
LOST = 1  # the stage whose rank 1 never gets the layout in ``lose``
MIDDLE = 2  # the stage whose ranks import megatron-core, which takes longer than all else here


@final
class Place:
    """Where a rank is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.stage, self.tp_rank = rank, rank // TP, rank % TP
        self.tp_group = [dist.new_group([stage * TP, stage * TP + 1]) for stage in range(STAGES)][self.stage]


@final
class Stage(nn.Module):
    """The whole of one stage, float64; ``seed`` says which."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5)

        self.mix_DD, self.gate_ED = drawn(HIDDEN, HIDDEN), drawn(EXPERTS, HIDDEN)
        self.up_LFD, self.down_LDF = drawn(EXPERTS, INNER, HIDDEN), drawn(EXPERTS, HIDDEN, INNER)

    def mixed(self, x_TD: Tensor, layout: THD) -> Tensor:
        """Each token with the mean of those before it in its sequence."""
        x_BSD = thd_to_bshd(
            x_TD, layout.cu_seqlens, max_seqlen=layout.max_seqlen, cu_seqlens_padded=layout.cu_seqlens_padded
        )
        means_BSD = x_BSD.cumsum(1) / torch.arange(1, x_BSD.shape[1] + 1)[:, None]
        return bshd_to_thd(means_BSD, layout.cu_seqlens, cu_seqlens_padded=layout.cu_seqlens_padded) @ self.mix_DD

    def routed(self, x_TD: Tensor) -> Routing:
        weights_TK, ids_TK = (x_TD @ self.gate_ED.T).softmax(1).topk(TOP_K)
        return Routing(ids_TK, weights_TK)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.up_LFD[index].T) @ self.down_LDF[index].T

    def dense(self, x_TD: Tensor) -> Tensor:
        """One whole sequence, all experts."""
        x_TD = x_TD + self.mixed(x_TD, THD([0, len(x_TD)]))
        routing, y_TD = self.routed(x_TD), torch.zeros_like(x_TD)
        for index in range(EXPERTS):
            token, slot = (routing.topk_ids == index).nonzero(as_tuple=True)
            weighted = self.expert(index, x_TD[token]) * routing.topk_weights[token, slot, None]
            y_TD = y_TD.index_add(0, token, weighted)
        return x_TD + y_TD

    def keep_experts(self, tp_rank: int) -> None:
        """Those of one rank."""
        mine = slice(tp_rank * EXPERTS // TP, (tp_rank + 1) * EXPERTS // TP)
        self.up_LFD, self.down_LDF = nn.Parameter(self.up_LFD[mine].clone()), nn.Parameter(self.down_LDF[mine].clone())


@final
class StageOfRank(Dispatcher):
    """One rank's part of a stage."""

    def __init__(self, config: DispatcherConfig, place: Place) -> None:
        super().__init__(config, place.tp_group, name=f"stage {place.stage}, rank {place.tp_rank} of its {TP}")
        self.position, self.stage = place, Stage(place.stage)
        self.stage.keep_experts(place.tp_rank)

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.per_expert(partial(self.stage.expert, index) for index in range(len(sent.tokens_per_expert)))

    def moe(self, x: Tensor, layout: Layout | None) -> Tensor:
        """This rank's rows; ``layout`` is theirs."""
        y: Tensor = self(x, self.stage.routed(x), layout)
        return x + y

    def run(self, x: Tensor, layout: THD) -> Tensor:
        """Sequence parallelism: whole sequences are gathered to be mixed, and each rank goes on with its rows."""
        whole_TD = all_gather_tensor_autograd(x, 0, self.position.tp_group)
        x = x + self.stage.mixed(whole_TD, layout).tensor_split(TP)[self.position.tp_rank]
        return self.moe(x, layout.shard(self.position.tp_rank, TP))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch: rows and the gradient of the output, (T, D); gaps hold what must not be read."""

    layout: THD
    x_TD: Tensor
    upstream_TD: Tensor


def draw(index: int) -> Batch:
    lengths, owned = MICRO_BATCHES[index]
    generator = torch.Generator().manual_seed(50 + index)
    layout = THD(
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor([0, *owned], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max(lengths),
    )
    rows = sum(owned)
    x_TD, upstream_TD = torch.randn(2, rows, HIDDEN, generator=generator, dtype=torch.float64)
    real = layout.valid_T(rows)
    assert real is not None
    x_TD[~real], upstream_TD[~real] = 1e3, 0.0
    return Batch(layout=layout, x_TD=x_TD, upstream_TD=upstream_TD)


def unsharded() -> tuple[list[Stage], list[Tensor]]:
    """All stages with their gradients, and the gradients of each micro-batch's rows: a sequence at a time."""
    stages = [Stage(number) for number in range(STAGES)]
    grads = []
    for batch in map(draw, range(len(MICRO_BATCHES))):
        x_TD = batch.x_TD.clone().requires_grad_()
        for start, length in zip(batch.layout.owned.tolist(), batch.layout.real.diff().tolist(), strict=False):
            rows = slice(start, start + length)
            y_TD = x_TD[rows]
            for stage in stages:
                y_TD = stage.dense(y_TD)
            y_TD.backward(batch.upstream_TD[rows])
        grads.append(gradient(x_TD))
    return stages, grads


def train(place: Place) -> dict[str, Any]:
    """All micro-batches forward, then all backward: the layouts that arrived, and errors of gradients by name."""
    layer = StageOfRank(CONFIG, place)
    world = dist.group.WORLD
    assert world is not None
    layouts: list[dict[str, Any]] = []
    ins: list[Tensor] = []
    outs: list[Tensor] = []
    for index in range(len(MICRO_BATCHES)):
        layout = broadcast_layout(draw(index).layout if place.rank == 0 else None, world)
        assert isinstance(layout, THD)
        x = _received(place, index, layout).requires_grad_()
        y = layer.run(x, layout)
        if place.stage < STAGES - 1:
            dist.send(y.detach().contiguous(), place.rank + TP)
        layouts.append(written(layout))
        ins.append(x)
        outs.append(y)
    for index in reversed(range(len(MICRO_BATCHES))):
        _backward(place, index, ins[index], outs[index])
    found = {"layouts": layouts, "errors": _errors(place, layer.stage, ins)}
    layer.close()
    return found


def written(layout: Layout) -> dict[str, Any]:
    """What a layout holds, to be compared between processes."""
    assert isinstance(layout, THD)
    return {
        "cu_seqlens": layout.real.tolist(),
        "cu_seqlens_padded": layout.owned.tolist(),
        "max_seqlen": layout.max_seqlen,
        "dtype": str(layout.real.dtype),
    }


def _received(place: Place, index: int, layout: THD) -> Tensor:
    """The first stage's rows come from the data, those of the others from the stage before."""
    if place.stage == 0:
        return draw(index).x_TD.tensor_split(TP)[place.tp_rank].clone()
    rows = layout.num_rows()
    assert rows is not None
    x = torch.empty(rows // TP, HIDDEN, dtype=torch.float64)
    dist.recv(x, place.rank - TP)
    return x


def _backward(place: Place, index: int, x: Tensor, y: Tensor) -> None:
    grad = torch.empty_like(y)
    if place.stage == STAGES - 1:
        grad.copy_(draw(index).upstream_TD.tensor_split(TP)[place.tp_rank])
    else:
        dist.recv(grad, place.rank + TP)
    y.backward(grad)
    if place.stage:
        dist.send(gradient(x), place.rank - TP)


def _errors(place: Place, stage: Stage, ins: list[Tensor]) -> dict[str, float]:
    stages, grads_x = unsharded()
    whole = stages[place.stage]
    for weight in (stage.mix_DD, stage.gate_ED):  # each rank saw half of the rows
        assert weight.grad is not None
        dist.all_reduce(weight.grad, group=place.tp_group)
    want = dict(whole.named_parameters())
    errors = {name: relative(weight.grad, _part(want[name], name, place)) for name, weight in stage.named_parameters()}
    if place.stage == 0:
        for index, (x, grad) in enumerate(zip(ins, grads_x, strict=True)):
            errors[f"rows of micro-batch {index}"] = relative(x.grad, grad.tensor_split(TP)[place.tp_rank])
    return errors


def _part(weight: Tensor, name: str, place: Place) -> Tensor | None:
    """The gradient of what a rank holds of a weight of the unsharded stage."""
    if weight.grad is None or "L" not in name:
        return weight.grad
    return weight.grad.tensor_split(TP)[place.tp_rank]


def lose(place: Place, config: DispatcherConfig, *, with_plan: bool = False) -> str:
    """One MoE layer in every stage, and what came of it, where rank 1 of a middle stage never got the layout."""
    batch = draw(0)
    layout = None if (place.stage, place.tp_rank) == (LOST, 1) else batch.layout.shard(place.tp_rank, TP)
    layer = StageOfRank(config, place)
    x = batch.x_TD.tensor_split(TP)[place.tp_rank]
    try:
        plan: Any = layer.plan(layout) if with_plan else layout
        gaps = layer(x, layer.stage.routed(x), plan)[_gaps(batch, place)]
        return "gaps are zero" if not gaps.any() else "gaps went through experts"
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    finally:
        dist.barrier()
        layer.close()


def _gaps(batch: Batch, place: Place) -> Tensor:
    real = batch.layout.valid_T(len(batch.x_TD))
    assert real is not None
    return ~real.tensor_split(TP)[place.tp_rank]


def megatron(place: Place) -> dict[str, Any]:
    """What megatron-core's own broadcast brings here, and the layout of ours in its container."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_tp_rank

    layout = broadcast_layout(draw(0).layout if place.tp_rank == 0 else None, place.tp_group)
    assert isinstance(layout, THD)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=layout.real,
        cu_seqlens_kv=layout.real,
        cu_seqlens_q_padded=layout.owned,
        cu_seqlens_kv_padded=layout.owned,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_kv=layout.max_seqlen,
    )
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        batch = get_batch_on_this_tp_rank(
            _of_loader(draw(0)) if place.tp_rank == 0 else {},
            has_cu_seqlens=True,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            broadcast_src_rank=place.stage * TP,
            broadcast_group=place.tp_group,
            cp_size=1,
            tp_rank=place.tp_rank,
            micro_batch_size=1,
            seq_length=len(draw(0).x_TD),
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=STAGES,
            is_pipeline_first_stage=False,
            is_pipeline_last_stage=False,
        )
    return {
        "container": written(THD(params.cu_seqlens_q, params.cu_seqlens_q_padded, params.max_seqlen_q)),
        "cu_seqlens": batch["cu_seqlens"].flatten().tolist(),
        "max_seqlen": int(batch["max_seqlen"]),
        "has padded": batch["cu_seqlens_padded"] is not None,
    }


def _of_loader(batch: Batch) -> dict[str, Any]:
    """What a data loader with a batch dimension gives rank 0 of a tensor-parallel group."""
    row = torch.zeros(1, len(batch.x_TD), dtype=torch.int64)
    return {
        "tokens": row,
        "labels": row,
        "loss_mask": row.float(),
        "position_ids": row,
        "attention_mask": None,
        "cu_seqlens": batch.layout.real[None],
        "cu_seqlens_padded": batch.layout.owned[None],
        "max_seqlen": torch.tensor([batch.layout.max_seqlen], dtype=torch.int32),
    }


def rank_body(rank: int) -> dict[str, Any]:
    """Everything the test looks at, in one start of the processes."""
    place = Place(rank)
    return {
        "train": train(place),
        "megatron": megatron(place) if place.stage == MIDDLE else None,
        "lost": lose(place, CONFIG),
        "lost before a plan": lose(place, CONFIG.replace(debug=True), with_plan=True),
        "lost by hand": lose(place, CONFIG.replace(infer_layout=True)),
    }
