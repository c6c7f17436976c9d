#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.histc, with which trainers count the tokens of each expert, counts 40,000,000 times the same id as
# 16,777,216 (2 to the 24) with one thread, and as 33,554,432 with two: each thread adds 1 to a float32, which stops there.
# One would expect 40,000,000, which float32 holds exactly, or at least the same number on each machine.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
cat > "$folder/seen.py" <<'END'
import torch

ids = torch.zeros(40_000_000)
assert torch.tensor(40_000_000.0).item() == 40_000_000
seen = {}
for threads in (1, 2):
    torch.set_num_threads(threads)
    seen[threads] = torch.histc(ids, bins=4, min=0, max=4).tolist()
exact = torch.bincount(ids.long(), minlength=4).tolist()
print(torch.__version__, "histc by threads", seen, "bincount", exact)
assert seen == {1: [2.0**24, 0, 0, 0], 2: [2.0**25, 0, 0, 0]} and exact == [40_000_000, 0, 0, 0]
# In float64 it is right.
assert torch.histc(ids.double(), bins=4, min=0, max=4).tolist() == exact
END
cd "$folder"
"$python" -W ignore seen.py
