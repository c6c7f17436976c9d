"""Leave padding out of what a router of Megatron computes. Its padding mask is True where a row is padding.

Megatron's own routers, up to 0.19.2, do so in part:

- Under ``calculate_per_token_loss`` they scale losses by the rows of all ranks, because an all-reduce in place changes
  the number of their own rows.
- Their counts for an expert bias take the mask for a map of tokens and experts.
- Quantile balancing refuses a mask. And the routing of verl's replay ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_dispatch.integrations.megatron.core import TopKRouter

_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")  # methods of a router
_COUNTS, _Z_LOSS = "get_tokens_per_expert_and_token_count", "z_loss_func"  # functions that they call


def leave_padding_out(router: Any) -> None:
    """Make a router send padding to no expert, and compute its losses and counts from the other rows."""
    router.register_forward_hook(_route_no_padding, with_kwargs=True)
    router.routing = partial(_route, router)


def _route_no_padding(
    router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], routed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Send padding rows to no expert."""
    mask_SB = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    if mask_SB is None:
        return routed
    probs_TE, routing_map_TE = routed
    return probs_TE, routing_map_TE & ~mask_SB.reshape(-1, 1)


def _route(router: Any, logits: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Run the routing of the router's class, which a trainer may have replaced.

    Quantile balancing counts all rows, as it does without a mask: its quantiles are of a fixed number of rows.
    """
    routing = partial(type(router).routing, router, logits, **kwargs)
    if padding_mask is None or router.routing_type == "quantile_balancing":
        return routing()
    with _real_rows_only(router, ~padding_mask.reshape(-1, 1)) as bias:
        probs_TE, routing_map_TE = routing(padding_mask=padding_mask)
        bias.finish(routing_map_TE)
    return probs_TE, routing_map_TE


@contextmanager
def _real_rows_only(router: Any, real_T1: Tensor) -> Iterator[_BiasCounts]:
    own, names, bias = type(router), TopKRouter._apply_aux_loss.__globals__, _BiasCounts(router, real_T1)
    replaced = {name: names[name] for name in (_COUNTS, _Z_LOSS)}
    methods: dict[str, Any] = {name: partial(_loss, getattr(own, name), router, real_T1) for name in _LOSSES}
    methods["apply_z_loss"] = partial(_with_mask, own.apply_z_loss, router, real_T1)
    methods["_apply_expert_bias"] = bias.count
    vars(router).update(methods)
    names[_COUNTS] = partial(_mean_counts, replaced[_COUNTS])
    names[_Z_LOSS] = partial(_mean_z_loss, replaced[_Z_LOSS], router)
    try:
        yield bias
    finally:
        names.update(replaced)
        for name in methods:
            del vars(router)[name]


def _loss(
    apply: Callable[..., Tensor],
    router: Any,
    real_T1: Tensor,
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    *args: Any,
    with_padding_mask: bool = True,
) -> Tensor:
    return apply(router, probs, scores * real_T1, routing_map & real_T1, *args, with_padding_mask=True)


def _with_mask(
    apply: Callable[..., Tensor], router: Any, real_T1: Tensor, logits: Tensor, padding_mask: Tensor | None = None
) -> Tensor:
    return apply(router, logits, padding_mask=~real_T1.reshape(-1))


def _mean_counts(counts: Callable[..., Any], *args: Any, reduce_group: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the mean number of real rows of a rank for that of this rank.

    Megatron multiplies it by the number of ranks, to cancel a division by the tokens of all. Ranks have gaps of other
    sizes, so only the mean gives that number.
    """
    tokens_per_expert, _, total = counts(*args, reduce_group=reduce_group, **kwargs)
    return tokens_per_expert, total / reduce_group.size(), total


def _mean_z_loss(
    z_loss: Callable[..., Tensor], router: Any, logits: Tensor, coeff: float, padding_mask: Tensor
) -> Tensor:
    """Return this rank's part of the mean over the real rows of all ranks. Megatron adds means over those of a rank."""
    loss, group = z_loss(logits, coeff, padding_mask=padding_mask), router.tp_cp_group
    if router.calculate_per_token_loss or group.size() == 1:
        return loss  # Megatron then multiplies it by the number of real rows of this rank
    own = (~padding_mask).sum()
    total = own.clone()
    torch.distributed.all_reduce(total, group=group)
    mean: Tensor = loss * own * group.size() / total.clamp(min=1)
    return mean


class _BiasCounts:
    """Counts the real rows of each expert, which decide on its bias."""

    def __init__(self, router: Any, real_T1: Tensor) -> None:
        self._router, self._real_T1, self._counted = router, real_T1, False

    def count(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count as the router does, in the place of its method."""
        self._counted = True
        type(self._router)._apply_expert_bias(self._router, routing_map & self._real_T1)

    def finish(self, routing_map: Tensor) -> None:
        """Take padding out of the counts of a routing that did not call the method."""
        router = self._router
        if not self._counted and getattr(router, "enable_expert_bias", False) and torch.is_grad_enabled():
            with torch.no_grad():
                router.local_tokens_per_expert -= (routing_map & ~self._real_T1).sum(dim=0)
