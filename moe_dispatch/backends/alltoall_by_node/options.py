"""The options of ``alltoall_by_node``, and what follows from them before the backend is open."""

from __future__ import annotations

import logging
from typing import Annotated, Literal, final

import torch
from pydantic import Field

from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.alltoall.exact import ExactAllToAll
from moe_dispatch.backends.alltoall.options import constraints_of, sent_along
from moe_dispatch.backends.alltoall_by_node.backend import WITHIN_NODE, AllToAllByNode, Nodes
from moe_dispatch.backends.base import Backend, BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.errors import ConfigError

logger = logging.getLogger("moe_dispatch")


@final
class AllToAllByNodeOptions(BackendOptions):
    """Options of ``alltoall_by_node``.

    A row goes once to each node that owns one of its experts, and there once to each rank; sums come back in the same
    way. So fewer bytes travel between nodes than on ``alltoall``. If all ranks are on one node, or each is on a node of
    its own, nothing is saved, and it works as ``alltoall``.

    Attributes:
        reduction: As in ``alltoall``. With "fast", the rank that relays rows to its node also adds up the node's sums.
        ranks_per_node: Number of consecutive ranks of the group that share a node. None detects it by host name.
    """

    name = "alltoall_by_node"
    auto_reason = "is for slow links between nodes"

    reduction: Literal["fast", "exact"] = "fast"
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None

    def constraints(self, shape: MoEShape) -> Constraints:
        self._size(shape)
        return constraints_of(shape, None, "it has no exchange of fixed size; backend='alltoall' would work")

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        exact, nodes, columns = self.reduction == "exact", self._nodes(0, shape), 1 + shape.num_local_experts
        legs = {"": volume}
        if nodes is not None:
            if volume.legs is None or shape.ranks_per_node not in (None, nodes.ranks_per_node):
                return None
            legs = dict(zip(("", WITHIN_NODE), volume.legs, strict=True))
            columns += nodes.num_columns
        return sent_along(shape, legs, dtype, {"counts": volume.others * 8 * columns}, exact=exact)

    def open(self, context: BackendContext) -> Backend:
        comm, shape = context.communicator, context.shape
        nodes = self._nodes(comm.rank, shape)
        if nodes is not None and comm.dry_run:
            raise ConfigError(
                "Backend 'alltoall_by_node': a dry run must be on one node, got several, on which ranks of other "
                "places on their nodes do not send what this rank sends. Use backend='alltoall'."
            )
        if comm.rank == 0:
            logger.info(
                "backend 'alltoall_by_node': ranks per node: %d (%s), %s.",
                self._size(shape),
                "detected" if self.ranks_per_node is None else "configured",
                f"nodes: {nodes.num_nodes}" if nodes else f"ranks: {comm.size}, so it works as 'alltoall'",
            )
        if nodes is not None:
            return AllToAllByNode(context, nodes)
        return AllToAll(context) if self.reduction == "fast" else ExactAllToAll(context)

    def _size(self, shape: MoEShape) -> int:
        """Return the number of ranks of the group that share a node.

        Raises:
            ConfigError: The ranks cannot be divided among nodes of this size.
        """
        size = min(self.ranks_per_node or shape.ranks_per_node or shape.ep_size, shape.ep_size)
        if shape.ep_size % size:
            raise ConfigError(
                f"Backend 'alltoall_by_node': ep_size must be a multiple of ranks_per_node, got {shape.ep_size} ranks "
                f"and ranks_per_node={size}. Give another ranks_per_node, or leave it out to detect it."
            )
        return size

    def _nodes(self, rank: int, shape: MoEShape) -> Nodes | None:
        """Return the nodes of the group, seen from a rank, if rows travel in two legs; None if they travel in one."""
        size = self._size(shape)
        if size in (1, shape.ep_size):
            return None
        return Nodes(
            rank=rank,
            ranks_per_node=size,
            num_nodes=shape.ep_size // size,
            num_local_experts=shape.num_local_experts,
            exact=self.reduction == "exact",
        )
