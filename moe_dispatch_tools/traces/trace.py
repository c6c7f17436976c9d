"""Frozen values of a trace: ``Trace``, its calls, and the part of each rank in a call.

Dimensions: ``T`` rows of a rank in the model, ``K`` top_k, ``E`` experts of the whole group, ``P`` its ranks.
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
from moe_dispatch.errors import TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import merge_slots
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The input of one rank to one dispatch; all tensors are on the CPU.

    Attributes:
        routing: Ids, int64 (T, K), and weights (T, K) from the model.
        layout: The layout of x.
        on_host: Whether the host knew the real rows. Eager mode then left out padding rows. Otherwise they were masked.
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
        """Number of rows, T."""
        return len(self.routing.topk_ids)

    def sent_ids(self, *, cut: bool) -> Tensor:
        """Return the experts of the rows, int64. The id is -1 for no expert. A row has no expert twice.

        Args:
            cut: Whether to leave out padding rows, as a dispatcher does in eager mode if ``on_host``. The result is
                then (real rows, K). Otherwise padding rows have ids of -1, and the result is (T, K).
        """
        ids, valid_T = self.routing.topk_ids, self.layout.valid_T(self.num_rows)
        if valid_T is not None:
            ids = ids[valid_T] if cut else torch.where(valid_T.unsqueeze(1), ids, -1)
        return merge_slots(ids, torch.zeros(ids.shape), asks=True)[0]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch of all ranks.

    Attributes:
        layer: The index of the dispatcher. Dispatchers are in the order of their first dispatches.
        step: The number of recorded dispatches of this dispatcher before this one.
        parts: One part per rank, in the order of ``Trace.ranks``.
    """

    layer: int
    step: int
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The routing of real steps. ``record`` writes a trace, and ``load`` reads it.

    Attributes:
        config: The config of the dispatchers.
        backend_name: The name of the backend, never "auto".
        ep_size: The number of ranks, P.
        ranks: The ranks with a part in this trace: all P ranks, or one rank after an error.
        ranks_per_node: The number of consecutive ranks on a host.
        needs: The constraints of the backend on row counts in the recorded run.
        layers: The names of the dispatchers on rank ``ranks[0]``; "dispatcher 0" and so on for those without a name.
        calls: The calls, in the order of rank ``ranks[0]``.
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
        """Record the routing of every dispatch inside a ``with`` block, in one file for all ranks.

        The first ``steps`` dispatches of every dispatcher with the same channel are recorded, that is, with the same
        config and group. Two kinds of dispatches are not recorded: dispatches inside a backward, where a checkpoint
        repeats earlier dispatches, and dispatches with ``again=sent``, which use an earlier routing. At the end of the
        block, rank 0 gathers all parts and writes the file. If the block raises, each rank writes its own part, such as
        ``run.rank3.safetensors``.

        Args:
            dispatcher: An open dispatcher.
            path: The file. Its directory is created. An existing file is replaced at the end of the block.
            steps: The largest number of dispatches to record. Each one needs 8 to 12 bytes of memory per row and slot.

        Raises:
            TraceError: safetensors is missing, or the path cannot be written. The other ranks raise PeerError.
            StateError: The dispatcher is closed, or another block is recording its channel. A dispatch inside the block
                raises it in a CUDA graph, ``torch.compile`` or selective checkpointing.

        Cost: The start and the end of the block are collective. Inside the block, each dispatch copies ids, weights and
        lengths to the host without a host sync. A dispatch outside of a recording has no extra cost.
        """
        from moe_dispatch_tools.traces.recording import record  # noqa: PLC0415 - it makes a Trace

        return record(dispatcher, Path(path), steps)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace file.

        Raises:
            TraceError: The file is missing, incomplete or not a trace of this format, or safetensors is missing.
        """
        from moe_dispatch.replay.file import read  # noqa: PLC0415
        from moe_dispatch_tools.traces.columns import trace_from  # noqa: PLC0415

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
        """Sizes of the layer on the recorded group. The constraints of a backend depend on them.

        Spare expert slots are left out, because a trace has ids of experts and no placement.
        """
        config = self.config.replace(spare_experts_per_rank=0, balance=None)
        return shape_of(config, self.ep_size, self.ranks_per_node)

    def cuts(self, part: Part) -> bool:
        """Return whether the dispatcher left out the padding rows of a part, instead of masking them."""
        return part.on_host and not self.config.graph_safe

    def tokens_per_expert(self) -> Tensor:
        """Return the number of rows that went to each expert in each call, without padding: int64 (calls, E)."""
        counts = torch.zeros(len(self.calls), self.config.num_experts, dtype=torch.int64)
        for row, call in zip(counts, self.calls, strict=True):
            for part in call.parts:
                ids = part.sent_ids(cut=True)
                row += torch.bincount(ids[ids >= 0], minlength=len(row))[: len(row)]
        return counts

    def require_whole(self, where: str) -> None:
        """Raise a TraceError that begins with ``where`` if some ranks are missing."""
        if len(self.ranks) != self.ep_size:
            raise TraceError(
                f"{where}: the trace must hold all {self.ep_size} ranks, got rank {', '.join(map(str, self.ranks))}. "
                "Record a run that ends without an error."
            )

    def check_ids(self, where: str) -> None:
        """Raise a TraceError that begins with ``where`` if the router produced an id outside -1..E-1."""
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
        """Raise an error if the routing does not fit a config.

        Args:
            config: The config. Its backend, hidden size, padding and mode may differ from the recorded run.
            ep_size: The number of ranks of the new run.

        Raises:
            TraceError: A field does not fit. The error names it with both values.
        """
        for field, recorded, wanted in (
            ("num_experts", self.config.num_experts, config.num_experts),
            ("top_k", self.config.top_k, config.top_k),
            ("ep_size", self.ep_size, ep_size),
        ):
            if recorded != wanted:
                raise TraceError(
                    f"Trace.check: {field} must be {recorded}, as in the trace, got {wanted}. Use a config with "
                    f"{recorded}, or record a trace with this config."
                )
        if config.max_tokens_per_rank is not None and self.max_rows > config.max_tokens_per_rank:
            raise TraceError(
                f"Trace.check: max_tokens_per_rank must be at least {self.max_rows}, the rows of the trace, got "
                f"{config.max_tokens_per_rank}. Raise it."
            )
