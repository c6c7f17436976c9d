"""A trace as frozen values: ``Trace``, its calls, and the part of each rank in a call.

Dimensions: ``T`` rows of a rank as the model gave them, ``K`` top_k, ``E`` experts of the whole group, ``P`` its ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.dispatchers.verbs import merged_slots
from moe_dispatch.errors import TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The input of one rank to one dispatch; all tensors are on the CPU.

    Attributes:
        routing: int64 (T, K) ids and (T, K) weights, as the model gave them.
        layout: The layout of x.
        on_host: Whether the host knew which rows are real; if not, padding rows are masked instead of cut.
        shape: The shape of x.
        dtype: The dtype of x.
    """

    routing: Routing
    layout: Layout
    on_host: bool
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.routing.topk_ids)

    def sent_ids(self, *, cut: bool) -> Tensor:
        """Return the experts to which the rows go: int64, -1 for none, no expert twice for one row.

        Args:
            cut: Leave out padding rows, as a dispatcher does in eager mode if ``on_host``, which gives (real rows, K);
                else they stay with the id -1, which gives (T, K).
        """
        ids, valid_T = self.routing.topk_ids, self.layout.valid_T(self.num_rows)
        if valid_T is not None:
            ids = ids[valid_T] if cut else torch.where(valid_T.unsqueeze(1), ids, -1)
        return merged_slots(ids, torch.zeros(ids.shape), asks=True)[0]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch of all ranks.

    Attributes:
        layer: The index of the dispatcher, in the order of their first dispatches.
        step: How many dispatches of this dispatcher were recorded before.
        parts: One part per rank, in the order of ``Trace.ranks``.
    """

    layer: int
    step: int
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The routing of real steps: ``record`` it, ``load`` it.

    Attributes:
        config: The config of the dispatchers.
        backend_name: The backend; "auto" is resolved.
        ep_size: P.
        ranks: The ranks whose parts are here: all P, or one after an error.
        ranks_per_node: How many consecutive ranks shared a host.
        needs: The backend's constraints on numbers of rows, where this was recorded.
        layers: The names of the dispatchers on rank ``ranks[0]``; "dispatcher 0" and so on if they had none.
        calls: In the order of rank ``ranks[0]``.
        versions: The versions of moe_dispatch, torch and Python.
    """

    config: DispatcherConfig
    backend_name: str
    ep_size: int
    ranks: tuple[int, ...]
    ranks_per_node: int | None
    needs: Constraints
    layers: tuple[str, ...]
    calls: tuple[Call, ...]
    versions: dict[str, str]

    @staticmethod
    def record(dispatcher: Dispatcher, path: str | Path, *, steps: int = 100) -> AbstractContextManager[None]:
        """Record the routing of every dispatch inside a ``with`` block; one file for all ranks.

        It records the first ``steps`` dispatches of every dispatcher that shares this one's channel (config and group).
        It does not record dispatches inside a backward (a checkpoint computing again), nor ``again=sent``, which has no
        routing of its own. Leaving the block gathers on rank 0, which writes the file. If the block raises, each rank
        writes its own part to a file beside it, ``run.rank3.safetensors``.

        Args:
            dispatcher: An open dispatcher.
            path: The file. Its directory is created; an existing file is replaced at the end.
            steps: Bounds the memory that is used: 8 to 12 bytes per row, slot, step and dispatcher.

        Raises:
            TraceError: safetensors is missing, or the path cannot be written; PeerError on the other ranks.
            StateError: The dispatcher is closed, or its channel is being recorded already; inside the block, a
                dispatch in a CUDA graph, ``torch.compile`` or selective checkpointing.

        Cost: entering and leaving are collective; inside, each dispatch copies ids, weights and lengths to the host
        without a host sync. No cost if no trace is recorded.
        """
        from moe_dispatch.traces.recording import record  # noqa: PLC0415 - it makes a Trace

        return record(dispatcher, Path(path), steps)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace file.

        Raises:
            TraceError: The file is missing, cut off, or no trace of this format; or safetensors is missing.
        """
        from moe_dispatch.traces.columns import trace_from  # noqa: PLC0415
        from moe_dispatch.traces.file import read  # noqa: PLC0415

        return trace_from(*read(Path(path)), where=str(path))

    @property
    def steps(self) -> int:
        """The largest number of dispatches of any dispatcher."""
        return max((call.step + 1 for call in self.calls), default=0)

    @property
    def max_rows(self) -> int:
        """The largest number of rows of any rank in any dispatch, padding included."""
        return max((part.num_rows for call in self.calls for part in call.parts), default=0)

    @property
    def shape(self) -> MoEShape:
        """The shape on which the constraints of backends depend."""
        return shape_of(self.config, self.ep_size, self.ranks_per_node)

    def cuts(self, part: Part) -> bool:
        """Whether the padding rows of a part were cut out, rather than masked."""
        return part.on_host and not self.config.graph_safe

    def tokens_per_expert(self) -> Tensor:
        """Return how many rows of these ranks went to each expert, without any padding: int64 (calls, E)."""
        counts = torch.zeros(len(self.calls), self.config.num_experts, dtype=torch.int64)
        for row, call in zip(counts, self.calls, strict=True):
            for part in call.parts:
                ids = part.sent_ids(cut=True)
                row += torch.bincount(ids[ids >= 0], minlength=len(row))[: len(row)]
        return counts

    def require_whole(self, where: str) -> None:
        """Raise TraceError, which begins with ``where``, if some ranks are missing."""
        if len(self.ranks) != self.ep_size:
            raise TraceError(
                f"{where}: the trace must hold all {self.ep_size} ranks, got rank {', '.join(map(str, self.ranks))}. "
                "Record one that is not interrupted."
            )

    def check_ids(self, where: str) -> None:
        """Raise TraceError, which begins with ``where``, if the router produced an id outside -1..E-1."""
        last = self.config.num_experts - 1
        for call in self.calls:
            for rank, part in zip(self.ranks, call.parts, strict=True):
                ids, valid_T = part.routing.topk_ids, part.layout.valid_T(part.num_rows)
                ids = ids if valid_T is None else ids[valid_T]
                if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) <= last:
                    raise TraceError(
                        f"{where}: topk_ids must lie in -1..{last}, got {int(ids.min())}..{int(ids.max())} on rank "
                        f"{rank} in step {call.step} of {self.layers[call.layer]}. Check the router."
                    )

    def check(self, config: DispatcherConfig, *, ep_size: int) -> None:
        """Refuse a config that the routing does not fit.

        Args:
            config: May have another backend, hidden size, padding or mode.
            ep_size: The number of ranks that will run it.

        Raises:
            TraceError: The error names the field and both values.
        """
        for field, recorded, wanted in (
            ("num_experts", self.config.num_experts, config.num_experts),
            ("top_k", self.config.top_k, config.top_k),
            ("ep_size", self.ep_size, ep_size),
        ):
            if recorded != wanted:
                raise TraceError(
                    f"Trace.check: {field} must be that of the trace, {recorded}, got {wanted}. Use the trace's, or "
                    "record a trace under this config."
                )
        if config.max_tokens_per_rank is not None and self.max_rows > config.max_tokens_per_rank:
            raise TraceError(
                f"Trace.check: max_tokens_per_rank must be at least the trace's {self.max_rows} rows, got "
                f"{config.max_tokens_per_rank}. Raise it."
            )
