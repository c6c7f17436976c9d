"""The routing of a layer whose experts are given: the router's scores, gathered at the replayed ids."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch.capabilities.replay.entries import UNKNOWN
from moe_dispatch.errors import InputError
from moe_dispatch.types import Routing


def replayed(
    ids_TK: Tensor, scores_TE: Tensor, *, normalize: bool, own_ids_TK: Tensor | None = None, scale: float = 1.0
) -> Routing:
    """Return the routing to replayed experts, with weights from the router's own scores.

    Only the choice of experts is replayed. The weights are differentiable in the scores, so the router gets its
    gradient. Rows that the table does not know take the router's own choice. The routing also counts the slots in
    which the replayed expert differs from the router's choice; ``dispatch`` adds these counts to the metrics.

    Args:
        ids_TK: int64 (T, K), the result of ``routing_for``: -1 for a slot that goes nowhere, -2 for an unknown one.
        scores_TE: floating (T, E), the scores of **all** experts, after softmax or sigmoid. Scores of experts that the
            router did not choose must not be zeroed, because a replayed expert may be one of them.
        normalize: Whether the weights of a row are divided by their sum. A row whose replayed experts all score 0, as a
            softmax in float16 may underflow, keeps the weights 0.
        own_ids_TK: int64 (T, K), the router's own choice; by default the K largest scores. Give it if the router
            chooses otherwise, for example with a bias or by groups of experts.
        scale: Factor of the weights, after they are normalised.

    Returns:
        The routing. A slot that goes nowhere has the id -1 and the weight 0.

    Raises:
        InputError: The shapes or dtypes do not fit. On the CPU also if an id is not below E; on a GPU this check would
            be a host sync.

    Cost: a gather of (T, K), a comparison of (T, K, K) for the counts, and a top-k unless ``own_ids_TK`` is given. No
    host sync.
    """
    fits = ids_TK.dim() == scores_TE.dim() == 2 and len(ids_TK) == len(scores_TE)
    if not fits or ids_TK.dtype != torch.int64 or not scores_TE.is_floating_point():
        raise InputError(
            f"replayed: ids must be int64 (T, K) and scores floating (T, E), got {ids_TK.dtype} {tuple(ids_TK.shape)} "
            f"and {scores_TE.dtype} {tuple(scores_TE.shape)}. Cut the table with the layout of these rows."
        )
    if ids_TK.shape[1] > scores_TE.shape[1]:
        raise InputError(
            f"replayed: a row must have at most as many slots as there are experts, got {ids_TK.shape[1]} slots and "
            f"{scores_TE.shape[1]} experts. Replay the table of this model."
        )
    if own_ids_TK is not None and (own_ids_TK.shape != ids_TK.shape or own_ids_TK.dtype != torch.int64):
        raise InputError(
            f"replayed: own_ids must be int64 {tuple(ids_TK.shape)} as ids, got {own_ids_TK.dtype} "
            f"{tuple(own_ids_TK.shape)}. Pass the ids that the router chose for these rows."
        )
    if ids_TK.is_cpu and ids_TK.numel() and not torch.compiler.is_compiling():
        low, high = map(int, torch.aminmax(ids_TK))
        if low < UNKNOWN or high >= scores_TE.shape[1]:
            raise InputError(
                f"replayed: ids must lie in {UNKNOWN}..{scores_TE.shape[1] - 1}, got {low if low < UNKNOWN else high}. "
                "Replay the table of this model."
            )
    with torch.no_grad():
        own = scores_TE.topk(ids_TK.shape[1], dim=1).indices if own_ids_TK is None else own_ids_TK
        chosen = torch.where(ids_TK == UNKNOWN, own, ids_TK)
        compared = ids_TK >= 0
        differs = compared & ~(ids_TK.unsqueeze(2) == own.unsqueeze(1)).any(2)
        drift = torch.stack([differs.sum(), compared.sum()])
    goes = chosen >= 0
    weights_TK = torch.where(goes, scores_TE.gather(1, chosen.clamp(min=0)), 0)
    if normalize:
        total_T1 = weights_TK.sum(1, keepdim=True)
        # Below the smallest normal number, the quotient or its gradient would be infinite or NaN.
        vanishes_T1 = total_T1.abs() < torch.finfo(total_T1.dtype).tiny
        weights_TK = weights_TK / torch.where(vanishes_T1, 1, total_T1)
    return Routing(chosen, weights_TK if scale == 1.0 else weights_TK * scale, drift)
