#!/usr/bin/env bash
# triton 3.7.1: many routers mark a slot without an expert by the id E, one past the last. With TRITON_INTERPRET=1,
# tl.histogram of four bins counts four such slots as tokens of expert 3 (5 for 1), while -1 and 5 are left out. One
# would expect all three to be treated alike.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy==2.4.6
"$python" -m pip install --quiet --no-compile --disable-pip-version-check --no-deps triton==3.7.1
cat > "$folder/seen.py" <<'END'
import torch
import triton
import triton.language as tl

@triton.jit
def count(ids, counts, n: tl.constexpr, bins: tl.constexpr):
    tl.store(counts + tl.arange(0, bins), tl.histogram(tl.load(ids + tl.arange(0, n)), bins))

def counted(*ids):
    counts = torch.zeros(4, dtype=torch.int32)
    count[(1,)](torch.tensor(ids, dtype=torch.int32), counts, len(ids), 4)
    return counts.tolist()

seen = counted(0, 0, 1, 3, 4, 4, 4, 4), counted(0, 0, 1, 3, -1, -1, 5, 5)
print(triton.__version__, seen)
assert seen == ([2, 1, 0, 5], [2, 1, 0, 1])
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$python" -W ignore seen.py
