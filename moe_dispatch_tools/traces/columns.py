"""Convert the dispatches of a rank to a few long tensors, and back.

Each rank has these tensors:

- ``ids``, int32 (rows of all calls, K), and ``weights`` (rows of all calls, K),
- ``calls``, int64 (calls, 7), with the columns of ``_Row``,
- ``shapes``, int64: the shapes of x in all calls, one after another,
- ``layouts``, int64: the layouts of all calls, one after another, in the encoding of ``layouts/encoding.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_dispatch.backends.base import Constraints
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.recorder import Note
from moe_dispatch.errors import TraceError
from moe_dispatch.layouts.encoding import decode, encode
from moe_dispatch.types import Routing
from moe_dispatch_tools.traces.provenance import config_from, versions_here
from moe_dispatch_tools.traces.trace import Call, Part, Trace

# The index of a dtype is its code in a file, so new dtypes go to the end.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COLUMNS = ("ids", "weights", "calls", "shapes", "layouts")


class _Row(NamedTuple):
    """One call of one rank: its dispatcher and step, and its number of entries in the other tensors."""

    layer: int
    step: int
    rows: int
    dims: int
    layout_entries: int
    dtypes: int  # the code of the dtype of x, plus 16 times the code of the dtype of the weights
    on_host: int


def columns_of(notes: Sequence[Note], top_k: int) -> dict[str, Tensor]:
    """Convert the notes of one rank to tensors. Their devices must be synchronised."""
    layers: dict[Hashable, int] = {}
    steps, table = Counter[int](), list[_Row]()
    shapes, layouts = list[int](), list[int]()
    for note in notes:
        layer = layers.setdefault(note.owner, len(layers))
        encoded = encode(note.layout()).tolist()
        table.append(
            _Row(
                layer=layer,
                step=steps[layer],
                rows=len(note.ids_TK),
                dims=len(note.shape),
                layout_entries=len(encoded),
                dtypes=_DTYPES.index(note.dtype) + 16 * _DTYPES.index(note.weights_TK.dtype),
                on_host=int(note.on_host),
            )
        )
        steps[layer] += 1
        shapes += note.shape
        layouts += encoded
    widest = reduce(torch.promote_types, (note.weights_TK.dtype for note in notes), torch.bfloat16)
    return {
        "ids": torch.cat([torch.empty(0, top_k, dtype=torch.int32), *(note.ids_TK for note in notes)]),
        "weights": torch.cat([torch.empty(0, top_k, dtype=widest), *(note.weights_TK.to(widest) for note in notes)]),
        "calls": torch.tensor(table, dtype=torch.int64).view(-1, len(_Row._fields)),
        "shapes": torch.tensor(shapes, dtype=torch.int64),
        "layouts": torch.tensor(layouts, dtype=torch.int64),
    }


def metadata_of(channel: Channel, notes: Sequence[Note]) -> dict[str, str]:
    """Return the metadata of a trace. Each value is a name or JSON."""
    names: dict[Hashable, str] = {}
    for note in notes:
        names.setdefault(note.owner, note.name or f"dispatcher {len(names)}")
    needs = {name: value for name, value in asdict(channel.needs).items() if isinstance(value, int)}
    return {
        "config": channel.config.model_dump_json(),
        "backend": channel.backend_name,
        "ep_size": str(channel.communicator.size),
        "ranks_per_node": json.dumps(channel.shape.ranks_per_node),
        "needs": json.dumps(needs),
        "layers": json.dumps(list(names.values())),
        "versions": json.dumps(versions_here()),
    }


def trace_from(tensors: dict[str, Tensor], metadata: dict[str, str], *, where: str) -> Trace:
    """Make the trace of the file ``where`` from its tensors and its metadata.

    Raises:
        TraceError: A part is missing or has a wrong size, or this version does not know the config.
    """
    try:
        ranks = sorted({int(name.partition(".")[0].removeprefix("rank")) for name in tensors})
        per_rank = [
            {(row.layer, row.step): part for row, part in _parts({c: tensors[f"rank{r}.{c}"] for c in _COLUMNS})}
            for r in ranks
        ]
        versions = json.loads(metadata["versions"])
        return Trace(
            config=config_from(json.loads(metadata["config"]), versions, where=f"Trace.load: the config of {where}"),
            backend_name=metadata["backend"],
            ep_size=int(metadata["ep_size"]),
            ranks=tuple(ranks),
            ranks_per_node=json.loads(metadata["ranks_per_node"]),
            needs=_needs_from(json.loads(metadata["needs"])),
            layers=tuple(json.loads(metadata["layers"])),
            calls=tuple(_calls(per_rank)),
            versions=versions,
        )
    except (KeyError, IndexError, StopIteration, RuntimeError, TypeError, json.JSONDecodeError) as error:
        raise TraceError(
            f"Trace.load: {where} must have all parts of a trace, got {type(error).__name__}: {error}. Record it again."
        ) from error


def _calls(per_rank: list[dict[tuple[int, int], Part]]) -> Iterator[Call]:
    """Yield the calls that every rank has. An interrupted rank may lack the last calls."""
    for key in per_rank[0]:
        if all(key in parts for parts in per_rank):
            yield Call(layer=key[0], step=key[1], parts=tuple(parts[key] for parts in per_rank))


def _parts(columns: dict[str, Tensor]) -> Iterator[tuple[_Row, Part]]:
    rows = [_Row(*values) for values in columns["calls"].tolist()]
    lengths = [row.rows for row in rows]
    ids, weights = columns["ids"].long().split(lengths), columns["weights"].split(lengths)
    shapes = columns["shapes"].split([row.dims for row in rows])
    layouts = columns["layouts"].split([row.layout_entries for row in rows])
    for i, row in enumerate(rows):
        yield (
            row,
            Part(
                routing=Routing(ids[i], weights[i].to(_DTYPES[row.dtypes // 16])),
                layout=decode(layouts[i]),
                on_host=bool(row.on_host),
                shape=torch.Size(shapes[i].tolist()),
                dtype=_DTYPES[row.dtypes % 16],
            ),
        )


def _needs_from(values: dict[str, Any]) -> Constraints:
    """Make the constraints. Fields of other versions are left out."""
    known = {item.name for item in fields(Constraints)}
    return Constraints(**{name: value for name, value in values.items() if name in known})
