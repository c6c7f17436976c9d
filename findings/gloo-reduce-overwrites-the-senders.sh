#!/usr/bin/env bash
# torch 2.13.0 with gloo, 4 processes that hold 1, 2, 3, 4: rank 0 gets 10, and ranks 1 and 2 find 9 and 7 in their own
# tensors, the sums that they passed on. A counter that is reduced to rank 0 for a log and goes on counting is wrong
# from then on. One would expect that a sender's tensor is only read.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy
cat > "$folder/seen.py" <<'END'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

RANKS = 4

def rank_of(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x = torch.tensor([rank + 1.0])
    dist.reduce(x, dst=0)
    held = [None] * RANKS
    dist.all_gather_object(held, x.item())
    if rank == 0:
        print(torch.__version__, held)
        assert held == [10.0, 9.0, 7.0, 4.0]
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(rank_of, args=(os.path.join(folder, "store"),), nprocs=RANKS, start_method="fork")
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
