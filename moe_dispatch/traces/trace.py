"""The frozen values that a trace is read into.

Dimensions: ``T`` rows of a rank as the model gave them, ``K`` top_k, ``E`` experts in the whole group, ``P`` its ranks.
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
from moe_dispatch.dispatchers.rows import merge_duplicates
from moe_dispatch.errors import TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one rank brought to one dispatch; all tensors are on the CPU.

    Attributes:
        routing: int64 (T, K) ids and (T, K) weights, as the model gave them.
        layout: how x held tokens.
        on_host: whether its lengths were known on the host; where not, rows are masked instead of cut.
        shape: of x; ``dtype`` likewise.
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
        """Where the rows really go: int64, -1 for nowhere, no expert twice in a row.

        Args:
            cut: leave out rows that are no tokens, as a dispatcher does in eager mode where ``on_host``; else they
                stay, with -1. Gives (rows that are tokens, K), else (T, K).
        """
        ids, valid_T = self.routing.topk_ids, self.layout.valid_T(self.num_rows)
        if valid_T is not None:
            ids = ids[valid_T] if cut else torch.where(valid_T.unsqueeze(1), ids, -1)
        return merge_duplicates(ids, torch.zeros(ids.shape))[0]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch of all ranks.

    Attributes:
        layer: which dispatcher, counted in the order of their first dispatch.
        step: how many dispatches of this dispatcher were recorded before.
        parts: by rank, in the order of ``Trace.ranks``.
    """

    layer: int
    step: int
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The routing of real steps: ``record`` it, ``load`` it.

    Attributes:
        config: of the dispatchers.
        backend_name: what moved the rows; what "auto" chose.
        ep_size: P.
        ranks: whose parts are here: all P, or after an error one.
        ranks_per_node: consecutive ranks that shared a host.
        needs: what the backend needed where this was recorded, as far as it concerns numbers of rows.
        layers: names of the dispatchers, as rank ``ranks[0]`` had them; "dispatcher 0" where they had none.
        calls: in the order of rank ``ranks[0]``.
        versions: of moe_dispatch, torch and Python.
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

        Recorded is every dispatcher that shares the channel (config and group) of this one, its first ``steps``
        dispatches each; not recorded are dispatches inside a backward (a checkpoint computing again), and
        ``again=sent``, which has no routing of its own. Leaving the block gathers on rank 0, which writes the file;
        where the block raises, each rank writes its own part to a file beside it, ``run.rank3.safetensors``.

        Args:
            dispatcher: open.
            path: where; directories are made, an existing file is replaced at the end.
            steps: bounds what is kept in memory: 8 to 12 bytes per row, slot, step and dispatcher.

        Raises:
            TraceError: safetensors is missing, or the path cannot be written; PeerError where another rank says so.
            StateError: the dispatcher is closed, or its channel is being recorded already; inside the block, a
                dispatch in a CUDA graph, ``torch.compile`` or selective checkpointing.

        Cost: entering and leaving are collective. Nothing where no trace is recorded; inside, one copy of ids, weights
        and lengths to the host per dispatch, without a host sync.
        """
        from moe_dispatch.traces.recording import record  # noqa: PLC0415 - it makes what is defined here

        return record(dispatcher, Path(path), steps)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what ``record`` wrote.

        Raises:
            TraceError: there is no such file, it is not a trace, or of another format, or cut off; or safetensors is
                missing.
        """
        from moe_dispatch.traces.columns import trace_from  # noqa: PLC0415
        from moe_dispatch.traces.file import read  # noqa: PLC0415

        return trace_from(*read(Path(path)), where=str(path))

    @property
    def steps(self) -> int:
        """The most dispatches recorded of any dispatcher."""
        return max((call.step + 1 for call in self.calls), default=0)

    @property
    def max_rows(self) -> int:
        """The most rows that any rank brought to any dispatch, those that are no tokens included."""
        return max((part.num_rows for call in self.calls for part in call.parts), default=0)

    @property
    def shape(self) -> MoEShape:
        """What backends' constraints depend on."""
        return shape_of(self.config, self.ep_size, self.ranks_per_node)

    def cuts(self, part: Part) -> bool:
        """Whether rows of a part that are no tokens were cut out, rather than sent nowhere."""
        return part.on_host and not self.config.graph_safe

    def tokens_per_expert(self) -> Tensor:
        """int64 (calls, E): how many rows of the ranks here went to each expert, without any padding."""
        counts = torch.zeros(len(self.calls), self.config.num_experts, dtype=torch.int64)
        for row, call in zip(counts, self.calls, strict=True):
            for part in call.parts:
                ids = part.sent_ids(cut=True)
                row += torch.bincount(ids[ids >= 0], minlength=len(row))[: len(row)]
        return counts

    def require_whole(self, where: str) -> None:
        """Refuse a trace of some ranks only.

        Args:
            where: begins the error message.

        Raises:
            TraceError: not all ranks are here.
        """
        if len(self.ranks) != self.ep_size:
            raise TraceError(
                f"{where}: the trace must hold all {self.ep_size} ranks, got rank {', '.join(map(str, self.ranks))}. "
                "Record one that is not interrupted."
            )

    def check_ids(self, where: str) -> None:
        """Refuse a trace of a router that named experts that there are none of.

        Args:
            where: begins the error message.

        Raises:
            TraceError: with the offending values, and whose they are.
        """
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
        """Refuse to be used with a config that its routing does not fit.

        Args:
            config: may have another backend, hidden size, padding or mode.
            ep_size: ranks that will run it.

        Raises:
            TraceError: naming the field and both values.
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
