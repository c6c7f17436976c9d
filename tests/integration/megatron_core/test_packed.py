"""Packed sequences through a block of transformer layers: gaps go nowhere, however the rows are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.integration.deep_ep_users.dense import gradient
from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import (
    BALANCED,
    HIDDEN,
    RANKS,
    TOP_K,
    Case,
    Outcome,
    Parallel,
    gradients_of,
    has_copied_experts,
)
from tests.integration.megatron_core.model import moe_block
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = needs("megatron")

REAL, PADDED = (5, 3, 0, 4), (8, 4, 4, 8)  # rows of each sequence, and with its gap; multiples of 2 * cp
LAYERS = 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ALONE, SHARDED = Parallel(), Parallel(ep=4, tp=2, cp=2)


def params(real: tuple[int, ...] = REAL, padded: tuple[int, ...] | None = PADDED) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = [torch.tensor((0, *lengths)).cumsum(0).int() for lengths in (real, padded or real)]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[0],
        cu_seqlens_q_padded=ends[1] if padded else None,
        cu_seqlens_kv_padded=ends[1] if padded else None,
        max_seqlen_q=max(padded or real),
        max_seqlen_kv=max(padded or real),
    )


def rows_of_rank(rank: int, parallel: Parallel, contiguous: bool = False) -> list[int]:
    """Of the packed rows those that a rank holds: two mirrored chunks of each sequence, then a part of all that."""
    cp_rank, tp_rank = rank // parallel.tp % parallel.cp, rank % parallel.tp
    if contiguous:
        held = sum(PADDED) // (parallel.cp * parallel.tp)
        return list(range(sum(PADDED)))[(cp_rank * parallel.tp + tp_rank) * held :][:held]
    rows: list[int] = []
    start = 0
    for length in PADDED:
        chunk = length // (2 * parallel.cp)
        for part in (cp_rank, 2 * parallel.cp - 1 - cp_rank):
            rows += range(start + part * chunk, start + (part + 1) * chunk)
        start += length
    held = len(rows) // parallel.tp
    return rows[tp_rank * held : (tp_rank + 1) * held]


def real_rows() -> list[bool]:
    return [offset < real for real, padded in zip(REAL, PADDED, strict=True) for offset in range(padded)]


def case_of(parallel: Parallel, **config: Any) -> Case:
    return Case(parallel=parallel, config={"num_layers": LAYERS, **config}, seed=3)


def called(
    block: Any, hidden: Tensor, real_T: Tensor, *, between: Callable[[], Any] | None = None, **kwargs: Any
) -> Outcome:
    """Outputs of real rows, and all gradients, none of which comes in through a gap. ``between`` runs before these."""
    hidden = hidden.clone().requires_grad_()
    block.zero_grad()
    output = block(hidden, None, **kwargs) * real_T.view(-1, 1, 1)
    if between is not None:
        with torch.no_grad():
            between()
    output.square().sum().backward()
    return {"output": output.detach(), "hidden": gradient(hidden)} | gradients_of(block)


def drawn(rank: int, parallel: Parallel, contiguous: bool = False) -> tuple[Tensor, Tensor]:
    """[T, 1, D] of this rank, and which rows of it are real."""
    rows = rows_of_rank(rank, parallel, contiguous)
    whole = torch.randn(sum(PADDED), 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    return whole[rows], torch.tensor(real_rows())[rows]


def recompute_layers(block: Any) -> None:
    for layer in block.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def with_gaps(rank: int, parallel: Parallel, how: str) -> tuple[float, bool]:
    """Megatron is told of the gaps by a padding mask, we by the packed parameters alone.

    With a "tail", the last sequence of the batch is none: its rows lie behind the end of cu_seqlens_q_padded.
    """
    from moe_dispatch.integrations.megatron import convert

    block = moe_block(case_of(parallel, **(FULL if "full" in how else {})))
    contiguous = "contiguous" in how
    hidden, real_T = drawn(rank, parallel, contiguous)
    real, padded = (REAL[:-1], PADDED[:-1]) if "tail" in how else (REAL, PADDED)
    real_T &= torch.tensor(rows_of_rank(rank, parallel, contiguous)) < sum(padded)
    packed = params(real, padded)
    if contiguous:  # as releases after 0.19.2 say it
        packed.cp_partition_mode = "contiguous"
    if "lengths" in how:  # as verl and our plug-in for it
        packed.moe_dispatch_cu_seqlens, packed.cu_seqlens_q = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    want = called(block, hidden, real_T, packed_seq_params=packed, padding_mask=~real_T.unsqueeze(0))
    convert(block, **(BALANCED if "balanced" in how else {}))
    if "recomputed" in how:
        recompute_layers(block)
    # A mask of the caller's own, and all real, beside the gaps.
    mask: dict[str, Any] = {"padding_mask": torch.zeros(1, len(real_T), dtype=torch.bool)} if "masked" in how else {}
    dispatcher = block.layers[0].mlp.token_dispatcher.dispatcher
    before = dispatcher.metrics(gather=True).real_tokens_per_expert
    got = called(block, hidden, real_T, packed_seq_params=packed, **mask)
    sent = int((dispatcher.metrics(gather=True).real_tokens_per_expert - before).sum())
    assert has_copied_experts(block) == ("balanced" in how)
    copies = RANKS // (parallel.tp * parallel.cp)  # of the batch, one per data-parallel rank
    return difference(got, want), sent == sum(real) * copies * TOP_K * LAYERS  # rows count once, also if recomputed


def without_padded_offsets(rank: int, lengths: tuple[int, ...]) -> float:
    """No gaps, or rows behind the last sequence: nothing says that these are padding, so both compute them."""
    from moe_dispatch.integrations.megatron import convert

    block = moe_block(case_of(ALONE))
    hidden, real_T = drawn(rank, ALONE)[0], torch.ones(sum(PADDED), dtype=torch.bool)
    want = called(block, hidden, real_T, packed_seq_params=params(lengths, None))
    convert(block)
    return difference(called(block, hidden, real_T, packed_seq_params=params(lengths, None)), want)


def experts_biased(rank: int) -> bool:
    """Whether routers count, for the bias of their experts, real rows alone: those that are sent."""
    from moe_dispatch.integrations.megatron import convert

    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    block = moe_block(case_of(ALONE, **fields))
    convert(block)
    hidden, real_T = drawn(rank, ALONE)
    called(block, hidden, real_T, packed_seq_params=params())
    return all(layer.mlp.router.local_tokens_per_expert.sum() == sum(REAL) * TOP_K for layer in block.layers)


def agreements(rank: int, how: str) -> int:
    """How often ranks settled sizes in a forward of two MoE layers that need it."""
    from moe_dispatch.integrations.megatron import convert, follow_packed_sequences, moe_layer_spec
    from tests.integration.megatron_core.layer import groups, own_spec

    case = Case(config={"num_layers": LAYERS, "hidden_size": 256}, dtype=torch.bfloat16, seed=4)
    backend = {"name": "hybridep", "emulate": True}
    if how == "spec":
        block = moe_block(case, moe_layer_spec(own_spec(), backend=backend, pg_collection=groups(case.parallel)))
        follow_packed_sequences(block)
        follow_packed_sequences(block)  # a second time changes nothing
    else:
        block = moe_block(case)
        convert(block, backend=backend)
    hidden = torch.randn(4 + rank, 2, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
    metrics = block.layers[0].mlp.token_dispatcher.dispatcher.metrics
    before = int(metrics().collectives.get("sizes", 0))
    block(hidden, None)
    if how == "twice":
        block(hidden, None)
    for layer in block.layers:
        assert layer.mlp.token_dispatcher.plans is None
    return int(metrics().collectives.get("sizes", 0)) - before


def wrong_length(rank: int) -> str:
    from moe_dispatch.integrations.megatron import convert

    block = moe_block(case_of(ALONE))
    convert(block)
    with pytest.raises(ValueError, match="THD: cu_seqlens") as raised:
        block(torch.randn(20, 1, HIDDEN), None, packed_seq_params=params())
    return str(raised.value)


GAPS = {
    "masked, tail": ALONE,
    "recomputed, lengths": ALONE,
    "balanced, full": ALONE,
    "once": SHARDED,
    "masked, contiguous": SHARDED,
    "recomputed, tail": SHARDED,
    "balanced, recomputed, lengths": SHARDED,
}
CHECKS: dict[str, Check] = {
    how: functools.partial(with_gaps, parallel=parallel, how=how) for how, parallel in GAPS.items()
}
AGREEMENTS = {"spec": 1, "twice": 2}


@functools.cache
def results() -> dict[str, list[Any]]:
    counts = {how: functools.partial(agreements, how=how) for how in AGREEMENTS}
    rest: dict[str, Check] = {
        "without gaps": functools.partial(without_padded_offsets, lengths=PADDED),
        "rows behind": functools.partial(without_padded_offsets, lengths=PADDED[:-1]),
        "wrong length": wrong_length,
        "biased": experts_biased,
    }
    return run_megatron(CHECKS | counts | rest)


@pytest.mark.parametrize("name", CHECKS)
def test_gaps_between_sequences_go_nowhere(name: str) -> None:
    for error, only_real_ones_sent in require(results()[name]):
        assert error < 1e-5
        assert only_real_ones_sent


@pytest.mark.parametrize("name", ["without gaps", "rows behind"])
def test_packed_rows_without_gaps_are_all_sent(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


def test_biases_of_experts_count_real_rows() -> None:
    assert all(require(results()["biased"]))


@pytest.mark.parametrize("how", AGREEMENTS)
def test_sizes_are_settled_once_per_forward(how: str) -> None:
    assert require(results()[how]) == [AGREEMENTS[how]] * RANKS


def test_parameters_of_another_batch_are_refused() -> None:
    for text in require(results()["wrong length"]):
        assert "24" in text
        assert "20" in text
