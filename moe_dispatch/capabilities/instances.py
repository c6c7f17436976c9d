"""Objects of a class that are alive, for those who look around once and not in each call."""

from __future__ import annotations

import gc
from typing import Any


def instances_of(*kinds: type) -> list[Any]:
    """Return the live objects of exactly these classes: an object refers to its class.

    ``gc.get_objects`` would also return the tuples that other threads are building, and CPython raises SystemError in a
    thread whose unfinished tuple has a second holder.

    Cost: a pass over all objects of the process.
    """
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
