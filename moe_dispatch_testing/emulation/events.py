"""The event classes of deep_ep. On a CPU every call is finished when it returns, so waiting does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from moe_dispatch_testing.host_syncs import allow_host_syncs


class EventHandle:
    """A recorded event of the current stream (csrc/event.hpp of v1.2.1; ``deep_ep._C.EventHandle`` in v2)."""

    def current_stream_wait(self) -> None:
        """Do nothing, because no work is pending on a CPU."""


class EventOverlap:
    """An event or None, and tensors to keep alive (deep_ep/utils.py:12 of v1.2.1)."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Wait for the event, which must have been recorded.

        Raises:
            AssertionError: There is no event, because the call was not asynchronous (deep_ep/utils.py:43 of v1.2.1).
        """
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class ElasticEventOverlap(EventOverlap):
    """``EventOverlap`` of v2. It can run a hook after the wait, and can release its event (deep_ep/utils/event.py)."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        super().__init__(event, extra_tensors)
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases = False

    @allow_host_syncs()
    def current_stream_wait(self, release_handle: bool = False) -> Any:
        super().current_stream_wait()
        result = None
        if self.hook_after_wait is not None:
            result = self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = None
        return result

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        assert self.hook_after_wait is None, "A hook is already registered on this `EventOverlap`"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> ElasticEventOverlap:
        self._releases = release_handle
        return self

    def __exit__(self, *raised: object) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._releases)
        self._releases = False


@final
class EPEventOverlap(ElasticEventOverlap):
    """``EventOverlap`` of V2.5. The first wait returns the result of the hook (deep_ep/utils/event.py)."""

    def wait(self) -> Any:
        """Wait on the current stream."""
        return self.current_stream_wait()


EPEventOverlap.__name__ = EPEventOverlap.__qualname__ = "EventOverlap"
