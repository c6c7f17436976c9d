"""Files of routing tables.

A file has one tensor, ``stored``: (positions of all sequences, layers, top_k), in the encoding of the module
``encoding``. The metadata ``table`` is JSON: ``num_experts``, ``layers``, and ``sequences``, which are pairs of a name
and a number of positions, in the order of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_dispatch.errors import TraceError
from moe_dispatch.replay import file

if TYPE_CHECKING:
    from moe_dispatch.replay.table import RoutingTable, SequenceId

_KIND = file.Kind(
    key="moe_dispatch_routing", noun="a routing table", writer="RoutingTable.save", reader="RoutingTable.load"
)


def save(table: RoutingTable, path: Path) -> None:
    """Do the work of ``RoutingTable.save``."""
    head = {
        "num_experts": table.num_experts,
        "layers": table.layers,
        "sequences": [list(pair) for pair in table.lengths.items()],
    }
    file.write(path, {"stored": table.stored_NLK.contiguous()}, {"table": json.dumps(head)}, _KIND)


def load(
    make: type[RoutingTable], path: Path, sequences: Sequence[SequenceId] | None, layers: Sequence[int] | None
) -> RoutingTable:
    """Do the work of ``RoutingTable.load``. Read only the rows of ``sequences`` and the span of ``layers``."""
    with file.opened(path, _KIND) as (opened, metadata):
        head = json.loads(metadata["table"])
        lengths: dict[SequenceId, int] = dict(map(tuple, head["sequences"]))
        names = list(lengths) if sequences is None else sequences
        numbers = head["layers"] if layers is None else sorted(layers)
        _check_there(path, "sequence", names, list(lengths))
        _check_there(path, "layer", numbers, head["layers"])
        values = opened.get_slice("stored")
        starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        table = make.unknown(
            {name: lengths[name] for name in names}, tuple(numbers), values.get_shape()[2], head["num_experts"]
        )
        columns = [head["layers"].index(number) for number in numbers]
        low, high = columns[0], columns[-1] + 1
        inside = torch.tensor(columns, device="cpu") - low
        for name in names:
            part = values[starts[name] : starts[name] + lengths[name], low:high]
            table.stored_NLK[table.rows_of(name)] = part[:, inside]
    return table


def _check_there(path: Path, what: str, wanted: Sequence[SequenceId], there: Sequence[SequenceId]) -> None:
    absent = [item for item in wanted if item not in there]
    if absent or not wanted:
        raise TraceError(
            f"RoutingTable.load: every {what} to read must be one of the {len(there)} in {path}, got "
            f"{repr(absent[0]) if absent else 'none'}. Read a part that was recorded."
        )
