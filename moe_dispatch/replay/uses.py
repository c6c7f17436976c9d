"""Count the lookups of a table, to see that every entry is used in exactly one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.errors import InputError, StateError

if TYPE_CHECKING:
    from moe_dispatch.replay.table import RoutingTable, SequenceId

_AT_A_TIME = 1 << 20  # entries whose uses are exchanged in one collective
_SEVERAL = -1


@final
class Uses:
    """The step in which each entry was used: 0 for never, the number of the step plus 1, or -1 for several steps.

    The counts, int32 (rows of the table, layers), are made with the first lookup.
    """

    def __init__(self) -> None:
        self._steps_NL: Tensor | None = None

    def count(self, table: RoutingTable, rows_T: Tensor, layers: Sequence[int], step: int) -> None:
        """Count a lookup of rows of the table."""
        if self._steps_NL is None:
            with torch.inference_mode(False):  # training must be able to write to counts that an evaluation made
                self._steps_NL = _never(table)
        for layer in layers:
            steps_N = self._steps_NL[:, table.layers.index(layer)]
            before = steps_N[rows_T]
            is_first = (before == 0) | (before == step + 1)
            steps_N[rows_T] = torch.where(is_first, step + 1, _SEVERAL).to(torch.int32)

    def check(self, table: RoutingTable, sequences: Sequence[SequenceId], group: dist.ProcessGroup | None) -> None:
        """Do the work of ``RoutingTable.check_used``."""
        absent = [name for name in sequences if name not in table.lengths]
        problem = None
        if absent:
            problem = InputError(
                f"RoutingTable.check_used: every sequence must be in the table, got {absent[0]!r}, and a table of "
                f"{len(table.lengths)} sequences. Pass names of the table."
            )
        steps_NL = _never(table) if self._steps_NL is None else self._steps_NL
        self._steps_NL = None
        if group is not None:
            everyone = Communicator(group)
            facts = {"the table": [list(table.lengths.items()), table.layers], "sequences": sequences}
            raise_alike(everyone, problem, facts=facts, label="replay")
            steps_NL = _joined(steps_NL, everyone)
        elif problem is not None:
            raise problem
        is_counted_N = torch.zeros(len(steps_NL), dtype=torch.bool, device="cpu")
        for name in sequences:
            is_counted_N[table.rows_of(name)] = True
        known_NL = table.known_NL() & is_counted_N.unsqueeze(1)
        wrong = {"never": known_NL & (steps_NL == 0), "in several steps": known_NL & (steps_NL == _SEVERAL)}
        told = " and ".join(f"{int(at_NL.sum())} used {how}" for how, at_NL in wrong.items())
        for how, at_NL in wrong.items():
            for row, column in at_NL.nonzero()[:1].tolist():
                name, position = table.key_of(row)
                raise StateError(
                    f"RoutingTable.check_used: each of the {int(known_NL.sum())} known entries must be used in one "
                    f"step, got {told}. The first one used {how} is sequence {name!r}, position {position}, layer "
                    f"{table.layers[column]}. Check which micro-batches, ranks and layers looked it up."
                )


def _never(table: RoutingTable) -> Tensor:
    return torch.zeros(table.known_NL().shape, dtype=torch.int32, device="cpu")


def _joined(steps_NL: Tensor, everyone: Communicator) -> Tensor:
    """Join the uses of all ranks. Collective."""
    joined = []
    for mine in steps_NL.flatten().split(_AT_A_TIME):
        steps_PN = everyone.gather_tensor(mine, label="replay")
        latest_N = steps_PN.amax(0)
        several_N = ((steps_PN != 0) & (steps_PN != latest_N)).any(0)
        joined.append(torch.where(several_N, _SEVERAL, latest_N))
    return torch.cat(joined).view_as(steps_NL)
