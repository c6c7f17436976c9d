"""Record the routing of dispatches in copies on the host. A trace file or a ``RoutingTable`` is made of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.layouts.base import is_host
from moe_dispatch.layouts.encoding import arguments, encodable
from moe_dispatch.seams.observers import Observer
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.channel import Channel, Lease


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Note:
    """One dispatch of one rank. Copies from a device are complete after a synchronisation with the device.

    Attributes:
        owner: Key of the dispatcher.
        name: Name of the dispatcher, stored in recorded traces.
        ids_TK: Expert ids, int32.
        weights_TK: Weights of the slots.
        shape: Shape of x.
        dtype: Dtype of x.
        device: Device of x.
        layout: Function that makes the layout again, with tensors on the host.
        on_host: Whether the host knew the layout during the dispatch.
    """

    owner: Hashable
    name: str
    ids_TK: Tensor
    weights_TK: Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: Callable[[], Layout]
    on_host: bool


@final
class Recorder(Observer):
    """Keep the first ``steps`` dispatches of each dispatcher of a channel.

    Args:
        steps: Number of dispatches to keep.
        by_position: Whether the reader needs the sequence and the position of each row, as a ``RoutingTable`` does.

    Cost: each call copies ids, weights and lengths to the host, without a host sync.
    """

    def __init__(self, steps: int, *, by_position: bool = False) -> None:
        self.steps = steps
        self.by_position = by_position
        self.notes: list[Note] = []
        self._kept: dict[Hashable, int] = {}
        self._in_whole = False

    @staticmethod
    def records(channel: Channel) -> bool:
        """Return whether a recorder is attached to a channel."""
        return any(isinstance(observer, Recorder) for observer in channel.observers)

    def asked(self, x: Tensor, layout: Layout) -> None:
        """Refuse a dispatch that cannot be recorded, before it starts.

        Raises:
            StateError: A CUDA graph is capturing the call.
            InputError: A trace cannot hold the layout.
        """
        if self._in_whole:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            _refuse("a CUDA graph")
        if not encodable(layout):
            raise InputError(
                f"Dispatcher.dispatch: a trace cannot hold a {type(layout).__name__}. Flatten x, and pass Rows()."
            )

    def traced(self) -> None:
        """Refuse a dispatch of an operator, which knows no layout.

        Raises:
            StateError: Always.
        """
        _refuse("torch.compile or selective checkpointing")

    def started(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
        """Copy the input of a dispatch.

        A dispatch inside a backward is not recorded, because there a checkpoint repeats an earlier dispatch. After the
        first ``steps`` dispatches of a dispatcher, no more are recorded.
        """
        kept = self._kept.get(lease, 0)
        if self._in_whole or kept >= self.steps or torch._C._current_graph_task_id() != -1:
            return
        self._kept[lease] = kept + 1
        self.notes.append(
            Note(
                owner=lease,
                name=lease.name,
                ids_TK=_to_host(routing.topk_ids.to(torch.int32)),
                weights_TK=_to_host(routing.topk_weights.detach()),
                shape=x.shape,
                dtype=x.dtype,
                device=x.device,
                layout=_on_host(layout),
                on_host=layout.on_host,
            )
        )

    @contextmanager
    def whole(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> Iterator[None]:
        """Record one dispatch at the end of the block, and none of those in the block."""
        if self._in_whole:
            yield
            return
        self._in_whole = True
        try:
            yield
        finally:
            self._in_whole = False
        self.started(lease, x, routing, layout)


def _refuse(where: str) -> NoReturn:
    """Raise an error about a dispatch whose routing a recorder cannot see."""
    raise StateError(f"Dispatcher.dispatch: calls inside {where} cannot be recorded. Record eager steps.")


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. A copy from a device goes to pinned memory, and is not awaited."""
    return tensor.clone() if is_host(tensor) else tensor.to("cpu", non_blocking=True)


def _on_host(value: Any) -> Callable[[], Any]:
    """Return a function that makes a layout, or one of its fields, on the host.

    It runs later, because the constructor of a layout reads values, and the copies of the values are still under way.
    """
    if isinstance(value, Layout):
        cls: Callable[..., Layout] = type(value)
        fields = [_on_host(field) for field in arguments(value)]
        return lambda: cls(*(field() for field in fields))
    kept = _to_host(value) if isinstance(value, Tensor) else value
    return lambda: kept
