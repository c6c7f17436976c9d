#!/usr/bin/env bash
# torchft 0.2.0, torch 2.13.0: a configured ProcessGroupGloo says rank() == 0 on every rank, while its size() and its
# collectives are right. The rank that configure() was given is not handed to the base class, and rank() is not overridden.
# Guess: rank() is the rank that configure() was given. Code that shards by group.rank() then gives every rank shard 0.
# Seen on 2026-11-28, on a CPU: rank, rank(), size(), sum of an all-reduce: (0, 0, 2, 3.0) and (1, 0, 2, 3.0).
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check numpy torchft==0.2.0
cat > "$folder/probe.py" <<'PYTHON'
import multiprocessing
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist


def rank_of_group(rank, port, results):
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo()
    group.configure(f"127.0.0.1:{port}/run", f"replica{rank}", rank, 2)
    number = torch.tensor([rank + 1.0])
    group.allreduce([number], dist.AllreduceOptions()).wait()
    results.put((rank, group.rank(), group.size(), number.item()))
    results.close()
    results.join_thread()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results = multiprocessing.Queue()
    ranks = [multiprocessing.Process(target=rank_of_group, args=(rank, store.port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    seen = sorted(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    print(f"torchft {version('torchft')}, torch {version('torch')}: rank, rank(), size(), sum: {seen}")
    sys.exit(seen != [(0, 0, 2, 3.0), (1, 0, 2, 3.0)])
PYTHON
"$folder/venv/bin/python" "$folder/probe.py"
