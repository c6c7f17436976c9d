"""Contenders: implementations of one MoE layer, which differ only in how they move rows.

A layer runs with the experts of the conformance kit, to check its results. To measure it, it runs with experts that
cost nothing, or with SwiGLU experts of a width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.balance import ExpertPlacement, run_planner
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher, SlotWeights
from moe_dispatch.lean import first_mm, last_mm, swiglu
from moe_dispatch.permutation.grouped_mm import grouped_mm
from moe_dispatch_testing.rank_context import LayerCall, RankContext
from moe_dispatch_testing.scenario import Experts
from moe_dispatch_tools.compare.workload import Step
from moe_dispatch_tools.place import Place

# A function from rows (R, D) to rows (R, D). Its second argument is a function that returns the expert of each row,
# int64 (R,), counted from the first expert of this rank.
RowFunction = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class Contender(ABC):
    """An implementation of the layer on one rank.

    Attributes:
        dispatcher: The dispatcher; None for a peer.
        experts: Up matrices (L, D, 2W) and down matrices (L, W, D) of a timed call; none for experts that cost nothing.
        counts_L: Rows that each expert of this rank got in the last timed call; empty for a peer.
    """

    dispatcher: Dispatcher | None = None
    experts: tuple[Tensor, ...] = ()
    counts_L = torch.zeros(0)

    def prepare(self, call: LayerCall) -> None:  # noqa: B027 - optional
        """Learn what may be known of a call before the clock starts. Collective."""

    def leaves(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return the tensors whose gradients a timed backward computes."""
        return call.x, call.weights_TK, *self.experts

    @abstractmethod
    def checked(self, step: Step, call: LayerCall, rank: int) -> Tensor:
        """Run the forward with the experts of the conformance kit."""

    @abstractmethod
    def timed(self, call: LayerCall, mark: Callable[[], None]) -> Tensor:
        """Run the forward. Call ``mark``, which notes the time, when rows have arrived and when experts are done."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release buffers and groups that outlive a call."""


def make_experts(config: DispatcherConfig, width: int, place: Place, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Make this rank's SwiGLU experts, an up matrix (D, 2W) and a down matrix (W, D) each; none if the width is 0."""
    local, hidden = config.num_experts // place.size, config.hidden_size
    shapes = ((local, hidden, 2 * width), (local, width, hidden)) if width else ()
    return tuple(torch.randn(shape).div_(shape[1] ** 0.5).to(place.device, dtype).requires_grad_() for shape in shapes)


@final
class Ours(Contender):
    """A dispatcher of moe-dispatch, and the plan that each call makes. Without ``experts``, they cost nothing."""

    dispatcher: Dispatcher

    def __init__(self, dispatcher: Dispatcher, experts: tuple[Tensor, ...]) -> None:
        self.dispatcher, self.experts, self._slot_weights = dispatcher, experts, SlotWeights(dispatcher)

    def place(self, planner: str, counts_E: Tensor) -> None:
        """Place experts once, for the rows of all ranks. Collective."""
        config, shape = self.dispatcher.config, self.dispatcher._channel.shape
        home = ExpertPlacement.contiguous(config.num_experts, shape.ep_size, spare=config.spare_slots(shape.ep_size))
        per_node = shape.ranks_per_node or shape.ep_size
        self.dispatcher.place(run_planner(planner, counts_E, home, ranks_per_node=per_node))

    def checked(self, step: Step, call: LayerCall, rank: int) -> Tensor:
        dispatcher, experts, numbers = self.dispatcher, call.experts, None
        context = RankContext(scenario=step.scenario, dispatcher=dispatcher, rank=rank, calls=(call,))
        sent = dispatcher.dispatch(call.x, call.routing, context.plan(call))
        if sent.placement is not None:
            local = dispatcher.config.num_experts // dispatcher._channel.shape.ep_size
            own = slice(rank * local, (rank + 1) * local)
            stacked = (experts.matrix_EWW[own], experts.bias_ED[own])
            sent, (matrix_SWW, bias_SD) = self._slot_weights.fetch(sent, *stacked)
            experts, numbers = Experts(matrix_EWW=matrix_SWW, bias_ED=bias_SD), range(len(bias_SD))
        return dispatcher.combine(context.run_experts(sent, experts, numbers), sent)

    def timed(self, call: LayerCall, mark: Callable[[], None]) -> Tensor:
        dispatcher = self.dispatcher
        sent = dispatcher.dispatch(call.x, call.routing, dispatcher.plan(call.layout, like=call.x))
        mark()
        if self.experts:
            sent, rows = self._slot_weights.run(sent, self._swiglu, *self.experts)
        else:
            rows = self._weighed(sent, sent.rows)
        mark()
        self.counts_L = sent.real_tokens_per_expert
        return dispatcher.combine(rows, sent)

    def _swiglu(self, part: Dispatched, up: Tensor, down: Tensor) -> Any:
        """Run experts on rows; on packets, run experts that save what arrived."""
        config = self.dispatcher.config
        if config.deliver == "rows":
            return part.grouped_mm(self._weighed(part, swiglu(part.grouped_mm(part.rows, up))), down)
        first = first_mm(part, up)
        if config.weights == "combine":
            return last_mm(part, first, down, activation=swiglu)
        return last_mm(part, self._weighed(part, swiglu(first)), down)

    def _weighed(self, part: Dispatched, rows: Tensor) -> Tensor:
        by_experts = self.dispatcher.config.weights == "experts"
        return (rows * part.weights.unsqueeze(1)).to(rows.dtype) if by_experts else rows

    def close(self) -> None:
        self.dispatcher.close()


class Peer(Contender):
    """An implementation outside this package. Each token must name ``top_k`` different experts.

    Attributes:
        sorts: Whether rows arrive in the order of their experts. If not, real experts sort them.
    """

    sorts = True

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup) -> None:
        self.config, self.group = config, group
        self.local = config.num_experts // group.size()

    @abstractmethod
    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        """Dispatch, run the experts and combine."""

    def checked(self, step: Step, call: LayerCall, rank: int) -> Tensor:
        def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
            ids_R = local_ids()
            order_R = ids_R.argsort(stable=True)
            parts = rows_RD[order_R].split(torch.bincount(ids_R, minlength=self.local).tolist())
            first = rank * self.local
            outputs = torch.cat([call.experts.apply(first + e, part) for e, part in enumerate(parts)])
            return outputs.to(rows_RD.dtype)[order_R.argsort()]

        return self.layer(call, experts)

    def timed(self, call: LayerCall, mark: Callable[[], None]) -> Tensor:
        def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
            mark()
            outputs = self._swiglu(rows_RD, local_ids()) if self.experts else rows_RD
            mark()
            return outputs

        return self.layer(call, experts)

    def _swiglu(self, rows_RD: Tensor, ids_R: Tensor) -> Tensor:
        up, down = self.experts
        offs = torch.bincount(ids_R, minlength=self.local).cumsum(0).int()
        order_R = None if self.sorts else ids_R.argsort(stable=True)
        rows = rows_RD if order_R is None else rows_RD.index_select(0, order_R)
        outputs = grouped_mm(swiglu(grouped_mm(rows, up, offs)), down, offs)
        return outputs if order_R is None else outputs.index_select(0, order_R.argsort())


def run_layer(contender: Contender, call: LayerCall, mark: Callable[[], Any]) -> None:
    """Run forward and backward. Call ``mark`` at the start and at the end of each phase in ``PHASES``."""
    mark()
    y = contender.timed(call, mark)
    mark()
    torch.autograd.grad(y, contender.leaves(call), call.upstream)
    mark()
