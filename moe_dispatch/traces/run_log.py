"""The frozen value that the log of a run is read into.

Dimensions: ``S`` steps, ``P`` ranks of the group, ``E`` its experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import Tensor

from moe_dispatch.config import DispatcherConfig

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher
    from moe_dispatch.traces.run_writing import RunWriter


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunLog:
    """What ``Dispatcher.metrics`` said step by step: what the dispatchers of one config counted, all layers together.

    A step is what lies between two calls of ``RunWriter.step``. Counts are int64 on the CPU, of one step each.

    Attributes:
        config: of the dispatchers.
        backend_name: what was used; "auto" is resolved.
        name: of the dispatcher that was given, or "".
        ep_size: P.
        versions: of moe_dispatch, torch and Python.
        written: steps of each rank's file; more than S where a crash came between.
        dispatches_SP: calls of dispatch.
        tokens_SE: rows that went to each expert.
        rows: rows without a token, each (S, P), by cause: "rank", "expert", "cut" and "masked" of ``Metrics``.
        sent: bytes to other ranks, each (S, P), by collective.
        needed_SP: the most rows that any dispatch so far needed for a rank's experts; None where not graph-safe.
        room_S: for how many there was room; likewise.
        pairs_needed_SP, pairs_room_S: the same of rows from one rank to one rank; None where there is no such bound.
    """

    config: DispatcherConfig
    backend_name: str
    name: str
    ep_size: int
    versions: dict[str, str]
    written: tuple[int, ...]
    dispatches_SP: Tensor
    tokens_SE: Tensor
    rows: dict[str, Tensor]
    sent: dict[str, Tensor]
    needed_SP: Tensor | None
    room_S: Tensor | None
    pairs_needed_SP: Tensor | None
    pairs_room_S: Tensor | None

    @staticmethod
    def record(dispatcher: Dispatcher, directory: str | Path) -> AbstractContextManager[RunWriter]:
        """Write down what a dispatcher's channel counts, step by step; call ``step()`` of what ``with`` gives.

        One file for each rank, ``rank0.jsonl``, every step flushed, so that a run that crashes leaves its record. The
        dispatchers that share the channel (config and group) are counted together, as in ``metrics()``; those of
        another config or group need a directory of their own.

        Args:
            dispatcher: open.
            directory: made where there is none.

        Raises:
            TraceError: the file of some rank cannot be made, or is there already; PeerError where another rank says so.
            StateError: the dispatcher is closed.

        Cost: entering is collective; leaving is not. ``step()`` is local: one line written, and the host syncs of
        ``metrics()``.
        """
        from moe_dispatch.traces.run_writing import record  # noqa: PLC0415 - it reads what is defined in dispatchers

        return record(dispatcher, Path(directory))

    @staticmethod
    def load(directory: str | Path) -> RunLog:
        """Read what ``record`` wrote, as many steps as every rank has; a last line that was cut off is left out.

        Raises:
            TraceError: there is no such directory or no file of a rank in it, ranks are missing or of different runs, a
                line is damaged, or of another format.
        """
        from moe_dispatch.traces.run_reading import load  # noqa: PLC0415 - it makes what is defined here

        return load(Path(directory))

    @property
    def steps(self) -> int:
        """S."""
        return len(self.tokens_SE)
