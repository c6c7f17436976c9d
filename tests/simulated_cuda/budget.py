"""The budget of each verb: how many launches, copies and syncs it may ask of a device. ``budget.json`` holds it.

``python -m tests.simulated_cuda.budget`` measures all verbs and writes the table anew.
``python -m tests.simulated_cuda.budget alltoall eager rows dispatch`` lists what one verb asks for, with its lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("budget.json")
KINDS = {"launches": ("kernel", "memset"), "copies": ("copy",), "pageable": ("copy-pageable",), "syncs": ("sync",)}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 32}
MODES: dict[str, dict[str, Any]] = {"eager": {}, "graph-safe": SAFE, "balanced": {**SAFE, "balance": "exact"}}
LAYOUTS = ("rows", "bshd")
# The backend, the number of ranks, and the modes, by the name in the table.
BACKENDS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "local": ("local", 1, ("eager", "graph-safe")),
    "alltoall": ("alltoall", 2, tuple(MODES)),
    "alltoall_by_node": ({"name": "alltoall_by_node", "ranks_per_node": 2}, 4, ("eager",)),
    "allgather": ("allgather", 2, ("eager", "graph-safe")),
}
Counts = dict[str, int]


def combinations() -> Iterator[tuple[str, str, str]]:
    """Yield every backend, mode and layout of the table. "bshd" has lengths that the host knows, and no plan."""
    for backend, (_, _, modes) in BACKENDS.items():
        for mode in modes:
            for layout in LAYOUTS:
                yield backend, mode, layout


def counted(records: list[Any]) -> Counts:
    """Count launches, copies and syncs. Those of NCCL itself are not seen."""
    found = Counter(record.kind for record in records)
    return {name: sum(found[kind] for kind in kinds) for name, kinds in KINDS.items()}


def measure(backend: str, mode: str, layout: str) -> dict[str, list[Any]]:
    """Return the records of each verb on device 0."""
    from tests.simulated_cuda.layer import Recorder, record_verbs
    from tests.simulated_cuda.ranks import NcclRanks

    config, size, _ = BACKENDS[backend]
    recorder = Recorder(size)
    by_rank = NcclRanks().run(lambda group: record_verbs(group, recorder, config, layout, MODES[mode]), size)
    return by_rank[0]


def read() -> dict[str, Counts]:
    """Return the budget by "backend mode layout verb"."""
    table: dict[str, Counts] = json.loads(TABLE.read_text())
    return table


def _main(only: list[str]) -> None:
    from tests.simulated_cuda import plugin  # noqa: F401 (sets the environment)
    from tests.simulated_cuda.values import simulated

    with simulated():
        if only:
            *combination, verb = only
            for record in measure(*combination)[verb]:
                print(record.kind, record.amount, record.detail[:90], "|", record.place)
        else:
            table = {
                " ".join([*combination, verb]): counted(records)
                for combination in combinations()
                for verb, records in measure(*combination).items()
            }
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(counts)}" for key, counts in table.items())
            TABLE.write_text(f"{{\n{lines}\n}}\n")
            print(TABLE.read_text())
    sys.stdout.flush()
    os._exit(0)  # the threads of NCCL would wait for a device


if __name__ == "__main__":
    _main(sys.argv[1:])
