"""Faults in how gradients of copied experts come home. Comparisons must see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from moe_dispatch.balance.movement import Movement

FAULTS = {"lost": 0, "twice": 2}  # how often each gradient of a copy counts


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A block in which the fault is there."""
    collect = Movement.collect

    def wrong(self: Movement, own: Any, home_NW: Tensor) -> Any:
        return collect(self, own, home_NW * FAULTS[fault])

    with mock.patch.object(Movement, "collect", wrong):
        yield
