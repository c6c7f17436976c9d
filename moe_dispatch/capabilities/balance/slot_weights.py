"""``SlotWeights``: run experts with the weights of the expert slots of a placement, and bring gradients home.

Copies of an expert get their gradient in ``_Fetch.backward``: each rank computes the gradient of its own copy, sends it
to the home of the expert, and ``collect`` of the movement adds the gradients there.

The weights that arrive are not kept until the backward. Autograd keeps tensors, so ``run`` frees the memory behind them
after the experts, and ``_Leave.backward`` allocates it again and fetches the weights a second time. If hooks of saved
tensors are active, such as those that offload to the CPU, the memory is theirs: they may still read it on another
stream. Such a rank frees nothing, and takes part in the second fetch for the sake of its peers.

M experts whose home is this rank, B slots with fetched weights, W numbers of one expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.capabilities.balance.exact import ExactPlacement
from moe_dispatch.capabilities.balance.movement import (
    Movement,
    StaticMovement,
    apart,
    movement_apart,
    movement_of,
    side_by_side,
    static_movement,
)
from moe_dispatch.communication import raise_alike
from moe_dispatch.dispatched import Dispatched, InFlight, check_plain
from moe_dispatch.dispatchers.autograd import double_backward, tie
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.dispatcher import Dispatcher
from moe_dispatch.dispatchers.meter import is_recomputation
from moe_dispatch.errors import InputError, StateError
from moe_dispatch.seams.tracing import refuse_traced

Moves = Movement | StaticMovement
Experts = Callable[..., Tensor]


@final
class SlotWeights:
    """Bring expert weights to the expert slots of a placement. Make one for each layer.

    Every rank keeps the parameters of its own experts, ``num_experts / ep_size`` of them, in any placement. So
    placements do not change the optimizer or checkpoints.

    Args:
        dispatcher: Dispatcher of the layer.
        *stacked: Parameters of this rank's own experts, as for ``run``, which the ranks compare at once. In eager mode
            they do so in the first call; in graph-safe mode only here, because a call does not wait for the device.

    Raises:
        InputError: The parameters do not fit the config, or differ between ranks. Raised on every rank.
        PeerError: Another rank refused its parameters.
    """

    def __init__(self, dispatcher: Dispatcher, *stacked: Tensor) -> None:
        self._lease = dispatcher._lease
        self._agreed: list[tuple[torch.dtype, torch.Size, bool]] = []  # parameters that the ranks have compared
        self._asks_once = False  # whether they do so in the first call of graph-safe mode too
        if stacked:
            self._compare(self._lease.enter(), stacked, now=True)

    def run(self, sent: Dispatched | InFlight, experts: Experts, *stacked: Tensor) -> tuple[Dispatched, Tensor]:
        """Run experts on the rows of a dispatch, with the weights of this rank's slots. Collective.

        The home of an expert sends its weights to each slot on another rank. With an ``InFlight``, weights and rows
        travel at the same time. The memory of the weights is free again when the experts have run; the backward fetches
        them a second time. Inside activation checkpointing, the recomputation is the second time. Hooks of saved
        tensors, as of activation offloading, may be active on some ranks only: there the memory is not freed.

        In the backward the gradients of copies come home. They are added there in float32 (float64 for float64), in an
        order that does not change, and rounded once.

        Args:
            sent: Result of a dispatch of this dispatcher.
            experts: Called as ``experts(part, *weights)``, and returns an output (R, H) for the rows of ``part``, a
                ``Dispatched`` with some of the slots of ``sent``. ``weights`` has for each of ``stacked`` a tensor with
                the weights of these slots. With ``balance="exact"`` in eager mode it is called for this rank's own
                experts, with views of ``stacked``, and if there are copies a second time for them.
                After the call ``weights`` have no memory: do not keep them. A loss that is computed inside must have
                its backward with or after that of the outputs, because only this one brings the weights back.
            *stacked: Parameters of this rank's own experts: (M, ...), all with the same dtype and device. Every rank
                passes parameters of the same sizes and dtype, with the same ``requires_grad``.

        Returns:
            The dispatch with arrived rows, and the outputs for all of them, to combine. The outputs make every rank
            take part in the exchanges of the backward, also a rank whose experts got no row.

        Raises:
            InputError: The tensors do not fit the config or each other. In eager mode also if they differ between
                ranks in sizes, dtype or ``requires_grad``, on every rank. In graph-safe mode ranks that differ are told
                only if the constructor was given the tensors: otherwise they exchange messages of different sizes.
            PeerError: In eager mode, another rank refused its parameters.
            StateError: The call is being compiled, the dispatcher is closed, or ``sent`` is of another dispatcher.

        Cost: one all-to-all, and two in the backward; none if no weight has to travel. In graph-safe mode with
        ``balance="exact"``, each all-to-all has the weights of ``P * S`` experts for S spare slots, and own
        parameters are copied to their slots. ``Backend.bring_copies``, where there is one, replaces those that fetch.
        In eager mode the first call, and one whose parameters are not like those before, also has a small all-reduce on
        the control group, in which the ranks compare their parameters.
        """
        lease, channel = self._enter(sent, stacked)
        if sent.placement is None:
            landed = sent.wait()
            return landed, experts(landed, *_together(stacked))
        moves = _moves_of(channel, sent, stacked[0].device, whole=False)
        if not moves.moves and moves.apart:
            landed, own = self._landed(sent, lease), _together(stacked)
            return landed, experts(_part(landed, slice(moves.num_own), landed.in_graph, landed.weights), *own)
        finish = _exchange(channel, moves, stacked)
        landed = self._landed(sent, lease)
        buffer_BW = finish()
        del finish  # and with it what arrived and what was sent, before the experts need memory
        own, slots = _fetched(lease, moves, buffer_BW, stacked)
        outputs = _run_parts(landed, moves, experts, own, slots)
        slot = _trained(slots)
        if torch.is_grad_enabled() and (landed.in_graph.requires_grad or slot.requires_grad):
            recomputed = is_recomputation()  # its backward follows
            told = torch.zeros(2, dtype=torch.uint8, device="cpu")[int(recomputed) :][:1]
            first, again = buffer_BW.view(-1)[:1], (lease, moves, tuple(buffer_BW.shape))
            kept = [weight.detach() for weight in stacked]

            def left(outputs: Tensor) -> Tensor:
                # The node that fetches comes before those that lead to weights, so a pass for weights fetches nothing.
                tied = tie(outputs, slot)
                return _Leave.apply(tied, landed.in_graph, first, told, again, *kept)  # type: ignore[no-any-return, no-untyped-call]

            outputs = left(outputs) if isinstance(outputs, Tensor) else outputs.with_edge(left)
            if not recomputed and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                buffer_BW.untyped_storage().resize_(0)
        return landed, outputs

    def fetch(self, sent: Dispatched | InFlight, *stacked: Tensor) -> tuple[Dispatched, tuple[Tensor, ...]]:
        """Return the weights of all slots of this rank, for experts that ``run`` cannot call. Collective.

        Autograd keeps these weights until the backward, so they take memory in every layer. A recomputation fetches
        them again. Arguments, errors and gradients are those of ``run``.

        Returns:
            The dispatch with arrived rows, to use in place of ``sent``; and for each of ``stacked`` a tensor with the
            weights of the slots, own ones first. Use this result: it makes every rank take part in the backward of the
            exchange. Without a placement ``stacked`` itself is returned.

        Cost: one all-to-all, and one in the backward; none if no weight has to travel. This rank's own weights are
        copied to their slots.
        """
        lease, channel = self._enter(sent, stacked)
        if sent.placement is None:
            return sent.wait(), stacked
        moves = _moves_of(channel, sent, stacked[0].device, whole=True)
        finish = _exchange(channel, moves, stacked)
        landed = self._landed(sent, lease)
        _, slots = _fetched(lease, moves, finish(), stacked)
        if (slot := _trained(slots)).requires_grad:
            weights = tie(landed.weights, slot)
            landed = dataclasses.replace(landed, weights=weights)
        return landed, slots

    def _enter(self, sent: Dispatched | InFlight, stacked: Sequence[Tensor]) -> tuple[Lease, Channel]:
        if torch.compiler.is_compiling():
            refuse_traced(
                "SlotWeights: weights must be fetched outside of compiled regions, got a call that is being traced. "
                "Compile the experts alone."
            )
        if not isinstance(sent, Dispatched | InFlight):
            raise InputError(f"SlotWeights: sent must be the result of a dispatch, got {type(sent).__name__}.")
        lease = self._lease
        channel = lease.enter()
        asks = not channel.config.graph_safe
        if not asks and self._asks_once and not self._agreed:
            asks = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        self._compare(channel, stacked, now=sent.placement is not None and asks)
        return lease, channel

    def _compare(self, channel: Channel, stacked: Sequence[Tensor], *, now: bool) -> None:
        """Check parameters. ``now``: also compare them with those of the other ranks, unless that was done before."""
        try:
            _check_stacked(channel.config.num_experts // channel.communicator.size, stacked)
        except InputError as error:
            if now and not self._agreed:  # the peers compare in their first call
                raise_alike(channel.control, error, of_call=True, label="parameters")
            raise
        kinds = [(weight.dtype, weight.shape, weight.requires_grad) for weight in stacked]
        if now and kinds != self._agreed:
            # Their bytes travel, and those of their gradients. A rank that changes them later on its own waits here,
            # and the watchdog names it.
            facts = {
                f"parameter {number} of SlotWeights": f"{dtype} {tuple(shape)}, {'trained' if trained else 'frozen'}"
                for number, (dtype, shape, trained) in enumerate(kinds)
            }
            raise_alike(channel.control, None, facts=facts, of_call=True, label="parameters")
            self._agreed = kinds

    def _landed(self, sent: Dispatched | InFlight, lease: Lease) -> Dispatched:
        landed = sent.wait()
        if landed.state.lease is not lease:
            raise StateError(
                "SlotWeights: sent must come from the dispatcher of these weights, got the result of another one. Make "
                "SlotWeights with the dispatcher that dispatched."
            )
        return landed


def slot_weights_of(dispatcher: Dispatcher) -> SlotWeights:
    """Return the ``SlotWeights`` that a dispatcher keeps, for layers that have no place of their own for it.

    New ones for each call would compare the parameters of the ranks in each call. These compare in their first call in
    graph-safe mode too, unless a CUDA graph captures it. When such layers are built, adapters and frozen parameters are
    not known.
    """
    kept: SlotWeights = vars(dispatcher).setdefault("_slot_weights", SlotWeights(dispatcher))
    kept._asks_once = True
    return kept


def _moves_of(channel: Channel, sent: Dispatched | InFlight, device: torch.device, *, whole: bool) -> Moves:
    """Return what travels for a dispatch. With ``whole``, own weights have slots too."""
    placement, rank = sent.placement, channel.communicator.rank
    if not isinstance(placement, ExactPlacement):
        assert placement is not None
        return movement_of(placement, rank, device)
    if channel.config.graph_safe:
        return static_movement(placement, rank)
    return movement_of(placement.read(), rank, device) if whole else movement_apart(placement, rank, device)


def _fetched(
    lease: Lease, moves: Moves, buffer_BW: Tensor, stacked: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the parameters of own experts, if they run apart, and the weights of the slots, as results of autograd."""
    found: tuple[Tensor, ...] = _Fetch.apply(lease, moves, (buffer_BW,), *stacked)  # type: ignore[no-untyped-call]
    own = len(stacked) if moves.apart else 0
    return found[:own], found[own:]


def _trained(slots: Sequence[Tensor]) -> Tensor:
    """Return weights whose gradient goes home, or the first weights if all are frozen."""
    return next((weights for weights in slots if weights.requires_grad), slots[0])


def _run_parts(
    landed: Dispatched, moves: Moves, experts: Experts, own: Sequence[Tensor], slots: Sequence[Tensor]
) -> Tensor:
    """Run the experts, apart for own ones and copies if the moves say so."""
    if not own:
        return experts(landed, *slots)
    if not moves.num_slots:
        return experts(_part(landed, slice(moves.num_own), landed.in_graph, landed.weights), *own)
    assert landed.host_counts is not None
    of_own = sum(landed.host_counts[: moves.num_own])
    sizes = [of_own, len(landed.in_graph) - of_own]
    parts = zip((own, slots), _split(moves), landed.in_graph.split(sizes), landed.weights.split(sizes), strict=True)
    outputs = [
        experts(_part(landed, some, rows, shares, begin), *weights)
        for (weights, some, rows, shares), begin in zip(parts, (0, of_own), strict=True)
    ]
    if not isinstance(outputs[0], Tensor):
        return outputs[0].joined(outputs)
    return torch.cat(outputs) if landed.quantised is None else landed.quantised.joined(outputs)


def _split(moves: Moves) -> tuple[slice, slice]:
    return slice(moves.num_own), slice(moves.num_own, moves.num_own + moves.num_slots)


def _part(landed: Dispatched, some: slice, rows: Tensor, weights: Tensor, begin: int = 0) -> Dispatched:
    """Return a dispatch with some of its slots only, whose rows start at ``begin``."""
    quantised, tokens_per_expert = landed.quantised, landed.tokens_per_expert[some]
    its_rows, carried = slice(begin, begin + len(rows)), landed.carried
    if quantised is not None:
        quantised = quantised.part(its_rows, tokens_per_expert, rows)
    packets = None if landed.packets is None else landed.packets.of_part(its_rows)
    return dataclasses.replace(
        landed,
        in_graph=rows,
        quantised=quantised,
        packets=packets,
        carried=None if carried is None else {name: values[its_rows] for name, values in carried.items()},
        weights=weights,
        tokens_per_expert=tokens_per_expert,
        real_tokens_per_expert=landed.real_tokens_per_expert[some],
        host_counts=None if landed.host_counts is None else landed.host_counts[some],
    )


def _check_stacked(local: int, stacked: Sequence[Tensor]) -> None:
    """Refuse tensors that are not the parameters of this rank's ``local`` experts."""
    if others := [type(weight).__name__ for weight in stacked if not isinstance(weight, Tensor)]:
        told = f"stacked must be tensors, got {', '.join(others)}. Pass each tensor as an argument of its own."
        raise InputError(f"SlotWeights: {told}")
    check_plain("SlotWeights", **{f"stacked[{number}]": weight for number, weight in enumerate(stacked)})
    shapes = [tuple(weight.shape) for weight in stacked]
    if not shapes or any(shape[:1] != (local,) for shape in shapes):
        raise InputError(
            f"SlotWeights: stacked must be tensors ({local}, ...), one entry for each expert whose home is this rank "
            f"(num_experts / ep_size), got {', '.join(map(str, shapes)) or 'none'}. Stack the parameters of this "
            "rank's experts."
        )
    kinds = {(weight.dtype, weight.device) for weight in stacked}
    if len(kinds) > 1 or not stacked[0].is_floating_point():
        told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(
            f"SlotWeights: stacked must be floating, with one dtype and device, got {told}. Use a SlotWeights of their "
            "own for tensors of other dtypes."
        )


def _together(stacked: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parameters of own experts behind one node of autograd, as ``_Fetch`` does where weights travel."""
    if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in stacked):
        return stacked
    own: tuple[Tensor, ...] = _Together.apply(*stacked)  # type: ignore[no-untyped-call]
    return own


class _Together(torch.autograd.Function):
    """Tensors as they are. In the backward, no gradient passes before all of them are there.

    ZeRO 2 of DeepSpeed reduces gradients in the order in which they are ready, which must be the same on all ranks.
    Without this node it would depend on whether any expert has a copy.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.set_materialize_grads(False)  # experts that got no row may have no gradient
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad, strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


@torch.no_grad()
def _exchange(
    channel: Channel, moves: Moves, stacked: Sequence[Tensor], into: Tensor | None = None
) -> Callable[[], Tensor]:
    """Start to fetch weights. The returned function waits for them, and returns the filled buffer.

    Args:
        channel: Channel of the dispatcher.
        moves: What travels.
        stacked: Parameters of this rank's own experts.
        into: Buffer to fill; None makes one, (B, W), with at least one row, so that its memory is never empty.
    """
    buffer = into
    if buffer is None:
        buffer = stacked[0].new_empty(max(moves.num_slots, 1), _width(stacked))
    if channel.backend.brings_copies and isinstance(moves, StaticMovement):
        own_MW = side_by_side(stacked, out=buffer[: moves.num_own])
        arrived = channel.backend.bring_copies(own_MW, moves.copies_PS)

        @torch.no_grad()
        def place() -> Tensor:
            buffer[moves.num_own :] = arrived()
            return buffer

        return place
    received = buffer[: moves.num_slots]
    if not moves.apart:
        received = buffer.new_empty(sum(moves.rows_in), buffer.shape[1])
    work = None
    if moves.moves:
        outgoing = moves.departing(stacked)
        work = channel.communicator.all_to_all(received, outgoing, moves.rows_in, moves.rows_out, label="weights")

    @torch.no_grad()
    def finish() -> Tensor:
        if work is not None:
            work.wait()
        if not moves.apart:
            moves.fill(buffer, stacked, received)
        return buffer

    return finish


class _Fetch(torch.autograd.Function):
    """Make weights of slots out of the parameters. The backward brings the gradients of copies home."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, moves: Moves, held: tuple[Tensor], *stacked: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a rank whose experts got no row may have no gradient
        ctx.lease, ctx.moves = lease, moves
        ctx.like = [weight[:0] for weight in stacked]
        slots = apart(held[0][: moves.num_slots], stacked)
        results = (*(weight.view_as(weight) for weight in stacked), *slots) if moves.apart else slots
        needed = ctx.needs_input_grad[3:] * (2 if moves.apart else 1)
        ctx.mark_non_differentiable(*(result for result, need in zip(results, needed, strict=True) if not need))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("dispatch")
        moves: Moves = ctx.moves
        ctx.lease.channel.announce(ctx.lease.name)
        count = len(ctx.like) if moves.apart else 0
        trained = [number for number, needed in enumerate(ctx.needs_input_grad[3:]) if needed]  # alike on all ranks
        like = [ctx.like[number] for number in trained]
        of_own = _zeros_for_none([grads[number] for number in trained if count], like, moves.num_own)
        of_slots = _zeros_for_none([grads[count + number] for number in trained], like, moves.num_slots)
        home_NW = of_slots[0].new_empty(sum(moves.rows_out), _width(like))
        if moves.moves:
            outgoing = moves.outgoing(side_by_side(of_slots))
            link = ctx.lease.enter().communicator
            work = link.all_to_all(home_NW, outgoing, moves.rows_out, moves.rows_in, label="weights.backward")
            if work is not None:
                work.wait()
        collected = dict(zip(trained, moves.collect(of_own or moves.own_grads(of_slots), home_NW), strict=True))
        return None, None, None, *map(collected.get, range(len(ctx.like)))


def _zeros_for_none(grads: Sequence[Tensor | None], like: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return gradients, with zeros (rows, ...) for missing ones. Empty if ``grads`` is."""
    pairs = zip(grads, like, strict=False)
    return [tensor.new_zeros(rows, *tensor.shape[1:]) if grad is None else grad for grad, tensor in pairs]


def _width(stacked: Sequence[Tensor]) -> int:
    """Return W."""
    return sum(weight.shape[1:].numel() for weight in stacked)


class _Leave(torch.autograd.Function):
    """Return the outputs of experts. The backward fetches the weights again, unless a recomputation has done so.

    ``rows_RD`` connects every rank to the second fetch.

    All ranks must decide alike whether they fetch. ``told`` decides: it is the first of two bytes in a first forward,
    and the second one in a recomputation, which puts its own tensor in the place of the saved one. A copy that hooks
    make is not the second of two bytes, and where a tensor is in memory can be asked without reading it. ``first`` is
    the first number of the buffer, which every rank has, also one without copies. If its memory is not empty, hooks
    kept it or copies of the weights, and what this rank fetches is thrown away.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        rows_RD: Tensor,
        first: Tensor,
        told: Tensor,
        again: tuple[Lease, Moves, tuple[int, int]],
        *stacked: Tensor,
    ) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(first, told, *stacked)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("combine")
        first, told, *stacked = ctx.saved_tensors
        lease, moves, (rows, width) = ctx.again
        if not (told.storage_offset() == 1 and told.untyped_storage().nbytes() == 2):
            lease.channel.announce(lease.name)
            buffer_BW, memory = None, first.untyped_storage()
            if memory.nbytes() == 0:
                memory.resize_(rows * width * first.element_size())
                # ``data`` has no version of its own to change, so autograd takes the weights for those that it saved.
                buffer_BW = first.data.as_strided((rows, width), (width, 1), 0)
            _exchange(lease.enter(), moves, stacked, into=buffer_BW)()
        return grad, *[None] * (4 + len(stacked))
