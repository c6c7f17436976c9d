"""Replay the routing of an earlier pass: of the rollout engine, or of the trainer's own first forward.

There are three ideas. A ``RoutingTable`` holds expert ids by sequence, position and MoE layer, on the host. A ``Cut``
holds the ids of the rows of one micro-batch on one rank, in the order of the rank's layout. ``replayed`` gathers the
router's scores at these ids, so that the router keeps its gradient.
"""

from moe_dispatch.capabilities.replay.cut import Cut, SequenceId
from moe_dispatch.capabilities.replay.recording import Recording
from moe_dispatch.capabilities.replay.router import replayed
from moe_dispatch.capabilities.replay.table import RoutingTable
from moe_dispatch.capabilities.replay.turns import Turn

__all__ = ["Cut", "Recording", "RoutingTable", "SequenceId", "Turn", "replayed"]
