#!/usr/bin/env bash
# triton 3.7.1: a sort of scores with one NaN, with TRITON_INTERPRET=1, is no permutation of its input. One would expect
# the NaN at one end, as in torch and numpy.
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
def sort(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.sort(tl.load(x + i)))

def sorted_(*numbers):
    x = torch.tensor(numbers)
    y = torch.zeros_like(x)
    sort[(1,)](x, y, len(numbers))
    return y.tolist()

seen = sorted_(1.0, float("nan"), 3.0, 2.0)
print(triton.__version__, seen)
assert seen == [1.0, 1.0, 2.0, 3.0]
assert sorted_(1.0, 4.0, 3.0, 2.0) == [1.0, 2.0, 3.0, 4.0]
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$python" -W ignore seen.py
