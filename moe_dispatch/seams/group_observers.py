"""The seam for observers of collectives. ``observers_of`` returns those of a process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A collective that can be waited for."""

    def wait(self) -> object:
        """Wait for the collective."""


class CollectiveObserver:
    """Hears of the collectives on a process group. A subclass defines the methods that it needs."""

    def called(self, name: str) -> None:
        """Hear that the dispatcher of this name makes the next collectives; "" if it is not known."""

    def collective(self, label: str, nbytes: int, tensor: Tensor, start: Callable[[Any], Work], options: Any) -> Work:
        """Start a collective, or raise to refuse it.

        Args:
            label: Name under which the call and its bytes are counted.
            nbytes: Bytes that this rank sends to other ranks.
            tensor: Tensor on the device of the collective.
            start: Function that starts it.
            options: Argument of ``start``: the options of the method of the group, such as its time limit.
        """
        return start(options)

    def raised_alone(self, error: Exception) -> None:
        """Hear of an error that only this rank raises, while the others wait. It may tell them."""


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, list[CollectiveObserver]] = weakref.WeakKeyDictionary()


def observers_of(group: dist.ProcessGroup | None) -> list[CollectiveObserver]:
    """Return the list of what observes a group, to read or to change."""
    return [] if group is None else _of_group.setdefault(group, [])
