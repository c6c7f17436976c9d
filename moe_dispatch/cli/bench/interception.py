"""The collectives a contender really runs, seen where each of them passes: torch's dispatcher of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch.cli.bench.contenders import Contender
from moe_dispatch.cli.bench.workload import Tokens
from moe_dispatch.errors import MoEDispatchError

PHASES = ("dispatch", "combine", "backward")


class UncountedError(MoEDispatchError, NotImplementedError):
    """A collective that cannot be recorded."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One all-to-all of this rank.

    Attributes:
        phase: "dispatch", "combine" or "backward".
        row_bytes: bytes of one row of the tensor.
        splits_out: rows to each rank.
        splits_in: rows from each rank.
        bytes_sent: bytes to other ranks.
    """

    phase: str
    row_bytes: int
    splits_out: tuple[int, ...]
    splits_in: tuple[int, ...]
    bytes_sent: int


@final
class Recorder(TorchDispatchMode):
    """Records all-to-alls while entered, those of backward too. Functional collectives are seen once, as such.

    Raises:
        UncountedError: on any other collective, rather than counting it as nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = PHASES[0]
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
                phase=self.phase,
                row_bytes=row_bytes,
                splits_out=splits_out,
                splits_in=tuple(given["output_split_sizes"]) or splits_out,
                bytes_sent=(rows - splits_out[group.rank()]) * row_bytes,
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


def record_layer(contender: Contender, tokens: Tokens) -> list[Exchange]:
    """The all-to-alls of one forward and backward, in the phases "dispatch", "combine" and "backward"."""
    recorder = Recorder()

    def experts(rows_RD: Tensor, local_ids: Callable[[], Tensor]) -> Tensor:
        recorder.phase = "combine"
        return rows_RD

    x_TD, weights_TK = contender.leaves(tokens)
    with recorder:
        y_TD = contender.layer(x_TD, weights_TK, tokens, experts)
        recorder.phase = "backward"
        torch.autograd.grad(y_TD, (x_TD, weights_TK), tokens.upstream_TD)
    return recorder.exchanges


def bytes_by_phase(exchanges: list[Exchange]) -> dict[str, int]:
    """Bytes to other ranks."""
    sent = dict.fromkeys(PHASES, 0)
    for exchange in exchanges:
        sent[exchange.phase] += exchange.bytes_sent
    return sent


def floor_bytes(tokens: Tokens, group: dist.ProcessGroup) -> int:
    """The fewest bytes of this rank one way: each token once to each other rank that owns one of its experts.

    A row is its numbers, and 6 bytes per slot for a float32 weight and an int16 expert id.
    """
    ranks_TK = tokens.ids_TK // (len(tokens.tokens_per_expert_E) // group.size())
    members_TP = torch.zeros(len(ranks_TK), group.size(), dtype=torch.bool, device=ranks_TK.device).scatter_(
        1, ranks_TK, True
    )
    members_TP[:, group.rank()] = False
    row_bytes = tokens.x_TD.shape[1] * tokens.x_TD.itemsize
    return int(members_TP.sum()) * (row_bytes + 6 * ranks_TK.shape[1])
