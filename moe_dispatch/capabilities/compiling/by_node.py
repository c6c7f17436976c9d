"""The form of routes of ``alltoall_by_node``."""

from __future__ import annotations

from typing import final

from torch import Tensor

from moe_dispatch.backends.alltoall_by_node.backend import AllToAllByNode, ExactNodeRoute, NodeRoute
from moe_dispatch.backends.base import Route
from moe_dispatch.capabilities.compiling.routes import LegForm, Tables, form_of, leg_tensors, way_tensors
from moe_dispatch.types import Capacity


@final
@form_of(AllToAllByNode)
class ByNodeForm(LegForm):
    """The form of ``alltoall_by_node``, exact or not."""

    def tensors(self, route: NodeRoute | ExactNodeRoute) -> list[Tensor]:
        head = [*leg_tensors(route.between), *leg_tensors(route.within)]
        if isinstance(route, ExactNodeRoute):
            head += [*way_tensors(route.way_between), *way_tensors(route.way_within), route.weights_TK.clone()]
        return [*head, *super().tensors(route)]

    def num_rows(self, route: NodeRoute | ExactNodeRoute) -> int:
        return route.between.cu_T.shape[0] - 1

    def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Route:
        between, within = self.leg(tables, num_rows), self.leg(tables, None)
        if not self.backend.nodes.exact:
            index = self.index(tables, None, None)
            return NodeRoute(context=self.context, between=between, within=within, index=index)
        way_between, way_within = self.way(tables, between), self.way(tables, within)
        size = between.cu_T.shape[0] - 1, self.context.shape.top_k
        return ExactNodeRoute(
            context=self.context,
            between=between,
            within=within,
            way_between=way_between,
            way_within=way_within,
            weights_TK=tables.table(*size, dtype=tables.weights_TK.dtype),
            index=self.index(tables, None, None),
        )
