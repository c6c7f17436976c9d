"""``SlotWeights``: bring the weights of experts to the expert slots that hold them, and their gradients home.

Copies of an expert get their gradient in ``_Fetch.backward``: each rank computes the gradient of its own copy, sends it
to the home of the expert, and ``_summed`` adds the gradients there, rank by rank.

S expert slots of this rank, L experts whose home is this rank, N weights that travel, W numbers of one expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from moe_dispatch.balance.movement import Movement, movement_of
from moe_dispatch.balance.placement import ExpertPlacement
from moe_dispatch.dispatchers.autograd import double_backward, tie
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.permutation import accumulation_dtype
from moe_dispatch.types import Dispatched, InFlight


@final
class SlotWeights:
    """Bring expert weights to the expert slots of a placement. Make one for each layer.

    Every rank keeps the parameters of its own experts, ``num_experts / ep_size`` of them, in any placement. So
    placements do not change the optimizer or checkpoints.

    Args:
        dispatcher: Dispatcher of the layer.
        recomputed: Whether the layer runs inside activation checkpointing. The weights that arrived are then kept until
            the parameters change, and a recomputation uses them instead of fetching them again. Tensors of equal shapes
            must then be fetched in one call, unless they are parameters.
    """

    def __init__(self, dispatcher: Dispatcher, *, recomputed: bool = False) -> None:
        self._dispatcher = dispatcher
        self._recomputed = recomputed
        self._kept: dict[tuple[int | torch.Size, ...], tuple[list[int], dict[ExpertPlacement, Tensor]]] = {}

    def fetch(self, sent: Dispatched | InFlight, *stacked: Tensor) -> tuple[Dispatched, tuple[Tensor, ...]]:
        """Return the weights of this rank's expert slots, in the order of ``sent.placement``. Collective.

        The home of an expert sends its weights to each slot on another rank. With an ``InFlight``, weights and rows
        travel at the same time. In the backward the gradients of copies come home. They are added there rank by rank
        in float32 (float64 for float64), and rounded once.

        Args:
            sent: Result of a dispatch of this dispatcher.
            *stacked: Parameters of this rank's own experts: (L, ...), all with the same dtype and device. Every rank
                passes parameters of the same sizes, with the same ``requires_grad``.

        Returns:
            The dispatch with arrived rows, to use in place of ``sent``; and for each of ``stacked`` a tensor (S, ...),
            zero in empty slots. Use this result: it makes every rank take part in the backward of the exchange, also a
            rank whose experts got no row. Without a placement ``stacked`` itself is returned.

        Raises:
            InputError: The tensors do not fit the config or each other.
            StateError: The call is being compiled, the dispatcher is closed, or ``sent`` is of another dispatcher.

        Cost: one all-to-all, and one in the backward; none if no weight has to travel. This rank's own weights are
        copied to their slots.
        """
        if torch.compiler.is_compiling():
            raise StateError(
                "SlotWeights.fetch: weights must be fetched outside of compiled regions, got a call that is being "
                "traced. Fetch them before the region, and pass them in."
            )
        lease = self._dispatcher._lease
        channel, placement = lease.enter(), sent.placement
        _check_stacked(channel.config.num_experts // channel.communicator.size, stacked)
        if placement is None:
            return sent.wait(), stacked
        movement = movement_of(placement, channel.communicator.rank, stacked[0].device)
        with torch.no_grad():
            arrive = self._start_fetch(channel, placement, movement, stacked)
        landed = sent.wait()
        if landed.state.lease is not lease:
            raise StateError(
                "SlotWeights.fetch: sent must come from the dispatcher of these weights, got the result of another "
                "one. Make SlotWeights with the dispatcher that dispatched."
            )
        weights: tuple[Tensor, ...] = _Fetch.apply(lease, movement, arrive(), *stacked)  # type: ignore[no-untyped-call]
        if not weights[0].requires_grad:
            return landed, weights
        return dataclasses.replace(landed, weights=tie(landed.weights, weights[0])), weights

    def _start_fetch(
        self, channel: Channel, placement: ExpertPlacement, movement: Movement, stacked: Sequence[Tensor]
    ) -> Callable[[], Tensor]:
        """Start the exchange. Returns a function that waits for the weights of the received slots, (N, W)."""
        if not movement.moves:
            return lambda: stacked[0].new_empty(0, _width(stacked))
        if not self._recomputed or torch.is_inference_mode_enabled():
            return _exchange_weights(channel, movement, _side_by_side(stacked, movement.sent))
        # Tensors that are made anew in each forward can only be told apart by their shapes.
        key = tuple(id(weight) if isinstance(weight, nn.Parameter) else weight.shape for weight in stacked)
        before, kept = self._kept.get(key, ([], {}))
        if torch._C._current_graph_task_id() != -1 and placement in kept:  # a recomputation in the backward
            return lambda: kept[placement]
        versions = [weight._version for weight in stacked]
        if versions != before:
            kept = {}
            self._kept[key] = versions, kept
        finish = _exchange_weights(channel, movement, _side_by_side(stacked, movement.sent))

        def keep() -> Tensor:
            kept[placement] = finish()
            return kept[placement]

        return keep


def _check_stacked(local: int, stacked: Sequence[Tensor]) -> None:
    """Refuse tensors that are not the parameters of this rank's ``local`` experts."""
    shapes = [tuple(weight.shape) for weight in stacked]
    if not shapes or any(shape[:1] != (local,) for shape in shapes):
        raise InputError(
            f"SlotWeights.fetch: stacked must be tensors ({local}, ...), one entry for each expert whose home is "
            f"this rank (num_experts / ep_size), got {', '.join(map(str, shapes)) or 'none'}. Stack the parameters "
            "of this rank's experts."
        )
    kinds = {(weight.dtype, weight.device) for weight in stacked}
    if len(kinds) > 1 or not stacked[0].is_floating_point():
        told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(
            f"SlotWeights.fetch: stacked must be floating, with one dtype and device, got {told}. Fetch tensors of "
            "other dtypes by a SlotWeights of their own."
        )


class _Fetch(torch.autograd.Function):
    """Put own and received weights in their slots. The backward brings the gradients of copies home."""

    @staticmethod
    def forward(
        ctx: Any, lease: Lease, movement: Movement, received_NW: Tensor, *stacked: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a rank whose experts got no row may have no gradient
        ctx.lease, ctx.movement = lease, movement
        ctx.like = [weight[:0] for weight in stacked]
        slots = []
        for weight, received in zip(stacked, _apart(received_NW, stacked), strict=True):
            of_slots = weight.index_select(0, movement.experts_S)  # one pass; other slots follow
            of_slots[movement.empty] = 0
            of_slots[movement.received] = received.view(-1, *weight.shape[1:])
            slots.append(of_slots)
        return tuple(slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        movement: Movement = ctx.movement
        ctx.lease.tell_watchdog()
        given = [
            like.new_zeros(len(movement.experts_S), *like.shape[1:]) if grad is None else grad
            for grad, like in zip(grads, ctx.like, strict=True)
        ]
        home_NW = given[0].new_empty(0, _width(given))
        if movement.moves:
            outgoing = _side_by_side(given, movement.received)
            home_NW = _exchange_weights(ctx.lease.enter(), movement, outgoing, back=True)()
        return None, None, None, *(_summed(movement, *pair) for pair in zip(given, _apart(home_NW, given), strict=True))


def _summed(movement: Movement, grad: Tensor, home_NW: Tensor) -> Tensor:
    """Add the gradients of the copies of each expert, rank by rank.

    Args:
        movement: Moves of this rank.
        grad: Gradients of this rank's slots, (S, ...).
        home_NW: Gradients of the copies on other ranks, by rank and slot.

    Returns:
        The gradients of this rank's experts, (L, ...).
    """
    total = _side_by_side([grad], movement.slots_L)  # one pass; experts that are not only here follow
    sums = total.new_zeros(len(movement.shared_experts), total.shape[1], dtype=accumulation_dtype(grad.dtype))
    for rank, (held, part) in enumerate(zip(movement.held, home_NW.split(movement.rows_out), strict=True)):
        positions, numbers = held.shared
        if rank == movement.rank:
            sums[numbers] += total[movement.shared_experts[numbers]]
        elif held.count:
            sums[numbers] += part[positions]  # a rank holds an expert once, so no number occurs twice
            positions, experts = held.alone
            total[experts] = part[positions]
    total[movement.shared_experts] = sums.to(grad.dtype)
    return total.view(-1, *grad.shape[1:])


def _width(tensors: Sequence[Tensor]) -> int:
    """Return W, the numbers of one expert in all tensors."""
    return sum(tensor[0].numel() for tensor in tensors)


def _side_by_side(tensors: Sequence[Tensor], numbers_N: Tensor) -> Tensor:
    """Return entries of all tensors side by side, (N, W)."""
    parts = [tensor.index_select(0, numbers_N).view(len(numbers_N), tensor[0].numel()) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _apart(both_NW: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Undo ``_side_by_side``: return the part of each tensor."""
    parts: tuple[Tensor, ...] = both_NW.split([tensor[0].numel() for tensor in like], 1)
    return parts


def _exchange_weights(
    channel: Channel, movement: Movement, outgoing: Tensor, *, back: bool = False
) -> Callable[[], Tensor]:
    """Start to exchange weights, or gradients on the way back. The returned function waits for what arrives."""
    rows_in, rows_out, label = movement.rows_in, movement.rows_out, "weights"
    if back:
        rows_in, rows_out, label = rows_out, rows_in, "weights.backward"
    received = outgoing.new_empty(sum(rows_in), outgoing.shape[1])
    work = channel.communicator.all_to_all(received, outgoing, rows_in, rows_out, label=label)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return received

    return finish
