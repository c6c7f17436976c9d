"""Looking for live objects must not disturb what other threads do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from moe_dispatch.capabilities.instances import instances_of


class Kind:
    pass


class Slotted:
    __slots__ = ("other",)


class Other(Kind):
    pass


def disturbed(look: Callable[[], Any]) -> int:
    """Return how often a thread could not build a tuple while this one looked."""
    failed, stop, interval = [], threading.Event(), sys.getswitchinterval()

    def build() -> None:
        while not stop.is_set():
            try:
                tuple(str(number) for number in range(30))
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=build)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(30):
            look()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    return len(failed)


def test_only_live_objects_of_the_classes_are_found() -> None:
    live, other = [Kind(), Slotted(), Kind()], Other()
    assert {*map(id, instances_of(Kind, Slotted))} == {*map(id, live)}
    assert instances_of(Other) == [other]
    del live[0]
    assert len(instances_of(Kind)) == 1


def test_threads_build_tuples_meanwhile() -> None:
    assert disturbed(lambda: instances_of(Kind)) == 0
