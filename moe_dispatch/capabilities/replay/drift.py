"""Count the slots whose replayed expert differs from the choice of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.dispatchers.meter import is_recomputation
from moe_dispatch.layouts import Layout
from moe_dispatch.seams.observers import Observer
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel, Lease


@final
class DriftObserver(Observer):
    """Add up ``Routing.drift`` for each dispatcher of a channel, on the device of the rows. No sync."""

    def __init__(self, channel: Channel) -> None:
        self._meter = channel.meter
        self._counts: dict[tuple[str, torch.device], Tensor] = {}

    def started(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
        """Count the slots of a dispatch, unless it is recomputed.

        Raises:
            StateError: The first replay on the device is being captured in a CUDA graph.
        """
        drift = routing.drift
        if drift is None or is_recomputation():
            return
        key = (lease.name, drift.device)
        if key not in self._counts:
            self._counts[key] = self._meter.zeros("replayed ", drift.device, 2)
        with self._meter.turn(drift.device):
            self._counts[key].add_(drift)

    def totals(self) -> Mapping[str, Mapping[str, int]]:
        """Return the drifted and the replayed slots. A host sync on a GPU."""
        drifted, replayed = Counter[str](), Counter[str]()
        for (name, _), counts in self._counts.items():
            both = self._meter.read(counts)
            drifted[name] += both[0]
            replayed[name] += both[1]
        return {"slots_drifted": drifted, "slots_replayed": replayed}
