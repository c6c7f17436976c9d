"""The order of work on several CUDA streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from moe_dispatch.errors import StateError


@final
class StreamOrder:
    """Puts updates of shared memory in order, on whichever streams they run.

    All dispatches of a channel add to the same counters. Micro-batches may run on streams of their own, which do not
    wait for each other. So each update waits for the last update of another stream. The streams wait and the host does
    not, and what else they do stays unordered.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Let the current stream wait for the last update on the device. The block makes the next update.

        A captured update runs in replays, which the caller puts in order as any work on a stream.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(device)
        last, event = self._last.get(device, (stream, None))
        if event is not None and last != stream:
            stream.wait_event(event)
        yield
        event = torch.cuda.Event() if event is None else event
        event.record(stream)
        self._last[device] = stream, event


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of a CUDA device, else None."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def refuse_other_stream(stream: torch.cuda.Stream | None) -> None:
    """Refuse to finish a dispatch on another stream than its own: nothing would order the two.

    Raises:
        StateError: The current stream is another one.
    """
    if stream is not None and (current := torch.cuda.current_stream(stream.device)) != stream:
        raise StateError(
            f"Dispatcher.dispatch: wait() must run on the stream of the dispatch, {stream}, got {current}. Call it "
            "under torch.cuda.stream(...) of the dispatch, and let the other stream wait for that one."
        )
