"""How the routes of backends become tensors and come back.

An operator takes and returns tensors only, so a compiled graph carries a route as the list of its tensors. A
``RouteForm`` takes the routes of one backend apart, and puts them together. ``@form_of(MyBackend)`` registers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from moe_dispatch.backends.allgather import AllGather, AllGatherRoute
from moe_dispatch.backends.alltoall.backend import AllToAll, AllToAllRoute, Leg
from moe_dispatch.backends.alltoall.exact import ExactAllToAll, ExactRoute, SlotWay
from moe_dispatch.backends.alltoall.fixed import FixedAllToAll
from moe_dispatch.backends.base import Backend, Route
from moe_dispatch.backends.local import Local, LocalRoute
from moe_dispatch.communication import read_host
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import SlotIndex
from moe_dispatch.types import Capacity


@final
class Tables:
    """The tensors of a route that is made from tensors: the given ones in their order, or new ones without values.

    Args:
        new_size: Function that returns a symbol for a size that is known only at run time. Each symbol must be the
            length of a tensor of the route. Static sizes need no symbol.
        weights_TK: Tensor with the dtype and the device of the weights. Its shape may be wrong, in which case the real
            kernel will refuse the call.
        given: Result of ``RouteForm.tensors``; None for tensors without values, for tracing.
    """

    def __init__(self, new_size: Callable[[], int], weights_TK: Tensor, given: Sequence[Tensor] | None = None) -> None:
        self.new_size = new_size
        self.weights_TK = weights_TK
        self._given = None if given is None else iter(given)

    def table(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the next tensor. The shape and the dtype matter only for a new one."""
        if self._given is not None:
            return next(self._given)
        return torch.empty(shape, dtype=dtype, device=self.weights_TK.device)

    def numbers(self, length: int) -> list[int]:
        """Return the next numbers of the host, which ``on_host`` made a tensor; zeros for tracing."""
        return [0] * length if self._given is None else read_host(next(self._given))


def on_host(*numbers: Sequence[int]) -> Tensor:
    """Return numbers of the host, such as the sizes of messages, as one int64 tensor on the CPU."""
    return torch.tensor(list(chain(*numbers)), dtype=torch.int64, device="cpu")


class RouteForm(ABC):
    """The form of the routes of a backend that declares ``Constraints.compilable``.

    Args:
        backend: The open backend.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend: Any = backend
        self.context = backend.context

    @abstractmethod
    def tensors(self, route: Any) -> list[Tensor]:
        """Return a route as tensors, for ``route``.

        No tensor shares memory with another, or with the arguments of the dispatch. ``on_host`` makes a tensor of
        numbers that are on the host.
        """

    @abstractmethod
    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Route:
        """Make a route from its ``tensors``, taken in their order, without a host sync.

        Fake kernels call this with tables without values.

        Args:
            tables: The tensors.
            num_rows: Tp; None if Tp is known only at run time. Like all sizes, it matters only for tracing.
            capacity: Capacity of a graph-safe dispatch, whose sizes are all static; None in eager mode.
        """

    @abstractmethod
    def num_rows(self, route: Any) -> int:
        """Return Tp, the number of rows that this rank brought."""

    @abstractmethod
    def num_grouped(self, route: Any) -> int:
        """Return R, the number of expert-major rows."""

    @final
    def restored(self, tensors: Sequence[Tensor]) -> Route:
        """Rebuild a route from its ``tensors``. The sizes that ``route`` gets are not used."""
        unused = Capacity(rows=0, buffer_rows=0, pair_rows=0) if self.context.shape.graph_safe else None
        return self.route(Tables(int, tensors[0], tensors), 0, unused)

    def index(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> SlotIndex:
        """Make the index of a dispatch from its ``index_tensors``, or one without values for tracing.

        Args:
            tables: The tables of the route.
            num_rows: S, the number of rows that arrived; None if it is known only at run time.
            capacity: Capacity of a graph-safe dispatch, whose sizes are all known; None in eager mode.
        """
        shape, buffer_rows = self.context.shape, None if capacity is None else capacity.buffer_rows
        return index_from(
            tables,
            num_rows,
            shape.top_k,
            shape.pad_multiple,
            num_keys=shape.num_local_experts,
            buffer_rows=buffer_rows,
        )


Form = TypeVar("Form", bound=type[RouteForm])
_FORMS: dict[type[Backend], type[RouteForm]] = {}
_BY_NODE = "moe_dispatch.backends.alltoall_by_node.backend"


def form_of(backend: type[Backend]) -> Callable[[Form], Form]:
    """Return a decorator that registers a form for a class of backends, and for its subclasses without another form."""

    def register(form: Form) -> Form:
        _FORMS[backend] = form
        return form

    return register


def load_form(backend: Backend) -> RouteForm:
    """Return the form of the routes of an open backend.

    Raises:
        StateError: There is none.
    """
    if type(backend).__module__ == _BY_NODE:  # a backend in a folder that may be deleted
        import_module("moe_dispatch.capabilities.compiling.by_node")
    for cls in type(backend).__mro__:
        if cls in _FORMS:
            return _FORMS[cls](backend)
    raise StateError(
        f"{type(backend).__qualname__}: a backend that declares compilable must turn its routes into tensors and back, "
        "got one that does not. Register a RouteForm with form_of of moe_dispatch.capabilities.compiling.routes, or "
        "declare compilable=False."
    )


def index_tensors(index: SlotIndex) -> list[Tensor]:
    """Return the tables of an index, for ``index_from``. No two share memory. Counts are left out."""
    tables = index.source_R, index.slot_N, index.byrow_N, index.cu_S, index.position_N, index.padding, index.filled_R
    return [table for table in tables if table is not None]


def index_from(
    tables: Tables,
    num_rows: int | None,
    top_k: int,
    pad_multiple: int,
    *,
    num_keys: int = 0,
    buffer_rows: int | None = None,
) -> SlotIndex:
    """Rebuild an index from its ``index_tensors``, or make one without values for tracing. The result has no counts.

    Args:
        tables: The tables, with those of the index next.
        num_rows: S; None if S is known only at run time.
        top_k: K.
        pad_multiple: As in ``group_slots``.
        num_keys: L; needed only with ``buffer_rows``.
        buffer_rows: R of an index of fixed size; None if the shapes depend on the keys.
    """
    table, new_size = tables.table, tables.new_size
    is_padded, fixed_size = pad_multiple > 1, buffer_rows is not None
    edges = new_size() if num_rows is None else num_rows + 1
    slots = (edges - 1) * top_k if fixed_size else new_size()
    grouped = buffer_rows if buffer_rows is not None else new_size() if is_padded else slots
    source_R, slot_N, byrow_N, cu_S = table(grouped), table(slots), table(slots), table(edges)
    position_N = table(slots) if is_padded or fixed_size else None
    padding = None
    if is_padded:
        padding = table(num_keys * (pad_multiple - 1) if fixed_size else new_size())
    return SlotIndex(
        num_rows=cu_S.shape[0] - 1,
        top_k=top_k,
        num_grouped=source_R.shape[0],
        pad_multiple=pad_multiple,
        source_R=source_R,
        slot_N=slot_N,
        byrow_N=byrow_N,
        cu_S=cu_S,
        position_N=position_N,
        padding=padding,
        filled_R=table(grouped) if fixed_size else None,
    )


class RankMajorForm(RouteForm):
    """The form of a route that is its index, and what a subclass adds."""

    def tensors(self, route: Any) -> list[Tensor]:
        return index_tensors(route.index)

    def num_rows(self, route: Any) -> int:
        index: SlotIndex = route.index
        return index.num_rows

    @final
    def num_grouped(self, route: Any) -> int:
        index: SlotIndex = route.index
        return index.num_grouped


@final
@form_of(Local)
class LocalForm(RankMajorForm):
    """The form of ``local``."""

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> LocalRoute:
        index = self.index(tables, num_rows, capacity)
        return LocalRoute(context=self.context, index=index, exact=self.backend.exact)


@final
@form_of(AllGather)
class AllGatherForm(RankMajorForm):
    """The form of ``allgather``. All rows arrive everywhere."""

    def num_rows(self, route: AllGatherRoute) -> int:
        return route.num_rows

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> AllGatherRoute:
        everyone = None if num_rows is None else num_rows * self.context.shape.ep_size
        return AllGatherRoute(context=self.context, index=self.index(tables, everyone, capacity))


class LegForm(RankMajorForm):
    """The form of a route that begins with a leg."""

    @final
    def leg(self, tables: Tables, num_rows: int | None) -> Leg:
        """Make a leg of ``num_rows`` rows from its ``leg_tensors``. None is a number known only at run time."""
        size, sent = self.context.shape.ep_size, tables.new_size()
        rows = tables.numbers(2 * size)
        return Leg(
            context=self.context,
            rows_out=rows[:size],
            rows_in=rows[size:],
            source_B=tables.table(sent),
            member_B=tables.table(sent),
            cu_T=tables.table(tables.new_size() if num_rows is None else num_rows + 1),
        )

    @final
    def way(self, tables: Tables, leg: Leg) -> SlotWay:
        """Make the way back of the slots of a leg from its ``way_tensors``."""
        size = self.context.shape.ep_size
        slots = tables.numbers(2 * size)
        index = index_from(tables, leg.cu_T.shape[0] - 1, self.context.shape.top_k, 1)
        return SlotWay(slots_out=slots[:size], slots_in=slots[size:], index=index)


@final
@form_of(AllToAll)
class AllToAllForm(LegForm):
    """The form of ``alltoall`` in eager mode."""

    def tensors(self, route: AllToAllRoute) -> list[Tensor]:
        return [*leg_tensors(route.leg), *super().tensors(route)]

    def num_rows(self, route: AllToAllRoute) -> int:
        return route.leg.cu_T.shape[0] - 1

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Route:
        leg = self.leg(tables, num_rows)
        return AllToAllRoute(context=self.context, leg=leg, index=self.index(tables, None, capacity))


def leg_tensors(leg: Leg) -> list[Tensor]:
    """Return the numbers of rows and the tables of a leg, for ``LegForm.leg``."""
    return [on_host(leg.rows_out, leg.rows_in), leg.source_B, leg.member_B, leg.cu_T]


def way_tensors(way: SlotWay) -> list[Tensor]:
    """Return the numbers of slots and the tables of a way back, for ``LegForm.way``."""
    return [on_host(way.slots_out, way.slots_in), *index_tensors(way.index)]


@final
@form_of(FixedAllToAll)
class FixedAllToAllForm(RankMajorForm):
    """The form of graph-safe ``alltoall``. The numbers of rows follow from the sizes of tables."""

    def tensors(self, route: AllToAllRoute) -> list[Tensor]:
        return [*leg_tensors(route.leg)[1:], *super().tensors(route)]

    def num_rows(self, route: AllToAllRoute) -> int:
        return route.leg.cu_T.shape[0] - 1

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Route:
        assert num_rows is not None
        assert capacity is not None
        assert capacity.pair_rows is not None
        size, table = self.context.shape.ep_size, tables.table
        sent, members, edges = table(capacity.pair_rows * size), table(num_rows * size), table(num_rows + 1)
        leg = self.backend.leg(sent, members, edges)
        index = self.index(tables, leg.source_B.shape[0], capacity)
        return AllToAllRoute(context=self.context, leg=leg, index=index)


@final
@form_of(ExactAllToAll)
class ExactForm(LegForm):
    """The form of ``alltoall`` with ``reduction="exact"``."""

    def tensors(self, route: ExactRoute) -> list[Tensor]:
        head = [*leg_tensors(route.leg), *way_tensors(route.way), route.weights_TK.clone()]
        return [*head, *super().tensors(route)]

    def num_rows(self, route: ExactRoute) -> int:
        return route.leg.cu_T.shape[0] - 1

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Route:
        leg = self.leg(tables, num_rows)
        way = self.way(tables, leg)
        weights_TK = tables.table(leg.cu_T.shape[0] - 1, self.context.shape.top_k, dtype=tables.weights_TK.dtype)
        index = self.index(tables, None, None)
        return ExactRoute(context=self.context, leg=leg, way=way, index=index, weights_TK=weights_TK)
