#!/usr/bin/env bash
# torch 2.13.0 with gloo, 16 processes that hold 0, 1, NaN, 3, ..., 15: the maximum is the same on all ranks, and
# depends on where an element lies in the tensor. It is NaN in 2 of 32 elements, 15 in 26, and 1 in 4: there the ring
# has met NaN after 3 to 15 and went on with what came next. One would expect NaN everywhere, as torch.amax gives, or
# 15.
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

RANKS = 16

def rank_of(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x = torch.full((2 * RANKS,), float("nan") if rank == 2 else float(rank))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    everywhere = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(everywhere, x)
    assert all(torch.equal(other.nan_to_num(-1), x.nan_to_num(-1)) for other in everywhere)
    if rank == 0:
        print(torch.__version__, x.tolist())
        assert x.isnan().sum() == 2
        assert x[:4].tolist() == [1.0] * 4
        assert x[6:].tolist() == [15.0] * 26
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(rank_of, args=(os.path.join(folder, "store"),), nprocs=RANKS, start_method="fork")
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
