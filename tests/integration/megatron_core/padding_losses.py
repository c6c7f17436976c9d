"""The gradient that losses of a router leave on it, without any other loss, on ranks that hold parts of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.megatron_core import test_packed
from tests.integration.megatron_core.layer import EXPERTS, HIDDEN, TOP_K, Case, Parallel
from tests.integration.megatron_core.model import moe_block
from tests.integration.steps import difference

GAPS, EVEN = (5, 3, 0, 4), (8, 4, 4, 8)  # rows of each sequence; EVEN with the gaps
ALONE = Parallel(ep=1)
AUX: dict[str, Any] = {"moe_aux_loss_coeff": 1.0}
LOSSES: dict[str, dict[str, Any]] = {
    kind: {**AUX, "moe_router_load_balancing_type": kind} for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
} | {"z_loss": {"moe_z_loss_coeff": 1.0, "moe_router_load_balancing_type": "none"}}
BIASED: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def block_of(parallel: Parallel, *, ours: bool, **config: Any) -> Any:
    from moe_dispatch.integrations.megatron import convert

    block = moe_block(Case(parallel=parallel, seed=3, config={"num_layers": 1, **config}))
    drawn = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) / 4
    router = block.layers[0].mlp.router
    router.weight.data.copy_(drawn)
    if ours:
        convert(block)
    return block


def rows(rank: int, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """Rows of this rank, [T, 1, D], of a batch in which the lengths of EVEN are the padded ones; and their numbers."""
    held = test_packed.rows_of_rank(rank if parallel.cp * parallel.tp > 1 else 0, parallel)
    whole = torch.randn(sum(EVEN), 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    return whole[held], torch.tensor(held)


def gradient(rank: int, parallel: Parallel, lengths: tuple[int, ...], *, ours: bool, **config: Any) -> Tensor:
    """Summed over the ranks of a batch, and divided by its tokens under ``calculate_per_token_loss``.

    Without ours, and with gaps, the router gets the real rows alone, and no mask: only one rank can do that.
    """
    block = block_of(parallel, ours=ours, **config)
    hidden, numbers = rows(rank, parallel)
    packed = test_packed.params(lengths, EVEN if ours else None)
    if not ours and lengths != EVEN:
        hidden = hidden[torch.tensor(test_packed.real_rows())[numbers]]
    (block(hidden.requires_grad_(), None, packed_seq_params=packed) * 0).sum().backward()
    found: Tensor = block.layers[0].mlp.router.weight.grad
    found = found.clone()
    if parallel.cp * parallel.tp > 1:
        dist.all_reduce(found)
    return found / sum(lengths) if config["calculate_per_token_loss"] else found


def compared(rank: int, parallel: Parallel, loss: str, per_token: bool) -> float:
    """How far ours is, with gaps, from Megatron without a mask on the real rows of one rank.

    What Megatron itself makes of a division by ranks, it makes without gaps too.
    """
    config = {**LOSSES[loss], "calculate_per_token_loss": per_token}
    with_ranks, without = (gradient(rank, where, EVEN, ours=False, **config) for where in (parallel, ALONE))
    scale = float((with_ranks * without).sum() / without.square().sum())
    want = gradient(rank, ALONE, GAPS, ours=False, **config) * scale
    got = gradient(rank, parallel, GAPS, ours=True, **config)
    return float((got - want).abs().max() / want.abs().max())


def quantile(rank: int) -> dict[str, float]:
    """Quantile balancing with gaps in the offsets: what Megatron alone makes of the batch, but no gap is sent."""
    found = {}
    for ours in (False, True):
        config = {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0}
        block = block_of(ALONE, ours=ours, **config)
        hidden, numbers = rows(rank, ALONE)
        real_T = torch.tensor(test_packed.real_rows())[numbers]
        outcome = test_packed.called(block, hidden, real_T, packed_seq_params=test_packed.params(GAPS, EVEN))
        found[ours] = outcome, block.layers[0].mlp.router.qb_beta_accum.clone()
    sent = block.layers[0].mlp.token_dispatcher.dispatcher.metrics().real_tokens_per_expert.sum()
    return {
        "outcome": difference(found[True][0], found[False][0]),
        "bias": float((found[True][1] - found[False][1]).abs().max()),
        "sent": int(sent),
        "wanted": sum(GAPS) * TOP_K,
    }


def with_routing_of_verl(rank: int) -> dict[str, float]:
    """verl's replay replaces the routing of all routers by one that ignores the mask. Real rows count all the same."""
    from tests.integration.frameworks.sources import import_real

    bare = ("verl", "verl.utils", "verl.utils.megatron")
    patch = import_real("verl.utils.megatron.router_replay_patch", bare=bare)
    config = {**LOSSES["seq_aux_loss"], **BIASED, "calculate_per_token_loss": False}
    want, counts = _of_routing(rank, config)
    patch.apply_router_replay_patch()
    got, theirs = _of_routing(rank, config)
    return {"gradient": float((got - want).abs().max() / want.abs().max()), "counts": theirs, "wanted": counts}


def _of_routing(rank: int, config: dict[str, Any]) -> tuple[Tensor, float]:
    block = block_of(ALONE, ours=True, **config)
    hidden, _ = rows(rank, ALONE)
    (block(hidden.requires_grad_(), None, packed_seq_params=test_packed.params(GAPS, EVEN)) * 0).sum().backward()
    router = block.layers[0].mlp.router
    return router.weight.grad.clone(), float(router.local_tokens_per_expert.sum())
