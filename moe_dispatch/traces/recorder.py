"""What a routing trace is made of: copies of the routing of each dispatch, kept on the host until somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.layouts.base import is_host
from moe_dispatch.layouts.encoding import arguments, encodable
from moe_dispatch.types import Routing


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Note:
    """One dispatch of one rank. From a device its tensors arrive when that has been synchronised with.

    Attributes:
        owner: whose dispatch it is.
        name: of the dispatcher.
        ids_TK: int32; ids that do not fit were none of an expert's.
        weights_TK: as given.
        shape: of x; ``dtype`` and ``device`` likewise.
        layout: makes the layout, with tensors on the host; ``on_host`` says whether they were there before.
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
class Recorder:
    """Keeps the first dispatches of each dispatcher of a channel.

    Cost of a call: copies of ids, weights and lengths; no host sync.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.notes: list[Note] = []
        self._kept: dict[Hashable, int] = {}

    def note(self, owner: Hashable, name: str, x: Tensor, routing: Routing, layout: Layout) -> Note | None:
        """Copy what one dispatch is given; None where it is not to be kept.

        Not kept are dispatches inside a backward, where a checkpoint computes again what was recorded, and those of a
        dispatcher that has had its ``steps``.

        Raises:
            StateError: the call is being captured in a CUDA graph.
            InputError: a layout that a trace cannot hold.
        """
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.refuse("a CUDA graph")
        if not encodable(layout):
            raise InputError(
                "Dispatcher.dispatch: while a trace is recorded the layout must be one of moe_dispatch.layouts, got "
                f"{type(layout).__name__}. Flatten the rows yourself and pass Rows()."
            )
        if self._kept.get(owner, 0) >= self.steps or torch._C._current_graph_task_id() != -1:
            return None
        return Note(
            owner=owner,
            name=name,
            ids_TK=_to_host(routing.topk_ids.to(torch.int32)),
            weights_TK=_to_host(routing.topk_weights.detach()),
            shape=x.shape,
            dtype=x.dtype,
            device=x.device,
            layout=_on_host(layout),
            on_host=layout.on_host,
        )

    def keep(self, note: Note) -> None:
        """Take a note into the record."""
        self._kept[note.owner] = self._kept.get(note.owner, 0) + 1
        self.notes.append(note)

    def refuse(self, where: str) -> NoReturn:
        """Refuse a dispatch whose routing a recorder cannot see.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"Dispatcher.dispatch: while a trace is recorded it must be called eagerly, got a call inside {where}. "
            "Record eager steps of the same model."
        )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host: from a device into pinned memory, without waiting for it."""
    return tensor.clone() if is_host(tensor) else tensor.to("cpu", non_blocking=True)


def _on_host(layout: Layout) -> Callable[[], Layout]:
    """Makes the layout again, later: constructors read values, which are still on their way here."""
    cls: Callable[..., Layout] = type(layout)
    fields = [_later(value) for value in arguments(layout)]
    return lambda: cls(*(field() for field in fields))


def _later(value: Any) -> Callable[[], Any]:
    if isinstance(value, Layout):
        return _on_host(value)
    kept = _to_host(value) if isinstance(value, Tensor) else value
    return lambda: kept
