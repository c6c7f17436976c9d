"""The collectives a contender really runs, seen where each of them passes: torch's dispatcher of operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.errors import MoEDispatchError


class UncountedError(MoEDispatchError, NotImplementedError):
    """A collective that cannot be recorded."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One all-to-all of this rank.

    Attributes:
        row_bytes: bytes of one row of the tensor.
        splits_out: rows to each rank.
        splits_in: rows from each rank.
    """

    row_bytes: int
    splits_out: tuple[int, ...]
    splits_in: tuple[int, ...]


@final
class Recorder(TorchDispatchMode):
    """Records all-to-alls while entered, those of backward too. Functional collectives are seen once, as such.

    Raises:
        UncountedError: on any other collective, rather than counting it as nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an all-to-all; run every operator as it is."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            names = (argument.name for argument in func._schema.arguments)
            self._record(func._opname, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return result

    def _record(self, name: str, given: dict[str, Any]) -> None:
        if not given.keys() & {"process_group", "group_name"}:
            return  # it waits for a tensor or wraps it; only what knows a group moves bytes
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
    group = given["group_name"]  # a group, or its name where the caller resolved it
    return c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def replay(exchanges: list[Exchange], group: dist.ProcessGroup, device: torch.device) -> None:
    """Run the same all-to-alls on bytes, awaiting each, with nothing around them but fresh buffers."""
    for exchange in exchanges:
        outgoing = torch.empty(sum(exchange.splits_out), exchange.row_bytes, dtype=torch.uint8, device=device)
        received = torch.empty(sum(exchange.splits_in), exchange.row_bytes, dtype=torch.uint8, device=device)
        group.alltoall_base(received, outgoing, list(exchange.splits_in), list(exchange.splits_out)).wait()
