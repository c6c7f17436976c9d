"""Measure the cost of a call apart from its collectives, on so few tokens that moving them costs nothing.

A mode of torch's operator dispatcher records the collectives of a call. They then run again alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.errors import MoEDispatchError
from moe_dispatch_tools.bench.contenders import Contender, identity_experts
from moe_dispatch_tools.bench.costs import synchronize
from moe_dispatch_tools.bench.workload import Tokens


class UncountedError(MoEDispatchError, NotImplementedError):
    """A contender ran a collective that the recorder does not support."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One all-to-all of this rank.

    Attributes:
        row_bytes: Bytes of one row of the tensor.
        splits_out: Number of rows to each rank.
        splits_in: Number of rows from each rank.
    """

    row_bytes: int
    splits_out: tuple[int, ...]
    splits_in: tuple[int, ...]


@final
class Recorder(TorchDispatchMode):
    """Record the all-to-alls of a block, forward and backward. A functional collective is recorded once.

    Raises:
        UncountedError: The block ran another collective, whose time would be missing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and record it if it is an all-to-all."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            names = (argument.name for argument in func._schema.arguments)
            self._record(func._opname, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return result

    def _record(self, name: str, given: dict[str, Any]) -> None:
        if not given.keys() & {"process_group", "group_name"}:
            return  # an operator without a group only waits for a tensor or wraps it
        if name not in ("alltoall_base_", "all_to_all_single"):
            raise UncountedError(
                f"Recorder: collectives must be all-to-alls, got {name}. Leave out the contender that calls it."
            )
        group = _group_of(given)
        rows = given["input"].shape[0]
        splits_out = tuple(given["input_split_sizes"]) or (rows // group.size(),) * group.size()
        row_bytes = given["input"].nbytes // rows if rows else 0
        self.exchanges.append(
            Exchange(
                row_bytes=row_bytes,
                splits_out=splits_out,
                splits_in=tuple(given["output_split_sizes"]) or splits_out,
            )
        )


def _group_of(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given["group_name"]  # a group or its name
    return c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def replay(exchanges: list[Exchange], group: dist.ProcessGroup, device: torch.device) -> None:
    """Run the recorded all-to-alls again, one after the other, on new buffers."""
    for exchange in exchanges:
        outgoing = torch.empty(sum(exchange.splits_out), exchange.row_bytes, dtype=torch.uint8, device=device)
        received = torch.empty(sum(exchange.splits_in), exchange.row_bytes, dtype=torch.uint8, device=device)
        group.alltoall_base(received, outgoing, list(exchange.splits_in), list(exchange.splits_out)).wait()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Milliseconds of a forward dispatch and combine that autograd records, minus the time of its collectives.

    Attributes:
        median_ms: Difference of the medians of the wall times.
        fastest_ms: Difference of the shortest wall times.
        processor_ms: Difference of the medians of the processor time of the calling thread. It does not grow while the
            thread waits for a rank on the same core.
        in_place_ms: Median wall time of a call, minus the time of the collectives inside the call. None for a contender
            that does not call the methods of the process group.
        fastest_in_place_ms: Shortest wall time of a call, minus the time of the collectives inside the call.
    """

    median_ms: float
    fastest_ms: float
    processor_ms: float
    in_place_ms: float | None
    fastest_in_place_ms: float | None


def measure_overhead(contender: Contender, tokens: Tokens, runs: int, group: dist.ProcessGroup) -> Overhead:
    """Time the layer and its collectives alone, in turn. Then time the collectives inside the layer. Collective.

    Collectives that run alone, one right after the other, find their code in the cache, and take less time than inside
    the layer. The differences therefore still contain a part of the collectives. The times in place do not.
    """
    x_TD, weights_TK = contender.leaves(tokens)
    device = x_TD.device

    def layer() -> None:
        contender.layer(x_TD, weights_TK, tokens, identity_experts)

    with Recorder() as recorder:
        layer()

    def bare() -> None:
        replay(recorder.exchanges, group, device)

    for _ in range(runs // 10):
        layer()
    times = [(_time(layer, group, device), _time(bare, group, device)) for _ in range(runs)]
    (wall, thread), (bare_wall, bare_thread) = (zip(*column, strict=True) for column in zip(*times, strict=True))
    beside = [_time_in_place(layer, group, device, len(recorder.exchanges)) for _ in range(runs)]
    known = [1e3 * seconds for seconds in beside if seconds is not None]
    return Overhead(
        median_ms=1e3 * (median(wall) - median(bare_wall)),
        fastest_ms=1e3 * (min(wall) - min(bare_wall)),
        processor_ms=1e3 * (median(thread) - median(bare_thread)),
        in_place_ms=median(known) if known else None,
        fastest_in_place_ms=min(known) if known else None,
    )


def _time_in_place(
    call: Callable[[], None], group: dist.ProcessGroup, device: torch.device, exchanges: int
) -> float | None:
    """Return the time of a call minus its all-to-alls, in seconds; None if an all-to-all was missed.

    The call waits for each all-to-all right after its start.
    """
    spent: list[float] = []
    issue = dist.ProcessGroup.alltoall_base

    def timed(*args: Any) -> dist.Work:
        synchronize(device)
        start = time.perf_counter()
        work = issue(*args)
        work.wait()
        synchronize(device)
        spent.append(time.perf_counter() - start)
        return work

    with patch.object(dist.ProcessGroup, "alltoall_base", timed):
        wall, _ = _time(call, group, device)
    return wall - sum(spent) if len(spent) == exchanges else None


def _time(call: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    dist.barrier(group)
    synchronize(device)
    wall, thread = time.perf_counter(), time.thread_time()
    call()
    synchronize(device)
    return time.perf_counter() - wall, time.thread_time() - thread
