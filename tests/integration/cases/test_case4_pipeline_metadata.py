"""Case 4: packed metadata on every pipeline stage. NVIDIA/Megatron-LM#4150, for #4092."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import THD, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.layouts import Layout, broadcast_layout
from moe_dispatch_testing import run_processes, run_ranks
from moe_dispatch_testing.ranks import thread_group
from tests.integration.needs import needs

pytestmark = needs("megatron")

STAGES, TP, HIDDEN, EXPERTS, ROWS = 4, 2, 16, 4, 20
LOST = 1  # the stage whose rank 1 never gets the layout
LOSER, PEER = LOST * TP + 1, LOST * TP
OTHERS = [rank for rank in range(STAGES * TP) if rank not in (LOSER, PEER)]
LAYOUT = THD(torch.tensor([0, 5, 8, 17]).int(), torch.tensor([0, 6, 10, 20]).int(), 9)
CONFIG = DispatcherConfig(
    backend="alltoall", num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, infer_layout=False, debug=True
)


def one_layer(dispatcher: Dispatcher, layout: Layout | None, tp_rank: int, *, with_plan: bool) -> str:
    """What became of the gaps in a layer on one rank, or what was raised."""
    real, rows = LAYOUT.valid_T(ROWS), ROWS // TP
    assert real is not None
    weights, ids = torch.rand(rows, EXPERTS).topk(2)
    try:
        plan: Any = dispatcher.plan(layout) if with_plan else layout
        sent = dispatcher.dispatch(torch.ones(rows, HIDDEN), Routing(ids, weights), plan)
        gaps: Tensor = dispatcher.combine(sent.rows, sent)[~real.tensor_split(TP)[tp_rank]]
        return "gaps went through experts" if gaps.any() else "gaps are zero"
    except Exception as error:
        return "".join(traceback.format_exception_only(error))


def told(config: DispatcherConfig, *, with_plan: bool = False) -> list[str]:
    """Of each rank of all stages, where one rank never got the layout."""
    stores = [HashStore() for _ in range(STAGES)]

    def body(group: dist.ProcessGroup) -> str:
        stage, tp_rank = divmod(group.rank(), TP)
        name = f"stage {stage}, rank {tp_rank} of its {TP}"
        dispatcher = build_dispatcher(config, thread_group(stores[stage], tp_rank, TP), name=name)
        layout = None if group.rank() == LOSER else LAYOUT.shard(tp_rank, TP)
        return one_layer(dispatcher, layout, tp_rank, with_plan=with_plan)

    return run_ranks(body, STAGES * TP)


@pytest.mark.parametrize(("verb", "with_plan"), [("dispatch", False), ("plan", True)])
def test_a_rank_that_never_got_the_layout_is_told_so_by_name(verb: str, with_plan: bool) -> None:
    found = told(CONFIG, with_plan=with_plan)
    assert found[LOSER].startswith(f"moe_dispatch.errors.LayoutError: Dispatcher.{verb}: a plan or a layout must be")
    assert "broadcast_layout brings the layout of a micro-batch to every rank" in found[LOSER]
    assert found[PEER].startswith("moe_dispatch.errors.PeerError: rank 1 refused")
    if not with_plan:
        for rank in (LOSER, PEER):
            assert f"In the dispatcher 'stage {LOST}, rank {rank % TP} of its 2'." in found[rank]
    assert [found[rank] for rank in OTHERS] == ["gaps are zero"] * 6


def test_by_hand_nobody_is_told() -> None:
    """With layouts inferred, the rank without one takes gaps for tokens."""
    found = told(CONFIG.replace(infer_layout=True, debug=False))
    assert found[LOSER] == "gaps went through experts"
    assert [found[rank] for rank in (PEER, *OTHERS)] == ["gaps are zero"] * 7


def megatron(rank: int) -> dict[str, Any]:
    """What megatron-core's own broadcast brings to a middle stage, and the layout of ours in its container."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_tp_rank

    assert dist.group.WORLD is not None
    layout = broadcast_layout(None if rank else LAYOUT, dist.group.WORLD)
    assert isinstance(layout, THD)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=layout.real,
        cu_seqlens_q_padded=layout.owned,
        max_seqlen_q=layout.max_seqlen,
    )
    row = torch.zeros(1, ROWS, dtype=torch.int64)
    of_loader = {
        **dict.fromkeys(("tokens", "labels", "position_ids"), row),
        "loss_mask": row.float(),
        "attention_mask": None,
        "cu_seqlens": LAYOUT.real[None],
        "cu_seqlens_padded": LAYOUT.owned[None],
        "max_seqlen": torch.tensor([LAYOUT.max_seqlen], dtype=torch.int32),
    }
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        batch = get_batch_on_this_tp_rank(
            {} if rank else of_loader,
            has_cu_seqlens=True,
            broadcast_src_rank=0,
            broadcast_group=dist.group.WORLD,
            cp_size=1,
            tp_rank=rank,
            micro_batch_size=1,
            seq_length=ROWS,
            pipeline_model_parallel_size=STAGES,
            **dict.fromkeys(("is_pipeline_first_stage", "is_pipeline_last_stage", "mtp_on_this_rank"), False),
            **dict.fromkeys(("is_hybrid_cp", "create_attention_mask_in_dataloader"), False),
        )
    return {
        "container": repr(THD(params.cu_seqlens_q, params.cu_seqlens_q_padded, params.max_seqlen_q)),
        "broadcast": (batch["cu_seqlens"].flatten().tolist(), int(batch["max_seqlen"])),
        "has padded": batch["cu_seqlens_padded"] is not None,
    }


def test_megatrons_own_container_and_broadcast() -> None:
    """#4092 is repaired in megatron-core 0.19.2, but for the padded ends: without context parallelism they stay."""
    for rank, found in enumerate(run_processes(megatron, TP, timeout=timedelta(seconds=120))):
        wanted = {"container": repr(LAYOUT), "broadcast": ([0, 5, 8, 17], 9), "has padded": rank == 0}
        assert found == wanted
