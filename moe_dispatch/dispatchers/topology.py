"""Which ranks of a group share a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import pairwise

from moe_dispatch.communication import Communicator


def detect_ranks_per_node(control: Communicator) -> int:
    """``ranks_per_node`` of a group, from its hosts' names. Collective."""
    return ranks_per_node(control.gather_json(socket.gethostname(), label="build"))


def ranks_per_node(hosts: Sequence[str]) -> int:
    """The largest number of consecutive ranks that share a host in every such block of the group.

    Args:
        hosts: the host of each rank. Containers with names of their own count as hosts of their own.
    """
    borders = [rank for rank, (left, right) in enumerate(pairwise(hosts), start=1) if left != right]
    sizes = [size for size in range(1, len(hosts) + 1) if len(hosts) % size == 0]
    inside = [size for size in sizes if all(border % size == 0 for border in borders)]
    return max(inside)
