"""The last product of experts, and its combine.

Let a be a row of an expert, W its last matrix and g the gradient of the token, as it arrives from the token's rank. The
gradient of the token's weight is ``<g, a W>``, which equals ``<g W^T, a>``. The backward needs ``g W^T`` anyway, so the
outputs of experts are not saved.

Source: SonicMoE (arXiv 2512.14080, section 3.2), for one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Route
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.capabilities.lean.activations import compute, gradients
from moe_dispatch.capabilities.lean.matrices import check_sent, checked, gradient_from, joined, product_of, real_flags
from moe_dispatch.capabilities.lean.packets import Copies, without_memory
from moe_dispatch.dispatched import Dispatched, check_plain
from moe_dispatch.dispatchers import autograd, checks
from moe_dispatch.dispatchers.autograd import State, double_backward
from moe_dispatch.dispatchers.channel import Channel, profiler_range
from moe_dispatch.errors import InputError
from moe_dispatch.permutation import Permutation
from moe_dispatch.permutation.grouped_mm import experts_of_rows, grouped_mm
from moe_dispatch.seams.observers import may_be_wrapped, tell_combined

Activated = Callable[..., Tensor]


def last_mm(
    sent: Dispatched,
    rows: Tensor | Sequence[Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activated | None = None,
) -> Any:
    """Multiply rows by each expert's last matrix, for ``combine``, and save no outputs of experts.

    It takes the place of the last ``sent.grouped_mm(rows, weights)``. Pass the result to ``combine`` as it is.

    Args:
        sent: Result of the dispatch.
        rows: (R, H). With ``activation``, its inputs: (R, H) or wider, or several of them.
        weights: (L, H, D), a matrix for each of this rank's experts. Under autocast, rows and weights are converted to
            its dtype.
        bias: (L, D), added to the outputs of each expert; None for none.
        activation: Function of ``rows`` and of nothing else that requires grad, row by row. The backward computes it
            again instead of saving its result. ``swiglu`` is one.

    Returns:
        ``Outputs`` for ``combine`` of the same dispatch. In a compiled region, (R, D).

    Raises:
        InputError: The shape or the dtype of an argument does not fit, or the activation uses a tensor that requires
            grad.

    Cost: that of ``sent.grouped_mm``. In the backward, the activation is computed again, and the gradients that arrive
    are copied to the experts, once for a whole backward and once for each pass of one that is split.
    """
    check_sent("last_mm", sent)
    inputs = (rows,) if isinstance(rows, Tensor) else tuple(rows)
    if saves_outputs(sent):
        outputs = sent.grouped_mm(inputs[0] if activation is None else activation(*inputs), weights)
        return outputs if bias is None else _add_bias(outputs, bias.to(outputs.dtype), sent.offs)
    check_plain("last_mm", **{f"rows[{number}]": each for number, each in enumerate(inputs)})
    num_rows = sent.in_graph.shape[0]
    if (
        not inputs
        or any(each.dim() != 2 or each.shape[0] != num_rows for each in inputs)
        or (activation is None and len(inputs) > 1)
    ):
        shapes = ", ".join(str(tuple(each.shape)) for each in inputs) or "none"
        raise InputError(
            f"last_mm: rows must be (R={num_rows}, H), or with activation its inputs, got {shapes}. Pass one row for "
            "each row of sent."
        )
    activated = compute(activation, inputs)
    dtype, (matrix,) = checked("last_mm", sent, activated.dtype, activated.shape[1], weights)
    check_output(sent, matrix, bias)
    inputs = tuple(each.to(dtype) for each in inputs)
    bias = None if bias is None else bias.to(dtype)
    with torch.no_grad():
        activated = activated.to(dtype)
        outputs = grouped_mm(activated, matrix, sent.offs, sent._padding)
        outputs = outputs if bias is None else _add_bias(outputs, bias, sent.offs)
    return _in_graph(sent, inputs, activated, matrix, bias, activation, outputs)


def saves_outputs(sent: Dispatched) -> bool:
    """Return whether ``last_mm`` computes plain rows: in traced calls, and for slots whose rows were copied."""
    return not isinstance(sent.state, State) or (sent.packets is None and sent.placement is not None)


def check_output(sent: Dispatched, matrix: Tensor, bias: Tensor | None) -> None:
    """Raise InputError if outputs of experts, or their bias, would not have the columns of rows."""
    columns, num_experts = sent.in_graph.shape[1], matrix.shape[0]
    if matrix.shape[2] != columns:
        raise InputError(
            f"last_mm: weights must be (L, H, D={columns}), so that outputs are like rows, got {tuple(matrix.shape)}. "
            "nn.Linear stores (D, H): pass weights.transpose(1, 2)."
        )
    if bias is not None and bias.shape != (num_experts, columns):
        raise InputError(
            f"last_mm: bias must be (L={num_experts}, D={columns}), got {tuple(bias.shape)}. Pass one row for each "
            "expert of this rank."
        )


def _add_bias(outputs: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    expert_R = experts_of_rows(offs, None, len(outputs)).clamp(max=len(bias) - 1)
    return outputs + bias.index_select(0, expert_R)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Outputs:
    """The outputs of experts for ``combine``. They are no tensor: only ``combine`` may read them.

    Attributes:
        rows: (R, D), without a graph.
        edge: Their place in the graph, in the form of the rows that arrive in the backward of combine.
        copies: How these rows are copied to experts.
    """

    rows: Tensor
    edge: Tensor
    copies: Copies

    def joined(self, others: Sequence[Outputs]) -> Outputs:
        """Return outputs of several parts of the experts, which follow each other. The first of them is this one."""
        edge = self.edge
        for other in others[1:]:
            edge = joined(edge, other.edge)
        return Outputs(rows=torch.cat([each.rows for each in others]), edge=edge, copies=self.copies)

    def with_edge(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        """Return the same outputs at another place in the graph."""
        return Outputs(rows=self.rows, edge=change(self.edge), copies=self.copies)

    def brought_back(self, channel: Channel, sent: Dispatched) -> Tensor:
        """Do what ``combine`` does with rows.

        Raises:
            InputError: The outputs belong to another dispatch.
        """
        of_sent = sent.state
        if getattr(of_sent.route, "left_out", of_sent.route) is not self.copies.route:
            raise InputError(
                "Dispatcher.combine: the result of last_mm must be combined with the dispatch that it was made with, "
                "got that of another one. Pass the same sent to last_mm and to combine."
            )
        rows_RD = checks.check_combine(self.rows, sent.in_graph, channel)
        if not channel.needs.differentiable and self.edge.requires_grad:
            checks.check_rows("Dispatcher.combine", "rows", self.edge, channel.config, channel.needs)
        if channel.observers or may_be_wrapped(of_sent.lease, self.edge):
            tell_combined(channel, of_sent.lease, self.edge)
        weights_R = sent.weights.detach() if channel.config.weights == "combine" else None
        y: Tensor = _Combine.apply(self.edge, rows_RD, weights_R, of_sent, self.copies.route)  # type: ignore[no-untyped-call]
        return y


# As for ``Copies``.
del Outputs.__dataclass_fields__


class _Combine(torch.autograd.Function):
    """Combine as a function of a place in the graph. The backward only brings gradients to the ranks of experts."""

    @staticmethod
    def forward(
        ctx: Any, edge: Tensor, rows_RD: Tensor, weights_R: Tensor | None, state: State, route: Route
    ) -> Tensor:
        lease, channel = state.lease, state.lease.channel
        ctx.state, ctx.route, ctx.dtype = state, route, edge.dtype
        ctx.number = channel.trail.follow("combine", rows_RD.device, of=state.number, dispatcher=lease.number)
        y_TD = state.route.combine(rows_RD, weights_R).data
        return state.layout.unflatten(autograd.trim(y_TD, state.real_rows, state.num_rows), state.shape).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("combine")
        if type(grad) is not Tensor:
            check_plain("Dispatcher.combine", gradient=grad)
        state, route = ctx.state, ctx.route
        grad_TD, lease = grad.reshape(state.num_rows, grad.shape[-1]), state.lease
        lease.channel.announce(lease.name)
        lease.channel.trail.follow("combine.backward", grad.device, of=ctx.number, dispatcher=lease.number)
        with profiler_range("combine.backward"):
            if state.real_rows is not None or state.padded != state.num_rows:
                grad_TD = autograd.pad(grad_TD, state.real_rows, state.padded)
            try:
                if isinstance(route, RankMajorRoute):
                    arrived = route.spread_gradient(grad_TD)
                    found = arrived if isinstance(arrived, Tensor) else arrived.decoded(ctx.dtype)
                else:
                    found, _ = route.combine_backward(grad_TD, None, None)
            except Exception as error:
                lease.name_in(error)
                raise
        return found, None, None, None, None


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Given:
    """What both nodes of a last product have, beside the tensors that they save.

    Attributes:
        copies: How gradients that arrive are copied to experts.
        permutation: Implementation that weighs rows.
        activation: As in ``last_mm``.
        weighs: Whether combine applies the weights.
        shared: What the node of rows leaves to that of the matrix: the number of the backward, copies, what arrived or
            has been copied, and the result of the activation; None if it was not computed.
    """

    copies: Copies
    permutation: Permutation
    activation: Activated | None
    weighs: bool
    shared: list[tuple[int, Copies, Tensor, Tensor | None]] = field(default_factory=list)


def _in_graph(
    sent: Dispatched,
    inputs: tuple[Tensor, ...],
    activated: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    activation: Activated | None,
    outputs: Tensor,
) -> Outputs:
    """Return outputs at a place in the graph that has a node for the rows and one for the matrix."""
    state: State = sent.state
    channel = state.lease.enter("combine")
    copies = sent.packets.copies if sent.packets is not None else Copies(route=state.route)
    given = _Given(
        copies=copies,
        permutation=channel.context.permutation_of(activated),
        activation=activation,
        weighs=channel.config.weights == "combine",
    )
    offs, padding = sent.offs, sent._padding
    place = without_memory(outputs, copies.num_arrived(len(outputs)), outputs.shape[1], sent.in_graph.dtype)
    weights_R, token, of_matrix = autograd.anchor(sent.weights, channel), None, None
    if torch.is_grad_enabled() and (matrix.requires_grad or (bias is not None and bias.requires_grad)):
        kept = (activated, ()) if activation is None else (None, tuple(each.detach() for each in inputs))
        saved = (kept[0].detach(),) if kept[0] is not None else kept[1]
        token = _OfMatrix.apply(matrix, bias, place, given, sent.weights.detach(), offs, padding, *saved)  # type: ignore[no-untyped-call]
        of_matrix = token.grad_fn
    held = None if bias is None else bias.detach()
    wants_dots = given.weighs and state.wants_weights
    of_rows = _OfRows.apply(
        weights_R, place, given, of_matrix, wants_dots, matrix.detach(), held, offs, padding, *inputs
    )  # type: ignore[no-untyped-call]
    return Outputs(rows=outputs, edge=joined(of_rows, token), copies=copies)


class _OfRows(torch.autograd.Function):
    """The last product as a function of its rows, or the inputs of their activation, and of the weights of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_R: Tensor,
        place: Tensor,
        given: _Given,
        of_matrix: Any,
        wants_dots: bool,
        matrix: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        padding: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.given, ctx.of_matrix, ctx.num_inputs = given, of_matrix, len(inputs)
        ctx.wants_dots = wants_dots and ctx.needs_input_grad[0]
        ctx.wants_rows = any(ctx.needs_input_grad[9:])
        ctx.dtype = inputs[0].dtype
        needs_inputs = ctx.wants_dots or (ctx.wants_rows and given.activation is not None)
        ctx.save_for_backward(
            *(weights_R if given.weighs else None, matrix, bias, offs, padding), *(inputs if needs_inputs else ())
        )
        return place.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("combine")
        weights_R, matrix, bias, offs, padding, *inputs = ctx.saved_tensors
        given = ctx.given
        nothing = [None] * 8
        if not (ctx.wants_dots or ctx.wants_rows):
            return None, *nothing, *[None] * ctx.num_inputs
        operands = [matrix.transpose(1, 2), *([bias.unsqueeze(2)] if ctx.wants_dots and bias is not None else [])]
        # The node of the matrix runs next, if it runs in this pass, and would make the copies and the activation again.
        runs_next = ctx.of_matrix is not None and torch._C._will_engine_execute_node(ctx.of_matrix)
        copies, arrived, activated = given.copies, grad, None
        if runs_next and copies.by_expert(grad) is None:
            copies, arrived = Copies(route=None), copies.of(grad, ctx.dtype)
        found_RH = product_of(copies, arrived, operands, offs, padding)
        grad_RH = found_RH[0]
        dots = found_RH[1].squeeze(1) if len(found_RH) > 1 else None
        del found_RH
        if given.weighs:
            activated = compute(given.activation, inputs) if ctx.wants_dots else None
            flags = real_flags(offs, padding, grad_RH)
            grad_RH, found = given.permutation.weigh(
                grad_RH, weights_R, lambda: flags, grad_RH.dtype, partners_RD=activated
            )
            if found is not None:
                dots = found if dots is None else found + torch.where(flags, dots, 0).to(found.dtype)
        if runs_next:
            given.shared[:] = [(torch._C._current_graph_task_id(), copies, arrived, activated)]
        del arrived, activated
        grads: list[Tensor | None] = [None] * ctx.num_inputs
        if ctx.wants_rows:
            grads = [*gradients(given.activation, grad_RH, inputs if given.activation is not None else (grad_RH,))]
        return dots, *nothing, *grads


class _OfMatrix(torch.autograd.Function):
    """The last product as a function of its matrix and bias. Its result only has a place in the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        matrix: Tensor,
        bias: Tensor | None,
        place: Tensor,
        given: _Given,
        weights_R: Tensor,
        offs: Tensor,
        padding: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.given, ctx.dtype, ctx.num_inputs = given, matrix.dtype, len(inputs)
        ctx.save_for_backward(weights_R if given.weighs else None, offs, padding, *inputs)
        return place.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise double_backward("combine")
        weights_R, offs, padding, *inputs = ctx.saved_tensors
        given, of_matrix, of_bias = ctx.given, None, None
        copies, arrived, rows_RH = given.copies, grad, None
        if given.shared and given.shared[0][0] == torch._C._current_graph_task_id():
            _, copies, arrived, rows_RH = given.shared[0]
        given.shared.clear()
        rows_RH = compute(given.activation, inputs) if rows_RH is None else rows_RH
        flags = real_flags(offs, padding, rows_RH)
        if weights_R is not None:
            rows_RH, _ = given.permutation.weigh(
                rows_RH, weights_R, lambda: flags, rows_RH.dtype, clears=padding is not None
            )
        elif padding is not None:
            rows_RH = torch.where(flags.unsqueeze(1), rows_RH, 0)
        # Copies are zero on padding, where rows may hold NaN.
        if ctx.needs_input_grad[0]:
            of_matrix = gradient_from(copies, arrived, rows_RH, offs, swapped=True)
        if ctx.needs_input_grad[1]:
            ones_R = weights_R if weights_R is not None else flags
            of_bias = gradient_from(copies, arrived, ones_R.to(ctx.dtype).unsqueeze(1), offs, swapped=True).squeeze(1)
        return of_matrix, of_bias, *[None] * (5 + ctx.num_inputs)
